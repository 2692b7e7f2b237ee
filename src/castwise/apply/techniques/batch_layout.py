"""The memory layout and the channels of batches, as the techniques require them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from castwise.apply.pytree import Batch, tree_map_tensors
from castwise.registry.techniques import StepConfig

Prepare = Callable[[Batch], Batch]


def preparation(loop: StepConfig) -> Prepare | None:
    """Return the function that converts every batch on the device; None if nothing is to be converted.

    A batch that has the layout already costs nothing: resident batches are converted once.
    """
    if not loop.channels_last and loop.num_channels is None:
        return None
    # Plain functions: a model may be saved with its hooks.
    return partial(tree_map_tensors, partial(_convert, loop))


def prepare_inputs(model: nn.Module, loop: StepConfig) -> None:
    """Let a model convert what it is called with."""
    prepare = preparation(loop)
    if prepare is not None:
        model.register_forward_pre_hook(partial(_convert_call, prepare), with_kwargs=True)


def _convert(loop: StepConfig, part: Tensor) -> Tensor:
    if part.dim() != 4:
        return part
    missing = 0 if loop.num_channels is None else loop.num_channels - part.shape[1]
    if missing > 0:
        part = nn.functional.pad(part, (0, 0, 0, 0, 0, missing))
    return part.contiguous(memory_format=torch.channels_last) if loop.channels_last else part


def _convert_call(prepare: Callable[[Any], Any], _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return prepare(args), prepare(kwargs)
