"""Where the memory of a trial goes, part by part, and why a lower precision does not halve it."""

from collections.abc import Callable
from dataclasses import dataclass

from castwise.analysis.steady_metrics import peak_allocated_bytes, peak_reserved_bytes
from castwise.max_batch.result import held_bytes, parts_of
from castwise.records.schema import Trial
from castwise.registry.precisions import known_precision

# A part that explains less than this share of the distance from half is not named. Source: chosen here.
_WORTH_NAMING = 0.1
# A ratio this near to a half is a half. Source: chosen here.
_NEAR = 0.02
# How far the parts' sum may be from the measured peak. Source: the project's goal.
TOLERANCE = 0.05
TENSOR_PARTS = (
    ("weights_bytes", "weights"),
    ("masters_bytes", "float32 masters"),
    ("gradients_bytes", "gradients"),
    ("optimizer_bytes", "optimizer state"),
    ("batches_bytes", "batches on the device"),
    ("saved_bytes", "activations saved for backward"),
    ("weight_casts_bytes", "autocast's weight copies"),
    ("temporaries_bytes", "other tensors"),
)
# Parts that the allocator and the driver hold on top of the step's peak.
BEYOND_THE_PEAK = ("slack_bytes", "outside_bytes")


@dataclass(frozen=True)
class Part:
    """One part of a trial's memory.

    Attributes:
        name: Its name in CSV and JSON.
        title: Its name for people.
        num_bytes: What it holds; None if it is not known.
    """

    name: str
    title: str
    num_bytes: int | None


@dataclass(frozen=True)
class MemoryBreakdown:
    """A trial's memory in parts.

    Attributes:
        trial: The trial.
        parts: Its parts, disjoint: they sum to `total_bytes`.
        total_bytes: On a GPU what the allocator held and what was used outside it. On a CPU the growth of the process,
            or what its tensors held, whichever is more.
        peak_bytes: The peak while steps were timed: on a GPU of what tensors held, on a CPU of the process's growth.
        seen_bytes: The same in the step whose memory was broken down.
    """

    trial: Trial
    parts: tuple[Part, ...]
    total_bytes: int
    peak_bytes: int
    seen_bytes: int

    @property
    def error(self) -> float:
        """Return by what share the parts' sum differs from the measured peak."""
        return self.seen_bytes / self.peak_bytes - 1

    def bytes_of(self, name: str) -> int:
        """Return what a part holds, 0 if it is not known."""
        return next((part.num_bytes or 0 for part in self.parts if part.name == name), 0)


def breakdown_of(trial: Trial) -> MemoryBreakdown | None:
    """Return where a trial's memory goes; None if that was not measured."""
    parts, peak = parts_of(trial), held_bytes(trial)
    if parts is None or not peak:
        return None
    tensors = [Part(name, title, getattr(parts, name)) for name, title in TENSOR_PARTS]
    if trial.spec.device_type == "cpu":
        rest = max(0, peak - parts.tensors_bytes)
        found = (*tensors, Part("process_bytes", "process besides tensors", rest))
        whole = parts.tensors_bytes + rest
        return MemoryBreakdown(trial, found, whole, peak, whole)
    allocated, reserved = peak_allocated_bytes(trial) or 0, peak_reserved_bytes(trial) or 0
    slack = max(0, reserved - parts.peak_bytes)
    found = (
        *tensors,
        Part("workspace_bytes", "workspaces", parts.workspace_bytes),
        Part("slack_bytes", "allocator's slack", slack),
        Part("outside_bytes", "CUDA context and others", parts.outside_bytes),
    )
    return MemoryBreakdown(trial, found, sum(part.num_bytes or 0 for part in found), allocated, parts.peak_bytes)


def why_not_halved(base: MemoryBreakdown, other: MemoryBreakdown, form: Callable[[float], str]) -> str:
    """Return in a sentence how a precision's memory compares with float32's, and what keeps it from half of it.

    Each part is compared with half of what it holds in float32; those that hold more make up the distance.

    Args:
        base: Float32's.
        other: That of the same loop and batch in another precision.
        form: Formats bytes.
    """
    precision, batch = other.trial.spec.precision, other.trial.spec.batch_size
    whole, ratio = base.seen_bytes, other.seen_bytes / base.seen_bytes
    head = f"{precision} at batch {batch} holds {form(other.seen_bytes)}, {ratio:.2f} times fp32's {form(whole)}"
    excess = other.seen_bytes - whole / 2
    if excess <= _NEAR * whole:
        part = max(other.parts, key=lambda part: base.bytes_of(part.name) - other.bytes_of(part.name))
        return f"{head}. Most is saved in {part.title}: {_change(base, part, form)}."

    def above_half(part: Part) -> float:
        is_beyond = part.name in BEYOND_THE_PEAK
        return 0.0 if is_beyond else other.bytes_of(part.name) - base.bytes_of(part.name) / 2

    named = [part for part in other.parts if above_half(part) >= _WORTH_NAMING * excess]
    named.sort(key=above_half, reverse=True)
    reasons = [f"{part.title}: {_change(base, part, form)}{_reason(other.trial, part.name)}" for part in named]
    more = "more than fp32" if ratio > 1 else "more than half"
    return f"{head}. What makes it {more}: {'; '.join(reasons)}."


def _change(base: MemoryBreakdown, part: Part, form: Callable[[float], str]) -> str:
    before, now = base.bytes_of(part.name), part.num_bytes or 0
    if before == 0:
        return f"{form(now)} more"
    if abs(now / before - 1) <= _NEAR:
        return f"{form(now)} as in fp32"
    return f"{form(now)} after {form(before)} ({now / before:.2f} times)"


def _reason(trial: Trial, name: str) -> str:
    """Return why a part does not halve, by what the trial is known to have run."""
    dtypes = trial.facts.param_dtypes if trial.facts is not None else {}
    row = known_precision(trial.spec.precision)
    keeps_float32 = set(dtypes) == {"float32"}
    has_masters = row is not None and row.master_weights
    reasons = {
        "weights_bytes": ", kept in float32" if keeps_float32 else "",
        "gradients_bytes": (
            ", of the float32 weights' dtype"
            if keeps_float32
            else ", in float32 for the masters and again for the weights"
            if has_masters
            else ""
        ),
        "optimizer_bytes": ", kept in float32" if keeps_float32 or has_masters else "",
        "masters_bytes": ", of which fp32 has none",
        "weight_casts_bytes": ", of which fp32 has none",
        "batches_bytes": ", cast in the step and not before",
        "saved_bytes": ", some of them in float32 still, or in both dtypes",
        "process_bytes": ", libraries and what was freed and not given back",
    }
    return reasons.get(name, "")
