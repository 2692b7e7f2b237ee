"""The columns of the published loop beside the tuned one."""

import math
import statistics
from collections.abc import Sequence

from castwise.analysis.training_metrics import Run
from castwise.registry.techniques import join
from castwise.render.intervals import ratio_text
from castwise.render.table import Column
from castwise.render.training_table import gpus_text
from castwise.render.units import format_bytes, format_seconds
from castwise.suites.tuned_vs_published import TunedPair, largest_bytes, median_seconds


def shown_tuned(rows: Sequence[TunedPair]) -> list[Column[TunedPair]]:
    """Return the columns worth showing: what tells rows apart, and the figures that exist."""
    return [column for column in TUNED if _is_worth_it(column, [column.value(row) for row in rows])]


def _is_worth_it(column: Column[TunedPair], values: Sequence[object]) -> bool:
    if column.name in _TELLING_APART:
        return len(set(values)) > 1
    return any(value is not None for value in values)


def _score(pair: TunedPair, side: Sequence[Run]) -> float | None:
    scores = pair.scores(side)
    return statistics.fmean(scores) if scores else None


def _score_text(pair: TunedPair, side: Sequence[Run]) -> str:
    scores = pair.scores(side)
    if not scores:
        return "–"
    spread = f" ± {_number(pair, statistics.stdev(scores))}" if len(scores) > 1 else ""
    return f"{_number(pair, statistics.fmean(scores))}{spread}{'' if pair.is_language_model else ' %'}"


def _number(pair: TunedPair, value: float, sign: str = "") -> str:
    return f"{value:{sign}.1f}" if pair.is_language_model else f"{100 * value:{sign}.2f}"


def _difference(pair: TunedPair) -> float | None:
    found = pair.difference
    return found.value if found is not None else None


def _difference_text(pair: TunedPair) -> str:
    found = pair.difference
    if found is None:
        return "–"
    text = _number(pair, found.value, "+")
    if not math.isfinite(found.low):
        return text
    return f"{text} [{_number(pair, found.low, '+')}, {_number(pair, found.high, '+')}]"


def _speedup(pair: TunedPair) -> float | None:
    return pair.speedup.value if pair.speedup is not None else None


def _seeds(pair: TunedPair) -> str:
    before, after = len(pair.published), len(pair.tuned)
    return f"{before} each" if before == after else f"{before} published, {after} tuned"


def _loop(pair: TunedPair) -> str:
    return join(pair.spec.techniques)


_TELLING_APART = ("workload", "batch_size", "gpus")

TUNED: tuple[Column[TunedPair], ...] = (
    Column(
        "workload",
        "workload",
        lambda p: p.spec.workload,
        lambda p: p.spec.workload,
        left=True,
    ),
    Column(
        "precision",
        "precision",
        lambda p: p.spec.precision,
        lambda p: p.spec.precision,
        left=True,
    ),
    Column(
        "batch_size",
        "batch",
        lambda p: p.spec.batch_size,
        lambda p: str(p.spec.batch_size),
    ),
    Column("gpus", "GPUs", lambda p: gpus_text(p.spec), lambda p: gpus_text(p.spec)),
    Column("seeds", "seeds", lambda p: min(len(p.published), len(p.tuned)), _seeds),
    Column(
        "published_seconds",
        "published loop",
        lambda p: median_seconds(p.published),
        lambda p: format_seconds(median_seconds(p.published)),
    ),
    Column(
        "tuned_seconds",
        "tuned loop",
        lambda p: median_seconds(p.tuned),
        lambda p: format_seconds(median_seconds(p.tuned)),
    ),
    Column("speedup", "times as fast", _speedup, lambda p: ratio_text(p.speedup)),
    Column(
        "settled_speedup",
        "by the epochs after the first",
        lambda p: p.settled_speedup.value if p.settled_speedup is not None else None,
        lambda p: ratio_text(p.settled_speedup),
    ),
    Column(
        "published_bytes",
        "peak allocated, published",
        lambda p: largest_bytes(p.published),
        lambda p: format_bytes(largest_bytes(p.published)),
    ),
    Column("tuned_bytes", "tuned", lambda p: largest_bytes(p.tuned), lambda p: format_bytes(largest_bytes(p.tuned))),
    Column(
        "published_score",
        "accuracy or perplexity, published",
        lambda p: _score(p, p.published),
        lambda p: _score_text(p, p.published),
    ),
    Column("tuned_score", "tuned", lambda p: _score(p, p.tuned), lambda p: _score_text(p, p.tuned)),
    Column("difference", "difference", _difference, _difference_text),
    Column("loop", "the tuned loop", _loop, _loop, left=True, wraps=True),
)

# What a narrow terminal does without, the first first.
DISPENSABLE = ("loop", "published_bytes", "tuned_bytes", "seeds", "settled_speedup")
