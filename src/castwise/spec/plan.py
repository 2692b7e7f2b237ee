"""What to measure: the question that a trial answers, and the plan that is a list of such questions."""

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal, Self, get_args

from pydantic import Field, model_validator

from castwise.errors import UsageError, unknown_name
from castwise.registry.datasets import SYNTHETIC_PREFIX
from castwise.registry.precisions import PRECISIONS, find_precision
from castwise.registry.technique_constraints import resolve
from castwise.registry.techniques import NONE, find_technique, join, normalize_for_world_size, parse_techniques
from castwise.registry.techniques import SETS as TECHNIQUE_SETS
from castwise.registry.workloads import Workload, find_workload
from castwise.spec.frozen import FrozenModel, renamed
from castwise.spec.loss_scale import parse_loss_scale
from castwise.spec.quantities import format_bytes
from castwise.spec.recipe import Recipe
from castwise.spec.user_model import UserModel, UserWorkload

SYNTHETIC = "synthetic"

TrialKind = Literal["steady", "training"]
Parallelism = Literal["none", "ddp", "dp"]


class MeasurementProtocol(FrozenModel):
    """How long and how often to measure.

    Attributes:
        warm_up_steps: Steps before the first that may be timed, at the least, until earlier processes of a cell have
            shown how many it takes.
        warm_up_seconds: When warm-up, which begins after the first step, ends even if the step time has not settled.
        block_seconds: The length aimed at for one timed block; a block is one step at the least.
        lead_in_seconds: The least time of the untimed steps right before a block, in whole launches; there are none if
            a launch takes longer than a second. 0, as in older records: none.
        num_blocks: Timed blocks in a trial.
        max_seconds: When a trial stops timing even with fewer blocks (never under `min_blocks`).
        min_blocks: The fewest blocks a trial may end with.
        timeout_seconds: How long one phase (set-up with the first step, warm-up, one block) may take
            before the trial is `timeout`.
        memory_parts: Whether one more step, after the timed ones, is taken apart to tell what holds the memory.
    """

    warm_up_steps: int = Field(default=5, ge=1)
    warm_up_seconds: float = Field(default=10.0, gt=0)
    block_seconds: float = Field(default=0.2, gt=0)
    lead_in_seconds: float = renamed(0.0, "lead_seconds", ge=0)
    num_blocks: int = Field(default=20, ge=1)
    max_seconds: float = Field(default=60.0, gt=0)
    min_blocks: int = Field(default=3, ge=1)
    timeout_seconds: float = Field(default=600.0, gt=0)
    memory_parts: bool = False

    @model_validator(mode="after")
    def _blocks_fit(self) -> Self:
        if self.min_blocks > self.num_blocks:
            raise ValueError(f"min_blocks ({self.min_blocks}) is more than num_blocks ({self.num_blocks})")
        return self


# A CPU's steps take long and spread widely: fewer, longer blocks, and an end well inside two minutes for four trials.
CPU_PROTOCOL = MeasurementProtocol(
    warm_up_steps=2, warm_up_seconds=3.0, block_seconds=0.5, num_blocks=12, max_seconds=12.0
)
# Blocks on a GPU begin in the midst of steps: behind a pause its clock is another, and the first launch takes its time.
# Two looks of the telemetry's take 10 ms, at times 17. Source: benchmarks/records/pauses.
_CUDA_LEAD_SECONDS = 0.03
CUDA_PROTOCOL = MeasurementProtocol(lead_in_seconds=_CUDA_LEAD_SECONDS)
# Where somebody waits for it: four trials of less than a second.
CPU_SHORT = MeasurementProtocol(warm_up_steps=2, warm_up_seconds=0.2, block_seconds=0.05, num_blocks=8, max_seconds=0.5)
# In rounds a process is one of several, and ends as soon as its step time is known.
CPU_ROUND = MeasurementProtocol(
    warm_up_steps=2, warm_up_seconds=3.0, block_seconds=0.5, num_blocks=6, min_blocks=3, max_seconds=6.0
)
CUDA_ROUND = MeasurementProtocol(
    warm_up_steps=4,
    block_seconds=0.1,
    lead_in_seconds=_CUDA_LEAD_SECONDS,
    num_blocks=12,
    min_blocks=4,
    max_seconds=20.0,
)
# A batch that fits is tried by a few steps, most of them near the device's limit, where one may take seconds. The
# optimizer's state is there from the first step's end on: from the second, memory is that of any later one.
FIT = MeasurementProtocol(
    warm_up_steps=3,
    warm_up_seconds=0.05,
    block_seconds=0.15,
    num_blocks=4,
    min_blocks=2,
    max_seconds=0.6,
    memory_parts=True,
)


