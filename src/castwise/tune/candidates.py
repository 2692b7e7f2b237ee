"""Changes to a configuration, and which of them are worth a measurement next; the cheap kinds come first.

A change that was not faster is tried again only if a change that interacts with it has been accepted since. Changes
that interact are tried as a pair, too, since neither may be faster alone.
"""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from castwise.analysis.statistics import Estimate
from castwise.records.schema import Environment
from castwise.registry.precisions import find_precision, precision_row, why_emulated
from castwise.registry.technique_fit import resolve, why_unsupported
from castwise.registry.techniques import (
    PRECISION,
    TECHNIQUES,
    Rank,
    exclude_each_other,
    find_technique,
    rows_of,
    step_config_of,
)
from castwise.spec.loss_scale import is_dynamic
from castwise.spec.trial import TrialSpec
from castwise.spec.types import Numerics
from castwise.tune.measurements import LEAST_GAIN, PROMISING, Outcome

_BATCH = "batch"

# Techniques that are also tried together, if a configuration has neither: one may be faster only with the other.
_PAIRS = tuple((row.name, other) for row in TECHNIQUES for other in row.tried_with if other != PRECISION)
# A precision is tried with this technique first, and without it only if that was slower.
_COMPANION = next(row.name for row in TECHNIQUES if PRECISION in row.tried_with)

_LARGE_LAYERS = next(row.name for row in TECHNIQUES if row.is_for_fp8)

# A precision this far behind the accepted one is not tried again, unless the device waited for something that hid its
# gain, and a change accepted since removed that. Source: chosen here.
_HOPELESS = 0.9
# In 16 bits a step casts and copies weights on top of its products. Graphs and compilation make that cheap, so that a
# 16-bit precision may be this far behind float32. Source: an H200, mlp-4096: bf16-master has 0.82 times the speed of
# TF32 in the plain loop, and 1.26 times in CUDA graphs.
_HOPELESS_WITH_CASTS = 0.5
# On a compiled loop another one costs a compilation, and has to have looked faster before. Source: 17 searches on an
# H200: seven were tried on compiled loops, and none was faster.
_HOPELESS_COMPILED = PROMISING
_MAX_COMPILED_PRECISIONS = 2
_MAX_BATCH_FACTOR = 8
_IN_VAIN = ("same", "slower", "too large", "failed", "unsupported")


@dataclass(frozen=True)
class Change:
    """A change to a configuration; None leaves the precision or the batch as it is."""

    precision: str | None = None
    techniques: tuple[str, ...] = ()  # what is added; one that excludes another replaces it
    batch_size: int | None = None

    @property
    def parts(self) -> set[str]:
        """Return what it changes: `precision`, `batch`, and the names of techniques."""
        parts = set(self.techniques)
        if self.precision:
            parts.add(PRECISION)
        if self.batch_size:
            parts.add(_BATCH)
        return parts

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
    def cures(self) -> set[str]:
        return {cause for row in rows_of(self.techniques) for cause in row.cures}

    @property
    def removes_waiting(self) -> bool:
        """Return whether it only removes time in which the device waits."""
        return not self.precision and not self.batch_size and all(r.removes_waiting for r in rows_of(self.techniques))

    def on(self, spec: TrialSpec) -> TrialSpec:
        if self.precision is not None:
            row = find_precision(self.precision)
            spec = spec.model_copy(update={"precision": row.name, "loss_scale": row.loss_scale})
        if self.batch_size is not None:
            spec = spec.model_copy(update={"batch_size": self.batch_size})
        kept = [
            name for name in spec.techniques if not any(exclude_each_other(name, added) for added in self.techniques)
        ]
        # The plain loop alone is profiled.
        return resolve((*kept, *self.techniques), spec.with_protocol(profile_steps=0))

    def is_within(self, accepted: "Change") -> bool:
        """Return whether it is a part of the changes that were accepted together."""
        return self.parts <= accepted.parts and self.precision in (None, accepted.precision)

    def interacts_with(self, other: "Change") -> bool:
        """Return whether the gain of one change may depend on the other."""
        for one, another in ((self, other), (other, self)):
            for row in rows_of(one.techniques):
                tried_with = (name for name in row.tried_with if name != PRECISION)
                if another.parts & {*row.interacts_with, *tried_with}:
                    return True
        return False


