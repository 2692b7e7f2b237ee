"""The columns of the largest batches, of the curve below them, and of where memory goes."""

from collections.abc import Callable, Sequence

from castwise.analysis import steady_metrics
from castwise.analysis.energy import joules_per_unit
from castwise.max_batch.memory_breakdown import BEYOND_THE_PEAK, MemoryBreakdown, breakdown_of
from castwise.max_batch.result import MaxBatch, trained
from castwise.records.schema import Trial
from castwise.registry.precisions import BASELINE
from castwise.registry.published import LargestBatch, largest_batches
from castwise.registry.techniques import join
from castwise.render.table import Column
from castwise.render.units import format_bytes, format_energy, format_rate, format_ratio, format_seconds

# Neighbours of a curve's table differ by this factor at the least: what was tried near the limit is in CSV and JSON.
_APART = 1.5


def loop_name(fit: MaxBatch) -> str:
    """Return a fit's loop in a few words: `bf16-mixed, channels-last`."""
    spec = fit.spec
    return f"{spec.precision}, {join(spec.techniques)}" if spec.techniques else spec.precision


def batch_text(trial: Trial | None) -> str:
    """Return a batch size as people read it."""
    return "–" if trial is None else f"{trial.spec.batch_size:,}"


def rate_text(trial: Trial | None) -> str:
    """Return a throughput with its unit."""
    rate = None if trial is None else _rate_of(trial)
    return "–" if trial is None or rate is None else f"{format_rate(rate)} {steady_metrics.unit_of(trial)}/s"


def _rate_of(trial: Trial) -> float | None:
    """Return a throughput; of a batch that did not fit none, though its first steps may have been timed."""
    return steady_metrics.throughput(trial) if trained(trial) else None


def _step_of(trial: Trial) -> float | None:
    return steady_metrics.step_seconds(trial) if trained(trial) else None


def published_of(fit: MaxBatch) -> list[LargestBatch]:
    """Return what sources published of a fit's workload in its precision; none of float32 itself, or of other loops."""
    spec = fit.spec
    return [] if spec.techniques or spec.precision == BASELINE else largest_batches(spec.workload, spec.precision)


def num_steps(trial: Trial | None) -> int | None:
    """Return the steps that a trial has trained, warm-up and timed ones."""
    if trial is None or trial.facts is None or not trial.ranks:
        return None
    return trial.facts.warm_up_steps + sum(block.all_steps for block in trial.ranks[0].blocks)


def baseline_of(fit: MaxBatch, fits: Sequence[MaxBatch]) -> MaxBatch | None:
    """Return float32's fit of the same loop, None where there is none."""
    same = (each for each in fits if each.spec.precision == BASELINE and each.spec.techniques == fit.spec.techniques)
    return next(same, None)


def ratio_of(fit: MaxBatch, fits: Sequence[MaxBatch]) -> float | None:
    """Return how many times float32's largest batch a fit's is; None without float32 beside it."""
    base = baseline_of(fit, fits)
    if base is None or base.largest is None or fit.largest is None or base.failing is None or fit.failing is None:
        return None
    return fit.largest.spec.batch_size / base.largest.spec.batch_size


def _predicted(fit: MaxBatch) -> int | None:
    return fit.prediction.batch_size if fit.prediction is not None else None


def _predicted_text(fit: MaxBatch) -> str:
    foretold, error = _predicted(fit), fit.prediction_error
    if foretold is None:
        return "–"
    return f"{foretold:,}" if error is None else f"{foretold:,} ({100 * error:+z.1f} %)"


def _of(trial: Trial | None, get: Callable[[Trial], int | float | None]) -> int | float | None:
    return None if trial is None else get(trial)


def _published_text(fit: MaxBatch) -> str:
    found = published_of(fit)
    return "; ".join(f"{each.ratio:.2f}× ({each.gpu})" for each in found) or "–"


