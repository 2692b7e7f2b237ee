"""Where the memory of a trial goes, part by part, and why a lower precision does not halve it."""

from collections.abc import Mapping
from dataclasses import dataclass

from castwise.analysis.steady_metrics import peak_allocated_bytes, peak_reserved_bytes
from castwise.max_batch.result import held_bytes, parts_of
from castwise.records.schema import Trial
from castwise.registry.precisions import known_precision
from castwise.show.fields import find_field
from castwise.show.units import format_bytes

# A part that explains less than this share of the distance from half is not named. Source: chosen here.
_WORTH_NAMING = 0.1
# A ratio this near to a half is a half. Source: chosen here.
_NEAR = 0.02
# How far the parts' sum may be from the measured peak. Source: the project's goal.
TOLERANCE = 0.05
TENSOR_PARTS = (
    "weights_bytes",
    "masters_bytes",
    "gradients_bytes",
    "optimizer_bytes",
    "batches_bytes",
    "saved_bytes",
    "weight_casts_bytes",
    "temporaries_bytes",
)
# Parts that the allocator and the driver hold on top of the step's peak.
BEYOND_THE_PEAK = ("slack_bytes", "outside_bytes")


@dataclass(frozen=True)
class MemoryBreakdown:
    trial: Trial
    parts: Mapping[str, int]  # bytes by field name; disjoint: they sum to `total_bytes`
    # On a GPU what the allocator held and what was used outside it. On a CPU the growth of the process, or what its
    # tensors held, whichever is more.
    total_bytes: int
    # The peak while steps were timed: on a GPU of what tensors held, on a CPU of the process's growth.
    peak_bytes: int
    seen_bytes: int  # the same in the step whose memory was broken down

    @property
    def error(self) -> float:
        """Return by what share the parts' sum differs from the measured peak."""
        return self.seen_bytes / self.peak_bytes - 1

    def bytes_of(self, name: str) -> int:
        """Return what a part holds, 0 if it is not known."""
        return self.parts.get(name, 0)


def breakdown_of(trial: Trial) -> MemoryBreakdown | None:
    """Return where a trial's memory goes; None if that was not measured."""
    measured, peak = parts_of(trial), held_bytes(trial)
    if measured is None or not peak:
        return None
    parts = {name: getattr(measured, name) or 0 for name in TENSOR_PARTS}
    if trial.spec.device_type == "cpu":
        parts["process_bytes"] = max(0, peak - measured.tensors_bytes)
        whole = measured.tensors_bytes + parts["process_bytes"]
        return MemoryBreakdown(trial, parts, whole, peak, whole)
    allocated, reserved = peak_allocated_bytes(trial) or 0, peak_reserved_bytes(trial) or 0
    parts["workspace_bytes"] = measured.workspace_bytes or 0
    parts["slack_bytes"] = max(0, reserved - measured.peak_bytes)
    parts["outside_bytes"] = measured.outside_bytes or 0
    return MemoryBreakdown(trial, parts, sum(parts.values()), allocated, measured.peak_bytes)


def why_not_halved(base: MemoryBreakdown, other: MemoryBreakdown) -> str:
    """Return in a sentence how a precision's memory compares with float32's, and what keeps it from half of it.

    The base is float32's memory, the other that of the same loop and batch in another precision. Each part is compared
    with half of what it holds in float32; those that hold more make up the distance.
    """
    precision, batch = other.trial.spec.precision, other.trial.spec.batch_size
    whole, ratio = base.seen_bytes, other.seen_bytes / base.seen_bytes
    head = (
        f"{precision} at batch {batch} holds {format_bytes(other.seen_bytes)}, {ratio:.2f} times fp32's "
        f"{format_bytes(whole)}"
    )

    def change(name: str) -> str:
        before, now = base.bytes_of(name), other.bytes_of(name)
        title = find_field(name).title
        if before == 0:
            return f"{title}: {format_bytes(now)} more"
        if abs(now / before - 1) <= _NEAR:
            return f"{title}: {format_bytes(now)}, as in fp32"
        return f"{title}: from {format_bytes(before)} to {format_bytes(now)}"

    excess = other.seen_bytes - whole / 2
    if excess <= _NEAR * whole:
        saved = max(other.parts, key=lambda name: base.bytes_of(name) - other.bytes_of(name))
        return f"{head}. Most is saved in {change(saved)}."
    above_half = {
        name: held - base.bytes_of(name) / 2 for name, held in other.parts.items() if name not in BEYOND_THE_PEAK
    }
    named = [name for name, above in above_half.items() if above >= _WORTH_NAMING * excess]
    named.sort(key=lambda name: above_half[name], reverse=True)
    question = "Why more" if ratio > 1 else "Why not half"
    return f"{head}. {question}: {'; '.join(change(name) + _reason(other.trial, name) for name in named)}."


def _reason(trial: Trial, name: str) -> str:
    """Return why a part does not halve, by what the trial is known to have run."""
    dtypes = trial.facts.param_dtypes if trial.facts is not None else {}
    row = known_precision(trial.spec.precision)
    keeps_float32 = set(dtypes) == {"float32"}
    has_masters = row is not None and row.master_weights
    gradients = ", in float32 for the masters and again for the weights" if has_masters else ""
    reasons = {
        "weights_bytes": ", kept in float32" if keeps_float32 else "",
        "gradients_bytes": ", of the float32 weights' dtype" if keeps_float32 else gradients,
        "optimizer_bytes": ", kept in float32" if keeps_float32 or has_masters else "",
        "masters_bytes": ", of which fp32 has none",
        "weight_casts_bytes": ", of which fp32 has none",
        "batches_bytes": ", cast in the step and not before",
        "saved_bytes": ", because some stay in float32, or in both dtypes",
        "process_bytes": ", libraries and what was freed and not given back",
    }
    return reasons.get(name, "")
