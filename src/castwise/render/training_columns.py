"""The columns of a suite's table: one training run a row."""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Literal

from castwise.analysis import steady_metrics
from castwise.analysis.training_metrics import Run, data_share, epochs_of, length_in_words
from castwise.registry.techniques import join
from castwise.render.sparkline import sparkline
from castwise.render.table import Column
from castwise.render.units import format_bytes, format_percent, format_rate, format_ratio, format_seconds

# What a narrow terminal does without, the first first.
DISPENSABLE = (
    "loss_curve",
    "start_seconds",
    "validation_seconds",
    "driver_used_bytes",
    "peak_reserved_bytes",
    "final_loss",
    "data_set",
    "skipped_steps",
    "throughput_per_second",
    "data_share",
    "peak_allocated_bytes",
    "efficiency",
    "published_pair_speedup",
)


def run_columns(pairs: Mapping[str, float]) -> tuple[Column[Run], ...]:
    """Return all columns.

    Args:
        pairs: Speed-ups over float32 at the batch the source paired a run with, by the trial's key.
    """
    return (
        *_QUESTION,
        *_TIMES,
        Column(
            "published_pair_speedup",
            "at published batches",
            lambda r: pairs.get(r.trial.spec.key),
            lambda r: format_ratio(pairs.get(r.trial.spec.key)),
        ),
        *_RESULTS,
    )


def shown(columns: Sequence[Column[Run]], rows: Sequence[Run]) -> list[Column[Run]]:
    """Return the columns worth showing: what tells runs apart, and the figures that exist."""
    return [column for column in columns if _is_worth_it(column, [column.value(row) for row in rows])]


def competing(run: Run) -> Hashable:
    """Return what runs share whose figures compete: all but precision; None where one did not end well."""
    spec = run.trial.spec
    asked = (spec.workload, spec.data_set, spec.batch_size, spec.spread, spec.seed, length_of(run))
    return asked if run.trial.status == "ok" else None


def loss_curve() -> Column[Run]:
    """Return a column of the training loss over time as a small curve, each between its own ends, for terminals."""

    def curve(run: Run) -> str | None:
        losses = [loss for epoch in epochs_of(run.trial) for _, loss in epoch.losses]
        drawn = [loss for loss in losses if math.isfinite(loss)]
        return sparkline(losses, min(drawn), max(drawn)) if len(drawn) > 3 else None

    return Column("loss_curve", "loss over time", curve, lambda run: curve(run) or "–", left=True)


def length_of(run: Run) -> str:
    """Return how long a run was beside what its source's was, and so whether it was cut short."""
    return length_in_words(run.trial) or "–"


def _is_worth_it(column: Column[Run], values: list[object]) -> bool:
    if column.name in _ALWAYS:
        return True
    if column.name == "loss_scale":
        return bool({str(value) for value in values} - {"none", "dynamic"})
    if column.name in _TELLING_APART:
        return len(set(values)) > 1
    return any(value not in (None, 0, 0.0) for value in values)


def _part(run: Run, name: Literal["total", "start", "validation"]) -> float | None:
    if run.split is None:
        return None
    return {"total": run.split.total, "start": run.split.start, "validation": run.split.validation}[name]


def _rate(run: Run) -> str:
    unit = steady_metrics.unit_of(run.trial)
    return "–" if run.throughput is None else f"{format_rate(run.throughput)} {unit}/s"


def gpus_of(run: Run) -> str:
    """Return how many GPUs a run had, and how it was spread over them."""
    spec = run.trial.spec
    return str(spec.world_size) if spec.parallelism == "none" else f"{spec.world_size} {spec.parallelism}"


def _techniques(run: Run) -> str:
    return join(run.trial.spec.techniques)


def _waits(run: Run) -> float | None:
    return data_share(run.trial)


def _loss(run: Run) -> float | None:
    epochs = epochs_of(run.trial)
    return epochs[-1].losses[-1][1] if epochs else None


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


