"""The largest batches in sentences: what fits, what the knee costs, why memory is not halved, and what went wrong."""

from collections.abc import Sequence

from castwise.analysis import steady_metrics
from castwise.errors import UsageError
from castwise.max_batch.columns import (
    batch_text,
    breakdowns_of,
    loop_name,
    num_steps,
    published_of,
    rate_text,
    ratio_of,
)
from castwise.max_batch.memory_breakdown import TOLERANCE, why_not_halved
from castwise.max_batch.result import MaxBatch
from castwise.records.schema import Shortfall, Trial
from castwise.registry.precisions import BASELINE, known_precision
from castwise.render.units import format_bytes, format_ratio


def conclusions(fits: Sequence[MaxBatch]) -> list[str]:
    """Return what the search found, in sentences."""
    lines = [line for fit in fits for line in _found(fit)]
    lines += [line for fit in fits for line in _ratios(fit, fits)]
    accounts = breakdowns_of(fits)
    bases = {each.trial.spec.techniques: each for each in accounts if each.trial.spec.precision == BASELINE}
    for account in accounts:
        base = bases.get(account.trial.spec.techniques)
        is_same_batch = base is not None and base.trial.spec.batch_size == account.trial.spec.batch_size
        if base is not None and is_same_batch and _is_narrower(account.trial.spec.precision):
            lines.append(why_not_halved(base, account, format_bytes))
    return lines


def _is_narrower(precision: str) -> bool:
    """Return whether a precision holds anything in fewer bits than float32: of TF32 nobody expects half the memory."""
    row = known_precision(precision)
    return row is None or row.param_dtype != "float32" or row.autocast_dtype is not None


def _found(fit: MaxBatch) -> list[str]:
    largest, failing = fit.largest, fit.failing
    if largest is None or failing is None:
        return []
    knee = fit.knee
    line = (
        f"{loop_name(fit)}: batch {batch_text(largest)} trained {num_steps(largest)} steps in a fresh process, "
        f"batch {batch_text(failing)} {'ran out of memory' if failing.status == 'oom' else failing.status}."
    )
    if knee is not None and knee is not largest:
        line += (
            f" Batch {batch_text(knee)} is the smallest within 2 % of the best throughput measured ({rate_text(knee)})"
        )
        held, most = steady_metrics.peak_allocated_bytes(knee), steady_metrics.peak_allocated_bytes(largest)
        line += f", in {100 * held / most:.0f} % of the memory." if held and most else "."
    return [line]


def _ratios(fit: MaxBatch, fits: Sequence[MaxBatch]) -> list[str]:
    ratio, published = ratio_of(fit, fits), published_of(fit)
    if ratio is None or not published:
        return []
    said = "; ".join(
        f"{each.suite} had {format_ratio(each.ratio)} on a {each.gpu} ({each.baseline} and {each.batch_size})"
        for each in published
    )
    return [f"{loop_name(fit)}: {format_ratio(ratio)} fp32's largest batch; {said}."]


def remarks(fits: Sequence[MaxBatch]) -> list[str]:
    """Return what a reader must know of the figures, a line each."""
    lines: list[str] = []
    for fit in fits:
        if fit.largest is None:
            lines += why_none(fit)
        elif fit.problem is not None:
            lines.append(f"{fit.problem.spec.label}: {fit.problem.status}: {fit.problem.message}")
        elif fit.failing is None:
            lines.append(f"{loop_name(fit)}: the search ended before any batch ran out of memory")
    lines += _shared(fits)
    lines += _diverged(fits)
    lines += _missing_parts(fits)
    lines += [
        f"{account.trial.spec.label}: the step taken apart peaked {100 * account.error:+.1f} % beside the timed ones"
        for account in breakdowns_of(fits)
        if abs(account.error) > TOLERANCE
    ]
    if any(fit.spec.device_type == "cpu" for fit in fits):
        lines.append("memory on a CPU is the growth of the process, an upper bound of what tensors hold")
    return lines


def raise_if_nothing_fits(fits: Sequence[MaxBatch]) -> None:
    """Say so where memory is too small for the smallest batch of every loop.

    Raises:
        UsageError: It is; the message says what the smallest batches need.
    """
    if fits and all(fit.largest is None and fit.failing is not None for fit in fits):
        lines = [line for fit in fits for line in why_none(fit)]
        raise UsageError(f"{'; '.join(lines)}.")


def why_none(fit: MaxBatch) -> list[str]:
    """Return why no batch fits, a line each: what the smallest one needs, or what it ended in."""
    lines = []
    short = next((trial for trial in fit.trials if trial.status == "oom"), None)
    if short is not None:
        lines.append(f"batch {short.spec.batch_size} does not fit in {loop_name(fit)}: {_needs(short)}")
    if fit.problem is not None:
        lines.append(f"{fit.problem.spec.label}: {fit.problem.status}: {fit.problem.message}")
    return lines


def _needs(trial: Trial) -> str:
    found = trial.shortfall
    if found is None:
        limit = trial.spec.memory_limit_bytes or trial.environment.gpu_memory_bytes
        return f"it ran out of {format_bytes(limit)}" if limit else trial.message
    return f"needs {_least(trial, found)}{format_bytes(found.needed_bytes)}, {format_bytes(found.free_bytes)} free"


def _least(trial: Trial, found: Shortfall) -> str:
    # A CPU's process has run a step when it is found too large; a GPU's ends at the tensor that does not fit.
    return "" if trial.spec.device_type == "cpu" and found else "at least "


def _shared(fits: Sequence[MaxBatch]) -> list[str]:
    most = max((fit.num_foreign for fit in fits), default=0)
    if not most:
        return []
    others = "another process" if most == 1 else f"up to {most} other processes"
    return [f"{others} computed on the GPU while steps were timed: throughput, energy and knees are of a GPU in turns"]


def _diverged(fits: Sequence[MaxBatch]) -> list[str]:
    names = [loop_name(fit) for fit in fits if fit.largest is not None and fit.largest.status == "diverged"]
    if not names:
        return []
    return [f"the loss of {', '.join(names)} was no number at the largest batch: it takes as much memory as any"]


def _missing_parts(fits: Sequence[MaxBatch]) -> list[str]:
    reasons: dict[str, None] = {}
    for fit in fits:
        parts = fit.largest.ranks[0].memory_parts if fit.largest is not None and fit.largest.ranks else None
        if parts is not None and parts.missing:
            reasons[f"{loop_name(fit)}: where its memory goes is not known: {parts.missing}"] = None
    return list(reasons)
