"""The columns of the tables that set published figures beside measured ones."""

from collections import Counter
from collections.abc import Sequence

from castwise.analysis import steady_metrics, training_metrics
from castwise.records.schema import Trial
from castwise.render.table import Column
from castwise.render.units import format_bytes, format_percent, format_ratio, format_seconds
from castwise.suites.compare_published import PublishedComparison
from castwise.suites.result import LimitFound


def shown_published(rows: Sequence[PublishedComparison]) -> list[Column[PublishedComparison]]:
    """Return the columns that hold something."""
    return [column for column in PUBLISHED if column.name in _ALWAYS or _is_worth_it(column, rows)]


def _is_worth_it(column: Column[PublishedComparison], rows: Sequence[PublishedComparison]) -> bool:
    values = {column.value(row) for row in rows}
    return len(values) > 1 if column.name in ("workload", "loss_scale") else values != {None}


def _seconds(row: PublishedComparison) -> float | None:
    """Return the median time of the whole runs, None where there is none: times of shortened ones say nothing."""
    splits = (training_metrics.split(trial) for trial in row.trials if training_metrics.is_whole(trial))
    return training_metrics.median(split.total for split in splits if split is not None)


def _length(row: PublishedComparison) -> str | None:
    lengths = Counter(_length_of(trial) for trial in row.trials)
    if len(row.trials) < 2:
        return next(iter(lengths), None)
    return "; ".join(f"{length}, {count} seed{'s' if count > 1 else ''}" for length, count in lengths.items())


def _length_of(trial: Trial) -> str:
    if training_metrics.is_whole(trial):
        return "whole"
    if not trial.ranks:
        return trial.status
    length = training_metrics.length_in_words(trial) or "–"
    return length if trial.status == "ok" else f"{trial.status} after {length}"


def _memory(row: PublishedComparison) -> int | None:
    """Return the measured memory of the same kind as the published."""
    of_kind = {
        "allocated": steady_metrics.peak_allocated_bytes,
        "reserved": steady_metrics.peak_reserved_bytes,
        "driver": training_metrics.driver_used_bytes,
    }[row.published.memory]
    found = [value for trial in row.trials if (value := of_kind(trial)) is not None]
    return max(found, default=None) if row.published.memory_bytes else None


def _published_accuracy(row: PublishedComparison) -> float | None:
    return row.accuracies[0] if row.accuracies else row.published.accuracy


def _after(row: PublishedComparison) -> str | None:
    if (
        row.accuracies is None
        or row.num_epochs is None
        or any(training_metrics.is_whole(trial) for trial in row.trials)
    ):
        return None
    return f"epoch {row.num_epochs}"


def _text(value: object) -> str:
    return "–" if value is None else str(value)


def _published_seconds(row: PublishedComparison) -> str:
    return row.published.outcome if row.published.seconds is None else format_seconds(row.published.seconds)


def _batch_pair(pair: tuple[int | None, int | None]) -> str:
    fits, fails = pair
    words = (None if fits is None else f"{fits} trains", None if fails is None else f"{fails} does not")
    return ", ".join(word for word in words if word) or "–"


# What a narrow terminal does without, the first first.
DISPENSABLE = (
    ("published_memory_bytes", "memory_bytes", "memory"),
    "equal_batch_speedup",
    "ratio",
    "seconds",
    ("published_accuracy", "accuracy", "accuracy_after"),
    "published_seconds",
)

_ALWAYS = ("precision", "batch_size", "published_seconds", "measured")

PUBLISHED: tuple[Column[PublishedComparison], ...] = (
    Column("workload", "workload", lambda r: r.published.workload, lambda r: r.published.workload, left=True),
    Column(
        "precision",
        "precision",
        lambda r: r.published.precision,
        lambda r: r.published.precision,
        left=True,
    ),
    Column("loss_scale", "loss scale", lambda r: r.published.loss_scale, lambda r: _text(r.published.loss_scale)),
    Column("batch_size", "batch", lambda r: r.published.batch_size, lambda r: str(r.published.batch_size)),
    Column("published_seconds", "published time", lambda r: r.published.seconds, _published_seconds),
    Column("measured", "measured run", _length, lambda r: _text(_length(r)), left=True, wraps=True),
    Column("seconds", "measured time", _seconds, lambda r: format_seconds(_seconds(r))),
    Column(
        "published_speedup",
        "published speed-up",
        lambda r: r.published_speedup,
        lambda r: format_ratio(r.published_speedup),
    ),
    Column("speedup", "measured speed-up", lambda r: r.speedup, lambda r: format_ratio(r.speedup)),
    Column("ratio", "measured / published", lambda r: r.ratio, lambda r: format_ratio(r.ratio)),
    Column(
        "equal_batch_speedup",
        "at equal batch",
        lambda r: r.equal_batch_speedup,
        lambda r: format_ratio(r.equal_batch_speedup),
    ),
    Column(
        "published_memory_bytes",
        "published memory",
        lambda r: r.published.memory_bytes,
        lambda r: format_bytes(r.published.memory_bytes),
    ),
    Column("memory_bytes", "measured memory", _memory, lambda r: format_bytes(_memory(r))),
    Column(
        "memory",
        "memory is",
        lambda r: r.published.memory if r.published.memory_bytes else None,
        lambda r: r.published.memory if r.published.memory_bytes else "–",
        left=True,
    ),
    Column(
        "published_accuracy",
        "published accuracy",
        _published_accuracy,
        lambda r: format_percent(_published_accuracy(r)),
    ),
    Column(
        "accuracy",
        "measured accuracy",
        lambda r: r.accuracies[1] if r.accuracies else None,
        lambda r: format_percent(r.accuracies[1] if r.accuracies else None),
    ),
    Column("accuracy_after", "both after", _after, lambda r: _text(_after(r)), left=True),
)

LIMITS: tuple[Column[LimitFound], ...] = (
    Column("workload", "workload", lambda r: r.workload, lambda r: r.workload, left=True),
    Column("precision", "precision", lambda r: r.precision, lambda r: r.precision, left=True),
    Column("loss_scale", "loss scale", lambda r: r.loss_scale, lambda r: r.loss_scale, left=True),
    Column(
        "published",
        "published",
        lambda r: list(r.published),
        lambda r: f"{_batch_pair(r.published)} ({r.gpu})" if r.gpu else "–",
        left=True,
    ),
    Column("measured", "here", lambda r: list(r.measured), lambda r: _batch_pair(r.measured), left=True),
    Column("reserved_bytes", "reserved", lambda r: r.reserved_bytes, lambda r: format_bytes(r.reserved_bytes)),
)
