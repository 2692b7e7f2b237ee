"""The convolution that reads a model's images: how it is found, and how another takes its place."""

from typing import Any

from torch import nn

from castwise.worker.techniques.hooks import has_hooks


def find_stem(model: nn.Module) -> tuple[str, nn.Conv2d | None]:
    """Return the name and the module of a model's first convolution; None where it begins with no ordinary one.

    One whose class is another may compute something else, one with groups has no channels to be put together, and hooks
    would be lost with the module.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            plain = type(module) is nn.Conv2d and module.groups == 1 and module.padding_mode == "zeros"
            plain &= not has_hooks(module)
            return name, module if plain and not isinstance(module.padding, str) else None
    return "", None


def take_place(model: nn.Module, name: str, conv: nn.Conv2d, kind: type[nn.Conv2d]) -> None:
    """Put a convolution of another class, with the same settings and the same weights, in the place of one."""
    arguments: dict[str, Any] = {"stride": conv.stride, "padding": conv.padding, "bias": conv.bias is not None}
    kernel = (conv.kernel_size[0], conv.kernel_size[1])
    made = kind(conv.in_channels, conv.out_channels, kernel, device="meta", **arguments)
    made.weight, made.bias = conv.weight, conv.bias
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, made)
