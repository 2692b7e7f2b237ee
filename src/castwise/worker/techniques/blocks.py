"""The repeated blocks of a model, such as a transformer's layers."""

from collections import Counter

from torch import nn

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that a model repeats, each once, in the order in which the model registers them.

    Blocks are the members of a ModuleList, ModuleDict or Sequential that have layers of their own and whose class the
    model repeats with the same shapes: a transformer's layers, a ResNet's bottlenecks. The others of that class are
    blocks, too, as the first bottleneck of a stage is. Stages, which all differ in shape, are searched for blocks
    instead. No block lies in another one. The list is empty if the model repeats nothing.
    """

    def is_member(module: nn.Module) -> bool:
        has_forward = type(module).forward is not nn.Module.forward and type(module) is not nn.Sequential
        return has_forward and any(True for _ in module.children())

    members = {
        child: (type(child), tuple(parameter.shape for parameter in child.parameters()))
        for module in model.modules()
        if isinstance(module, _LISTS)
        for child in module.children()
        if is_member(child)
    }
    shapes = Counter(members.values())
    repeated = {kind for (kind, _), count in shapes.items() if count > 1}

    def find(module: nn.Module) -> list[nn.Module]:
        if module in members and type(module) in repeated:
            return [module]
        return [block for child in module.children() for block in find(child)]

    return list(dict.fromkeys(find(model)))
