"""Changes to a loop: what each makes of it, which of them go together, and which come first."""

from collections.abc import Sequence
from dataclasses import dataclass

from castwise.registry.precisions import find_precision
from castwise.registry.technique_constraints import resolve, why_unsupported
from castwise.registry.techniques import DECIDING_ON_DEVICE, GRAPHS, find_technique
from castwise.spec.loss_scale import is_dynamic
from castwise.spec.trial import TrialSpec

_PRECISION, _BATCH = "precision", "batch"

# What is tried together as well, where a loop has neither: the one may pay with the other only.
PAIRS = (
    ("channels-last", "cudnn-search"),
    ("compile", "cuda-graph"),
    ("no-step-sync", "fused-optimizer"),  # without the fused one, skipping on the device costs copies
    ("loader-workers", "pinned-transfer"),
    ("compile", "batch-norm-kernel"),  # both take a sitting that compiles
)
# Tensor Cores read channels innermost, float32 on CUDA cores does not: a precision brings it along, and goes without
# it only where that was slower.
COMPANION = "channels-last"
# What else acts on each other: a move that did not pay is tried again once its partner is part of the loop.
_ACTING = (
    (_PRECISION, "cuda-graph"),  # a step that launches bound does not gain from faster kernels
    (_PRECISION, "compile"),
    (_PRECISION, "compiled-update"),  # masters cost next to nothing in it
    (_PRECISION, "resident-data"),  # nor one that waits for its data
    (_PRECISION, "loader-workers"),
    ("compile", "channels-last"),
    ("compile", "cudnn-search"),
    ("compile", "space-to-depth"),  # the copies that these two make are part of other kernels then
    ("compile", "matmul-stem"),
)
_TOGETHER = frozenset(frozenset(pair) for pair in (*PAIRS, *_ACTING))

# More of what a loop must have first.
_ONLY_ON = {
    "compile-max-autotune": "compile",
    "max-pool-kernel": "channels-last",
    "batch-norm-kernel": "compile",  # alone its launches cost more than it saves
    "cuda-graph-8": "cuda-graph",
}

# A loop that waits for its data gains from nothing else; dear moves come when cheap ones are spent: each costs seconds
# to minutes in every process.
_DATA_RANK, _PRECISION_RANK, _CHEAP_RANK, COMPILE_RANK, _BATCH_RANK = 0, 1, 2, 3, 5
_RANKS = {
    "resident-data": _DATA_RANK,
    "loader-workers": _DATA_RANK,
    "pinned-transfer": _DATA_RANK,
    "compile": COMPILE_RANK,
    "compiled-update": COMPILE_RANK,
    "batch-norm-kernel": COMPILE_RANK,
    "compile-max-autotune": COMPILE_RANK + 1,
}


@dataclass(frozen=True)
class Change:
    """A change to a loop.

    Attributes:
        precision: The precision it goes to; None leaves it.
        techniques: The techniques it adds; one that excludes another takes its place.
        batch_size: The batch it goes to; None leaves it.
    """

    precision: str | None = None
    techniques: tuple[str, ...] = ()
    batch_size: int | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """Return what it changes: `precision`, `batch`, and the names of techniques."""
        return ((_PRECISION,) if self.precision else ()) + ((_BATCH,) if self.batch_size else ()) + self.techniques

    @property
    def singles(self) -> list["Change"]:
        """Return its changes one by one, the precision first."""
        first = [Change(precision=self.precision)] if self.precision else []
        batch = [Change(batch_size=self.batch_size)] if self.batch_size else []
        return [*first, *(Change(techniques=(name,)) for name in self.techniques), *batch]

    @property
    def name(self) -> str:
        """Return it as people read it: `bf16-mixed + channels-last`."""
        batch = f"batch {self.batch_size}" if self.batch_size else None
        return " + ".join(filter(None, (self.precision, *self.techniques, batch)))

    @property
    def rank(self) -> int:
        """Return when its turn is: the lowest first."""
        if self.batch_size:
            return _BATCH_RANK
        if self.precision:
            return _PRECISION_RANK
        return max(_RANKS.get(name, _CHEAP_RANK) for name in self.techniques)

    def on(self, spec: TrialSpec) -> TrialSpec:
        """Return the loop that it makes of one."""
        if self.precision is not None:
            row = find_precision(self.precision)
            spec = spec.model_copy(update={"precision": row.name, "loss_scale": row.loss_scale})
        if self.batch_size is not None:
            spec = spec.model_copy(update={"batch_size": self.batch_size})
        kept = [name for name in spec.techniques if not any(_excludes(name, added) for added in self.techniques)]
        return resolve((*kept, *self.techniques), spec)


def change_between(below: TrialSpec, spec: TrialSpec) -> Change:
    """Return the move that makes one loop of another."""
    added = tuple(name for name in spec.techniques if name not in below.techniques)
    precision = None if spec.precision == below.precision else spec.precision
    return Change(precision, added, None if spec.batch_size == below.batch_size else spec.batch_size)


def is_within(move: Change, reached: Change) -> bool:
    """Return whether a move is part of one that several were taken together in."""
    return set(move.parts) <= set(reached.parts) and move.precision in (None, reached.precision)


def cumulative_configs(current: TrialSpec, moves: Sequence[Change]) -> list[TrialSpec]:
    """Return the loops on the way up by several moves, one change at a time.

    Args:
        current: The loop below.
        moves: The moves, the best first; one that changes what an earlier one does is left out.
    """
    changed: set[str] = set()
    loops: list[TrialSpec] = []
    for move in moves:
        own = set(move.parts)
        named = changed - {_PRECISION, _BATCH}
        if own & changed or any(_excludes(one, other) for one in move.techniques for other in named):
            continue
        changed |= own
        for single in move.singles:
            loops.append(single.on(loops[-1] if loops else current))
    return [loop for loop in loops if why_unsupported(loop) is None]


def is_compiled(loop: TrialSpec) -> bool:
    """Return whether a loop compiles, which each of its processes does anew."""
    return any(_RANKS.get(name, 0) >= COMPILE_RANK for name in loop.techniques)


def is_applicable(name: str, current: TrialSpec) -> bool:
    """Return whether a technique can do anything on a loop that has what it has already."""
    if name in _ONLY_ON and _ONLY_ON[name] not in current.techniques:
        return False
    if name == "cuda-graph":
        return "cuda-graph-8" not in current.techniques
    if name == "compile":
        return "compile-max-autotune" not in current.techniques
    if name == "no-step-sync":  # these decide on the device, too; a fused optimizer leaves the loss to be read
        reads = current.recipe is not None and current.recipe.read_loss_every_step
        return not any(graph in current.techniques for graph in GRAPHS) and (
            reads or "fused-optimizer" not in current.techniques
        )
    return True


def interact(one: Change, other: Change) -> bool:
    """Return whether one move may pay otherwise once the other is taken."""
    return any(frozenset((part, another)) in _TOGETHER for part in one.parts for another in other.parts)


def may_enable(taken: Change, below: TrialSpec, refused: Change, reason: str) -> bool:
    """Return whether a loop may allow a move that its process refused before.

    Args:
        taken: What the loop got since.
        below: What it was before.
        refused: The move.
        reason: Why it was refused; where techniques would help it names them.
    """
    lent = any(name in reason for name in taken.techniques)
    skips, skipped = (is_dynamic(spec.loss_scale) for spec in (taken.on(below), below))
    return lent or (skipped and not skips and not DECIDING_ON_DEVICE.isdisjoint(refused.techniques))


def _excludes(one: str, other: str) -> bool:
    return other in find_technique(one).excludes or one in find_technique(other).excludes
