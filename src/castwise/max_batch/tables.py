"""The tables of largest batches: a row for each loop, the curve below them, and where memory goes."""

from collections.abc import Sequence
from typing import Any

from castwise.analysis import steady_metrics
from castwise.analysis.energy import joules_per_unit
from castwise.max_batch.memory_breakdown import BEYOND_THE_PEAK, TENSOR_PARTS, MemoryBreakdown, breakdown_of
from castwise.max_batch.result import MaxBatch, has_trained
from castwise.records.schema import Trial
from castwise.registry.precisions import BASELINE
from castwise.registry.published import LargestBatch, largest_batches
from castwise.registry.techniques import join
from castwise.render.fields import FlatRow, find_fields
from castwise.render.table import DataTable
from castwise.spec.trial import TrialSpec

SUMMARY = (
    "precision",
    "techniques",
    "largest_batch",
    "failing_batch",
    "batch_ratio",
    "published",
    "predicted_batch",
    "fixed_bytes",
    "sample_bytes",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "throughput_per_second",
    "knee_batch",
    "knee_throughput",
    "num_steps",
    "num_trials",
)
CURVE = (
    "precision",
    "techniques",
    "batch_size",
    "throughput_per_second",
    "step_seconds",
    "joules_per_unit",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "status",
)
PARTS = (*(name for name, _ in TENSOR_PARTS), "workspace_bytes", "outside_bytes")
# Batches of the curve's table differ by this factor at least; CSV and JSON have all that were tried.
_APART = 1.5


def loop_name(spec: TrialSpec) -> str:
    """Return a loop in a few words: `bf16-mixed, channels-last`."""
    return f"{spec.precision}, {join(spec.techniques)}" if spec.techniques else spec.precision


def num_steps(trial: Trial | None) -> int | None:
    """Return the steps that a trial has trained, warm-up and timed ones."""
    if trial is None or trial.facts is None or not trial.ranks:
        return None
    return trial.facts.warm_up_steps + sum(block.all_steps for block in trial.ranks[0].blocks)


def published_of(found: MaxBatch) -> list[LargestBatch]:
    """Return what sources published of the same workload in the same precision; nothing for other loops."""
    spec = found.spec
    return [] if spec.techniques or spec.precision == BASELINE else largest_batches(spec.workload, spec.precision)


def baseline_of(found: MaxBatch, others: Sequence[MaxBatch]) -> MaxBatch | None:
    """Return the result of the same loop in float32; None if there is none."""
    techniques = found.spec.techniques
    return next(
        (each for each in others if each.spec.precision == BASELINE and each.spec.techniques == techniques), None
    )


def ratio_of(found: MaxBatch, others: Sequence[MaxBatch]) -> float | None:
    """Return how many times float32's largest batch a loop's is; None without either."""
    base = baseline_of(found, others)
    if base is None or base.largest is None or found.largest is None or base.failing is None or found.failing is None:
        return None
    return found.largest.spec.batch_size / base.largest.spec.batch_size


def summary_row(found: MaxBatch, others: Sequence[MaxBatch] = ()) -> dict[str, Any]:
    """Return a loop's largest batch as plain values by field name."""
    largest, knee, prediction = found.largest, found.knee, found.prediction
    published = "; ".join(f"{each.ratio:.2f}× ({each.gpu})" for each in published_of(found))
    return {
        "precision": found.spec.precision,
        "techniques": join(found.spec.techniques),
        "largest_batch": None if largest is None else largest.spec.batch_size,
        "failing_batch": None if found.failing is None else found.failing.spec.batch_size,
        "batch_ratio": ratio_of(found, others),
        "published": published or None,
        "predicted_batch": None if prediction is None else prediction.batch_size,
        "prediction_error": found.prediction_error,
        "fixed_bytes": None if prediction is None else prediction.fixed_bytes,
        "sample_bytes": None if prediction is None else prediction.sample_bytes,
        "peak_allocated_bytes": None if largest is None else steady_metrics.peak_allocated_bytes(largest),
        "peak_reserved_bytes": None if largest is None else steady_metrics.peak_reserved_bytes(largest),
        "throughput_per_second": None if largest is None else steady_metrics.throughput(largest),
        "knee_batch": None if knee is None else knee.spec.batch_size,
        "knee_throughput": None if knee is None else steady_metrics.throughput(knee),
        "num_steps": num_steps(largest),
        "num_trials": len(found.trials),
        "unit": steady_metrics.unit_of(found.trials[0]),
    }


