"""Which changes to a configuration are worth a measurement next, by what was tried before; the cheap kinds come first.

A change that was not faster is tried again only if a change that interacts with it has been accepted since. Changes
that interact are tried as a pair, too, since neither may be faster alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from castwise.analysis.statistics import Estimate
from castwise.records.schema import Environment
from castwise.registry.precisions import find_precision
from castwise.registry.techniques import TECHNIQUES, why_unsupported
from castwise.spec.trial import TrialSpec
from castwise.spec.types import Numerics
from castwise.tune.changes import (
    COMPANION,
    COMPILE_RANK,
    PAIRS,
    Change,
    interact,
    is_applicable,
    is_compiled,
    may_enable,
)
from castwise.tune.measurements import Outcome

NUMERICS: tuple[Numerics, ...] = ("bits", "rounding", "draws", "shape")

# A precision this far behind the accepted one is not tried again, unless the device waited for something that hid its
# gain, and a change accepted since removed that. Source: chosen here.
_HOPELESS = 0.9
# In 16 bits a step casts and copies weights on top of its products. Graphs and compilation make that cheap, so that a
# 16-bit precision may be this far behind float32. Source: an H200, mlp-4096: bf16-master has 0.82 times the speed of
# TF32 in the plain loop, and 1.26 times in CUDA graphs.
_HOPELESS_WITH_CASTS = 0.5
_MAX_COMPILED_PRECISIONS = 2
_MAX_BATCH_FACTOR = 8
_IN_VAIN = ("same", "slower", "too large", "failed", "unsupported")


@dataclass(frozen=True)
class TriedChange:
    """A change that was tried."""

    stage: int  # how many changes were accepted before
    change: Change
    below: TrialSpec  # the configuration that it is compared with
    spec: TrialSpec  # the configuration that it made
    ratio: Estimate | None  # its speed-up by units per second; None if it was not measured
    outcome: Outcome
    reason: str = ""
    limited: bool = False  # whether it was tried for a memory limit alone


@dataclass(frozen=True)
class SearchSpace:
    """What a search may try, and on which machine."""

    start: TrialSpec  # the plain loop
    precisions: tuple[str, ...]  # the first is the start's
    techniques: tuple[str, ...]
    environment: Environment
    larger_batches: bool = False
    memory_bytes: float | None = None  # the fastest configuration that holds no more is looked for, too

    def candidates(self, current: TrialSpec, tried: Sequence[TriedChange]) -> list[Change]:
        """Return the changes to try next on a configuration: the open ones of the lowest rank; none if none is left.

        Every session on a compiled configuration compiles it again, so that all that compiles no longer than it does
        is tried at once there.
        """
        found = [change for change in self._all(current, tried) if _is_open(change, tried, current)]
        lowest = min((change.rank for change in found), default=0)
        if lowest > COMPILE_RANK or not is_compiled(current):
            return [change for change in found if change.rank == lowest]
        found = [change for change in found if change.rank <= COMPILE_RANK]
        precisions = sorted((change for change in found if change.precision), key=lambda each: -_speed(each, tried))
        # Techniques first: if there is no time for all, the precisions were compared at an earlier stage already.
        return [*(change for change in found if not change.precision), *precisions[:_MAX_COMPILED_PRECISIONS]]

    def _all(self, current: TrialSpec, tried: Sequence[TriedChange]) -> list[Change]:
        new = [name for name in self.techniques if name not in current.techniques and is_applicable(name, current)]
        others = [name for name in self.precisions[1:] if name != current.precision]  # never back to the first
        changes = [change for name in others for change in _to_precision(name, new, tried, current)]
        changes += [Change(techniques=(name,)) for name in new]
        for first, second in PAIRS:
            pair = Change(techniques=(first, second))
            if first in new and second in self.techniques and second not in current.techniques:
                is_useful = is_applicable(second, Change(techniques=(first,)).on(current))
                if is_useful and not _has_refused_part(pair, tried, current):
                    changes.append(pair)
        if self.larger_batches and current.batch_size < _MAX_BATCH_FACTOR * self.start.batch_size:
            changes.append(Change(batch_size=2 * current.batch_size))
        return changes


def allowed_techniques(numerics: Numerics, kind: str = "steady") -> tuple[str, ...]:
    """Return the techniques of a kind of trial that change the numbers this much at the most."""
    most = NUMERICS.index(numerics)
    return tuple(row.name for row in TECHNIQUES if kind in row.kinds and NUMERICS.index(row.numerics) <= most)


def next_stage(tried: Sequence[TriedChange]) -> int:
    """Return how many changes were accepted."""
    return 1 + max((each.stage for each in tried if each.outcome == "taken"), default=-1)


def _to_precision(precision: str, new: Sequence[str], tried: Sequence[TriedChange], current: TrialSpec) -> list[Change]:
    """Return the changes to a precision: with its companion technique, and alone if that was of no use."""
    alone, both = Change(precision=precision), Change(precision=precision, techniques=(COMPANION,))
    if COMPANION not in new or why_unsupported(Change(techniques=(COMPANION,)).on(current)) is not None:
        return [alone]
    in_vain = any(each.change == both and each.below == current and each.outcome in _IN_VAIN for each in tried)
    return [both, alone] if in_vain else [both]


def _is_open(change: Change, tried: Sequence[TriedChange], current: TrialSpec) -> bool:
    """Return whether a change is to be tried: it is new or promising, or it interacts with one accepted since."""
    last = _last_try(change, tried)
    if last is None:
        return True
    if last.stage == next_stage(tried) or last.outcome in ("taken", "failed", "too large"):
        return False
    since = [each for each in tried if each.outcome == "taken" and each.stage >= last.stage]
    if last.outcome == "unsupported":
        if not _was_refused_by_trial(last):
            return True  # the constraints of the techniques tell at once
        return any(may_enable(each.change, each.below, change, last.reason) for each in since)
    acting = [each for each in since if interact(change, each.change)]
    if change.precision is not None:
        return bool(acting) and _may_catch_up(last, since, acting, current)
    return bool(acting) or _value(last) > 1


def _may_catch_up(
    last: TriedChange, since: Sequence[TriedChange], acting: Sequence[TriedChange], current: TrialSpec
) -> bool:
    """Return whether a precision was near enough to the accepted one, given what may have hidden its gain."""
    rival = next((_value(each) for each in since if each.stage == last.stage and each.change.precision), 1.0)
    # A change that removed waiting time may have done so for this precision alone.
    hidden = math.prod(_value(each) for each in acting if each.change.removes_waiting)
    adds_casts = _is_16_bit(last.spec.precision) and not _is_16_bit(current.precision)
    return _value(last) / rival * hidden >= (_HOPELESS_WITH_CASTS if adds_casts else _HOPELESS)


def _is_16_bit(precision: str) -> bool:
    row = find_precision(precision)
    return (row.autocast_dtype or row.param_dtype) != "float32"


def _was_refused_by_trial(tried: TriedChange) -> bool:
    return tried.outcome == "unsupported" and why_unsupported(tried.spec) is None


def _has_refused_part(pair: Change, tried: Sequence[TriedChange], current: TrialSpec) -> bool:
    """Return whether a trial refused one of a pair, for a reason that does not name the other, and would again."""
    for part in pair.singles:
        last = _last_try(part, tried)
        if last is not None and _was_refused_by_trial(last) and not _is_open(part, tried, current):
            others = set(pair.techniques) - set(part.techniques)
            if not any(name in last.reason for name in others):
                return True
    return False


def _last_try(change: Change, tried: Sequence[TriedChange]) -> TriedChange | None:
    """Return the last try of a change; for a precision alone that with its companion counts, unless it was in vain."""
    for each in reversed(tried):
        if each.change == change:
            return each
        if change.precision and not change.techniques and each.change.precision == change.precision:
            return None if each.outcome in _IN_VAIN else each
    return None


def _speed(change: Change, tried: Sequence[TriedChange]) -> float:
    last = _last_try(change, tried)
    return math.inf if last is None or last.ratio is None else last.ratio.value


def _value(tried: TriedChange) -> float:
    return 1.0 if tried.ratio is None else tried.ratio.value
