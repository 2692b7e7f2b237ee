"""Hooks of users on modules that a technique would put others in the place of."""

from torch import nn

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Return whether anything is called with a module's forward or backward."""
    return any(getattr(module, kind) for kind in _KINDS)
