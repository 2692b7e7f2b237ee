"""Builders of the workloads, one module a family, and the look-up from a registry row to its task."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from castwise.errors import UsageError
from castwise.registry.workloads import Workload, check_data_set
from castwise.spec.types import SYNTHETIC, Family
from castwise.trial.data.datasets import resident_batches
from castwise.trial.models import (
    dpn,
    fastai_resnet,
    mlp,
    mnist_cnn,
    resnet9,
    rnn_lm,
    torchvision_timm,
    transformer,
    wide_resnet,
)
from castwise.trial.models.task import Task

__all__ = ["build_task", "check_workload"]

_BUILDERS: dict[Family, Callable[[Workload], Task]] = {
    "mlp": mlp.build,
    "mnist_cnn": mnist_cnn.build,
    "wide_resnet": wide_resnet.build,
    "resnet9": resnet9.build,
    "dpn": dpn.build,
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
