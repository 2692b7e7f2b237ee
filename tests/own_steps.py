"""Steps of a small model that has the user's own loop, with and without techniques."""

from collections.abc import Callable
from typing import Any

import torch
from small_step import CPU, cross_entropy, make_net, make_task
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer, lr_scheduler

from castwise.registry.precisions import find_precision
from castwise.registry.techniques import step_config_of
from castwise.registry.workloads import OptimizerSpec
from castwise.trial.step import TrainingStep
from castwise.trial.user_model.contract import Contract
from castwise.trial.user_model.loop import make_compute_loss, make_loop

UNUSED = OptimizerSpec("SGD", (("lr", 1e9),))
STEPS = 20


def in_groups(net: nn.Module) -> Optimizer:
    """Return an optimizer as users have them: some weights decay, and others do not."""
    decay = [p for p in net.parameters() if p.dim() > 1]
    others = [p for p in net.parameters() if p.dim() <= 1]
    return AdamW([{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-3)


def halving(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    """Return a scheduler whose rates rise for five steps and fall from then on."""
    return lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5), lr_scheduler.ExponentialLR(optimizer, 0.5)],
        milestones=[5],
    )


def step_of(
    precision: str,
    *techniques: str,
    dynamic: bool = False,
    device: torch.device = CPU,
    parts_of: Callable[[nn.Module], dict[str, Any]] | None = None,
    **parts: Any,
) -> TrainingStep:
    """Return the step of a small model with the user's own loop; parts_of makes its parts of the model."""
    net = make_net()
    if parts_of is not None:
        parts |= parts_of(net)
    if callable(parts.get("optimizer")) and not isinstance(parts["optimizer"], type):
        parts["optimizer"] = parts["optimizer"](net)
    contract = Contract(model=net, **parts)
    task = make_task(
        net, cross_entropy if contract.training_step is None else make_compute_loss(contract, "x.py:build")
    )
    task.user_loop = make_loop(contract, "x.py:build")
    row = find_precision(precision)
    return TrainingStep(
        task,
        row,
        UNUSED,
        loss_scale="dynamic" if dynamic else "none",
        clip_grad_norm=contract.clip_grad_norm,
        device=device,
        loop=step_config_of(techniques),
    )


def losses_of(step: TrainingStep, batches: list[Any]) -> Tensor:
    losses = [step(batches[index % len(batches)]) for index in range(STEPS)]
    step.flush()
    return torch.stack([loss.detach() for loss in losses])


def as_dict(batch: tuple[Tensor, ...]) -> dict[str, Any]:
    return {"images": batch[0], "targets": [batch[1], None]}


def train_on_dict(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return cross_entropy(model, (batch["images"], batch["targets"][0]))
