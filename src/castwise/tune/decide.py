"""A search: a generator of the sessions that it lacks, which receives what they measured, and returns its end.

It starts from the plain loop and follows what looked faster. Whether a change is followed up is decided by the first
session that measured it, so that later measurements, which settle doubts, and those on record do not lead the search
elsewhere; what is accepted in the end is decided by all measurements. The final session, which comes after it, proves.
"""

import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from castwise.orchestrator.runner import unsupported_reason
from castwise.registry.precisions import find_precision, precision_row
from castwise.registry.techniques import rows_of
from castwise.spec.trial import TrialSpec
from castwise.tune.candidates import (
    Change,
    SearchSpace,
    TriedChange,
    change_between,
    cumulative_configs,
    is_compiled,
    next_stage,
)
from castwise.tune.measurements import DRIFTED, ONE_PROCESS, PROMISING, Key, Measurements, key_of, unique
from castwise.tune.memory_limit import BatchPoint, next_batch
from castwise.tune.time_budget import TimeLeft, compile_cost

Ending = Literal["nothing left", "budget", "failed", "interrupted"]  # a search does not decide on the last

# At most so many configurations are measured next to the current one: a CPU has no cores for more than one.
_SIDE_BY_SIDE = {"cuda": 6, "cpu": 1}
_BESIDE_UNKNOWN = 2  # beside a plain loop whose memory is not known yet
_CONTEXT_BYTES = 2**30  # what a process holds in addition to its tensors
_USABLE = 0.95  # of the device's memory, so that a kernel search finds its workspace
# To find out which of two configurations is faster, and if one looks so much faster that it is worth the time.
_MAX_SESSIONS_OF_A_PAIR, _MAX_SESSIONS_OF_A_GAIN = 3, 8
_GAIN = 1.05
_MAX_BATCHES = 3  # smaller ones that are measured, in addition to those on record
_SAVES_MEMORY = 0.99  # a change that leaves more than this share of the memory does not count as saving it


@dataclass(frozen=True)
class Session:
    """Configurations to measure together, each in a fresh process."""

    specs: tuple[TrialSpec, ...]  # the others are compared with the first
    purpose: str


@dataclass(frozen=True)
class Done:
    ending: Ending
    tried: tuple[TriedChange, ...]  # stage by stage
    used: tuple[TrialSpec, ...]  # every configuration whose measurements the search asked for


# Yields what is to be measured, and is sent all that is measured by then, and the time that is left.
Search = Generator[Session, tuple[Measurements, TimeLeft], Done]
_T = TypeVar("_T")
_Step = Generator[Session, tuple[Measurements, TimeLeft], _T]


def advance(steps: Search, news: tuple[Measurements, TimeLeft] | None = None) -> Session | Done:
    """Return what a search has measured next, or its end, given what is measured by now; nothing at its beginning."""
    try:
        return next(steps) if news is None else steps.send(news)
    except StopIteration as end:
        done: Done = end.value
        return done


