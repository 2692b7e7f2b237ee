"""Three linear layers with ReLU between them: the model of PyTorch's AMP recipe."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from castwise.apply.pytree import Batch
from castwise.registry.workloads import Workload
from castwise.trial.models.task import Task

_NUM_LINEAR_LAYERS = 3


def build(row: Workload) -> Task:
    """Return the task: random targets are fitted by mean squared error.

    Source: pytorch/tutorials recipes_source/recipes/amp_recipe.py at 00b83bfa (`make_model`, MSELoss).
    """
    (width,) = row.input_shape
    return Task(build_model(width), partial(make_batches, width), _compute_loss)


def build_model(width: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(width, width)]
    for _ in range(_NUM_LINEAR_LAYERS - 1):
        layers += [nn.ReLU(), nn.Linear(width, width)]
    return nn.Sequential(*layers)


def make_batches(
    width: int, count: int, batch_size: int, device: torch.device, generator: torch.Generator
) -> Sequence[Batch]:
    """Return random samples and targets, each of shape (batch, width)."""

    def draw() -> Tensor:
        return torch.randn(batch_size, width, generator=generator, device=device)

    return [(draw(), draw()) for _ in range(count)]


def _compute_loss(model: nn.Module, batch: Batch) -> Tensor:
    samples, targets = batch
    return nn.functional.mse_loss(model(samples).float(), targets)
