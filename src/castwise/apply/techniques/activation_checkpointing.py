"""Activation checkpointing: backward computes what is inside of a model's repeated blocks again, to save memory."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from castwise.apply.techniques.blocks import repeated_blocks
from castwise.errors import TechniqueError

_aten: Any = torch.ops.aten
_Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
# What is slow to compute again. Not convolutions: what follows them often overwrites their outputs.
_PRODUCTS = [
    *(getattr(_aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm")),
    *(
        getattr(_aten, f"_scaled_dot_product_{name}").default
        for name in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    ),
]


def checkpoint_blocks(model: nn.Module, selective: bool = False) -> None:
    """Let a model's repeated blocks keep their inputs alone for backward, which computes the rest again.

    With `selective` the outputs of matrix products and attention are kept, too. Names of parameters stay the same.
    Models of transformers do it themselves: theirs do not fill a cache twice.
    """
    keeping = partial(create_selective_checkpoint_contexts, _PRODUCTS)
    own: list[Any] = [part for part in model.modules() if getattr(part, "supports_gradient_checkpointing", False)]
    for part in own:
        options = {"use_reentrant": False} | ({"context_fn": keeping} if selective else {})
        enable = getattr(part, "activation_checkpointing_enable", None) or part.gradient_checkpointing_enable
        enable(options)
    blocks = [] if own else repeated_blocks(model)
    if not blocks and not own:
        raise TechniqueError(
            "activation-checkpointing finds no modules of one class in an nn.Sequential or ModuleList."
        )
    if selective and blocks and not any(isinstance(part, nn.Linear) for block in blocks for part in block.modules()):
        raise TechniqueError("selective-checkpointing finds no linear layers in blocks; take activation-checkpointing.")
    for block in blocks:
        norms = [part for part in block.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
        # A partial function, unlike a closure, is copied with the model.
        block.forward = partial(_run, block.forward, norms, keeping if selective else None)


def _run(
    forward: Callable[..., Any], norms: Sequence[nn.Module], keeping: _Contexts | None, *args: Any, **named: Any
) -> Any:
    if norms and not torch.compiler.is_compiling():  # whose second pass changes no buffers
        forward_context, backward_context = (nullcontext(), nullcontext()) if keeping is None else keeping()
        contexts = forward_context, _beside_statistics(norms, backward_context)
        named["context_fn"] = lambda: contexts
    elif keeping is not None:
        named["context_fn"] = keeping
    args = tuple(list(arg) if isinstance(arg, list) else arg for arg in args)  # a DenseNet's list grows later
    return checkpoint(forward, *args, use_reentrant=False, **named)


@contextmanager
def _beside_statistics(norms: Sequence[nn.Module], context: AbstractContextManager[Any]) -> Iterator[None]:
    """Give batch norms copies of their running statistics, which forward has updated already."""
    kept = [dict(norm._buffers) for norm in norms]
    for norm, buffers in zip(norms, kept, strict=True):
        norm._buffers.update({name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()})
    try:
        with context:
            yield
    finally:
        for norm, buffers in zip(norms, kept, strict=True):
            norm._buffers.update(buffers)
