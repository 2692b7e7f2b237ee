"""Hooks on modules: a technique that replaces a module would lose them."""

from torch import nn

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, kind) for kind in _KINDS)
