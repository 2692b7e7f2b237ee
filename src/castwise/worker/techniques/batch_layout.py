"""Batches in the form that a loop's techniques want them in: layout, channels."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from castwise.registry.techniques import StepConfig
from castwise.worker.models.task import Batch
from castwise.worker.pytree import tree_map_tensors

Prepare = Callable[[Batch], Batch]


def preparation(loop: StepConfig) -> Prepare | None:
    """Return what is done to every batch on the device, None where nothing is.

    It costs nothing where a batch has the form already: batches that lie on the device are brought to it once.
    """
    if not loop.channels_last and loop.num_channels is None:
        return None

    def prepare(batch: Batch) -> Batch:
        return tree_map_tensors(lambda part: _as_wanted(part, loop) if part.dim() == 4 else part, batch)  # type: ignore[no-any-return]

    return prepare


def _as_wanted(images: Tensor, loop: StepConfig) -> Tensor:
    missing = 0 if loop.num_channels is None else loop.num_channels - images.shape[1]
    if missing > 0:
        images = nn.functional.pad(images, (0, 0, 0, 0, 0, missing))
    return images.contiguous(memory_format=torch.channels_last) if loop.channels_last else images
