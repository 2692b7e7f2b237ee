"""All that a climb tried, a line a loop, as its tables have it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from castwise.analysis import steady_metrics
from castwise.analysis.speedup import rate_estimate, speedup_estimate, step_estimate
from castwise.analysis.statistics import Estimate
from castwise.records.schema import Trial
from castwise.spec.trial import TrialSpec
from castwise.tune.candidates import Outcome, TriedChange, TuningResult, by_units, needs_of

LIMITED = " (within the limit)"  # behind what such a loop changes


@dataclass(frozen=True)
class ResultRow:
    """A loop that was tried, as a line of the table.

    Attributes:
        rung: The rung that it is one of, or was tried for: 1 is the first above the plain loop.
        tried: What it changes.
        is_limited: Whether it was tried for a memory limit alone, and is no part of the ladder.
        spec: The loop.
        ratio: Its speed-up over the rung below.
        total: Its speed-up over the plain loop.
        outcome: What came of it.
        reason: Why.
        throughput: Units a second.
        unit: What throughput counts.
        first_step_seconds: The first step, searching and compiling included.
        peak_bytes: Peak of what tensors held.
        held_bytes: Peak of what counts against a memory limit: what the allocator reserved; of tensors on a CPU.
    """

    rung: int
    tried: str
    is_limited: bool
    spec: TrialSpec
    ratio: Estimate | None
    total: float | None
    outcome: Outcome | None
    reason: str
    throughput: float | None
    unit: str
    first_step_seconds: float | None
    peak_bytes: int | None
    held_bytes: int | None


def lines_of(climbed: TuningResult) -> list[ResultRow]:
    """Return the plain loop and all that was tried, in order.

    What was known to be impossible comes once, and no pairs; what a trial refused stands on its rung. A loop that was
    tried twice stands once on a rung.
    """
    lines = [_line(climbed, 0, "plain loop", climbed.start, None, None, "")]
    refused: set[str] = set()
    for each in climbed.attempts:
        if not _was_tried(climbed, each):
            had = any(other.move == each.move and _was_tried(climbed, other) for other in climbed.attempts)
            if len(each.move.parts) > 1 or each.move.name in refused or had:
                continue
            refused.add(each.move.name)
        line = _line(climbed, each.rung + 1, each.change.name, each.spec, each.ratio, each.outcome, each.reason)
        lines.append(replace(line, tried=line.tried + LIMITED, is_limited=True) if each.limited else line)
    return each_once(lines)


def _was_tried(climbed: TuningResult, attempt: TriedChange) -> bool:
    """Return whether a move was more than known to be impossible."""
    return attempt.outcome != "unsupported" or bool(climbed.of(attempt.spec))


def each_once(lines: Sequence[ResultRow]) -> list[ResultRow]:
    """Return lines without those of a loop that stands on the same rung already: the better known one is kept."""
    best: dict[tuple[int, bool, str], ResultRow] = {}
    for line in lines:
        best[_place(line)] = max(best.get(_place(line), line), line, key=_known)  # the first where they tie
    return [line for line in lines if best[_place(line)] is line]


def _place(line: ResultRow) -> tuple[int, bool, str]:
    return line.rung, line.is_limited, line.spec.configuration


def _known(line: ResultRow) -> tuple[bool, int]:
    return line.outcome == "taken", 0 if line.ratio is None else line.ratio.n


def _line(  # noqa: PLR0913, PLR0917  a figure each
    climbed: TuningResult,
    rung: int,
    tried: str,
    spec: TrialSpec,
    ratio: Estimate | None,
    outcome: Outcome | None,
    reason: str,
) -> ResultRow:
    trials = climbed.of(spec)
    well = [trial for trial in trials if trial.status == "ok"]
    total = by_units(speedup_estimate(climbed.of(climbed.start), well), climbed.start, spec)
    return ResultRow(
        rung=rung,
        tried=tried,
        is_limited=False,
        spec=spec,
        ratio=ratio,
        total=1.0 if spec.configuration == climbed.start.configuration and well else (total.value if total else None),
        outcome=outcome,
        reason=reason,
        throughput=throughput_of(well),
        unit=search_unit(climbed),
        first_step_seconds=max((found for each in trials if (found := _first_step(each)) is not None), default=None),
        peak_bytes=steady_metrics.largest(steady_metrics.peak_allocated_bytes(trial) for trial in well),
        held_bytes=int(held) if math.isfinite(held := needs_of(well)) else None,
    )


def _first_step(trial: Trial) -> float | None:
    """Return what a process's first step took; a training run has it in its first epoch."""
    epochs = trial.ranks[0].epochs if trial.ranks else ()
    if trial.spec.recipe is not None:
        return epochs[0].first_step_seconds if epochs else None
    return None if trial.facts is None else trial.facts.first_step_seconds


def search_unit(climbed: TuningResult) -> str:
    """Return what a climb's throughput counts."""
    return next((steady_metrics.unit_of(trial) for trial in climbed.trials), "samples")


def throughput_of(trials: Sequence[Trial]) -> float | None:
    """Return the units a second of one loop over its processes; None where nothing was timed."""
    rate = rate_estimate(trials, step_estimate(trials))
    return None if rate is None else rate.value
