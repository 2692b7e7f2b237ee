"""Compact records that may be shared: what a GPU did on castwise's own workloads, and nothing about whose it is.

A record has no host, user, path, argument or UUID, no time finer than a day, and nothing of a user's own model or
script: it has no field for them. `shared.json` beside this file has those that come with castwise.
"""

import hashlib
import re
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from castwise.registry.gpus import find_gpu_model, peak
from castwise.registry.precisions import Hardware, known_precision, why_unsupported
from castwise.registry.workloads import known_workload
from castwise.spec.frozen import FrozenModel
from castwise.spec.quantities import format_share
from castwise.spec.trial import TrialSpec
from castwise.spec.types import SYNTHETIC, Parallelism

_TABLE = Path(__file__).with_name("shared.json")
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]

# Cards run above their datasheet's clock when cool: an RTX A2000's products reach 1.17 of the peak, an RTX 5090's 1.14
# (registry/gpus.py). Chosen here.
_ABOVE_SHEET = 1.20
# A step that moves less may find it in a cache: 50 MB on an H200, 96 MB on an RTX 5090. Chosen here.
_LEAST_BYTES = 2e9
# How far the FLOPs and units of a sample may be from other records of the workload: techniques pad. Chosen here.
_SAME_WORK = 0.15
# What rows have in common that can be compared: fields of SharedRow, and of TrialSpec.
QUESTION = ("workload", "precision", "loss_scale", "batch_size", "data_set", "techniques", "world_size", "parallelism")
_WIDEST = 0.30  # an interval, as a share of its figure; chosen here


class SharedRow(FrozenModel):
    """The figures of one configuration, over all its processes."""

    workload: str  # a built-in one, torchvision:NAME or timm:NAME
    precision: str
    loss_scale: str
    batch_size: _Count  # samples per GPU and step
    data_set: str = SYNTHETIC
    techniques: tuple[str, ...] = ()
    world_size: _Count = 1
    parallelism: Parallelism = "none"
    n: _Count  # processes
    throughput: _Positive  # units per second
    throughput_low: _Positive | None = None  # 95 % interval; None if fewer than three processes were measured
    throughput_high: _Positive | None = None
    step_seconds: _Positive
    speedup: _Positive | None = None  # over fp32 with the same techniques; None for fp32, and without it
    speedup_low: _Positive | None = None
    speedup_high: _Positive | None = None
    peak_bytes: Annotated[int, Field(ge=0)] | None = None  # most that PyTorch's allocator had in use on a GPU
    joules_per_unit: _Positive | None = None
    flops: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)  # of a step on one GPU, by format
    moved_bytes: Annotated[int, Field(ge=0)] = 0  # that a step moves at least on one GPU; 0 if not known

    @property
    def question(self) -> tuple[object, ...]:
        """Return the values of `QUESTION`."""
        return tuple(getattr(self, name) for name in QUESTION)


