"""A small model of every kind of layer that precisions treat apart, and a training step of it."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from castwise.apply.pytree import Batch
from castwise.registry.precisions import PRECISIONS, Precision
from castwise.registry.techniques import PLAIN, StepConfig
from castwise.registry.workloads import OptimizerSpec
from castwise.spec.trial import MeasurementProtocol, TrialSpec
from castwise.spec.user_model import UserModel
from castwise.trial.models.task import Task
from castwise.trial.models.torchvision_timm import image_task
from castwise.trial.step import TrainingStep
from castwise.trial.user_model.contract import Contract
from castwise.trial.user_model.loop import make_loop

ComputeLoss = Callable[[nn.Module, Batch], Tensor]

CPU = torch.device("cpu")
every_row = pytest.mark.parametrize("row", [row for row in PRECISIONS if row.on_cpu], ids=lambda row: row.name)
PLAIN_SGD = OptimizerSpec("SGD", (("lr", 0.125),))
MOMENTUM_SGD = OptimizerSpec("SGD", (("lr", 0.125), ("momentum", 0.9), ("weight_decay", 0.25)))


class SmallNet(nn.Module):
    """Convolution, batch norm and a linear layer, for comparison with float64.

    The convolution has no bias, which batch norm would cancel; tanh in place of ReLU, whose gradient a rounding
    can switch on or off.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.linear = nn.Linear(8 * 6 * 6, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = torch.tanh(self.norm(self.conv(images)))
        return self.linear(features.flatten(1))  # type: ignore[no-any-return]


def cpu_spec(precision: str = "fp32", **changes: object) -> TrialSpec:
    """Return a spec of the MNIST network on the CPU; of a training run if it has a recipe."""
    fields: dict[str, object] = {
        "workload": "mnist-cnn",
        "precision": precision,
        "loss_scale": "none",
        "batch_size": 4,
        "device": "cpu",
        "kind": "steady" if changes.get("recipe") is None else "training",
        "protocol": MeasurementProtocol(warm_up_seconds=0.05),  # steps never settle on a busy machine
    }
    return TrialSpec.model_validate(fields | changes)


def user_spec(file: Path, precision: str = "fp32", **changes: object) -> TrialSpec:
    """Return a spec of what the function `build` of a user's file returns."""
    model = UserModel(kind="file", path=str(file), name="build")
    return cpu_spec(precision, workload=f"{file.name}:build", user_model=model, **changes)


def make_net(seed: int = 0) -> SmallNet:
    torch.manual_seed(seed)
    return SmallNet()


def make_batch(device: torch.device = CPU) -> Batch:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(16, 3, 8, 8, generator=generator)
    labels = torch.randint(10, (16,), generator=generator)
    return images.to(device), labels.to(device)


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images).float(), labels)


def make_task(model: nn.Module, compute_loss: ComputeLoss = cross_entropy) -> Task:
    return replace(image_task(model, (3, 8, 8), 10, draw=torch.randn), compute_loss=compute_loss)


def make_step(
    row: Precision,
    task: Task,
    optimizer: OptimizerSpec = PLAIN_SGD,
    *,
    loss_scale: str = "none",
    clip_grad_norm: float | None = None,
    device: torch.device = CPU,
    loop: StepConfig = PLAIN,
) -> TrainingStep:
    return TrainingStep(
        task, row, optimizer, loss_scale=loss_scale, clip_grad_norm=clip_grad_norm, device=device, loop=loop
    )


def trained_weights(
    row: Precision, batches: Iterable[Batch], *, clip: float | None, accumulate: int = 1, loop: StepConfig = PLAIN
) -> list[Tensor]:
    """Return the weights after a step of castwise's own on each batch, as of a user's model that brings SGD."""
    net = make_net()
    task = make_task(net)
    contract = Contract(net, accumulate=accumulate, clip_grad_norm=clip, optimizer=partial(torch.optim.SGD, lr=0.125))
    task.user_loop = make_loop(contract, "x")
    step = make_step(row, task, loss_scale=row.loss_scale, clip_grad_norm=clip, loop=loop)
    for batch in batches:
        step(batch)
    return [parameter.detach().float() for parameter in net.parameters()]


def compute_dtype(row: Precision) -> torch.dtype:
    """Return the dtype that convolutions and linear layers take and give."""
    dtype: torch.dtype = getattr(torch, row.autocast_dtype or row.param_dtype)
    return dtype


def stepped_tensors(step: TrainingStep) -> list[Tensor]:
    """Return what the optimizer steps, in the model's order."""
    return [tensor for group in step.optimizer.param_groups for tensor in group["params"]]
