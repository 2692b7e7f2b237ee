"""From the plain loop upwards: which changes to a loop are to be tried next, by what was tried before.

On the loop reached, every change that is open is a move, the cheap kinds first; all that were faster are taken
together, one on top of the other. What did not pay is tried again only where something taken since acts on it, and what
acts on each other is tried as a pair, since neither may pay alone. Nothing here measures.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from castwise.analysis import steady_metrics
from castwise.analysis.statistics import Estimate, verdict_of
from castwise.records.schema import Trial
from castwise.registry.precisions import find_precision
from castwise.registry.technique_constraints import why_unsupported
from castwise.registry.techniques import TECHNIQUES, Numerics, join
from castwise.spec.trial import TrialSpec
from castwise.tune.changes import (
    COMPANION,
    COMPILE_RANK,
    PAIRS,
    Change,
    change_between,
    interact,
    is_applicable,
    is_compiled,
    may_enable,
)

Outcome = Literal[
    "taken", "second best", "same", "slower", "unproven", "too large", "failed", "not tried", "unsupported"
]
Ending = Literal["nothing left", "budget", "failed"]

NUMERICS: tuple[Numerics, ...] = ("bits", "rounding", "draws", "shape")

# A screened loop is looked at further from here. Source: chosen here.
PROMISING = 1.005
_ONE = "one process: no interval"

# A precision this far behind the one taken is not tried again, unless time in which the device waits, and which these
# have taken away since, may have hidden its gain. Source: chosen here.
_HOPELESS = 0.9
# In 16 bits a step has casts and copies of weights on top of its products, which a graph, compilation and a compiled
# update make cheap: beside float32 it may be this far behind. At their best its products take half of TF32's time.
# Source: an H200, mlp-4096: bf16-master 0.82 times TF32's plain loop, 1.26 times it as graphs.
_HOPELESS_WITH_CASTS = 0.5
_UNCOVERING = frozenset(("cuda-graph", "resident-data", "loader-workers"))
_MOST_COMPILED_RIVALS = 2
_LARGEST_BATCH = 8  # times the first
_IN_VAIN = ("same", "slower", "too large", "failed", "unsupported")


@dataclass(frozen=True)
class TriedChange:
    """A move that was tried.

    Attributes:
        rung: How many rungs there were below.
        move: The move.
        below: The loop it was tried on.
        spec: The loop it made.
        ratio: Its speed-up over the rung below, by units a second; None where it was not measured.
        outcome: What came of it, beside the rung below.
        reason: Why, in a few words.
        limited: Whether it was tried in the climb under a memory limit alone, and is no part of the other ladder.
        over: The rung below, where the loop it was tried on turned out to be no rung; None where it is one.
    """

    rung: int
    move: Change
    below: TrialSpec
    spec: TrialSpec
    ratio: Estimate | None
    outcome: Outcome
    reason: str = ""
    limited: bool = False
    over: TrialSpec | None = None

    @property
    def change(self) -> Change:
        """Return what it changes of the rung below."""
        return self.move if self.over is None else change_between(self.over, self.spec)


@dataclass(frozen=True)
class TuningResult:
    """A climb's end.

    Attributes:
        start: The plain loop.
        attempts: All that was tried, rung by rung; of the climb under a memory limit what is not in the other.
        trials: Every trial, those of the probes among them.
        probes: Loops measured to tell what bounds the first and the last rung, and no rungs themselves.
        ending: Why no further move was tried.
        seconds: Wall time.
        num_recorded: How many of the trials were on record before, and are not in the wall time.
        budget_seconds: The wall time after which nothing further was tried; None where it is not known.
    """

    start: TrialSpec
    attempts: tuple[TriedChange, ...]
    trials: tuple[Trial, ...]
    probes: tuple[TrialSpec, ...]
    ending: Ending
    seconds: float
    num_recorded: int = 0
    budget_seconds: float | None = None

    @property
    def rungs(self) -> list[TrialSpec]:
        """Return the loops of the ladder, the plain one first."""
        return [self.start, *(each.spec for each in self.attempts if each.outcome == "taken" and not each.limited)]

    @property
    def winner(self) -> TrialSpec:
        """Return the last rung."""
        return self.rungs[-1]

    def of(self, spec: TrialSpec) -> list[Trial]:
        """Return the trials of one loop."""
        return [trial for trial in self.trials if trial.spec.configuration == spec.configuration]


@dataclass(frozen=True)
class SearchSpace:
    """What a climb may try.

    Attributes:
        precisions: Precisions; the first is the plain loop's.
        techniques: Techniques.
        start: The plain loop, whose batch a larger one is a multiple of; None tries no larger batch.
    """

    precisions: tuple[str, ...]
    techniques: tuple[str, ...]
    start: TrialSpec | None = None

    def moves(self, current: TrialSpec, attempts: Sequence[TriedChange]) -> list[Change]:
        """Return what is to be tried next on a loop: the open moves of the lowest rank; none where none is left.

        On a loop that compiles each sitting compiles it again: all that compiles no longer than it is tried at once.

        Args:
            current: The loop.
            attempts: What was tried; `rung` counts how often something was taken before.
        """
        found = [move for move in self._all(current, attempts) if _is_open(move, attempts, current)]
        lowest = min((move.rank for move in found), default=0)
        if lowest > COMPILE_RANK or not is_compiled(current):
            return [move for move in found if move.rank == lowest]
        found = [move for move in found if move.rank <= COMPILE_RANK]
        rivals = sorted((move for move in found if move.precision), key=lambda move: -_speed(_last(move, attempts)))
        return [*rivals[:_MOST_COMPILED_RIVALS], *(move for move in found if not move.precision)]

    def _all(self, current: TrialSpec, attempts: Sequence[TriedChange]) -> list[Change]:
        new = [name for name in self.techniques if name not in current.techniques and is_applicable(name, current)]
        others = [name for name in self.precisions[1:] if name != current.precision]  # none goes back to the first
        moves = [move for name in others for move in _to(name, new, attempts, current)]
        moves += [Change(techniques=(name,)) for name in new]
        pairs = [Change(techniques=pair) for pair in PAIRS if pair[0] in new and self._follows(pair, current)]
        moves += [pair for pair in pairs if not _has_refused_part(pair, attempts, current)]
        if self.start is not None and current.batch_size < _LARGEST_BATCH * self.start.batch_size:
            moves.append(Change(batch_size=2 * current.batch_size))
        return moves

    def _follows(self, pair: tuple[str, str], current: TrialSpec) -> bool:
        """Return whether a pair's second technique can do anything on a loop that has the first."""
        one, other = pair
        is_new = other in self.techniques and other not in current.techniques
        return is_new and is_applicable(other, Change(techniques=(one,)).on(current))


