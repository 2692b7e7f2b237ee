"""What techniques look for in a model: repeated blocks, such as a transformer's layers, and hooks."""

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any

from torch import nn

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that a model repeats, each once, in the order in which the model registers them.

    Blocks are the members of a ModuleList, ModuleDict or Sequential that have layers of their own and whose class the
    model repeats with the same shapes: a transformer's layers, a ResNet's bottlenecks. The others of that class are
    blocks, too, as the first bottleneck of a stage is. Stages, which all differ in shape, are searched for blocks
    instead. If no class repeats its shapes, as in a DPN, the class alone counts. A plain Sequential may be anything: it
    is a block if its shapes are repeated and it has no blocks inside. No block lies in another one. The list is empty
    if the model repeats nothing.
    """

    def repeated(kinds: Iterable[Hashable]) -> set[Any]:
        return {kind for kind, count in Counter(kinds).items() if count > 1}

    members = {
        child: (type(child), tuple(parameter.shape for parameter in child.parameters()))
        for module in model.modules()
        if isinstance(module, _LISTS)
        for child in module.children()
        if type(child).forward is not nn.Module.forward and any(True for _ in child.children())
    }
    alike = repeated(members.values())
    classes = {kind for kind, _ in alike} - {nn.Sequential} or repeated(map(type, members)) - {nn.Sequential}

    def find(module: nn.Module) -> list[nn.Module]:
        if module in members and type(module) in classes:
            return [module]
        inner = [block for child in module.children() for block in find(child)]
        return inner or [module] * (members.get(module) in alike)

    return list(dict.fromkeys(find(model)))


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks, which a technique that replaces it would lose."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in kinds)