@dataclass(frozen=True)
class TriedChange:
    stage: int  # how many changes were accepted before
    change: Change
    below: TrialSpec  # the configuration that it is compared with
    spec: TrialSpec  # the configuration that it made
    ratio: Estimate | None  # its speed-up by units per second; None if it was not measured
    outcome: Outcome
    reason: str = ""
    limited: bool = False  # whether it was tried for a memory limit alone

    @property
    def speedup(self) -> float:
        """Return its speed-up, 1 if it is not known."""
        return 1.0 if self.ratio is None else self.ratio.value

    @property
    def is_accepted(self) -> bool:
        return self.outcome == "accepted"

    @property
    def was_refused_by_trial(self) -> bool:
        """Return whether a process refused it, and not the constraints of the techniques."""
        return self.outcome == "unsupported" and why_unsupported(self.spec) is None


@dataclass(frozen=True)
class SearchSpace:
    """What a search may try, and on which machine."""

    start: TrialSpec  # the plain loop
    precisions: tuple[str, ...]  # the first is the start's
    techniques: tuple[str, ...]
    environment: Environment
    larger_batches: bool = False
    memory_bytes: float = math.inf  # the fastest configuration that holds no more is searched for, too
    fp32: TrialSpec | None = None  # the plain loop in fp32, measured next to a start that is PyTorch's default
    is_fp8_asked_for: bool = False  # whether the user named the precisions

    def without_layers(self, layers: Container[str] | None) -> dict[str, list[str]]:
        """Return the techniques for layers that the model does not have, by layer; none if its layers are not known."""
        found: dict[str, list[str]] = {}
        for row in rows_of(self.techniques):
            if not row.finds_layer(layers):
                found.setdefault(row.layer, []).append(row.name)
        return found

    def open_changes(self, current: TrialSpec, tried: Sequence[TriedChange]) -> list[Change]:
        """Return all changes to a configuration that are worth a measurement."""
        return [change for change in self._applicable(current, tried) if _is_open(change, tried, current)]

    def candidates(self, current: TrialSpec, tried: Sequence[TriedChange]) -> list[Change]:
        """Return the changes to try next on a configuration: the open ones of the lowest rank; none if none is left.

        Every session on a compiled configuration compiles it again, so that all that compiles no longer than it does
        is tried at once there.
        """
        found = self.open_changes(current, tried)
        lowest = min(map(self._rank, found), default=0)
        highest = Rank.COMPILE if lowest <= Rank.COMPILE and is_compiled(current) else lowest
        found = [change for change in found if self._rank(change) <= highest]
        if highest == lowest:
            return found

        def known_speedup(change: Change) -> float:
            last = _last_try(change, tried)
            return math.inf if last is None or last.ratio is None else last.ratio.value

        precisions = sorted((change for change in found if change.precision), key=known_speedup, reverse=True)
        # Techniques first: if there is no time for all, the precisions were compared at an earlier stage already.
        return [*(change for change in found if not change.precision), *precisions[:_MAX_COMPILED_PRECISIONS]]

    def _rank(self, change: Change) -> int:
        """Return a change's rank; emulated precisions are slow and come last, one by one."""
        row = find_precision(change.precision) if change.precision else None
        if row is None or why_emulated(row, self.environment.hardware) is None:
            return change.rank
        return len(Rank) + row.loop_changes

    def _applicable(self, current: TrialSpec, tried: Sequence[TriedChange]) -> list[Change]:
        """Return all changes that can change what a configuration does, whether they were tried or not."""
        new = [name for name in self.techniques if name not in current.techniques and is_applicable(name, current)]
        others = [name for name in self.precisions[1:] if name != current.precision]  # never back to the first
        fp8 = [name for name in others if find_precision(name).float8_recipe]
        changes = [change for name in others if name not in fp8 for change in _to_precision(name, new, tried, current)]
        changes += self._fp8_changes(fp8, tried, current)
        changes += [Change(techniques=(name,)) for name in new]
        for first, second in _PAIRS:
            pair = Change(techniques=(first, second))
            if first in new and second in self.techniques and second not in current.techniques:
                is_useful = is_applicable(second, Change(techniques=(first,)).on(current))
                if is_useful and not _has_refused_part(pair, tried, current):
                    changes.append(pair)
        if self.larger_batches and current.batch_size < _MAX_BATCH_FACTOR * self.start.batch_size:
            changes.append(Change(batch_size=2 * current.batch_size))
        return changes

    def _fp8_changes(self, names: Sequence[str], tried: Sequence[TriedChange], current: TrialSpec) -> list[Change]:
        """Return the changes to FP8 that are worth a try, in large layers first: it is slower in small ones.

        Without being asked for, the fastest recipe alone is tried; another one if that is not exact enough.
        """
        last = {attempt.change.precision: attempt for attempt in tried}
        fit = [name for name in names if why_unsupported(Change(precision=name).on(current)) is None]
        if not self.is_fp8_asked_for:
            if find_precision(current.precision).float8_recipe:
                return []
            fit = [name for name in fit if name not in last or last[name].outcome != "failed"][:1]
        changes: list[Change] = []
        for name in fit:
            every, large = Change(precision=name), Change(precision=name, techniques=(_LARGE_LAYERS,))
            refusals = [attempt.reason for attempt in tried if attempt.change == large and attempt.was_refused_by_trial]
            is_large_alike = _LARGE_LAYERS not in self.techniques or any(_LARGE_LAYERS in reason for reason in refusals)
            changes += [] if is_large_alike else [large]
            changes += [every] if is_large_alike or self.is_fp8_asked_for else []
        return changes


