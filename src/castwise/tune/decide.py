"""What a search measures next, or its end: a pure function of what was measured.

The search is derived anew from its measurements each time: `_Search.steps` walks from the plain loop upwards and
yields the first session of measurements that it lacks. Whether a change is followed up is decided by the first session
that measured it, so that later measurements, which prove differences, do not lead the walk elsewhere; what is accepted
in the end is decided by all measurements.
"""

import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from castwise.orchestrator.runner import unsupported_reason
from castwise.registry.techniques import probe_technique
from castwise.spec.trial import TrialSpec
from castwise.tune.candidates import SearchSpace, TriedChange, next_stage
from castwise.tune.changes import Change, change_between, cumulative_configs, is_compiled, is_within
from castwise.tune.measurements import ONE_PROCESS, PROMISING, Key, Measurements, key_of, loop_name, unique
from castwise.tune.memory_limit import BatchPoint, half_batch, next_batch
from castwise.tune.time_budget import TimeLeft

Ending = Literal["nothing left", "budget", "failed"]

# Configurations that are measured next to the current one at the most: a CPU has no cores for more than one.
_SIDE_BY_SIDE = {"cuda": 6, "cpu": 1}
_CONTEXT_BYTES = 2**30  # what a process holds besides its tensors
_USABLE = 0.85  # of the device's memory, so that a kernel search finds its workspace
_MAX_SESSIONS_OF_A_PAIR = 4  # to find out which of two configurations is faster
_MAX_BATCHES = 3  # smaller ones that are measured, besides those on record
_SAVES_MEMORY = 0.99  # a change that leaves more than this share of the memory does not count as saving it


@dataclass(frozen=True)
class Session:
    """Configurations to measure together, each in a fresh process."""

    specs: tuple[TrialSpec, ...]  # the others are compared with the first
    purpose: str


@dataclass(frozen=True)
class Done:
    """The end of a search."""

    ending: Ending
    tried: tuple[TriedChange, ...]  # stage by stage
    probes: tuple[TrialSpec, ...]  # measured only to tell what bounds the first and the fastest configuration
    used: tuple[TrialSpec, ...]  # every configuration whose measurements the search asked for


@dataclass(frozen=True)
class _Walk:
    """A walk upwards: each configuration differs from the one before by one change that looked faster."""

    path: list[TrialSpec]
    tried: list[TriedChange]
    ending: Ending


def decide(space: SearchSpace, measured: Measurements, time: TimeLeft) -> Session | Done:
    """Return what to measure next, or the result if nothing is left to measure or there is no time for it."""
    steps = _Search(space, measured, time).steps()
    try:
        return next(steps)
    except StopIteration as end:
        done: Done = end.value
        return done


