"""What a workload hands to the measuring loops."""

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
    """What of the training loop is the user's own.

    Attributes:
        make_optimizer: Returns the optimizer, over what is stepped in the place of the model's weights.
        make_scheduler: Returns what is called after each step that the optimizer took; None where nothing is.
        accumulate: Batches whose gradients are added up for one optimizer step; more than 1 means that what
            `make_batches` returns are tuples of so many.
        clip_grad_norm: The norm that gradients are clipped to, or None.
    """

    make_optimizer: "Callable[[Weights], Optimizer]"
    make_scheduler: Callable[[Optimizer], Callable[[], None] | None] | None
    accumulate: int = 1
    clip_grad_norm: float | None = None


class RecurrentState(Protocol):
    """What a task carries from step to step, for those who must know where it lies."""

    def read(self) -> tuple[Tensor, ...]:
        """Return the tensors that the next step starts from; none where it starts from zeros."""

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
        num_classes: Classes of a classifier, for telling what chance gives; None for other workloads.
        units_per_sample: Units of throughput in one sample.
        unit: What throughput counts, where it is not what the workload's row says.
        evaluate_batch: Returns what a validation batch adds: the loss summed over its targets, a float32 scalar; the
            number of targets predicted right, or None where that says nothing; the number of targets. None without
            validation data.
        recurrent_state: What is carried from step to step; None where nothing is.
        begin_epoch: Forgets what is carried from step to step (a language model's hidden state).
        group_of: Returns the layer group of a parameter of the model, by the parameter's name; groups count from 0
            and can have learning rates of their own. None where the model has no layer groups.
        load_weights: Fills the model with the pretrained weights of a file, before a precision is applied to it;
            raises DataError where the file is not theirs. None where the workload takes none.
        chunk_loss: Has the loss computed in this many parts, whose logits are computed again in backward; None where
            the loss is small beside the model.
        user_loop: What of the loop is the user's own; None for the workloads castwise has.
        notes: What a reader of the figures must know of the user's code.
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