class TrialSpec(FrozenModel):
    """One question: this workload, in this precision, with these techniques, on this device.

    Attributes:
        workload: A name of the workload registry, `torchvision:NAME` / `timm:NAME`, or that of the user's own model.
        precision: A name of the precision registry (aliases are resolved before a spec is made).
        loss_scale: `none`, `dynamic`, `dynamic-apex` or a number.
        batch_size: Samples per GPU and optimizer step.
        device: "cpu" or "cuda:N"; the first one, where there are several.
        data_set: `synthetic`, or the name of a real data set.
        techniques: Names of the technique registry, in its order; empty is the plain loop.
        world_size: Number of GPUs (processes, or replicas of DataParallel); on a CPU number of processes.
        parallelism: How the GPUs share a step.
        kind: What is measured.
        recipe: How the training run of a `training` trial goes; None for the other kinds.
        weights: The file of pretrained weights to start from; None starts from random ones.
        user_model: Where the user's own model comes from; None for the workloads castwise has.
        memory_limit_bytes: The most memory that the trial may take: its caching allocator on a GPU, the growth of its
            process on a CPU. None for no other limit than the device's.
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
    user_model: UserModel | None = renamed(None, "own")
    memory_limit_bytes: int | None = Field(default=None, ge=1)
    protocol: MeasurementProtocol = MeasurementProtocol()
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
    def redacted(self) -> Self:
        """Return the spec as records have it: the user's own model without its folder."""
        if self.user_model is None or self.user_model.redacted is self.user_model:
            return self
        return self.model_copy(update={"user_model": self.user_model.redacted})

    @property
    def without_timeout(self) -> Self:
        """Return the redacted spec with the default time limit, on which no figure depends."""
        spec = self.redacted
        default = type(spec.protocol).model_fields["timeout_seconds"].default
        return spec.model_copy(update={"protocol": spec.protocol.model_copy(update={"timeout_seconds": default})})

    @cached_property
    def key(self) -> str:
        """Return 12 hexadecimal digits that stand for every field but the time limit.

        Fields at their defaults do not enter, so that a field added later leaves old records their keys.
        """
        return _digest(self.without_timeout.model_dump_json(exclude_defaults=True))

    @cached_property
    def configuration(self) -> str:
        """Return 12 hexadecimal digits that stand for every field but the repeat and the time limit."""
        return _digest(self.without_timeout.model_dump_json(exclude_defaults=True, exclude={"repeat"}))

    @cached_property
    def comparison(self) -> str:
        """Return 12 hexadecimal digits, equal for configurations that differ in precision and loss scale alone."""
        apart = {"repeat", "precision", "loss_scale"}
        return _digest(self.without_timeout.model_dump_json(exclude_defaults=True, exclude=apart))

    @property
    def device_type(self) -> str:
        """Return the part of `device` before the colon: "cpu" or "cuda"."""
        return self.device.partition(":")[0]

    @property
    def num_processes(self) -> int:
        """Return how many processes run the trial: one a rank with `ddp`, else one."""
        return self.world_size if self.parallelism == "ddp" else 1

    @property
    def process_batch_size(self) -> int:
        """Return the samples of a step in one process: a replica's with `ddp`, those of all replicas with `dp`."""
        return self.batch_size * self.world_size // self.num_processes

    @property
    def may_hold_device_alone(self) -> bool:
        """Return whether its process may have neighbours wait while it times kernels.

        Peers on several devices would wait for each other's neighbours, and those for them.
        """
        return self.world_size == 1

    @property
    def label(self) -> str:
        """Return the spec in a few words, for progress and messages; no two trials of a plan share theirs."""
        own_scale = next((row.loss_scale for row in PRECISIONS if row.name == self.precision), None)
        scale = "" if self.loss_scale == own_scale else f" loss scale {self.loss_scale}"
        spread = f" on {self.spread}" if self.spread else ""
        seed = f" seed {self.seed}" if self.kind == "training" and self.seed else ""
        techniques = f" {join(self.techniques)}" if self.techniques else ""
        limit = "" if self.memory_limit_bytes is None else f" within {format_bytes(self.memory_limit_bytes)}"
        return f"{self.workload} {self.precision} batch {self.batch_size}{spread}{scale}{techniques}{seed}{limit}"

    @property
    def spread(self) -> str:
        """Return what the spec is spread over, in words: "4 GPUs (ddp)"; empty on one GPU."""
        unit = "CPU processes" if self.device_type == "cpu" else "GPUs"
        return f"{self.world_size} {unit} ({self.parallelism})" if self.world_size > 1 else ""


class Plan(FrozenModel):
    """The trials of one job, in the order in which they run."""

    specs: tuple[TrialSpec, ...]


