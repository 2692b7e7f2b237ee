"""What a workload provides to the training step: model, batches, loss."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from castwise.apply.precision import Weights
from castwise.apply.pytree import Batch
from castwise.apply.techniques.cuda_graph import RecurrentState
from castwise.spec.types import Unit

ComputeLoss = Callable[[nn.Module, Batch], Tensor]
# A model and its loss whose tensors have shapes and no values, and the mode that they run in.
FakeCopy = tuple[FakeTensorMode, nn.Module, ComputeLoss]
# What a validation batch adds: the loss summed over its targets, a float32 scalar; the number of targets predicted
# right, None if that has no meaning; the number of targets.
BatchScore = tuple[Tensor, Tensor | None, int]


@dataclass(frozen=True)
class UserLoop:
    """The user's own parts of the training loop."""

    make_optimizer: Callable[[Weights], Optimizer]  # over the model's weights or their masters
    make_scheduler: Callable[[Optimizer], Callable[[], None] | None] | None  # makes what is called after each step
    accumulate: int = 1  # batches of one optimizer step; if more than 1, `make_batches` returns tuples of as many
    clip_grad_norm: float | None = None


@dataclass
class Task:
    """A model and everything a training step needs besides the precision."""

    model: nn.Module  # in float32, on the CPU or on the device; the precision is applied to it later
    # (count, batch_size, device, generator of that device) -> `count` batches there, floating-point parts in float32
    make_batches: Callable[[int, int, torch.device, torch.Generator], Sequence[Batch]]
    # The scalar float32 loss of a batch, under autocast; the precision casts the inputs and outputs of `model(...)`.
    compute_loss: ComputeLoss
    evaluate_batch: Callable[[nn.Module, Batch], BatchScore] | None = None  # None without validation data
    num_classes: int | None = None  # of a classifier, for the accuracy of chance
    units_per_sample: int = 1  # units of throughput
    unit: Unit | None = None  # what throughput counts, if it is not the unit of the workload's row
    recurrent_state: RecurrentState | None = None
    begin_epoch: Callable[[], None] = lambda: None  # resets the state that is carried from step to step
    group_of: Callable[[str], int] | None = None  # a parameter's layer group, from 0, by the parameter's name
    # Fills the float32 model with a file's pretrained weights, or raises DataError.
    load_weights: Callable[[Path], None] | None = None
    # `compute_loss` with `num_chunks` or `is_sparse`, if it can; without a technique it takes neither.
    loss_with: Callable[..., Tensor] | None = None
    user_loop: UserLoop | None = None  # None for castwise's workloads
    training_set: Iterable[Any] | None = None  # the user's batches of an epoch; it has a length
    validate: Callable[[nn.Module], float] | None = None  # the user's: the score of the model
    higher_is_better: bool | None = None  # whether a higher score of `validate` is better; None if it cannot be judged
    fake_copy: FakeCopy | None = None  # of a model that was sharded since: shards cannot be copied
    notes: tuple[str, ...] = ()  # what the user's code did that affects its figures