def allowed_techniques(numerics: Numerics, kind: str = "steady") -> tuple[str, ...]:
    """Return the techniques of a kind of trial that change the numbers this much at the most."""
    most = NUMERICS.index(numerics)
    return tuple(row.name for row in TECHNIQUES if kind in row.kinds and NUMERICS.index(row.numerics) <= most)


def by_units(ratio: Estimate | None, below: TrialSpec, spec: TrialSpec) -> Estimate | None:
    """Return a ratio of step times as one of units a second: a step on a larger batch has more of them."""
    factor = spec.batch_size / below.batch_size
    if ratio is None or factor == 1:
        return ratio
    return replace(ratio, value=ratio.value * factor, low=ratio.low * factor, high=ratio.high * factor)


def said_of(ratio: Estimate) -> tuple[Outcome, str]:
    """Return what is said of a loop that is no rung, by its speed-up over the rung below, and why."""
    if ratio.n == 1:
        low: Outcome = "slower" if ratio.value < 1 / PROMISING else "same"
        return "second best" if ratio.value > PROMISING else low, _ONE
    verdict = verdict_of(ratio)
    named: dict[str, Outcome] = {"faster": "second best", "same": "same", "slower": "slower"}
    return named.get(verdict.kind, "unproven"), verdict.reason