@dataclass(frozen=True)
class ParameterGrid:
    """What is crossed with what; None stands for "what suits".

    Attributes:
        workloads: Workload names.
        precisions: Precision names or aliases; None takes all.
        batch_sizes: Samples per step; None takes each workload's own.
        loss_scales: Loss scales; None takes each precision's own.
        world_sizes: Numbers of GPUs; None takes one.
        parallelisms: How more than one GPU share a step; None takes `ddp`.
        techniques: Techniques, those of one trial joined by "+"; `none` and None are the plain loop.
    """

    workloads: tuple[str, ...] | None = None
    precisions: tuple[str, ...] | None = None
    batch_sizes: tuple[int, ...] | None = None
    loss_scales: tuple[str, ...] | None = None
    world_sizes: tuple[int, ...] | None = None
    parallelisms: tuple[str, ...] | None = None
    techniques: tuple[str, ...] | None = None


def build_plan(
    axes: ParameterGrid,
    *,
    device: str,
    data_set: str = SYNTHETIC,
    protocol: MeasurementProtocol | None = None,
    seed: int = 0,
    own: Mapping[str, UserWorkload] = MappingProxyType({}),
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
        own: What is known of the user's own models among the workloads, by their names as the axes have them.

    Raises:
        UsageError: A name is unknown, a batch size or a number of GPUs is under 1, techniques exclude each other,
            or a workload cannot take the data set.
    """
    is_cpu = device.startswith("cpu")
    protocol = protocol or (CPU_PROTOCOL if is_cpu else CUDA_PROTOCOL)
    precisions = [find_precision(name) for name in axes.precisions or [row.name for row in PRECISIONS]]
    loss_scales = [parse_loss_scale(text) for text in axes.loss_scales or ()]
    all_unscaled = all(row.loss_scale == "none" for row in precisions)
    spreads = _spreads(axes)
    most_gpus = max(size for size, _ in spreads)  # a loop on several is set beside the same one on one
    loops = [_steady_techniques(text) for text in axes.techniques or (NONE,)]
    specs: dict[str, TrialSpec] = {}
    for name in axes.workloads or ():
        workload, known = find_workload(name), own.get(name)
        check_data_set(workload, data_set)
        own_size = known.batch_size if known is not None else None
        batch_sizes = axes.batch_sizes or (own_size or (workload.cpu_batch_size if is_cpu else workload.batch_size),)
        for batch_size, spread, techniques, precision in itertools.product(batch_sizes, spreads, loops, precisions):
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
                    world_size=spread[0],
                    parallelism=spread[1],
                    user_model=known.model if known is not None else None,
                    protocol=protocol,
                    seed=seed,
                )
                spec = resolve(normalize_for_world_size(techniques, spread[0], most_gpus), spec)
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


def synthetic_like(data_set: str) -> str:
    """Return the name of random samples in the shape and number of a real data set's: `synthetic:mnist`."""
    return SYNTHETIC_PREFIX + data_set


def imitated_data_set(data_set: str) -> str | None:
    """Return the real data set that random samples stand in for, or None where they are no stand-in."""
    return data_set.removeprefix(SYNTHETIC_PREFIX) if data_set.startswith(SYNTHETIC_PREFIX) else None


def is_real(data_set: str) -> bool:
    """Return whether a data set is read from files."""
    return data_set != SYNTHETIC and imitated_data_set(data_set) is None


def device_of_rank(device: str, rank: int) -> str:
    """Return the device of a rank, or of a replica of `dp`, where the first one's is given: each has its own GPU."""
    kind, _, index = device.partition(":")
    return f"{kind}:{int(index) + rank}" if index else device


def _spreads(axes: ParameterGrid) -> list[tuple[int, Parallelism]]:
    """Return the numbers of GPUs, each with its ways to share a step; one GPU is shared by no one."""
    ways: list[Parallelism] = [_parallelism(name) for name in axes.parallelisms or ("ddp",)]
    spreads: list[tuple[int, Parallelism]] = []
    for world_size in axes.world_sizes or (1,):
        if world_size < 1:
            raise UsageError(f"A trial runs on one GPU at least; {world_size} GPUs are impossible.")
        spreads += [(world_size, way) for way in ways] if world_size > 1 else [(1, "none")]
    return spreads


def _steady_techniques(text: str) -> tuple[str, ...]:
    names = parse_techniques(text)
    for name in names:
        if name not in TECHNIQUE_SETS and "steady" not in find_technique(name).kinds:
            raise UsageError(
                f"{name} changes how a training run reads its data; here only steps are timed, "
                "on data that lies on the device. Leave it out."
            )
    return names


def _parallelism(name: str) -> Parallelism:
    known: tuple[Parallelism, ...] = get_args(Parallelism)
    for way in known:
        if name.strip().lower() == way != "none":
            return way
    raise unknown_name("parallelism", name, [way for way in known if way != "none"])


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise UsageError(f"A batch holds at least one sample; batch size {batch_size} is impossible.")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
