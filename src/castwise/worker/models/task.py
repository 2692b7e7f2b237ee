"""What a workload provides to the training step: model, batches, loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from castwise.spec.types import Unit

if TYPE_CHECKING:
    from castwise.worker.precision import Weights

Batch = tuple[Tensor, ...]
BatchScore = tuple[Tensor, Tensor | None, int]


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class UserLoop:
    """The user's own parts of the training loop.

    Attributes:
        make_optimizer: Returns the optimizer, of the model's weights or of the masters in their place.
        make_scheduler: Returns what is called after each optimizer step; None without a scheduler.
        accumulate: Batches whose gradients are added up for one optimizer step; if more than 1, `make_batches` returns
            tuples of as many batches.
        clip_grad_norm: The norm that gradients are clipped to, or None.
    """

    make_optimizer: "Callable[[Weights], Optimizer]"
    make_scheduler: Callable[[Optimizer], Callable[[], None] | None] | None
    accumulate: int = 1
    clip_grad_norm: float | None = None


class RecurrentState(Protocol):
    """State that a task carries from step to step, such as a language model's hidden state."""

    def read(self) -> tuple[Tensor, ...]:
        """Return the tensors that the next step starts from; none if it starts from zeros."""

    def write(self, tensors: tuple[Tensor, ...]) -> None:
        """Let the next step start from these tensors, as many as `read` returned."""


@dataclass
class Task:
    """A model and everything a training step needs besides the precision.

    Attributes:
        model: The model, in float32, on the CPU or on the device; the precision is applied to it later.
        make_batches: Returns `count` batches of `batch_size` samples on the device, floating-point parts in float32.
            Arguments: (count, batch_size, device, generator of that device).
        compute_loss: Returns the scalar loss of a batch; runs under the precision's autocast. The model's inputs
            and outputs are cast by the precision, so it calls `model(...)` and takes a float32 loss of what comes.
        num_classes: Classes of a classifier, for the accuracy of chance; None for other workloads.
        units_per_sample: Units of throughput in one sample.
        unit: What throughput counts, if it is not the unit of the workload's row.
        evaluate_batch: Returns what a validation batch adds: the loss summed over its targets, a float32 scalar; the
            number of targets predicted right, or None if that has no meaning; the number of targets. None
            without validation data.
        recurrent_state: State carried from step to step; None without.
        begin_epoch: Resets the state that is carried from step to step.
        group_of: Returns the layer group of a parameter of the model, by the parameter's name; groups count from 0
            and can have learning rates of their own. None where the model has no layer groups.
        load_weights: Fills the model with the pretrained weights of a file, before a precision is applied to it;
            raises DataError if the file is not theirs. None if the workload takes none.
        chunk_loss: Lets the loss be computed in this many parts, whose logits backward computes again; None if the loss
            is small compared with the model.
        user_loop: The user's own parts of the loop; None for castwise's workloads.
        notes: What the user's code did that affects its figures.
    """

    model: nn.Module
    make_batches: Callable[[int, int, torch.device, torch.Generator], Sequence[Batch]]
    compute_loss: Callable[[nn.Module, Batch], Tensor]
    evaluate_batch: Callable[[nn.Module, Batch], BatchScore] | None = None
    num_classes: int | None = None
    units_per_sample: int = 1
    unit: Unit | None = None
    recurrent_state: RecurrentState | None = None
    begin_epoch: Callable[[], None] = _nothing
    group_of: Callable[[str], int] | None = None
    load_weights: Callable[[Path], None] | None = None
    chunk_loss: Callable[[int], None] | None = None
    user_loop: UserLoop | None = None
    notes: tuple[str, ...] = ()
