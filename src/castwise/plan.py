"""What to measure: the question that a trial answers, and the plan that is a list of such questions."""

import hashlib
import itertools
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from castwise.data_sets import STAND_IN
from castwise.document import Document
from castwise.errors import UsageError
from castwise.loss_scales import parse_loss_scale
from castwise.precisions import PRECISIONS, find_precision
from castwise.recipe import Recipe
from castwise.workloads import Workload, find_workload

SYNTHETIC = "synthetic"

TrialKind = Literal["steady", "training"]
Parallelism = Literal["none", "ddp", "dp"]


class Protocol(Document):
    """How long and how often to measure.

    Attributes:
        warm_up_steps: Steps before the first that may be timed, at the least.
        warm_up_seconds: When warm-up ends even if the step time has not settled.
        block_seconds: The length aimed at for one timed block; a block is one step at the least.
        num_blocks: Timed blocks in a trial.
        max_seconds: When a trial stops timing even with fewer blocks (never under `min_blocks`).
        min_blocks: The fewest blocks a trial may end with.
        timeout_seconds: How long one phase (set-up, warm-up, one block) may take before the trial is `timeout`.
    """

    warm_up_steps: int = Field(default=5, ge=1)
    warm_up_seconds: float = Field(default=10.0, gt=0)
    block_seconds: float = Field(default=0.2, gt=0)
    num_blocks: int = Field(default=20, ge=1)
    max_seconds: float = Field(default=60.0, gt=0)
    min_blocks: int = Field(default=3, ge=1)
    timeout_seconds: float = Field(default=600.0, gt=0)

    @model_validator(mode="after")
    def _blocks_fit(self) -> Self:
        if self.min_blocks > self.num_blocks:
            raise ValueError(f"min_blocks ({self.min_blocks}) is more than num_blocks ({self.num_blocks})")
        return self


# A CPU's steps take long and spread widely: fewer, longer blocks, and an end well inside two minutes for four trials.
CPU_PROTOCOL = Protocol(warm_up_steps=2, warm_up_seconds=3.0, block_seconds=0.5, num_blocks=12, max_seconds=12.0)
CUDA_PROTOCOL = Protocol()


class TrialSpec(Document):
    """One question: this workload, in this precision, with these techniques, on this device.

    Attributes:
        workload: A name of the workload registry, or `torchvision:NAME` / `timm:NAME`.
        precision: A name of the precision registry (aliases are resolved before a spec is made).
        loss_scale: `none`, `dynamic`, `dynamic-apex` or a number.
        batch_size: Samples per GPU and optimizer step.
        device: "cpu" or "cuda:N".
        data_set: `synthetic`, or the name of a real data set.
        techniques: Changes to the loop that leave its result alone, in the order they are applied.
        world_size: Number of GPUs (processes, or replicas of DataParallel).
        parallelism: How the GPUs share a step.
        kind: What is measured.
        recipe: How the training run of a `training` trial goes; None for the other kinds.
        weights: The file of pretrained weights to start from; None starts from random ones.
        protocol: How long and how often.
        seed: Seeds weights, data and dropout.
        repeat: Tells apart trials that ask the same question again.
    """

    workload: str
    precision: str
    loss_scale: str
    batch_size: int = Field(ge=1)
    device: str
    data_set: str = SYNTHETIC
    techniques: tuple[str, ...] = ()
    world_size: int = Field(default=1, ge=1)
    parallelism: Parallelism = "none"
    kind: TrialKind = "steady"
    recipe: Recipe | None = None
    weights: str | None = None
    protocol: Protocol = Protocol()
    seed: int = 0
    repeat: int = 0

    @model_validator(mode="after")
    def _recipe_fits(self) -> Self:
        if (self.kind == "training") != (self.recipe is not None):
            raise ValueError(
                f"a trial of kind '{self.kind}' {'needs a' if self.kind == 'training' else 'has no'} recipe"
            )
        return self

    @property
    def key(self) -> str:
        """Return 12 hexadecimal digits that stand for every field.

        Fields at their defaults do not enter, so that a field added later leaves old records their keys.
        """
        return _digest(self.model_dump_json(exclude_defaults=True))

    @property
    def cell(self) -> str:
        """Return 12 hexadecimal digits that stand for every field but the repeat."""
        return _digest(self.model_dump_json(exclude_defaults=True, exclude={"repeat"}))

    @property
    def device_type(self) -> str:
        """Return the part of `device` before the colon: "cpu" or "cuda"."""
        return self.device.partition(":")[0]

    @property
    def label(self) -> str:
        """Return the spec in a few words, for progress and messages; no two trials of a plan share theirs."""
        own_scale = next((row.loss_scale for row in PRECISIONS if row.name == self.precision), None)
        scale = "" if self.loss_scale == own_scale else f" loss scale {self.loss_scale}"
        return f"{self.workload} {self.precision} batch {self.batch_size}{scale}"


