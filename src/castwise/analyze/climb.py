"""From the plain loop upwards: which changes to a loop are to be tried next, by what was tried before.

A rung is a loop. From the one reached, every change that is open is a move; the one that buys most is taken if its
interval lies above 1, and that is the next rung. What did not pay is tried again only where something taken since acts
on it, and what acts on each other is tried as a pair, since neither may pay alone. Nothing here measures.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from castwise.analyze.estimates import Estimate
from castwise.plan import TrialSpec
from castwise.precisions import find_precision
from castwise.record import Trial
from castwise.technique_rules import resolve
from castwise.techniques import TECHNIQUES, Numerics, find_technique, join

Outcome = Literal["taken", "second best", "same", "slower", "unproven", "failed", "unsupported"]
Ending = Literal["nothing left", "budget", "failed"]

NUMERICS: tuple[Numerics, ...] = ("bits", "rounding", "draws", "shape")
_PRECISION = "precision"

# What is tried together as well, where a loop has neither: the one may pay with the other only.
_PAIRS = (
    (_PRECISION, "channels-last"),  # Tensor Cores read channels innermost; float32 on CUDA cores does not
    ("channels-last", "cudnn-search"),
    ("compile", "cuda-graph"),
    ("no-step-sync", "fused-optimizer"),  # without the fused one, skipping on the device costs copies
)
# What else acts on each other: a move that did not pay is tried again once its partner is part of the loop.
_ACTING = (
    (_PRECISION, "cuda-graph"),  # a step that launches bound does not gain from faster kernels
    (_PRECISION, "compile"),
    ("compile", "channels-last"),
    ("compile", "cudnn-search"),
    ("cuda-graph", "fused-optimizer"),
)
_TOGETHER = frozenset(frozenset(pair) for pair in (*_PAIRS, *_ACTING))

# Dear moves come when cheap ones are spent: each of them costs seconds to minutes in every process.
_LATER = {"compile": 2, "compile-max-autotune": 3}
# A precision this far behind the one taken is not tried again, whatever is taken since. Source: chosen here.
_HOPELESS = 0.7


@dataclass(frozen=True)
class Move:
    """A change to a loop.

    Attributes:
        precision: The precision it goes to; None leaves it.
        techniques: The techniques it adds; one that excludes another takes its place.
    """

    precision: str | None = None
    techniques: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """Return what it changes: `precision`, and the names of techniques."""
        return ((_PRECISION,) if self.precision else ()) + self.techniques

    @property
    def name(self) -> str:
        """Return it as people read it: `bf16-mixed + channels-last`."""
        return " + ".join(filter(None, (self.precision, *self.techniques)))

    @property
    def rank(self) -> int:
        """Return when its turn is: the lowest first."""
        if self.precision:
            return 0
        return max(_LATER.get(name, 1) for name in self.techniques)

    def on(self, spec: TrialSpec) -> TrialSpec:
        """Return the loop that it makes of one."""
        if self.precision is not None:
            row = find_precision(self.precision)
            spec = spec.model_copy(update={"precision": row.name, "loss_scale": row.loss_scale})
        kept = [name for name in spec.techniques if not any(_excludes(name, added) for added in self.techniques)]
        return resolve((*kept, *self.techniques), spec)


@dataclass(frozen=True)
class Attempt:
    """A move that was tried.

    Attributes:
        rung: How many moves had been taken before.
        move: The move.
        below: The loop it was tried on.
        spec: The loop it made.
        ratio: Its speed-up over the one below; None where it was not measured.
        outcome: What came of it.
        reason: Why, in a few words.
    """

    rung: int
    move: Move
    below: TrialSpec
    spec: TrialSpec
    ratio: Estimate | None
    outcome: Outcome
    reason: str = ""


@dataclass(frozen=True)
class Climbed:
    """A climb's end.

    Attributes:
        start: The plain loop.
        attempts: All that was tried, in order.
        trials: Every trial, those of the probes among them.
        probes: Loops measured to tell what bounds the first and the last rung, and no rungs themselves.
        ending: Why no further move was tried.
        seconds: Wall time.
    """

    start: TrialSpec
    attempts: tuple[Attempt, ...]
    trials: tuple[Trial, ...]
    probes: tuple[TrialSpec, ...]
    ending: Ending
    seconds: float

    @property
    def rungs(self) -> list[TrialSpec]:
        """Return the loops of the ladder, the plain one first."""
        return [self.start, *(each.spec for each in self.attempts if each.outcome == "taken")]

    @property
    def winner(self) -> TrialSpec:
        """Return the last rung."""
        return self.rungs[-1]

    def of(self, spec: TrialSpec) -> list[Trial]:
        """Return the trials of one loop."""
        return [trial for trial in self.trials if trial.spec.cell == spec.cell]


@dataclass(frozen=True)
class Ladder:
    """What a climb may try.

    Attributes:
        precisions: Precisions.
        techniques: Techniques.
    """

    precisions: tuple[str, ...]
    techniques: tuple[str, ...]

    def moves(self, current: TrialSpec, attempts: Sequence[Attempt]) -> list[Move]:
        """Return what is to be tried next on a loop: the open moves of the lowest rank; none where none is left."""
        found = [move for move in self._all(current) if _is_open(move, attempts)]
        lowest = min((move.rank for move in found), default=0)
        return [move for move in found if move.rank == lowest]

    def _all(self, current: TrialSpec) -> list[Move]:
        precisions = [name for name in self.precisions if name != current.precision]
        new = [name for name in self.techniques if name not in current.techniques]
        moves = [Move(precision=name) for name in precisions] + [Move(techniques=(name,)) for name in new]
        for one, other in _PAIRS:
            if other in new and one == _PRECISION:
                moves += [Move(precision=name, techniques=(other,)) for name in precisions]
            elif one in new and other in new:
                moves.append(Move(techniques=(one, other)))
        return moves


def allowed_techniques(numerics: Numerics, kind: str = "steady") -> tuple[str, ...]:
    """Return the techniques of a kind of trial that change the numbers this much at the most."""
    most = NUMERICS.index(numerics)
    return tuple(row.name for row in TECHNIQUES if kind in row.kinds and NUMERICS.index(row.numerics) <= most)


def loop_name(spec: TrialSpec) -> str:
    """Return a loop as people read it: `bf16-mixed, channels-last+compile`."""
    return f"{spec.precision}, {join(spec.techniques) if spec.techniques else 'plain loop'}"


def _excludes(one: str, other: str) -> bool:
    return other in find_technique(one).excludes or one in find_technique(other).excludes


def _is_open(move: Move, attempts: Sequence[Attempt]) -> bool:
    """Return whether a move is to be tried: not yet tried, promising, or acted on by what was taken since."""
    last = next((each for each in reversed(attempts) if each.move == move), None)
    if last is None:
        return True
    rung = sum(each.outcome == "taken" for each in attempts)
    if last.rung == rung or last.outcome in ("taken", "failed"):
        return False
    since = [each for each in attempts if each.outcome == "taken" and each.rung >= last.rung]
    if last.outcome == "unsupported":  # another precision or technique may be what it lacked
        return True
    assert last.ratio is not None, "measured"
    acted_on = any(
        frozenset((part, taken)) in _TOGETHER for each in since for part in move.parts for taken in each.move.parts
    )
    if move.precision is not None:
        return acted_on and last.ratio.value / _lead(since, last.rung) >= _HOPELESS
    return acted_on or last.ratio.value > 1


def _lead(since: Sequence[Attempt], rung: int) -> float:
    """Return the speed-up of the move taken on the same rung, where that changed the precision too."""
    rivals = (each.ratio.value for each in since if each.rung == rung and each.move.precision and each.ratio)
    return next(rivals, 1.0)