class SharedRecord(FrozenModel):
    """What one machine measured."""

    schema_version: Literal[1]
    licence: Literal["CC0-1.0"]
    gpu: Annotated[str, Field(max_length=80)]  # as the driver names it
    capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    power_limit_watts: float | None = None
    driver: Annotated[str, Field(max_length=40)] | None = None
    torch: Annotated[str, Field(max_length=40)]
    cuda: Annotated[str, Field(max_length=40)] | None = None
    cudnn: Annotated[str, Field(max_length=40)] | None = None
    castwise: Annotated[str, Field(max_length=40)]
    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]  # the last day of measuring
    rows: tuple[SharedRow, ...]

    @property
    def text(self) -> str:
        return self.model_dump_json(indent=1, exclude_defaults=True) + "\n"

    @property
    def path(self) -> Path:
        """Return where it belongs: `h100-80gb-hbm3/0a1b2c3d4e5f.json`, by the GPU and the content."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.gpu.lower().removeprefix("nvidia ").removeprefix("geforce ")).strip("-")
        return Path(slug, f"{hashlib.sha256(self.text.encode()).hexdigest()[:12]}.json")


def question_of(spec: TrialSpec) -> tuple[object, ...]:
    """Return `SharedRow.question` of a spec."""
    return tuple(getattr(spec, name) for name in QUESTION)


def may_be_shared(spec: TrialSpec) -> bool:
    """Return whether a spec is of steady steps of a built-in model on GPUs of one host, and so tells of no user."""
    return (
        (spec.kind, spec.device_type, spec.num_nodes) == ("steady", "cuda", 1)
        and (spec.user_model, spec.weights, spec.memory_limit_bytes) == (None, None, None)
        and known_workload(spec.workload) is not None
    )


@cache
def shared_records() -> tuple[SharedRecord, ...]:
    """Return the records that come with castwise."""
    return tuple(SharedRecord.model_validate_json(line) for line in _TABLE.read_text("utf-8").splitlines())


def problems_of(content: bytes, name: str) -> list[str]:
    """Return what is wrong with a file of this name that should hold a shared record: a line each."""
    try:
        record = SharedRecord.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        return [f"it is no shared record: {'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}"]
    problems = [] if record.path.name == name else [f"its content was changed: its name would be {record.path.name}"]
    questions = [row.question for row in record.rows]
    problems += problems_of_machine(record)
    problems += ["it has no rows"] * (not questions) + ["it has a row twice"] * (len({*questions}) < len(questions))
    for row in record.rows:
        what = f"{row.workload} {row.precision} batch {row.batch_size}"
        problems += [f"{what}: {why}" for why in [*problems_of_row(row, record), *_beside_others(row)]]
    return problems


def problems_of_machine(record: SharedRecord) -> list[str]:
    """Return why figures of a record's GPU and day cannot be checked, or cannot be."""
    is_known = find_gpu_model(record.gpu, record.memory_bytes) is not None
    unknown = f"castwise knows no datasheet of the GPU '{record.gpu}': add it to registry/gpus.py first"
    is_future = record.date > datetime.now(UTC).date().isoformat()
    return [unknown] * (not is_known) + [f"the day {record.date} is in the future"] * is_future


def problems_of_row(row: SharedRow, record: SharedRecord) -> list[str]:
    """Return what is impossible or too uncertain in a row of a record, in words."""
    return [*_in_itself(row), *_on_the_gpu(row, record)]


def _in_itself(row: SharedRow) -> list[str]:
    found = []
    if known_workload(row.workload) is None or known_precision(row.precision) is None:
        found.append("castwise has no such workload or precision")
    for name in ("throughput", "speedup"):
        value, low, high = (getattr(row, f"{name}{end}") for end in ("", "_low", "_high"))
        if (low is None) != (high is None) or (low is not None and not low <= value <= high):
            found.append(f"the {name} is not within its interval")
        elif low is not None and high - low > _WIDEST * value:
            found.append(f"the interval of the {name} is wider than {format_share(_WIDEST)}")
    return found


def _on_the_gpu(row: SharedRow, record: SharedRecord) -> list[str]:
    """Return what the GPU cannot have done, by its datasheet and its capability."""
    found, precision, gpu = [], known_precision(row.precision), find_gpu_model(record.gpu, record.memory_bytes)
    if precision is not None and (why := why_unsupported(precision, Hardware(record.gpu, record.capability, ()))):
        found.append(why)
    limits = {name: peak(gpu, name) for name in row.flops}
    if row.flops and all(limits.values()):
        at_peak = sum(count / (limits[name] or 1.0) for name, count in row.flops.items())
        if at_peak > _ABOVE_SHEET * row.step_seconds:
            found.append(f"{format_share(at_peak / row.step_seconds)} of the GPU's peak in FLOP/s")
    if gpu is not None and row.moved_bytes > _LEAST_BYTES:
        at_peak = row.moved_bytes / gpu.bandwidth_bytes_per_second
        if at_peak > _ABOVE_SHEET * row.step_seconds:
            found.append(f"{format_share(at_peak / row.step_seconds)} of the GPU's memory bandwidth")
    if record.memory_bytes and (row.peak_bytes or 0) > record.memory_bytes:
        found.append("more memory than the GPU has")
    return found


def _beside_others(row: SharedRow) -> list[str]:
    """Return in what a row contradicts the records of castwise: the work of a sample is the same for all."""
    others = [each for record in shared_records() for each in record.rows if each.workload == row.workload]
    found = []
    for name, work in (("units", _units), ("FLOPs", lambda each: sum(each.flops.values()) / each.batch_size)):
        usual = [value for each in others if (value := work(each))]
        own = work(row)
        if own and usual and not min(usual) * (1 - _SAME_WORK) <= own <= max(usual) * (1 + _SAME_WORK):
            found.append(f"{own:.3g} {name} a sample, and {min(usual):.3g} to {max(usual):.3g} in other records")
    return found


def _units(row: SharedRow) -> float:
    return row.throughput * row.step_seconds / (row.batch_size * row.world_size)
