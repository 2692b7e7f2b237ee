"""Changes to a loop: what each makes of it, which of them interact, and in what order they are tried."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from castwise.registry.precisions import find_precision
from castwise.registry.techniques import (
    PRECISION,
    TECHNIQUES,
    Rank,
    exclude_each_other,
    find_technique,
    resolve,
    rows_of,
    step_config_of,
    why_unsupported,
)
from castwise.spec.loss_scale import is_dynamic
from castwise.spec.trial import TrialSpec

_BATCH = "batch"

# Techniques that are also tried together, if a loop has neither: one may be faster only with the other.
PAIRS = tuple((row.name, other) for row in TECHNIQUES for other in row.tried_with if other != PRECISION)
# A precision is tried with this technique first, and without it only if that was slower.
COMPANION = next(row.name for row in TECHNIQUES if PRECISION in row.tried_with)
COMPILE_RANK = Rank.COMPILE


@dataclass(frozen=True)
class Change:
    """A change to a loop; None leaves the precision or the batch as it is."""

    precision: str | None = None
    techniques: tuple[str, ...] = ()  # what is added; one that excludes another replaces it
    batch_size: int | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """Return what it changes: `precision`, `batch`, and the names of techniques."""
        return ((PRECISION,) if self.precision else ()) + ((_BATCH,) if self.batch_size else ()) + self.techniques

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
        """Return its rank: the lowest is tried first."""
        if self.batch_size:
            return Rank.BATCH
        if self.precision:
            return Rank.PRECISION
        return max(row.rank for row in rows_of(self.techniques))

    @property
    def removes_waiting(self) -> bool:
        """Return whether it only removes time in which the device waits."""
        rows = rows_of(self.techniques)
        return not self.precision and not self.batch_size and all(row.removes_waiting for row in rows)

    def on(self, spec: TrialSpec) -> TrialSpec:
        """Return a loop with this change."""
        if self.precision is not None:
            row = find_precision(self.precision)
            spec = spec.model_copy(update={"precision": row.name, "loss_scale": row.loss_scale})
        if self.batch_size is not None:
            spec = spec.model_copy(update={"batch_size": self.batch_size})
        kept = [
            name for name in spec.techniques if not any(exclude_each_other(name, added) for added in self.techniques)
        ]
        return resolve((*kept, *self.techniques), spec)


def change_between(below: TrialSpec, spec: TrialSpec) -> Change:
    """Return the change from one loop to another."""
    added = tuple(name for name in spec.techniques if name not in below.techniques)
    precision = None if spec.precision == below.precision else spec.precision
    return Change(precision, added, None if spec.batch_size == below.batch_size else spec.batch_size)


def is_within(change: Change, reached: Change) -> bool:
    """Return whether a change is a part of the changes that were accepted together."""
    return set(change.parts) <= set(reached.parts) and change.precision in (None, reached.precision)


def cumulative_configs(current: TrialSpec, changes: Sequence[Change]) -> list[TrialSpec]:
    """Return the loops that result from adding changes to the current one after another.

    A change to what an earlier one has changed is left out.
    """
    changed: set[str] = set()
    loops: list[TrialSpec] = []
    for change in changes:
        own = set(change.parts)
        named = changed - {PRECISION, _BATCH}
        if own & changed or any(exclude_each_other(one, other) for one in change.techniques for other in named):
            continue
        changed |= own
        for single in change.singles:
            loops.append(single.on(loops[-1] if loops else current))
    return [loop for loop in loops if why_unsupported(loop) is None]


def is_compiled(loop: TrialSpec) -> bool:
    """Return whether a loop is compiled, again in each of its processes."""
    return any(row.rank >= Rank.COMPILE for row in rows_of(loop.techniques))


def is_applicable(name: str, current: TrialSpec) -> bool:
    """Return whether adding a technique to a loop can change what it does."""
    row = find_technique(name)
    needed = row.tried_after or row.requires
    if needed and needed not in current.techniques:
        return False
    if any(other.tried_after == name and exclude_each_other(name, other.name) for other in rows_of(current.techniques)):
        return False  # the loop has a stronger form of it
    before, after = (step_config_of(names) for names in (current.techniques, (*current.techniques, name)))
    if current.recipe is None or not current.recipe.read_loss_every_step:
        before, after = (replace(config, reads_loss=False) for config in (before, after))
    return before != after


def interact(one: Change, other: Change) -> bool:
    """Return whether the gain of one change may depend on the other."""

    def names(change: Change, others: Change) -> bool:
        for row in rows_of(change.techniques):
            if set(others.parts) & {*row.interacts_with, *(name for name in row.tried_with if name != PRECISION)}:
                return True
        return False

    return names(one, other) or names(other, one)


def may_enable(accepted: Change, below: TrialSpec, refused: Change, reason: str) -> bool:
    """Return whether an accepted change may allow one that a process refused; the reason names what would help."""
    if any(name in reason for name in accepted.techniques):
        return True
    skipped, skips = is_dynamic(below.loss_scale), is_dynamic(accepted.on(below).loss_scale)
    return skipped and not skips and step_config_of(refused.techniques).scales_on_device