class Plan(Document):
    """The trials of one job, in the order in which they run."""

    specs: tuple[TrialSpec, ...]


@dataclass(frozen=True)
class Axes:
    """What is crossed with what; None stands for "what suits".

    Attributes:
        workloads: Workload names.
        precisions: Precision names or aliases; None takes all.
        batch_sizes: Samples per step; None takes each workload's own.
        loss_scales: Loss scales; None takes each precision's own.
    """

    workloads: tuple[str, ...] | None = None
    precisions: tuple[str, ...] | None = None
    batch_sizes: tuple[int, ...] | None = None
    loss_scales: tuple[str, ...] | None = None


def build_plan(
    axes: Axes, *, device: str, data_set: str = SYNTHETIC, protocol: Protocol | None = None, seed: int = 0
) -> Plan:
    """Return the product of the axes as a plan, each cell once.

    A loss scale applies to the precisions that scale their loss by default; the others stay as they are, so
    that `--loss-scale dynamic,128` beside fp32 does not measure fp32 twice. Where every precision was named and
    none scales its loss, the scale is taken at its word: `fp16-true` with a scale of 128 is a fair question.

    Args:
        axes: What is crossed with what.
        device: "cpu" or "cuda:N".
        data_set: `synthetic` or the name of a real data set that every workload named accepts.
        protocol: How long to measure; None takes the device type's default.
        seed: Seeds weights, data and dropout.

    Raises:
        UsageError: A name is unknown, a batch size is under 1, or a workload cannot take the data set.
    """
    is_cpu = device.startswith("cpu")
    protocol = protocol or (CPU_PROTOCOL if is_cpu else CUDA_PROTOCOL)
    precisions = [find_precision(name) for name in axes.precisions or [row.name for row in PRECISIONS]]
    loss_scales = [parse_loss_scale(text) for text in axes.loss_scales or ()]
    all_unscaled = all(row.loss_scale == "none" for row in precisions)
    specs: dict[str, TrialSpec] = {}
    for workload in [find_workload(name) for name in axes.workloads or ()]:
        check_data_set(workload, data_set)
        own_batch_size = workload.cpu_batch_size if is_cpu else workload.batch_size
        for batch_size, precision in itertools.product(axes.batch_sizes or (own_batch_size,), precisions):
            _check_batch_size(batch_size)
            takes_scales = loss_scales and (all_unscaled or precision.loss_scale != "none")
            for loss_scale in loss_scales if takes_scales else (precision.loss_scale,):
                spec = TrialSpec(
                    workload=workload.name,
                    precision=precision.name,
                    loss_scale=loss_scale,
                    batch_size=batch_size,
                    device=device,
                    data_set=data_set,
                    protocol=protocol,
                    seed=seed,
                )
                specs.setdefault(spec.key, spec)
    return Plan(specs=tuple(specs.values()))


def check_data_set(workload: Workload, data_set: str) -> None:
    """Make sure that a workload takes a data set.

    Raises:
        UsageError: It does not; the message names those it takes.
    """
    takes = (SYNTHETIC, *workload.data_sets)
    if data_set not in takes:
        raise UsageError(f"{workload.name} does not take the data set '{data_set}'. It takes: {', '.join(takes)}.")


def stand_in(data_set: str) -> str:
    """Return the name of random samples in the shape and number of a real data set's: `synthetic:mnist`."""
    return STAND_IN + data_set


def stands_in_for(data_set: str) -> str | None:
    """Return the real data set that random samples stand in for, or None where they are no stand-in."""
    return data_set.removeprefix(STAND_IN) if data_set.startswith(STAND_IN) else None


def is_real(data_set: str) -> bool:
    """Return whether a data set is read from files."""
    return data_set != SYNTHETIC and stands_in_for(data_set) is None


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise UsageError(f"A batch holds at least one sample; batch size {batch_size} is impossible.")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