def needs_of(trials: Sequence[Trial]) -> float:
    """Return the most memory that processes of one loop held, infinite where it is not known."""
    reserved = steady_metrics.largest(map(steady_metrics.peak_reserved_bytes, trials))
    allocated = steady_metrics.largest(map(steady_metrics.peak_allocated_bytes, trials))
    return float(reserved or allocated or math.inf)


def loop_name(spec: TrialSpec) -> str:
    """Return a loop as people read it: `bf16-mixed, channels-last+compile`."""
    return f"{spec.precision}, {join(spec.techniques) if spec.techniques else 'plain loop'}"


def _to(precision: str, new: Sequence[str], attempts: Sequence[TriedChange], current: TrialSpec) -> list[Change]:
    """Return the moves to a precision: with its companion; without it where that is of no use."""
    alone, both = Change(precision=precision), Change(precision=precision, techniques=(COMPANION,))
    if COMPANION not in new or why_unsupported(Change(techniques=(COMPANION,)).on(current)) is not None:
        return [alone]
    in_vain = any(
        each.move == both and each.below.configuration == current.configuration and each.outcome in _IN_VAIN
        for each in attempts
    )
    return [both, alone] if in_vain else [both]


def _is_open(move: Change, attempts: Sequence[TriedChange], current: TrialSpec) -> bool:
    """Return whether a move is to be tried: not yet tried, promising, or acted on by what was taken since."""
    last = _last(move, attempts)
    if last is None:
        return True
    rung = 1 + max((each.rung for each in attempts if each.outcome == "taken"), default=-1)
    if last.rung == rung or last.outcome in ("taken", "failed", "too large"):
        return False
    since = [each for each in attempts if each.outcome == "taken" and each.rung >= last.rung]
    if last.outcome == "unsupported":
        # Without a trial another precision or technique may be what it lacked.
        return not _refused_itself(last) or any(may_enable(each.move, each.below, move, last.reason) for each in since)
    assert last.ratio is not None, "measured"
    acting = [each for each in since if interact(move, each.move)]
    if move.precision is not None:
        casts = _is_narrow(move.precision) and not _is_narrow(current.precision)
        least = _HOPELESS_WITH_CASTS if casts else _HOPELESS
        return bool(acting) and last.ratio.value / _lead(since, last.rung) * _uncovered(acting) >= least
    return bool(acting) or last.ratio.value > 1


def _is_narrow(precision: str) -> bool:
    """Return whether products are of numbers of 16 bits."""
    row = find_precision(precision)
    return (row.autocast_dtype or row.param_dtype) != "float32"


def _refused_itself(attempt: TriedChange) -> bool:
    """Return whether it took a trial to find that a loop cannot be had."""
    return attempt.outcome == "unsupported" and why_unsupported(attempt.spec) is None


def _has_refused_part(pair: Change, attempts: Sequence[TriedChange], current: TrialSpec) -> bool:
    """Return whether a trial refused one of a pair, for a reason that does not name the other, and would again."""
    for part in pair.singles:
        last = _last(part, attempts)
        if last is not None and _refused_itself(last) and not _is_open(part, attempts, current):
            others = set(pair.techniques) - set(part.techniques)
            if not any(name in last.reason for name in others):
                return True
    return False


def _uncovered(taken: Sequence[TriedChange]) -> float:
    """Return what was gained by taking away time in which the device waits, whatever the precision."""
    return math.prod(each.ratio.value for each in taken if each.ratio and set(each.move.parts) <= _UNCOVERING)


def _last(move: Change, attempts: Sequence[TriedChange]) -> TriedChange | None:
    """Return the last attempt at a move; at a precision alone also that with its companion, unless it was in vain."""
    for each in reversed(attempts):
        if each.move == move:
            return each
        if move.precision and not move.techniques and each.move.precision == move.precision:
            return None if each.outcome in _IN_VAIN else each
    return None


def _speed(attempt: TriedChange | None) -> float:
    return math.inf if attempt is None or attempt.ratio is None else attempt.ratio.value


def _lead(since: Sequence[TriedChange], rung: int) -> float:
    """Return the speed-up of the move taken on the same rung, where that changed the precision too."""
    rivals = (each.ratio.value for each in since if each.rung == rung and each.move.precision and each.ratio)
    return next(rivals, 1.0)
