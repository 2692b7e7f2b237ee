"""torch.compile of a step's loss, and the compiler that it needs."""

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from castwise.apply.pytree import Batch, tree_tensors
from castwise.apply.techniques.blocks import repeated_blocks
from castwise.errors import TechniqueError

ComputeLoss = Callable[[nn.Module, Any], Tensor]

# The names by which Inductor and Triton look for a compiler if $CXX or $CC is not set.
_CXX = ("g++", "clang++", "c++")
_CC = ("gcc", "clang", "cc")


def check_compiler(device: torch.device) -> None:
    if device.type == "cuda" and find_spec("triton") is None:
        raise TechniqueError("compile needs Triton to make GPU kernels, and it is not installed. pip install triton")
    variable, names = ("CC", _CC) if device.type == "cuda" else ("CXX", _CXX)
    wanted = (os.environ[variable],) if os.environ.get(variable) else names
    if not any(shutil.which(name) for name in wanted):
        raise TechniqueError(
            f"compile needs a compiler, and there is none: looked for {', '.join(wanted)}. "
            f"Install one, or name it by {variable}."
        )


def compile_blocks(model: nn.Module, mode: str) -> None:
    """Let a model's repeated blocks run compiled; those of the same shapes share what is compiled."""
    blocks = repeated_blocks(model)
    if not blocks:
        raise TechniqueError("compile-blocks finds nothing to do: the model repeats no blocks. Take compile.")
    # Blocks of other shapes are compiled, too; after 8 of them torch would leave the others uncompiled.
    limit = max(len(blocks), torch._dynamo.config.recompile_limit)
    torch._dynamo.config.recompile_limit = limit
    for block in blocks:
        block.compile(mode=mode, dynamic=False)


class CompiledLoss:
    """A task's loss under torch.compile. Batches of another shape than the first run uncompiled.

    A last batch of another shape comes once an epoch: compiling it would cost more than it saves.
    """

    def __init__(self, compute_loss: ComputeLoss, mode: str | None) -> None:
        """Wrap a task's loss; `mode` is torch.compile's, or None if only blocks of the model are compiled."""
        self._plain = self._compiled = compute_loss
        if mode is not None:
            self._compiled = torch.compile(compute_loss, mode=mode, dynamic=False)
        self._shapes: tuple[torch.Size, ...] | None = None  # of the first batch's tensors

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        shapes = tuple(part.shape for part in tree_tensors(batch))
        if self._shapes is None:
            self._shapes = shapes
        if shapes == self._shapes:
            return self._compiled(model, batch)
        with run_uncompiled():
            return self._plain(model, batch)


def run_uncompiled() -> AbstractContextManager[object]:
    """Return a context in which compiled modules and functions run as they are written."""
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance
