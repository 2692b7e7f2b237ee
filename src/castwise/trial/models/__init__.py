"""Builders of the workloads, one module a family, and the look-up from a registry row to its task."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from castwise.errors import UsageError
from castwise.registry.workloads import Workload, check_data_set
from castwise.spec.types import SYNTHETIC, Family
from castwise.trial.data.datasets import resident_batches
from castwise.trial.models import fastai_resnet, mlp, rnn_lm, torchvision_timm, transformer
from castwise.trial.models.dpn import DualPathNetwork
from castwise.trial.models.mnist_cnn import MnistCnn
from castwise.trial.models.resnet9 import ResNet9
from castwise.trial.models.task import Task
from castwise.trial.models.wide_resnet import WideResNet

__all__ = ["build_task", "check_workload"]


def _build_small(make_model: Callable[..., nn.Module], row: Workload) -> Task:
    """Return the task of a classifier of ten classes, on noise with the mean and deviation of normalised images."""
    return torchvision_timm.image_task(make_model(**dict(row.options)), row.input_shape, 10, draw=torch.randn)


_BUILDERS: dict[Family, Callable[[Workload], Task]] = {
    "mlp": mlp.build,
    "mnist_cnn": partial(_build_small, MnistCnn),
    "wide_resnet": partial(_build_small, WideResNet),
    "resnet9": partial(_build_small, ResNet9),
    "dpn": partial(_build_small, DualPathNetwork),
    "torchvision": torchvision_timm.build_torchvision,
    "timm": torchvision_timm.build_timm,
    "rnn_lm": rnn_lm.build,
    "transformer": transformer.build,
    "fastai_resnet": fastai_resnet.build,
}

_CHECKS: dict[Family, Callable[[Workload], object]] = {
    "torchvision": torchvision_timm.check_torchvision,
    "timm": torchvision_timm.check_timm,
}


def check_workload(row: Workload) -> None:
    """Raise UsageError unless torchvision or timm has the row's model, which is not built."""
    if row.family in _CHECKS:
        _CHECKS[row.family](row)


def build_task(row: Workload, *, data_set: str = SYNTHETIC, data_dir: Path | None = None) -> Task:
    """Build a workload's model, its data and its loss; the weights come from torch's global seed."""
    check_data_set(row, data_set)
    task = _BUILDERS[row.family](row)
    if data_set == SYNTHETIC:
        return task
    if data_dir is None:
        raise UsageError(f"The data set '{data_set}' is read from a folder, and none was given. Name one.")
    if row.family == "transformer":
        return transformer.text_task(task, row, data_dir)
    side = row.input_shape[-1] if row.unit == "images" else None
    return replace(task, make_batches=resident_batches(data_set, data_dir, side))