@dataclass
class TuningSteps:
    """What a search knows while it goes on."""

    space: SearchSpace
    measured: Measurements
    time: TimeLeft
    limit: float = math.inf  # bytes; what holds more is not accepted
    used: list[TrialSpec] = field(default_factory=list)

    def run(self) -> Search:
        """Find the fastest configuration, and the fastest within the memory limit if there is one."""
        start, memory_bytes = self.space.start, self.space.memory_bytes
        # Speed-ups are given over fp32, too.
        others = [spec for spec in (self.space.fp32,) if spec is not None and self._is_supported(spec)]
        while (yield from self._screen_once(start, others, start.loop_name)) is None:
            pass  # a session for each group that fits
        unfit = {name for names in self.space.without_layers(self.measured.layers(start)).values() for name in names}
        fit = tuple(name for name in self.space.techniques if name not in unfit)
        self.space = replace(self.space, techniques=fit)
        tried: list[TriedChange] = []
        ending: Ending = "failed"
        if self.measured.is_ok(start) or self.measured.is_out_of_memory(start):
            tried, ending = yield from self._find_fastest()
            winner = next((attempt.spec for attempt in reversed(tried) if attempt.is_accepted), start)
            if not self.measured.is_ok(winner):
                ending = "failed"
            elif self.measured.held_bytes(winner) > memory_bytes:
                self.limit = memory_bytes
                limited, ending = yield from self._find_fitting(winner, tried, ending)
                tried += [replace(attempt, limited=True) for attempt in limited]
        return Done(ending, tuple(tried), tuple(unique(self.used)))

    # The path upwards

    def _find_fastest(self) -> _Step[tuple[list[TriedChange], Ending]]:
        """Follow what looks faster until nothing is left to try or the time is up, then settle what is in doubt.

        Returns:
            All that was tried, the accepted changes among it, and why nothing more is tried.
        """
        # On the path each configuration differs from the one before by a change that looked faster.
        path, tried = [self.space.start], list[TriedChange]()
        is_all_measured = True
        while is_all_measured:
            current, stage = path[-1], next_stage(tried)
            relevant = tried
            if self.measured.is_ok(current):
                # What failed on a configuration that ran out of memory may run on one that does not.
                relevant = [attempt for attempt in tried if attempt.is_accepted or self.measured.is_ok(attempt.below)]
            changes = self._space_of(current).candidates(current, relevant)
            if not changes:
                break
            # If there is no time for all: first what is against the causes that the plain loop's profile shows, then
            # what compiles most.
            causes = self.measured.causes(self.space.start)
            changes.sort(key=lambda change: (not change.cures & causes, -compile_cost(change.techniques)))
            supported: list[Change] = []
            for change in changes:
                spec = change.on(current)
                reason = unsupported_reason(spec, self.space.environment)
                if reason is None:
                    supported.append(change)
                else:
                    tried.append(TriedChange(stage, change, current, spec, None, "unsupported", reason))
            goes_ahead, is_all_measured = yield from self._screen_changes(path, [c.on(current) for c in supported])
            known = [change for change in supported if self.measured.of(change.on(current))]
            reached = yield from self._combine(current, known, best_alone=goes_ahead)
            tried += self._tried_on(current, known, reached, stage)
            path += reached
        if not is_all_measured:
            tried += self._not_tried(path[-1], tried)
        yield from self._settle(path)
        summary = self._summary(path, tried)
        return summary, "nothing left" if is_all_measured and not _lacks_time(summary) else "budget"

    def _space_of(self, current: TrialSpec) -> SearchSpace:
        """Return the space without what can hardly make this configuration faster, or fit."""
        lacks_memory = math.isfinite(self.limit) or self.measured.is_out_of_memory(current)
        rows = [row for row in rows_of(self.space.techniques) if lacks_memory or not row.only_saves_memory]
        rows = [row for row in rows if self.measured.can_gain(row, current)]
        names = self.space.precisions
        if not self.measured.may_pay_in_fp8(self.space.start) and not self.space.is_fp8_asked_for:
            names = tuple(name for name in names if not find_precision(name).float8_recipe)
        return replace(self.space, techniques=tuple(row.name for row in rows), precisions=names)

    def _not_tried(self, current: TrialSpec, tried: Sequence[TriedChange]) -> list[TriedChange]:
        """Return the changes for which no time was left: those that are open on the configuration reached."""
        stage = next_stage(tried)
        changes = [(change, change.on(current)) for change in self._space_of(current).open_changes(current, tried)]
        return [
            TriedChange(stage, change, current, spec, None, *self.measured.outcome(spec, None, self.limit))
            for change, spec in changes
            if self._is_supported(spec) and not self.measured.of(spec)
        ]

    def _screen_changes(self, path: Sequence[TrialSpec], specs: Sequence[TrialSpec]) -> _Step[tuple[bool, bool]]:
        """Measure changes to the last configuration of a path.

        Compilation takes minutes, and may take the time that is left. Before the first one, the configuration reached
        is compared with the last accepted one. If the result is in doubt, the last accepted one is also measured next
        to the compiled candidates.

        Returns:
            Whether one of them is so far ahead that the rest is compared with it, and whether all is done or measured.
        """
        current = path[-1]
        while True:
            # If not all fit into one session, or some take long to compile, what is far ahead is what the rest is
            # compared with: its steps are short, and the rest is not measured a second time on it.
            missing = [spec for spec in specs if not self.measured.of(spec)]
            takes_long = len(missing) > self._side_by_side(current, missing) or any(map(is_compiled, missing))
            better = [spec for spec in specs if self._improves(current, spec)] if takes_long else []
            if any(self.measured.is_clear(current, spec) for spec in better):
                return True, True
            others = list[TrialSpec]()
            if any(map(is_compiled, missing)) and not is_compiled(current):
                pair = self._top_in_doubt(path)
                if pair and self.measured.times_together(pair) < 2 and self._fits(pair):
                    yield from self._measure(pair, "is the last change faster?")
                    continue
                others = pair[:1]
            is_all_measured = yield from self._screen_once(current, specs, f"changes to {current.loop_name}", others)
            if is_all_measured is not None:
                return False, is_all_measured

    def _screen_once(
        self, current: TrialSpec, specs: Sequence[TrialSpec], purpose: str, others: Sequence[TrialSpec] = ()
    ) -> _Step[bool | None]:
        """Measure a session of what has no trial yet; return None then, else whether there was time for all."""
        self.used.extend([current, *specs])
        unmeasured = [spec for spec in unique(specs) if not self.measured.of(spec)]
        # A session that reached its deadline has left some out.
        missing = [spec for spec in unmeasured if not self.measured.times_asked([spec])]
        is_current_missing = not self.measured.of(current)
        if not missing and not is_current_missing:
            return not unmeasured
        width = self._side_by_side(current, missing)
        below = [current] if self.measured.is_ok(current) or is_current_missing else []
        for base in ([*below, *others], below) if others and width > 1 else (below,):
            group: list[TrialSpec] = []
            for spec in missing[: width + 1 - len(base)]:
                if self._fits([*base, *group, spec]):
                    group.append(spec)
            if group or is_current_missing:
                yield from self._measure([*base, *group], purpose)
                return None
        return False

    def _side_by_side(self, current: TrialSpec, specs: Sequence[TrialSpec]) -> int:
        """Return how many configurations may be measured next to one: as many as fit into the device's memory.

        They hold about what the current one does; another batch, or float32 beside 16 bits, may hold what the plain
        loop does.
        """
        most, memory = _SIDE_BY_SIDE.get(self.space.start.device_type, 1), self.space.environment.gpu_memory_bytes
        if not self.measured.of(self.space.start):  # a model may be large
            return min(most, _BESIDE_UNKNOWN)
        is_16_bit = precision_row(current.precision).is_16_bit
        like_current = all(
            spec.batch_size == current.batch_size
            and (spec.precision == current.precision or is_16_bit <= precision_row(spec.precision).is_16_bit)
            for spec in specs
        )
        held = self.measured.held_bytes(current if like_current else self.space.start)
        if memory is None or not math.isfinite(held):
            return most
        return max(1, min(most, int(memory * _USABLE / (held + _CONTEXT_BYTES)) - 1))

    def _combine(self, current: TrialSpec, changes: Sequence[Change], *, best_alone: bool) -> _Step[list[TrialSpec]]:
        """Return the path from the current configuration to the best combination of the changes that were faster."""
        better = [change for change in changes if self._improves(current, change.on(current))]
        better.sort(key=lambda change: self._merit(current, change.on(current)), reverse=True)
        if not better or best_alone:
            return [change.on(current) for change in better[:1]]
        path = [spec for spec in cumulative_configs(current, better) if self._is_supported(spec)]
        together = [current, *path] if self.measured.is_ok(current) else path
        self.used.extend(together)
        if len(path) > 1 and not self.measured.times_together(together) and self._fits(together):
            yield from self._measure(together, "changes together")
        best = better[0].on(current)
        known = [spec for spec in path if self._improves(current, spec, path)]
        top = max(known, key=lambda spec: self._merit(current, spec, path), default=best)
        top_fits, top_merit = self._merit(current, top, path)
        best_fits, best_merit = self._merit(current, best, path)
        if top not in path or (top_fits, top_merit * PROMISING) < (best_fits, best_merit):
            return [best]
        return path[: path.index(top) + 1]

    def _tried_on(
        self, current: TrialSpec, changes: Sequence[Change], reached: Sequence[TrialSpec], stage: int
    ) -> list[TriedChange]:
        """Return what came of changes to a configuration; those that are part of the path reached are accepted."""
        total = change_between(current, reached[-1] if reached else current)
        found: list[TriedChange] = []
        for change in changes:
            spec = change.on(current)
            ratio = self.measured.first_ratio(current, spec)
            if change.is_within(total):
                found.append(TriedChange(stage, change, current, spec, ratio, "accepted"))
            else:
                outcome, reason = self.measured.outcome(spec, ratio, self.limit)
                found.append(TriedChange(stage, change, current, spec, ratio, outcome, reason))
        if reached and not any(attempt.is_accepted for attempt in found):  # a part of one was: the rest stays open
            ratio = self.measured.first_ratio(current, reached[-1])
            found.append(TriedChange(stage, total, current, reached[-1], ratio, "accepted"))
        return found

    def _improves(self, current: TrialSpec, spec: TrialSpec, others: Sequence[TrialSpec] = ()) -> bool:
        """Return whether a change looked worth following up: it was faster, or it saves memory that is lacking."""
        if key_of(spec) == key_of(current) or not self.measured.is_ok(spec):
            return False
        if not self.measured.is_ok(current):
            return True
        held, before = self.measured.held_bytes(spec), self.measured.held_bytes(current)
        if before > self.limit:
            return held <= self.limit or held < _SAVES_MEMORY * before
        ratio = self.measured.first_ratio(current, spec, others)
        return ratio is not None and ratio.value > PROMISING and held <= self.limit

    def _merit(self, current: TrialSpec, spec: TrialSpec, others: Sequence[TrialSpec] = ()) -> tuple[bool, float]:
        """Return whether a configuration fits into the limit, and its speed; over its memory if it does not fit."""
        held = self.measured.held_bytes(spec)
        fits = held <= self.limit
        ratio = self.measured.first_ratio(current, spec, others)
        speed = (self.measured.rate(spec) or 0.0) if ratio is None else ratio.value
        return fits, speed if fits else speed / held

    # Doubts

    def _settle(self, path: Sequence[TrialSpec]) -> _Step[None]:
        """Measure neighbours whose difference is in doubt again; if there is no time for all, the top pair alone."""
        while True:
            doubtful, below = list[TrialSpec](), path[0]
            for spec in path[1:]:
                ratio = self.measured.ratio(below, spec)
                if ratio is not None and ratio.value > PROMISING:  # else the next one is compared with the one below
                    if not self.measured.is_answered(below, spec) and self._may_repeat([below, spec]):
                        doubtful += [below, spec]
                    below = spec
            top = self._top_in_doubt(path)
            is_top_open = bool(top) and not self.measured.is_answered(*top) and self._may_repeat(top)
            choices = (unique(doubtful), top if is_top_open else [])
            specs = next((choice for choice in choices if choice and self._fits(choice)), None)
            if specs is None:
                return
            yield from self._measure(specs, "is each change faster?")

    def _may_repeat(self, specs: Sequence[TrialSpec]) -> bool:
        ratio = self.measured.ratio(specs[0], specs[1]) if specs else None
        is_gain = ratio is not None and ratio.value >= _GAIN
        most = _MAX_SESSIONS_OF_A_GAIN if is_gain else _MAX_SESSIONS_OF_A_PAIR
        return bool(specs) and self.measured.times_together(specs) < most

    def _top_in_doubt(self, path: Sequence[TrialSpec]) -> list[TrialSpec]:
        """Return the last accepted configuration and the highest above it; nothing if that one is accepted itself."""
        accepted, top = path[0], path[-1]
        for spec in path[1:]:
            if self.measured.is_accepted(accepted, spec, self.limit):
                accepted = spec
        return [accepted, top] if accepted is not top and self._improves(accepted, top) else []

    def _summary(self, path: Sequence[TrialSpec], explored: Sequence[TriedChange]) -> list[TriedChange]:
        """Return all that was tried, each compared with the configuration accepted before it."""
        accepted = [path[0]]
        stages = {key_of(path[0]): 0}
        found: list[TriedChange] = []
        for spec in path[1:]:
            below, stage = accepted[-1], len(accepted) - 1
            tried = self._compared(stage, below, spec)
            if self.measured.is_accepted(below, spec, self.limit):
                reason = ONE_PROCESS if tried.ratio is not None and tried.ratio.n == 1 else ""
                tried = replace(tried, outcome="accepted", reason=reason)
                accepted.append(spec)
            elif tried.outcome == "second best":
                tried = replace(tried, outcome="unproven")
            found.append(tried)
            stages[key_of(spec)] = len(accepted) - 1
        for attempt in explored:
            stage = stages[key_of(attempt.below)]
            if not self.measured.of(attempt.spec):  # it is unsupported, or no time was left for it
                found.append(replace(attempt, stage=stage))
            elif key_of(attempt.spec) not in stages:
                tried = self._compared(stage, accepted[stage], attempt.spec)
                if key_of(attempt.below) != key_of(accepted[stage]):
                    reason = f"{tried.reason}; measured next to {attempt.below.loop_name}, which was not accepted"
                    tried = replace(tried, reason=reason)
                if tried.outcome == "second best" and stage == len(accepted) - 1:  # nothing was better
                    tried = replace(tried, outcome="unproven")
                found.append(tried)
        once: dict[tuple[int, Key], TriedChange] = {}
        for attempt in found:
            once.setdefault((attempt.stage, key_of(attempt.spec)), attempt)
        return sorted(once.values(), key=lambda attempt: (attempt.stage, not attempt.is_accepted))

    def _compared(self, stage: int, below: TrialSpec, spec: TrialSpec) -> TriedChange:
        ratio = self.measured.ratio(below, spec)
        outcome, reason = self.measured.outcome(spec, ratio, self.limit)
        if outcome in ("second best", "same", "slower") and not self.measured.agrees(below, spec):
            outcome, reason = "unproven", DRIFTED
        return TriedChange(stage, change_between(below, spec), below, spec, ratio, outcome, reason)

    # Within a memory limit

    def _find_fitting(
        self, winner: TrialSpec, tried: Sequence[TriedChange], ending: Ending
    ) -> _Step[tuple[list[TriedChange], Ending]]:
        """Look for what fits into the limit: the winner on smaller batches, then other configurations."""
        batches = yield from self._smaller_batches(winner, next_stage(tried))
        if ending == "budget" or _lacks_time(batches):
            return batches, "budget"
        # The least that a configuration could hold with all changes that were seen to save memory; it is not known if
        # there are others, which were not tried yet.
        others = [Change(techniques=(row.name,)) for row in rows_of(self.space.techniques) if row.only_saves_memory]
        are_all_known = not any(self._is_supported(change.on(self.space.start)) for change in others)
        shares: dict[str, float] = {}
        for attempt in tried:
            if attempt.ratio is not None:
                # There is one precision at a time.
                name = "precision" if attempt.change.precision else attempt.change.name
                share = self.measured.held_bytes(attempt.spec) / self.measured.held_bytes(attempt.below)
                shares[name] = min(shares.get(name, 1.0), share)
        if are_all_known and self.measured.held_bytes(self.space.start) * math.prod(shares.values()) > self.limit:
            return batches, ending
        found, ending = yield from self._find_fastest()
        known = {(key_of(attempt.below), key_of(attempt.spec)) for attempt in tried}
        new = [
            attempt
            for attempt in found
            if attempt.is_accepted or (key_of(attempt.below), key_of(attempt.spec)) not in known
        ]
        return [*batches, *new], ending

    def _smaller_batches(self, winner: TrialSpec, stage: int) -> _Step[list[TriedChange]]:
        """Measure the winner on smaller batches, and return what came of them."""
        while True:
            sizes = {trials[0].spec.batch_size for trials in self.measured.by_key.values()}
            smaller = sorted((size for size in sizes if size < winner.batch_size), reverse=True)
            specs = [spec for size in smaller if self.measured.of(spec := Change(batch_size=size).on(winner))]
            self.used.extend(specs)
            points = [BatchPoint(winner.batch_size, self.measured.held_bytes(winner), 1.0)]
            for spec in specs:
                ratio = self.measured.ratio(winner, spec)
                rate = None if ratio is None else ratio.value
                points.append(BatchPoint(spec.batch_size, self.measured.held_bytes(spec), rate))
            num_asked = sum(self.measured.times_asked([winner, spec]) > 0 for spec in specs)
            size, half = None, winner.batch_size // 2
            # Two batches tell what a sample takes. Another one would be compiled anew.
            if not specs and not winner.batch_size % 2 and not is_compiled(winner):
                size = half if self._fits([winner, Change(batch_size=half).on(winner)]) else None
            if size is None and num_asked < _MAX_BATCHES:
                size = next_batch(points, self.limit, compiles=is_compiled(winner))
            following = None if size is None else Change(batch_size=size).on(winner)
            if following is None or not self._is_supported(following):
                break
            if not self._fits([winner, following]):
                specs.append(following)  # for which no time is left
                break
            yield from self._measure([winner, following], f"batch {size} for the memory limit")
        return self._compared_batches(winner, specs, stage)

    def _compared_batches(self, winner: TrialSpec, specs: Sequence[TrialSpec], stage: int) -> list[TriedChange]:
        """Return what came of smaller batches: the fastest that fits is accepted, whatever it costs, the others not."""
        found = [self._compared(stage, winner, spec) for spec in specs]
        fitting = [attempt for attempt in found if attempt.ratio is not None and attempt.outcome != "too large"]
        best = max(fitting, key=lambda attempt: self._merit(winner, attempt.spec), default=None)
        for attempt in fitting:
            found[found.index(attempt)] = replace(
                attempt, outcome="accepted" if attempt is best else "second best", reason=ONE_PROCESS
            )
        return sorted(found, key=lambda attempt: (not attempt.is_accepted, -attempt.spec.batch_size))

    # Sessions

    def _measure(self, specs: Sequence[TrialSpec], purpose: str) -> _Step[None]:
        """Have these configurations measured together."""
        self.measured, self.time = yield Session(tuple(specs), purpose)

    def _fits(self, specs: Sequence[TrialSpec]) -> bool:
        """Return whether there is time for a session, and for a final session of what may come of it."""
        start = self.space.start
        final = unique([start, specs[0], specs[-1]]) if self.measured.is_ok(start) else []
        return self.time.fits(specs, self.measured, final)

    def _is_supported(self, spec: TrialSpec) -> bool:
        return unsupported_reason(spec, self.space.environment) is None


def _lacks_time(tried: Iterable[TriedChange]) -> bool:
    return any(attempt.outcome == "not tried" for attempt in tried)
