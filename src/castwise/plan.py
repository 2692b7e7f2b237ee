"""What to measure: the question that a trial answers, and the plan that is a list of such questions."""

import hashlib
import itertools
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from castwise.errors import UsageError
from castwise.loss_scales import parse_loss_scale
from castwise.precisions import find_precision
from castwise.workloads import find_workload

SYNTHETIC = "synthetic"

TrialKind = Literal["steady"]
Parallelism = Literal["none", "ddp", "dp"]


class Document(BaseModel):
    """Base of the JSON documents that cross the process boundary or lie on disk: frozen, no unknown keys."""

    # JSON has no NaN: written as a string, a diverged trial's loss comes back as what it was.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


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
    protocol: Protocol = Protocol()
    seed: int = 0
    repeat: int = 0

    @property
    def key(self) -> str:
        """Return 12 hexadecimal digits that stand for every field."""
        return _digest(self.model_dump_json())

    @property
    def cell(self) -> str:
        """Return 12 hexadecimal digits that stand for every field but the repeat."""
        return _digest(self.model_dump_json(exclude={"repeat"}))

    @property
    def device_type(self) -> str:
        """Return the part of `device` before the colon: "cpu" or "cuda"."""
        return self.device.partition(":")[0]

    @property
    def label(self) -> str:
        """Return the spec in a few words, for progress and messages."""
        return f"{self.workload} {self.precision} batch {self.batch_size}"


class Plan(Document):
    """The trials of one job, in the order in which they run."""

    specs: tuple[TrialSpec, ...]


def build_plan(
    *,
    workloads: tuple[str, ...],
    precisions: tuple[str, ...],
    batch_sizes: tuple[int, ...] | None,
    loss_scales: tuple[str, ...] | None,
    device: str,
    data_set: str = SYNTHETIC,
    protocol: Protocol | None = None,
    seed: int = 0,
) -> Plan:
    """Return the product of the axes as a plan, each cell once.

    A loss scale applies to the precisions that scale their loss by default; the others stay as they are, so
    that `--loss-scale dynamic,128` beside fp32 does not measure fp32 three times.

    Args:
        workloads: Names or prefixes accepted by the workload registry.
        precisions: Names or aliases accepted by the precision registry.
        batch_sizes: Samples per step; None takes each workload's own.
        loss_scales: Loss scales; None takes each precision's own.
        device: "cpu" or "cuda:N".
        data_set: `synthetic` or the name of a real data set that every workload named accepts.
        protocol: How long to measure; None takes the device type's default.
        seed: Seeds weights, data and dropout.

    Raises:
        UsageError: A name is unknown, a batch size is under 1, or a workload cannot take the data set.
    """
    is_cpu = device.startswith("cpu")
    protocol = protocol or (CPU_PROTOCOL if is_cpu else CUDA_PROTOCOL)
    specs: dict[str, TrialSpec] = {}
    for workload_name in workloads:
        workload = find_workload(workload_name)
        if data_set not in (SYNTHETIC, *workload.data_sets):
            takes = ", ".join((SYNTHETIC, *workload.data_sets))
            raise UsageError(f"{workload.name} does not take the data set '{data_set}'. It takes: {takes}.")
        own_batch = workload.cpu_batch_size if is_cpu else workload.batch_size
        for batch_size, precision_name in itertools.product(batch_sizes or (own_batch,), precisions):
            precision = find_precision(precision_name)
            if batch_size < 1:
                raise UsageError(f"A batch holds at least one sample; batch size {batch_size} is impossible.")
            scales = loss_scales if loss_scales and precision.loss_scale != "none" else (precision.loss_scale,)
            for scale in scales:
                spec = TrialSpec(
                    workload=workload.name,
                    precision=precision.name,
                    loss_scale=parse_loss_scale(scale),
                    batch_size=batch_size,
                    device=device,
                    data_set=data_set,
                    protocol=protocol,
                    seed=seed,
                )
                specs.setdefault(spec.key, spec)
    return Plan(specs=tuple(specs.values()))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