def allowed_techniques(numerics: Numerics, start: TrialSpec, *, autotunes: bool = True) -> tuple[str, ...]:
    """Return the techniques for loops like the plain one that change the numbers by at most this much."""
    order = get_args(Numerics)  # the least change first
    allowed = order[: order.index(numerics) + 1]
    rows = [row for row in TECHNIQUES if row.searched and (autotunes or row.rank != Rank.AUTOTUNE)]
    rows = [row for row in rows if (row.fits_scripts if start.is_script else start.kind in row.kinds)]
    if start.world_size == 1 and not (start.user_model is not None and start.user_model.launcher):
        rows = [row for row in rows if not row.only_on_several_gpus]
    return tuple(row.name for row in rows if row.numerics in allowed)


def next_stage(tried: Sequence[TriedChange]) -> int:
    """Return how many changes were accepted."""
    return 1 + max((attempt.stage for attempt in tried if attempt.is_accepted), default=-1)


def change_between(below: TrialSpec, spec: TrialSpec) -> Change:
    added = tuple(name for name in spec.techniques if name not in below.techniques)
    precision = None if spec.precision == below.precision else spec.precision
    return Change(precision, added, None if spec.batch_size == below.batch_size else spec.batch_size)


def cumulative_configs(current: TrialSpec, changes: Sequence[Change]) -> list[TrialSpec]:
    """Return the configurations that result from adding changes to the current one after another.

    A change to what an earlier one has changed is left out.
    """
    changed: set[str] = set()
    configs: list[TrialSpec] = []
    for change in changes:
        techniques = changed - {PRECISION, _BATCH}
        excluded = any(exclude_each_other(one, other) for one in change.techniques for other in techniques)
        if change.parts & changed or excluded:
            continue
        changed |= change.parts
        for single in change.singles:
            configs.append(single.on(configs[-1] if configs else current))
    return [config for config in configs if why_unsupported(config) is None]


def is_compiled(spec: TrialSpec) -> bool:
    """Return whether a configuration is compiled, again in each of its processes."""
    return any(row.rank >= Rank.COMPILE for row in rows_of(spec.techniques))


def is_applicable(name: str, current: TrialSpec) -> bool:
    """Return whether adding a technique to a configuration can change what it does."""
    row = find_technique(name)
    needed = row.tried_after or row.requires
    if row.is_for_fp8 and not find_precision(current.precision).float8_recipe:
        return False
    if needed and needed not in current.techniques:
        return False
    if any(other.tried_after == name and exclude_each_other(name, other.name) for other in rows_of(current.techniques)):
        return False  # the configuration has a stronger form of it
    before, after = (step_config_of(names) for names in (current.techniques, (*current.techniques, name)))
    if current.recipe is None or not current.recipe.read_loss_every_step:
        before, after = (replace(config, reads_loss=False) for config in (before, after))
    return before != after