_ALWAYS = ("precision", "batch_size", "length", "status")
_TELLING_APART = ("workload", "data_set", "gpus", "seed", "techniques")

_QUESTION: tuple[Column[Run], ...] = (
    Column("workload", "workload", lambda r: r.trial.spec.workload, lambda r: r.trial.spec.workload, left=True),
    Column("data_set", "data", lambda r: r.trial.spec.data_set, lambda r: r.trial.spec.data_set, left=True),
    Column("precision", "precision", lambda r: r.trial.spec.precision, lambda r: r.trial.spec.precision, left=True),
    Column("loss_scale", "loss scale", lambda r: r.trial.spec.loss_scale, lambda r: r.trial.spec.loss_scale, left=True),
    Column("techniques", "techniques", _techniques, _techniques, left=True, wraps=True),
    Column("batch_size", "batch", lambda r: r.trial.spec.batch_size, lambda r: str(r.trial.spec.batch_size)),
    Column("gpus", "GPUs", gpus_of, gpus_of),
    Column("seed", "seed", lambda r: r.trial.spec.seed, lambda r: str(r.trial.spec.seed)),
)

_TIMES: tuple[Column[Run], ...] = (
    Column("length", "length", length_of, length_of, left=True, wraps=True),
    Column("seconds", "time", lambda r: _part(r, "total"), lambda r: format_seconds(_part(r, "total"))),
    Column(
        "start_seconds",
        "first step",
        lambda r: _part(r, "start"),
        lambda r: format_seconds(_part(r, "start")),
    ),
    Column("data_share", "waits for data", _waits, lambda r: format_percent(_waits(r))),
    Column(
        "validation_seconds",
        "validation",
        lambda r: _part(r, "validation"),
        lambda r: format_seconds(_part(r, "validation")),
    ),
    Column("throughput_per_second", "throughput", lambda r: r.throughput, _rate, best="highest"),
    Column("speedup", "speed-up", lambda r: r.speedup, lambda r: format_ratio(r.speedup), best="highest"),
)

_RESULTS: tuple[Column[Run], ...] = (
    Column("efficiency", "scaling efficiency", lambda r: r.efficiency, lambda r: format_percent(r.efficiency)),
    Column(
        "peak_allocated_bytes",
        "peak allocated",
        lambda r: r.peak_allocated_bytes,
        lambda r: format_bytes(r.peak_allocated_bytes),
        best="lowest",
    ),
    Column(
        "peak_reserved_bytes",
        "peak reserved",
        lambda r: r.peak_reserved_bytes,
        lambda r: format_bytes(r.peak_reserved_bytes),
        best="lowest",
    ),
    Column(
        "driver_used_bytes",
        "driver's figure",
        lambda r: r.driver_used_bytes,
        lambda r: format_bytes(r.driver_used_bytes),
    ),
    Column("accuracy", "accuracy", lambda r: r.accuracy, lambda r: format_percent(r.accuracy)),
    Column("perplexity", "perplexity", lambda r: r.perplexity, lambda r: _number(r.perplexity)),
    Column("final_loss", "last loss", _loss, lambda r: _number(_loss(r))),
    Column("skipped_steps", "skipped", lambda r: r.skipped_steps, lambda r: str(r.skipped_steps)),
    Column("status", "status", lambda r: r.trial.status, lambda r: r.trial.status, left=True),
)

# In CSV and JSON only.
EXTRA: tuple[Column[Run], ...] = (
    Column("best_accuracy", "best accuracy", lambda r: r.best_accuracy, lambda r: format_percent(r.best_accuracy)),
    Column("message", "message", lambda r: r.trial.message, lambda r: r.trial.message),
    Column("device", "device", lambda r: r.trial.environment.device_name, lambda r: r.trial.environment.device_name),
    Column("key", "key", lambda r: r.trial.spec.key, lambda r: r.trial.spec.key),
)