def _bytes(name: str, title: str, value: Callable[[MaxBatch], float | None]) -> Column[MaxBatch]:
    return Column(name, title, value, lambda fit: format_bytes(value(fit)))


def _batch(name: str, title: str, get: Callable[[MaxBatch], Trial | None]) -> Column[MaxBatch]:
    return Column(
        name, title, lambda fit: _of(get(fit), lambda trial: trial.spec.batch_size), lambda fit: batch_text(get(fit))
    )


def _rate(name: str, title: str, get: Callable[[MaxBatch], Trial | None]) -> Column[MaxBatch]:
    return Column(name, title, lambda fit: _of(get(fit), steady_metrics.throughput), lambda fit: rate_text(get(fit)))


SUMMARY: tuple[Column[MaxBatch], ...] = (
    Column("precision", "precision", lambda fit: fit.spec.precision, lambda fit: fit.spec.precision, left=True),
    Column(
        "techniques",
        "techniques",
        lambda fit: join(fit.spec.techniques),
        lambda fit: join(fit.spec.techniques),
        left=True,
    ),
    _batch("largest_batch", "largest batch", lambda fit: fit.largest),
    _batch("failing_batch", "first that fails", lambda fit: fit.failing),
    Column("predicted_batch", "predicted", _predicted, _predicted_text),
    _bytes("fixed_bytes", "fixed", lambda fit: fit.prediction.fixed_bytes if fit.prediction else None),
    _bytes("sample_bytes", "per sample", lambda fit: fit.prediction.sample_bytes if fit.prediction else None),
    _bytes("peak_allocated_bytes", "peak allocated", lambda fit: _of(fit.largest, steady_metrics.peak_allocated_bytes)),
    _bytes("peak_reserved_bytes", "peak reserved", lambda fit: _of(fit.largest, steady_metrics.peak_reserved_bytes)),
    _rate("throughput_per_second", "throughput", lambda fit: fit.largest),
    _batch("knee_batch", "knee", lambda fit: fit.knee),
    _rate("knee_throughput", "at the knee", lambda fit: fit.knee),
    Column("num_steps", "steps", lambda fit: num_steps(fit.largest), lambda fit: str(num_steps(fit.largest) or "–")),
    Column("num_trials", "trials", lambda fit: len(fit.trials), lambda fit: str(len(fit.trials))),
)


def shown_summary(fits: Sequence[MaxBatch]) -> list[Column[MaxBatch]]:
    """Return the summary's columns worth showing, with the ratio to float32's largest batch and the published ones."""
    ratio = Column[MaxBatch](
        "batch_ratio", "over fp32", lambda fit: ratio_of(fit, fits), lambda fit: format_ratio(ratio_of(fit, fits))
    )
    published = Column[MaxBatch](
        "published", "published", lambda fit: published_of(fit) or None, _published_text, left=True
    )
    columns = [*SUMMARY[:4], ratio, published, *SUMMARY[4:]]
    return [
        column
        for column in columns
        if column.name in ("precision", "largest_batch", "failing_batch")
        or any(column.value(fit) not in (None, "", "none") for fit in fits)
    ]


def curve_of(fits: Sequence[MaxBatch]) -> list[Trial]:
    """Return the trials of the curves: those well apart, the knee, the largest that trained, the first that did not."""
    return [trial for fit in fits for trial in _curve(fit)]


def _curve(fit: MaxBatch) -> list[Trial]:
    kept: list[Trial] = []
    reach = fit.largest.spec.batch_size / _APART if fit.largest is not None else 0.0
    for trial in fit.trials:
        is_apart = not kept or trial.spec.batch_size >= _APART * kept[-1].spec.batch_size
        if trial in (fit.knee, fit.largest, fit.failing) or (
            trained(trial) and is_apart and trial.spec.batch_size <= reach
        ):
            kept.append(trial)
    return kept


def _energy(trial: Trial) -> str:
    return format_energy(joules_per_unit(trial), steady_metrics.unit_of(trial))