def may_enable(accepted: Change, below: TrialSpec, refused: Change, reason: str) -> bool:
    """Return whether an accepted change may allow one that a process refused; the reason names what would help."""
    if any(name in reason for name in accepted.techniques):
        return True
    skipped, skips = is_dynamic(below.loss_scale), is_dynamic(accepted.on(below).loss_scale)
    return skipped and not skips and step_config_of(refused.techniques).scales_on_device


def _to_precision(precision: str, new: Sequence[str], tried: Sequence[TriedChange], current: TrialSpec) -> list[Change]:
    """Return the changes to a precision: with its companion technique, and alone if that was of no use."""
    alone, both = Change(precision=precision), Change(precision=precision, techniques=(_COMPANION,))
    if _COMPANION not in new or why_unsupported(Change(techniques=(_COMPANION,)).on(current)) is not None:
        return [alone]
    tried_both = [attempt for attempt in tried if attempt.change == both and attempt.below == current]
    in_vain = any(attempt.outcome in _IN_VAIN for attempt in tried_both)
    return [both, alone] if in_vain else [both]


def _is_open(change: Change, tried: Sequence[TriedChange], current: TrialSpec) -> bool:
    """Return whether a change is to be tried: it is new or promising, or it interacts with one accepted since."""
    last = _last_try(change, tried)
    if last is None:
        return True
    if last.stage == next_stage(tried) or last.outcome in ("accepted", "failed", "too large"):
        return False
    since = [attempt for attempt in tried if attempt.is_accepted and attempt.stage >= last.stage]
    if last.outcome == "unsupported":
        if not last.was_refused_by_trial:
            return True  # the constraints of the techniques are checked without a trial
        return any(may_enable(attempt.change, attempt.below, change, last.reason) for attempt in since)
    interacting = [attempt for attempt in since if change.interacts_with(attempt.change)]
    if change.precision is not None:
        return bool(interacting) and _may_catch_up(last, since, interacting, current)
    # What it saved is a larger share of a step that has become shorter.
    saved = (1 - 1 / last.speedup) * math.prod(attempt.speedup for attempt in since)
    return bool(interacting) or saved >= LEAST_GAIN


def _may_catch_up(
    last: TriedChange, since: Sequence[TriedChange], interacting: Sequence[TriedChange], current: TrialSpec
) -> bool:
    """Return whether a precision was near enough to the accepted one, given what may have hidden its gain."""
    rivals = (attempt for attempt in since if attempt.stage == last.stage and attempt.change.precision)
    rival = next((attempt.speedup for attempt in rivals), 1.0)
    # A change that removed waiting time may have done so for this precision alone.
    hidden = math.prod(attempt.speedup for attempt in interacting if attempt.change.removes_waiting)
    adds_casts = precision_row(last.spec.precision).is_16_bit and not precision_row(current.precision).is_16_bit
    least = _HOPELESS_COMPILED if is_compiled(current) else _HOPELESS
    return last.speedup / rival * hidden >= (_HOPELESS_WITH_CASTS if adds_casts else least)


def _has_refused_part(pair: Change, tried: Sequence[TriedChange], current: TrialSpec) -> bool:
    """Return whether a trial refused one of a pair, for a reason that does not name the other, and would again."""
    for part in pair.singles:
        last = _last_try(part, tried)
        if last is not None and last.was_refused_by_trial and not _is_open(part, tried, current):
            others = set(pair.techniques) - set(part.techniques)
            if not any(name in last.reason for name in others):
                return True
    return False


def _last_try(change: Change, tried: Sequence[TriedChange]) -> TriedChange | None:
    """Return the last try of a change; for a precision alone that with its companion counts, unless it was in vain."""
    for attempt in reversed(tried):
        if attempt.change == change:
            return attempt
        if change.precision and not change.techniques and attempt.change.precision == change.precision:
            return None if attempt.outcome in _IN_VAIN else attempt
    return None
