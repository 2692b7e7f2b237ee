"""The training loop of each precision as one would write it by hand, for comparison with castwise's step.

Nothing of castwise's step is used here: only its models and batches, so that both sides compute the same.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from castwise.registry.workloads import Workload
from castwise.worker.models import build_task

Loop = Callable[[int], None]
Batch = tuple[Tensor, ...]
Step = Callable[[Batch], Tensor]
ComputeLoss = Callable[[nn.Module, Batch], Tensor]

_AUTOCAST = {"fp16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


def hand_loop(row: Workload, precision: str, batch_size: int, device: torch.device) -> Loop:
    """Return a function that trains the given number of steps."""
    torch.manual_seed(0)
    task = build_task(row)
    model = task.model.to(device).train()
    optimizer = getattr(torch.optim, row.optimizer.name)(model.parameters(), **dict(row.optimizer.arguments))
    generator = torch.Generator(device).manual_seed(0)
    batches = task.make_batches(row.resident_batches, batch_size, device, generator)
    step = make_step(task.compute_loss, model, optimizer, precision, row.clip_grad_norm)

    def loop(steps: int) -> None:
        for index in range(steps):
            step(batches[index % len(batches)])

    return loop


def make_step(
    loss_of: ComputeLoss, model: nn.Module, optimizer: torch.optim.Optimizer, precision: str, clip: float | None
) -> Step:
    """Return what trains on a batch and returns its loss."""
    device_type = next(model.parameters()).device.type
    weights = [weight for weight in model.parameters() if weight.requires_grad]

    def computed(batch: Batch) -> Tensor:
        with autocast_of(precision, device_type):
            return loss_of(model, batch)

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = computed(batch)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(weights, clip)
        optimizer.step()
        return loss

    if precision != "fp16-mixed":
        return step
    scaler = torch.amp.GradScaler(device_type)

    def scaled_step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = computed(batch)
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(weights, clip)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return scaled_step


def autocast_of(precision: str, device_type: str) -> AbstractContextManager[object]:
    """Return the autocast of a precision; one that does nothing for float32."""
    dtype = _AUTOCAST.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device_type, dtype=dtype)
