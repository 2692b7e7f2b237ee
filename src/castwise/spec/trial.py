"""What one trial measures: a workload in a precision, with techniques, on a device, and how long to time it."""

import hashlib
from functools import cached_property
from typing import Any, Self

from pydantic import Field, model_validator

from castwise.registry.precisions import known_precision
from castwise.spec.frozen import FrozenModel, renamed
from castwise.spec.quantities import format_bytes
from castwise.spec.recipe import Recipe
from castwise.spec.types import SYNTHETIC, Parallelism, TrialKind
from castwise.spec.user_model import UserModel


class MeasurementProtocol(FrozenModel):
    """How long and how often to measure."""

    # The fewest steps before the first timed one, if no earlier process of the configuration has shown how many.
    warm_up_steps: int = Field(default=5, ge=1)
    warm_up_seconds: float = Field(default=10.0, gt=0)  # at most, after the first step, even if it has not settled
    block_seconds: float = Field(default=0.2, gt=0)  # intended; a block has at least one step
    # At least, right before a block, in whole launches; none if a launch takes over a second, and in older records.
    lead_in_seconds: float = renamed(0.0, "lead_seconds", ge=0)
    num_blocks: int = Field(default=20, ge=1)
    max_seconds: float = Field(default=60.0, gt=0)  # when timing stops even with fewer blocks
    min_blocks: int = Field(default=3, ge=1)
    timeout_seconds: float = Field(default=600.0, gt=0)  # of one phase: set-up with the first step, warm-up, one block
    memory_parts: bool = False  # whether one more step, after the timed ones, is profiled for what holds the memory
    num_steps: int | None = Field(default=None, ge=1)  # that a script is timed for; None goes by the time
    profile_steps: int = Field(default=0, ge=0)  # run under torch's profiler after all else; 0 for none
    numerics: bool = False  # whether gradients and rounding errors of a step are examined after the profile

    @model_validator(mode="after")
    def _blocks_fit(self) -> Self:
        if self.min_blocks > self.num_blocks:
            raise ValueError(f"min_blocks ({self.min_blocks}) is more than num_blocks ({self.num_blocks})")
        return self