def curve_row(trial: Trial) -> dict[str, Any]:
    """Return one batch as plain values by field name; a batch that did not fit has no speed."""
    is_trained = has_trained(trial)
    parts = trial.ranks[0].memory_parts if trial.ranks else None
    is_known = parts is not None and not parts.missing
    return {
        "precision": trial.spec.precision,
        "techniques": join(trial.spec.techniques) if trial.spec.techniques else "",
        "batch_size": trial.spec.batch_size,
        "throughput_per_second": steady_metrics.throughput(trial) if is_trained else None,
        "step_seconds": steady_metrics.step_seconds(trial) if is_trained else None,
        "joules_per_unit": joules_per_unit(trial),
        "peak_allocated_bytes": steady_metrics.peak_allocated_bytes(trial),
        "peak_reserved_bytes": steady_metrics.peak_reserved_bytes(trial),
        "status": trial.status,
        "unit": steady_metrics.unit_of(trial),
        **{name: getattr(parts, name) if is_known else None for name in PARTS},
    }


def breakdown_row(found: MemoryBreakdown) -> dict[str, Any]:
    """Return where the memory of a trial goes as plain values by field name."""
    return {
        "precision": loop_name(found.trial.spec),
        **{part.name: part.num_bytes or 0 for part in found.parts},
        "seen_bytes": found.seen_bytes,
        "parts_error": found.error,
        "peak_bytes": found.peak_bytes,
        "total_bytes": found.total_bytes,
    }


def summary_table(max_batches: Sequence[MaxBatch]) -> DataTable[FlatRow]:
    """Return the largest batches, with the columns that have anything to say."""
    rows = [summary_row(found, max_batches) for found in max_batches]
    always = ("precision", "largest_batch", "failing_batch")
    names = [name for name in SUMMARY if name in always or any(row[name] not in (None, "", "none") for row in rows)]
    return DataTable(find_fields(names), rows)


def curve_table(max_batches: Sequence[MaxBatch]) -> DataTable[FlatRow]:
    """Return the curves: batches that are far apart, the knee, the largest that trained, the first that did not."""
    rows = [curve_row(trial) for found in max_batches for trial in _curve(found)]
    return DataTable(find_fields(name for name in CURVE if any(row[name] not in (None, "") for row in rows)), rows)


def _curve(found: MaxBatch) -> list[Trial]:
    kept: list[Trial] = []
    reach = found.largest.spec.batch_size / _APART if found.largest is not None else 0.0
    for trial in found.trials:
        size = trial.spec.batch_size
        is_apart = not kept or size >= _APART * kept[-1].spec.batch_size
        if trial in (found.knee, found.largest, found.failing) or (has_trained(trial) and is_apart and size <= reach):
            kept.append(trial)
    return kept


def breakdowns_of(max_batches: Sequence[MaxBatch]) -> list[MemoryBreakdown]:
    """Return where memory goes at the largest batch that all loops have measured; else at each one's largest."""
    known = [[each for trial in found.trained if (each := breakdown_of(trial)) is not None] for found in max_batches]
    known = [each for each in known if each]
    if not known:
        return []
    common = set.intersection(*({each.trial.spec.batch_size for each in own} for own in known))
    if not common:
        return [own[-1] for own in known]
    return [next(each for each in own if each.trial.spec.batch_size == max(common)) for own in known]


def part_titles(breakdowns: Sequence[MemoryBreakdown]) -> dict[str, str]:
    """Return the parts that any of some trials has, by name, as people read them."""
    known = {part.name: part.title for each in breakdowns for part in each.parts}
    return {name: title for name, title in known.items() if any(each.bytes_of(name) for each in breakdowns)}


def breakdown_table(breakdowns: Sequence[MemoryBreakdown]) -> DataTable[FlatRow]:
    """Return the parts that any of some trials has, their sums, and the measured peak.

    On a GPU there are two sums: what the peak is made of, and all, with what the allocator and the driver hold on top.
    """
    parts = list(part_titles(breakdowns))
    within = [name for name in parts if name not in BEYOND_THE_PEAK]
    beyond = [name for name in parts if name in BEYOND_THE_PEAK]
    names = ["precision", *within, "seen_bytes", "parts_error", *beyond, *(["total_bytes"] if beyond else [])]
    return DataTable(find_fields(names), [breakdown_row(each) for each in breakdowns])
