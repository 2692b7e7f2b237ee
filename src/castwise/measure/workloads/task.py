"""What a workload hands to the measuring loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, ...]


@dataclass
class Task:
    """A model and everything a training step needs besides the precision.

    Attributes:
        model: The model, in float32, on the CPU or on the device; the precision is applied to it later.
        make_batches: Returns `count` batches of `batch_size` samples on the device, floating-point parts in float32.
            Arguments: (count, batch_size, device, generator of that device).
        compute_loss: Returns the scalar loss of a batch; runs under the precision's autocast. The model's inputs
            and outputs are cast by the precision, so it calls `model(...)` and takes a float32 loss of what comes.
        units_per_sample: Units of throughput in one sample.
    """

    model: nn.Module
    make_batches: Callable[[int, int, torch.device, torch.Generator], Sequence[Batch]]
    compute_loss: Callable[[nn.Module, Batch], Tensor]
    units_per_sample: int = 1


Builder = Callable[[Any], Task]