# A CPU's steps take long and spread widely: fewer, longer blocks, and four trials end within two minutes.
CPU_PROTOCOL = MeasurementProtocol(
    warm_up_steps=2, warm_up_seconds=3.0, block_seconds=0.5, num_blocks=12, max_seconds=12.0
)
# Blocks on a GPU begin in the midst of steps: after an idle gap its clock differs, and the first launch takes longer.
# Source: chosen here, longer than two readings of the telemetry take.
_CUDA_LEAD_IN_SECONDS = 0.03
CUDA_PROTOCOL = MeasurementProtocol(lead_in_seconds=_CUDA_LEAD_IN_SECONDS)
# For a quick look: four trials of less than a second.
CPU_SHORT = MeasurementProtocol(warm_up_steps=2, warm_up_seconds=0.2, block_seconds=0.05, num_blocks=8, max_seconds=0.5)
# In rounds a process is one of several, and ends as soon as its step time is known.
CPU_ROUND = MeasurementProtocol(
    warm_up_steps=2, warm_up_seconds=2.0, block_seconds=0.3, num_blocks=6, min_blocks=3, max_seconds=4.0
)
CUDA_ROUND = MeasurementProtocol(
    warm_up_steps=4,
    block_seconds=0.1,
    lead_in_seconds=_CUDA_LEAD_IN_SECONDS,
    num_blocks=12,
    min_blocks=4,
    max_seconds=20.0,
)
# For the search for the largest batch: a few steps, since near the device's limit one may take seconds. The optimizer's
# state exists after the first step, so the second one uses as much memory as any later one.
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
    """What one trial measures: this workload, in this precision, with these techniques, on this device."""

    workload: str  # a name of the workload registry, `torchvision:NAME` / `timm:NAME`, or that of the user's own model
    precision: str  # a name of the precision registry (aliases are resolved before a spec is made)
    loss_scale: str  # `none`, `dynamic`, `dynamic-apex` or a number
    batch_size: int = Field(ge=1)  # samples per GPU and optimizer step
    device: str  # "cpu" or "cuda:N"; the first one of several
    data_set: str = SYNTHETIC  # `synthetic`, or the name of a real data set
    techniques: tuple[str, ...] = ()  # names of the technique registry, in its order; empty is the plain loop
    # Number of GPUs (processes, or replicas of DataParallel); on a CPU number of processes.
    world_size: int = Field(default=1, ge=1)
    num_nodes: int = Field(default=1, ge=1)  # number of hosts that these GPUs are in, as many in each
    parallelism: Parallelism = "none"  # how the GPUs share a step
    kind: TrialKind = "steady"  # what is measured
    recipe: Recipe | None = None  # the training run of a `training` trial; None for the other kinds
    weights: str | None = None  # the file of pretrained weights to start from; None starts from random ones
    # Where the user's own model comes from; None for built-in workloads.
    user_model: UserModel | None = renamed(None, "own")
    # The most memory that the trial may take: its caching allocator on a GPU, the growth of its process on a CPU. None
    # if only the device limits it.
    memory_limit_bytes: int | None = Field(default=None, ge=1)
    protocol: MeasurementProtocol = MeasurementProtocol()  # how long and how often
    seed: int = 0  # seeds weights, data and dropout
    # The number of the process among those of the same configuration; from 1000 on in a search's final session.
    repeat: int = 0

    @model_validator(mode="after")
    def _recipe_fits(self) -> Self:
        if (self.kind == "training") != (self.recipe is not None):
            raise ValueError(
                f"a trial of kind '{self.kind}' {'needs a' if self.kind == 'training' else 'has no'} recipe"
            )
        return self

    def __repr__(self) -> str:
        """Return the spec in a line; `model_dump` has all its fields."""
        return f"TrialSpec({self.label})"

    __str__ = __repr__

    @property
    def redacted(self) -> Self:
        """Return the spec as it is recorded: the user's own model without its folder."""
        redacted = self.user_model and self.user_model.redacted
        return self if redacted is self.user_model else self.model_copy(update={"user_model": redacted})

    @property
    def without_extras(self) -> Self:
        """Return the redacted spec with the default time limit and nothing profiled: no figure depends on them."""
        extras = ("timeout_seconds", "profile_steps", "numerics")
        return self.redacted.with_protocol(**{name: MeasurementProtocol.model_fields[name].default for name in extras})

    @cached_property
    def key(self) -> str:
        """Return 12 hexadecimal digits that identify every field but the time limit, the profile's steps and numerics.

        Fields at their defaults do not enter, so that a field added later does not change the keys of old records.
        """
        return _digest(self.without_extras.model_dump_json(exclude_defaults=True))

    @cached_property
    def configuration(self) -> str:
        """Return 12 hexadecimal digits that identify what `key` does, but for the repeat."""
        return _digest(self.without_extras.model_dump_json(exclude_defaults=True, exclude={"repeat"}))

    @cached_property
    def comparison(self) -> str:
        """Return 12 hexadecimal digits, equal for configurations that differ in precision and loss scale alone."""
        apart = {"repeat", "precision", "loss_scale"}
        return _digest(self.without_extras.model_dump_json(exclude_defaults=True, exclude=apart))

    @property
    def is_script(self) -> bool:
        """Return whether it measures a script of the user's, which has a loop of its own."""
        return self.user_model is not None and self.user_model.kind == "script"

    def with_protocol(self, **changes: Any) -> Self:
        """Return the spec with some fields of its protocol changed."""
        return self.model_copy(update={"protocol": self.protocol.model_copy(update=changes)})

    @property
    def device_type(self) -> str:
        """Return the part of `device` before the colon: "cpu", "cuda", "xpu" or "mps"."""
        return self.device.partition(":")[0]

    @property
    def num_processes(self) -> int:
        """Return how many processes run the trial: one a rank with `ddp` and `fsdp`, else one."""
        return self.world_size if self.parallelism in ("ddp", "fsdp") else 1

    @property
    def num_gpus(self) -> int:
        """Return how many GPUs share a step; of a script those of its launcher's ranks."""
        return self.world_size if self.user_model is None else max(self.world_size, self.user_model.num_ranks)

    @property
    def process_batch_size(self) -> int:
        """Return the samples of a step in one process: a rank's, or those of all replicas with `dp`."""
        return self.batch_size * self.world_size // self.num_processes

    @property
    def may_hold_devices_alone(self) -> bool:
        """Return whether its processes may make others wait: those of several machines could wait forever."""
        return self.num_nodes == 1

    @property
    def changed_loss_scale(self) -> str:
        """Return the loss scale if it is not the precision's own, or that is not known; empty otherwise."""
        row = known_precision(self.precision)
        return "" if row is not None and self.loss_scale == row.loss_scale else self.loss_scale

    @property
    def label(self) -> str:
        """Return the spec in a few words, for progress and messages; unique within a plan."""
        scale = self.changed_loss_scale and f" loss scale {self.changed_loss_scale}"
        gpus = f" on {self.world_size_label}" if self.world_size_label else ""
        seed = f" seed {self.seed}" if self.kind == "training" and self.seed else ""
        techniques = f" {'+'.join(self.techniques)}" if self.techniques else ""
        limit = "" if self.memory_limit_bytes is None else f" within {format_bytes(self.memory_limit_bytes)}"
        return f"{self.workload} {self.precision} batch {self.batch_size}{gpus}{scale}{techniques}{seed}{limit}"

    @property
    def loop_name(self) -> str:
        """Return the loop in a few words: `bf16-mixed, 4 GPUs (fsdp), channels-last+compile`."""
        return ", ".join(filter(None, (self.precision, self.world_size_label, "+".join(self.techniques))))

    @property
    def world_size_label(self) -> str:
        """Return how many GPUs share a step, in words: "4 GPUs (ddp)"; empty on one GPU."""
        unit = "CPU processes" if self.device_type == "cpu" else "GPUs"
        nodes = f" on {self.num_nodes} nodes" if self.num_nodes > 1 else ""
        return f"{self.world_size} {unit}{nodes} ({self.parallelism})" if self.world_size > 1 else ""


def device_of_rank(device: str, rank: int) -> str:
    """Return the device of a rank, or of a replica of `dp`, given that of the first."""
    kind, _, index = device.partition(":")
    return f"{kind}:{int(index) + rank}" if index else device


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