def _techniques(trial: Trial) -> str:
    return join(trial.spec.techniques) if trial.spec.techniques else ""


CURVE: tuple[Column[Trial], ...] = (
    Column("precision", "precision", lambda t: t.spec.precision, lambda t: t.spec.precision, left=True),
    Column("techniques", "techniques", _techniques, _techniques, left=True),
    Column("batch_size", "batch", lambda t: t.spec.batch_size, batch_text),
    Column("throughput_per_second", "throughput", _rate_of, rate_text),
    Column("step_seconds", "step time", _step_of, lambda t: format_seconds(_step_of(t))),
    Column("joules_per_unit", "energy", joules_per_unit, _energy),
    Column(
        "peak_allocated_bytes",
        "peak allocated",
        steady_metrics.peak_allocated_bytes,
        lambda t: format_bytes(steady_metrics.peak_allocated_bytes(t)),
    ),
    Column(
        "peak_reserved_bytes",
        "peak reserved",
        steady_metrics.peak_reserved_bytes,
        lambda t: format_bytes(steady_metrics.peak_reserved_bytes(t)),
    ),
    Column("status", "status", lambda t: t.status, lambda t: t.status, left=True),
)


def breakdowns_of(fits: Sequence[MaxBatch]) -> list[MemoryBreakdown]:
    """Return where memory goes at the largest batch that all fits have measured, or for lack of it at each one's."""
    with_parts = [[t for t in fit.trained if breakdown_of(t) is not None] for fit in fits]
    with_parts = [trials for trials in with_parts if trials]
    if not with_parts:
        return []
    common = set.intersection(*({t.spec.batch_size for t in trials} for trials in with_parts))
    chosen = [
        next(t for t in trials if t.spec.batch_size == max(common)) if common else trials[-1] for trials in with_parts
    ]
    return [account for trial in chosen if (account := breakdown_of(trial)) is not None]


def part_titles(accounts: Sequence[MemoryBreakdown]) -> dict[str, str]:
    """Return the parts that any of some accounts has, by name, as people read them."""
    known = {part.name: part.title for account in accounts for part in account.parts}
    return {name: title for name, title in known.items() if any(each.bytes_of(name) for each in accounts)}


def breakdown_columns(accounts: Sequence[MemoryBreakdown]) -> list[Column[MemoryBreakdown]]:
    """Return a column for each part that any of the accounts has, their sums, and the peak that was measured.

    On a GPU there are two sums: what the peak is made of, and all, with what the allocator and the driver hold beside.
    """
    name = Column[MemoryBreakdown]("precision", "precision", breakdown_name, breakdown_name, left=True)
    parts = [_part_column(name, title) for name, title in part_titles(accounts).items()]
    within = [column for column in parts if column.name not in BEYOND_THE_PEAK]
    beyond = [column for column in parts if column.name in BEYOND_THE_PEAK]
    seen = Column[MemoryBreakdown](
        "seen_bytes", "held at the peak", lambda each: each.seen_bytes, lambda each: format_bytes(each.seen_bytes)
    )
    peak = Column[MemoryBreakdown](
        "parts_error",
        "measured peak",
        lambda each: each.error,
        lambda each: f"{format_bytes(each.peak_bytes)} ({100 * each.error:+z.1f} %)",
    )
    total = Column[MemoryBreakdown](
        "total_bytes", "in all", lambda each: each.total_bytes, lambda each: format_bytes(each.total_bytes)
    )
    return [name, *within, seen, peak, *beyond, *([total] if beyond else [])]


def breakdown_name(account: MemoryBreakdown) -> str:
    """Return the loop an account is of, in a few words."""
    spec = account.trial.spec
    return f"{spec.precision}, {join(spec.techniques)}" if spec.techniques else spec.precision


def _part_column(name: str, title: str) -> Column[MemoryBreakdown]:
    return Column(name, title, lambda each: each.bytes_of(name), lambda each: format_bytes(each.bytes_of(name)))
