"""The training loop of each precision as one would write it by hand, for comparison with castwise's step.

Nothing of castwise's step is used here: only its models and batches, so that both sides compute the same.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from castwise.measure.workloads import build_task
from castwise.workloads import Workload

Loop = Callable[[int], None]


def hand_loop(row: Workload, precision: str, batch_size: int, device: torch.device) -> Loop:
    """Return a function that trains the given number of steps.

    Args:
        row: The workload.
        precision: "fp32", "tf32", "fp16-mixed" or "bf16-mixed".
        batch_size: Samples per step.
        device: Where it runs.
    """
    torch.manual_seed(0)
    task = build_task(row)
    model = task.model.to(device).train()
    optimizer = getattr(torch.optim, row.optimizer.name)(model.parameters(), **dict(row.optimizer.arguments))
    generator = torch.Generator(device).manual_seed(0)
    batches = task.make_batches(row.resident_batches, batch_size, device, generator)
    loss_of = task.compute_loss
    if precision == "fp16-mixed":
        return _scaled(model, optimizer, batches, loss_of, row.clip_grad_norm)
    if precision == "bf16-mixed":
        return _autocast(model, optimizer, batches, loss_of, row.clip_grad_norm)
    return _plain(model, optimizer, batches, loss_of, row.clip_grad_norm)


def _plain(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[Tensor, ...]],
    loss_of: Callable[..., Tensor],
    clip: float | None,
) -> Loop:
    def loop(steps: int) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model, batches[step % len(batches)])
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()

    return loop


def _autocast(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[Tensor, ...]],
    loss_of: Callable[..., Tensor],
    clip: float | None,
) -> Loop:
    def loop(steps: int) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = loss_of(model, batches[step % len(batches)])
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()

    return loop


def _scaled(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[Tensor, ...]],
    loss_of: Callable[..., Tensor],
    clip: float | None,
) -> Loop:
    scaler = torch.amp.GradScaler("cuda")

    def loop(steps: int) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = loss_of(model, batches[step % len(batches)])
            scaler.scale(loss).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()

    return loop