class _Search:
    """One derivation of the search. A method that yields a session lacks it, and is not resumed."""

    def __init__(self, space: SearchSpace, measured: Measurements, time: TimeLeft) -> None:
        self.space, self.measured, self.time = space, measured, time
        self.used: list[TrialSpec] = []

    def steps(self) -> Generator[Session, None, Done]:
        """Walk up to the fastest configuration, and to the fastest within the memory limit if there is one."""
        start, limit = self.space.start, self.space.memory_bytes
        probes = yield from self._probe(start)
        if not self.measured.is_ok(start) and not self.measured.is_out_of_memory(start):
            return self._done("failed", [], probes)
        walk = yield from self._walk(None)
        tried = yield from self._prove(walk, None)
        ending: Ending = "budget" if _lacks_time(tried) else walk.ending
        winner = next((each.spec for each in reversed(tried) if each.outcome == "taken"), start)
        if not self.measured.is_ok(winner):
            return self._done("failed", tried, probes)
        if key_of(winner) != key_of(start):
            probes += yield from self._probe(winner)
        if limit is not None and self.measured.held_bytes(winner) > limit:
            limited, ending = yield from self._search_within(limit, winner, tried, ending)
            tried += [replace(each, limited=True) for each in limited]
        return self._done(ending, tried, probes)

    def _done(self, ending: Ending, tried: Iterable[TriedChange], probes: Iterable[TrialSpec]) -> Done:
        return Done(ending, tuple(tried), tuple(probes), tuple(unique(self.used)))

    def _search_within(
        self, limit: float, winner: TrialSpec, tried: Sequence[TriedChange], ending: Ending
    ) -> Generator[Session, None, tuple[list[TriedChange], Ending]]:
        """Look for what fits into a limit: the winner on smaller batches, then other configurations."""
        batches = yield from self._smaller_batches(winner, tried, limit)
        if ending == "budget" or _lacks_time(batches):
            return batches, "budget"
        if self._least_bytes(tried) > limit:
            return batches, ending
        walk = yield from self._walk(limit)
        others = yield from self._prove(walk, limit)
        known = {(key_of(each.below), key_of(each.spec)) for each in tried}
        new = [
            each for each in others if each.outcome == "taken" or (key_of(each.below), key_of(each.spec)) not in known
        ]
        return [*batches, *new], "budget" if _lacks_time(others) else walk.ending

    # The walk upwards

    def _walk(self, limit: float | None) -> Generator[Session, None, _Walk]:
        """Take what looks faster, on and on, until nothing is left to try or the time is up."""
        path, tried = [self.space.start], list[TriedChange]()
        while True:
            current = path[-1]
            # What failed on a configuration that ran out of memory may run on one that does not.
            relevant = [each for each in tried if self._is_usable(each.below) or each.outcome == "taken"]
            changes = self.space.candidates(current, relevant if self._is_usable(current) else tried)
            if not changes:
                return _Walk(path, tried, "nothing left")
            supported: list[Change] = []
            for change in changes:
                spec = change.on(current)
                reason = unsupported_reason(spec, self.space.environment)
                if reason is None:
                    supported.append(change)
                else:
                    stage = next_stage(tried)
                    tried.append(TriedChange(stage, change, current, spec, None, "unsupported", reason))
            is_all_measured = yield from self._screen_changes(path, supported, limit)
            known = [change for change in supported if self.measured.of(change.on(current))]
            reached = yield from self._combine(current, known, limit)
            tried += self._tried_on(current, known, reached, next_stage(tried), limit)
            path += reached
            if not is_all_measured:
                return _Walk(path, tried, "budget")

    def _screen_changes(
        self, path: Sequence[TrialSpec], changes: Sequence[Change], limit: float | None
    ) -> Generator[Session, None, bool]:
        """Measure changes to the last configuration of a path; return whether there was time for all.

        Compilation takes minutes, and may take the time that is left. Before the first one, the configuration reached
        is compared with the last accepted one. If that leaves a doubt, the last accepted one is measured next to what
        compiles, too.
        """
        current = path[-1]
        specs = [change.on(current) for change in changes]
        others: list[TrialSpec] = []
        if any(is_compiled(spec) and not self.measured.of(spec) for spec in specs) and not is_compiled(current):
            pair = self._top_in_doubt(path, limit)
            if pair and self.measured.times_together(pair) < 2 and self._fits(pair):
                yield self._session(pair, "is the last change faster?")
            others = pair[:1]
        return (yield from self._screen(current, specs, f"changes to {loop_name(current)}", others))

    def _screen(
        self, current: TrialSpec, specs: Sequence[TrialSpec], purpose: str, others: Sequence[TrialSpec] = ()
    ) -> Generator[Session, None, bool]:
        """Measure what has no trial yet next to the current configuration; return whether there was time for all."""
        self.used += [current, *specs]
        missing = [spec for spec in unique(specs) if not self.measured.of(spec)]
        is_current_missing = not self.measured.of(current)
        if not missing and not is_current_missing:
            return True
        width = self._side_by_side()
        below = [current] if self._is_usable(current) or is_current_missing else []
        for base in ([*below, *others], below) if others and width > 1 else (below,):
            group: list[TrialSpec] = []
            for spec in missing[: width + 1 - len(base)]:
                if self._fits([*base, *group, spec], proofs=1):
                    group.append(spec)
            if group or is_current_missing:
                yield self._session([*base, *group], purpose)
        return False

    def _combine(
        self, current: TrialSpec, changes: Sequence[Change], limit: float | None
    ) -> Generator[Session, None, list[TrialSpec]]:
        """Return the path from the current configuration to the best that the changes which paid make together."""
        better = [change for change in changes if self._improves(current, change.on(current), limit)]
        better.sort(key=lambda change: self._merit(current, change.on(current), limit), reverse=True)
        if not better:
            return []
        path = [
            spec
            for spec in cumulative_configs(current, better)
            if unsupported_reason(spec, self.space.environment) is None
        ]
        together = [current, *path] if self._is_usable(current) else path
        self.used += together
        if len(path) > 1 and not self.measured.times_together(together) and self._fits(together, proofs=1):
            yield self._session(together, "changes together")
        best = better[0].on(current)
        known = [spec for spec in path if self._improves(current, spec, limit, path)]
        top = max(known, key=lambda spec: self._merit(current, spec, limit, path), default=best)
        top_fits, top_merit = self._merit(current, top, limit, path)
        best_fits, best_merit = self._merit(current, best, limit, path)
        if top not in path or (top_fits, top_merit * PROMISING) < (best_fits, best_merit):
            return [best]
        return path[: path.index(top) + 1]

    def _tried_on(
        self,
        current: TrialSpec,
        changes: Sequence[Change],
        reached: Sequence[TrialSpec],
        stage: int,
        limit: float | None,
    ) -> list[TriedChange]:
        """Return what came of changes to a configuration; those that are part of the path reached are taken."""
        total = change_between(current, reached[-1]) if reached else Change()
        found: list[TriedChange] = []
        for change in changes:
            spec = change.on(current)
            ratio = self.measured.first_ratio(current, spec)
            if reached and is_within(change, total):
                found.append(TriedChange(stage, change, current, spec, ratio, "taken"))
            else:
                outcome, reason = self.measured.outcome(spec, ratio, limit)
                found.append(TriedChange(stage, change, current, spec, ratio, outcome, reason))
        if reached and not any(each.outcome == "taken" for each in found):  # a part of one was: the rest stays open
            ratio = self.measured.first_ratio(current, reached[-1])
            found.append(TriedChange(stage, total, current, reached[-1], ratio, "taken"))
        return found

    def _improves(
        self, current: TrialSpec, spec: TrialSpec, limit: float | None, others: Sequence[TrialSpec] = ()
    ) -> bool:
        """Return whether a change looked worth following up: it was faster, or it saves memory that is lacking."""
        if key_of(spec) == key_of(current) or not self.measured.is_ok(spec):
            return False
        if not self._is_usable(current):
            return True
        held, before = self.measured.held_bytes(spec), self.measured.held_bytes(current)
        if limit is not None and before > limit:
            return held <= limit or held < _SAVES_MEMORY * before
        ratio = self.measured.first_ratio(current, spec, others)
        return ratio is not None and ratio.value > PROMISING and (limit is None or held <= limit)

    def _merit(
        self, current: TrialSpec, spec: TrialSpec, limit: float | None, others: Sequence[TrialSpec] = ()
    ) -> tuple[bool, float]:
        """Return whether a configuration fits into the limit, and its speed; over its memory if it does not fit."""
        held = self.measured.held_bytes(spec)
        fits = limit is None or held <= limit
        ratio = self.measured.first_ratio(current, spec, others)
        speed = (self.measured.rate(spec) or 0.0) if ratio is None else ratio.value
        return fits, speed if fits else speed / held

    # Proof

    def _prove(self, walk: _Walk, limit: float | None) -> Generator[Session, None, list[TriedChange]]:
        """Measure neighbours whose difference is in doubt again; if there is no time for all, the top pair alone."""
        doubtful, below = list[TrialSpec](), walk.path[0]
        for spec in walk.path[1:]:
            ratio = self.measured.ratio(below, spec)
            if ratio is not None and ratio.value > PROMISING:  # else the next one is compared with the one below
                if not self.measured.is_answered(below, spec) and self._may_repeat([below, spec]):
                    doubtful += [below, spec]
                below = spec
        top = self._top_in_doubt(walk.path, limit)
        for specs in (unique(doubtful), top if doubtful and self._may_repeat(top) else []):
            if specs and self._fits(specs):
                yield self._session(specs, "is each change faster?")
        return self._summary(walk, limit)

    def _may_repeat(self, specs: Sequence[TrialSpec]) -> bool:
        return bool(specs) and self.measured.times_together(specs) < _MAX_SESSIONS_OF_A_PAIR

    def _top_in_doubt(self, path: Sequence[TrialSpec], limit: float | None) -> list[TrialSpec]:
        """Return the last accepted configuration and the highest above it; nothing if that one is accepted itself."""
        accepted, top = path[0], path[-1]
        for spec in path[1:]:
            if self.measured.is_proven(accepted, spec, limit):
                accepted = spec
        return [accepted, top] if accepted is not top and self._improves(accepted, top, limit) else []

    def _summary(self, walk: _Walk, limit: float | None) -> list[TriedChange]:
        """Return all that was tried, each compared with the configuration accepted before it."""
        accepted = [walk.path[0]]
        stages = {key_of(walk.path[0]): 0}
        found: list[TriedChange] = []
        for spec in walk.path[1:]:
            below, stage = accepted[-1], len(accepted) - 1
            tried = self._compared(stage, below, spec, limit)
            if self.measured.is_proven(below, spec, limit):
                shown = self.measured.shown_ratio(below, spec)
                reason = ONE_PROCESS if shown is not None and shown.n == 1 else ""
                tried = replace(tried, ratio=shown, outcome="taken", reason=reason)
                accepted.append(spec)
            elif tried.outcome == "second best":
                tried = replace(tried, outcome="unproven")
            found.append(tried)
            stages[key_of(spec)] = len(accepted) - 1
        for each in walk.tried:
            stage = stages[key_of(each.below)]
            if each.outcome == "unsupported" and not self.measured.of(each.spec):
                found.append(replace(each, stage=stage))
            elif key_of(each.spec) not in stages:
                tried = self._compared(stage, accepted[stage], each.spec, limit)
                if key_of(each.below) != key_of(accepted[stage]):
                    reason = f"{tried.reason}; measured next to {loop_name(each.below)}, which was not accepted"
                    tried = replace(tried, reason=reason)
                if tried.outcome == "second best" and stage == len(accepted) - 1:  # nothing was better
                    tried = replace(tried, outcome="unproven")
                found.append(tried)
        once: dict[tuple[int, Key], TriedChange] = {}
        for each in found:
            once.setdefault((each.stage, key_of(each.spec)), each)
        return sorted(once.values(), key=lambda each: (each.stage, each.outcome != "taken"))

    def _compared(self, stage: int, below: TrialSpec, spec: TrialSpec, limit: float | None) -> TriedChange:
        ratio = self.measured.ratio(below, spec)
        outcome, reason = self.measured.outcome(spec, ratio, limit)
        return TriedChange(stage, change_between(below, spec), below, spec, ratio, outcome, reason)

    # What bounds a configuration

    def _probe(self, spec: TrialSpec) -> Generator[Session, None, list[TrialSpec]]:
        """Return what tells what bounds a configuration: half the batch, a CUDA graph, resident data, TF32."""
        names = [name for name in (probe_technique("launches"), probe_technique("data")) if name not in spec.techniques]
        wanted = [half_batch(spec), *(Change(techniques=(name,)).on(spec) for name in names)]
        if spec.precision == "fp32" and "tf32" in self.space.precisions:
            wanted.append(Change(precision="tf32").on(spec))
        probes = [
            each
            for each in wanted
            if each is not None
            and set(spec.techniques) <= set(each.techniques)  # a graph of eight steps is not made one of one
            and unsupported_reason(each, self.space.environment) is None
        ]
        yield from self._screen(spec, probes, f"what bounds {loop_name(spec)}")
        return [each for each in probes if self.measured.of(each)]

    # Memory

    def _smaller_batches(
        self, winner: TrialSpec, tried: Sequence[TriedChange], limit: float
    ) -> Generator[Session, None, list[TriedChange]]:
        """Return what came of the winner on smaller batches: the fastest that fits is taken, whatever it costs."""
        sizes = sorted({key[3] for key in self.measured.by_key if key[3] < winner.batch_size}, reverse=True)
        specs = [Change(batch_size=size).on(winner) for size in sizes]
        specs = [spec for spec in specs if self.measured.of(spec)]
        self.used += specs
        points = [self._batch_point(winner, spec) for spec in (winner, *specs)]
        num_asked = sum(self.measured.times_asked([winner, spec]) > 0 for spec in specs)
        size = next_batch(points, limit) if num_asked < _MAX_BATCHES else None
        following = None if size is None else Change(batch_size=size).on(winner)
        if following is not None and unsupported_reason(following, self.space.environment) is None:
            if self._fits([winner, following]):
                yield self._session([winner, following], f"batch {size} for the memory limit")
            specs.append(following)  # for which no time is left
        stage = next_stage(tried)
        found = [self._compared(stage, winner, spec, limit) for spec in specs]
        fitting = [each for each in found if each.ratio is not None and each.outcome != "too large"]
        best = max(fitting, key=lambda each: self._merit(winner, each.spec, limit), default=None)
        for each in fitting:
            shown = replace(each, ratio=self.measured.shown_ratio(winner, each.spec), reason=ONE_PROCESS)
            found[found.index(each)] = replace(shown, outcome="taken" if each is best else "second best")
        return sorted(found, key=lambda each: (each.outcome != "taken", -each.spec.batch_size))

    def _batch_point(self, winner: TrialSpec, spec: TrialSpec) -> BatchPoint:
        ratio = self.measured.ratio(winner, spec)
        rate = 1.0 if spec is winner else (None if ratio is None else ratio.value)
        return BatchPoint(spec.batch_size, self.measured.held_bytes(spec), rate)

    def _least_bytes(self, tried: Sequence[TriedChange]) -> float:
        """Return what a configuration would hold at the least with all that was seen to save memory."""
        shares: dict[str, float] = {}
        for each in tried:
            if each.ratio is not None:
                name = "precision" if each.change.precision else each.change.name  # there is one precision at a time
                share = self.measured.held_bytes(each.spec) / self.measured.held_bytes(each.below)
                shares[name] = min(shares.get(name, 1.0), share)
        return self.measured.held_bytes(self.space.start) * math.prod(shares.values())

    # Sessions

    def _session(self, specs: Sequence[TrialSpec], purpose: str) -> Session:
        self.used += specs
        return Session(tuple(specs), purpose)

    def _fits(self, specs: Sequence[TrialSpec], proofs: float = 0.0) -> bool:
        return self.time.fits(specs, self.measured, proofs=proofs)

    def _is_usable(self, spec: TrialSpec) -> bool:
        """Return whether others can be compared with a configuration."""
        return self.measured.is_ok(spec)

    def _side_by_side(self) -> int:
        """Return how many configurations may be measured next to one: as many as fit into the device's memory."""
        most, memory = _SIDE_BY_SIDE[self.space.start.device_type], self.space.environment.gpu_memory_bytes
        held = self.measured.held_bytes(self.space.start)
        if memory is None or not math.isfinite(held):
            return most
        return max(1, min(most, int(memory * _USABLE / (held + _CONTEXT_BYTES)) - 1))


def _lacks_time(tried: Iterable[TriedChange]) -> bool:
    return any(each.outcome == "not tried" for each in tried)
