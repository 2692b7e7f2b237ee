"""The climb from the plain loop to the fastest that computes the same: screened, taken together, then proven."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from castwise.orchestrator.job import Job
from castwise.orchestrator.rounds import Rounds, StopRule
from castwise.orchestrator.trial import UnboundedProgress, unsupported_reason
from castwise.records.schema import Trial
from castwise.spec.trial import TrialSpec
from castwise.tune.candidates import PROMISING, Ending, Outcome, SearchSpace, TriedChange, TuningResult, loop_name
from castwise.tune.changes import Change, change_between, cumulative_configs, is_compiled, is_within
from castwise.tune.memory_limit import BatchPoint, half_batch, min_memory_estimate, next_batch
from castwise.tune.results import LoopResults
from castwise.tune.time_budget import TimeBudget, is_short

_ONCE = StopRule(min_rounds=1, max_rounds=1)
# Loops that sit beside the one below at the most: a CPU has no cores for more than one.
_SIDE_BY_SIDE = {"cuda": 6, "cpu": 1}
_CONTEXT_BYTES = 2**30  # what a process holds beside its tensors
_USABLE = 0.85  # of the device's memory, so that a search finds its workspace
_MOST_PROOFS = 3  # sittings in which the rungs are proven
_MOST_SIZES = 3  # smaller batches at the most that are tried beside those on record
_NO_OUTCOME: tuple[Outcome, str] = ("taken", "")


@dataclass
class TuningSearch(LoopResults):
    """A climb made concrete on this machine.

    Attributes:
        start: The plain loop.
        ladder: What may be tried.
        job: The machine, its records, and where to tell of progress.
        budget_seconds: Wall time after which nothing further is tried; None takes what the plain step suggests.
        known: The recorded trials that stand.
        memory_bytes: What a loop may hold that is looked for besides; None looks for none.
    """

    start: TrialSpec
    ladder: SearchSpace
    job: Job = field(repr=False)
    budget_seconds: float | None
    known: list[Trial] = field(repr=False, default_factory=list)
    memory_bytes: float | None = None

    def __post_init__(self) -> None:
        self._cells: dict[str, TrialSpec] = {}  # all that belongs to the climb
        self._probes: list[TrialSpec] = []
        self._recorded = {id(trial) for trial in self.known}
        # How many trials a climb takes nobody knows, and why rounds of its own end is no news.
        self._runner = replace(self.job.runner, listener=UnboundedProgress(self.job.runner.listener, remarks=False))

    def run(self) -> TuningResult:
        """Climb until nothing left pays, or the time is up; then look for what is within the memory limit."""
        self._pace = TimeBudget(self.budget_seconds)
        self._pace.recall(self.known, self.start)
        self._probe(self.start)
        self._pace.short = is_short(self._of(self.start))
        ending: Ending = "failed"
        attempts: list[TriedChange] = []
        if self._is_well(self.start):
            attempts, ending = self._climb(None)
            winner = next((each.spec for each in reversed(attempts) if each.outcome == "taken"), self.start)
            if winner != self.start:
                self._probe(winner)
            if self.memory_bytes is not None and self._needs(winner) > self.memory_bytes:
                within, ending = self._within(winner, attempts, ending, self.memory_bytes)
                attempts += [replace(each, limited=True) for each in within]
        trials = tuple(trial for spec in self._cells.values() for trial in self._of(spec))
        recorded = sum(id(trial) in self._recorded for trial in trials)
        took, budget = self._pace.seconds, self._pace.budget_seconds
        return TuningResult(self.start, tuple(attempts), trials, tuple(self._probes), ending, took, recorded, budget)

    def _within(
        self, winner: TrialSpec, attempts: Sequence[TriedChange], ending: Ending, limit: float
    ) -> tuple[list[TriedChange], Ending]:
        """Look for what is within a limit: the winner on smaller batches, then the other loops where there is hope."""
        sizes, in_time = self._on_smaller_batches(winner, limit)
        rung = sum(each.outcome == "taken" for each in attempts)
        found = self._told_of_sizes(rung, winner, sizes, limit)
        if ending == "budget" or not in_time:
            return found, "budget"
        if min_memory_estimate(self.start, attempts, self._needs) > limit:
            return found, ending
        others, ending = self._climb(limit)
        seen = {(each.below.configuration, each.spec.configuration) for each in attempts}
        return [
            *found,
            *(each for each in others if (each.below.configuration, each.spec.configuration) not in seen),
        ], ending

    def _climb(self, limit: float | None) -> tuple[list[TriedChange], Ending]:
        """Climb once; return what was tried, rung by rung, and why it ended."""
        loops, tries = [self.start], list[TriedChange]()
        ending: Ending | None = None
        while ending is None:
            current = loops[-1]
            moves = self.ladder.moves(current, tries)
            open_moves = self._supported(current, moves, tries)
            if not moves:
                ending = "nothing left"
            elif open_moves:
                ending = None if self._measure(loops, open_moves, limit) else "budget"
                loops += self._step_up(current, open_moves, tries, limit)
        self._prove(loops, limit)
        told = self._told(loops, tries, limit)
        return told, "budget" if any(each.outcome == "not tried" for each in told) else ending

    def _measure(self, loops: Sequence[TrialSpec], moves: Sequence[Change], limit: float | None) -> bool:
        """Screen moves on the loop reached; return whether there was time for all.

        What compiles takes minutes, and may take the time that is left: before it does so for the first time, the loop
        reached is proven, as far as one sitting does. Where that leaves a doubt, the last rung sits beside what
        compiles.
        """
        current = loops[-1]
        specs = [move.on(current) for move in moves]
        if all(self._of(spec) for spec in specs) or not any(map(is_compiled, specs)):
            return self._screen(current, specs)
        top = [] if is_compiled(current) else self._top_in_doubt(loops, limit)
        if top and self._has_time_for(top, keep=0.0):
            self._sit_again(top)
        return self._screen(current, specs, self._rungs(loops, limit)[-1])

    def _step_up(
        self, current: TrialSpec, moves: Sequence[Change], tries: list[TriedChange], limit: float | None
    ) -> list[TrialSpec]:
        """Return the loops on the way up by all moves that were seen to be faster, none where none was."""
        moves = [move for move in moves if self._of(move.on(current))]
        rung = 1 + max((each.rung for each in tries if each.outcome == "taken"), default=-1)
        better = [move for move in moves if self._pays(current, move.on(current), limit)]
        better.sort(key=lambda move: self._merit(current, move.on(current), limit), reverse=True)
        loops = self._way_up(current, better, limit) if better else []
        reached = change_between(current, loops[-1]) if loops else Change()
        for move in moves:
            spec = move.on(current)
            ratio = self._ratio(current, spec)
            taken = bool(loops) and is_within(move, reached)
            outcome, reason = _NO_OUTCOME if taken else self._outcome(current, spec, limit)
            tries.append(TriedChange(rung, move, current, spec, ratio, outcome, reason))
        if loops:
            gain = self._ratio(current, loops[-1])
            if not any(is_within(move, reached) for move in moves):  # a part of one: what is left is open again
                tries.append(TriedChange(rung, reached, current, loops[-1], gain, *_NO_OUTCOME))
            said = "" if gain is None else f", {gain.value:.2f}×"
            self.job.runner.listener.remark(f"up by {reached.name}{said}")
        return loops

    def _way_up(self, current: TrialSpec, better: Sequence[Change], limit: float | None) -> list[TrialSpec]:
        """Return the loops from one up to the best that these moves make together, a change each."""
        loops = [
            loop
            for loop in cumulative_configs(current, better)
            if unsupported_reason(loop, self.job.runner.environment) is None
        ]
        best = better[0].on(current)
        if len(loops) > 1 and self._has_time_for([current, *loops]):
            self._sit_together([current, *loops])
        known = [loop for loop in loops if self._pays(current, loop, limit)]
        top = max(known, key=lambda loop: self._merit(current, loop, limit), default=best)
        (fits, gain), (best_fits, best_gain) = (self._merit(current, loop, limit) for loop in (top, best))
        if top not in loops or (fits, gain * PROMISING) < (best_fits, best_gain):
            return [best]
        return loops[: loops.index(top) + 1]

    def _pays(self, current: TrialSpec, spec: TrialSpec, limit: float | None) -> bool:
        ratio = self._ratio(current, spec)
        if ratio is None or spec.configuration == current.configuration:
            return False
        if limit is None:
            return ratio.value > PROMISING
        if self._needs(current) > limit:  # first of all into the limit
            return self._needs(spec) <= limit or (self._needs(spec) < self._needs(current) and ratio.value > PROMISING)
        return self._needs(spec) <= limit and ratio.value > PROMISING

    def _merit(self, current: TrialSpec, spec: TrialSpec, limit: float | None) -> tuple[bool, float]:
        ratio = self._ratio(current, spec)
        return limit is None or self._needs(spec) <= limit, 0.0 if ratio is None else ratio.value

    def _supported(self, current: TrialSpec, moves: Sequence[Change], tries: list[TriedChange]) -> list[Change]:
        """Return the moves that the loop can have; note why of those it cannot."""
        rung = 1 + max((each.rung for each in tries if each.outcome == "taken"), default=-1)
        kept: list[Change] = []
        for move in moves:
            spec = move.on(current)
            reason = unsupported_reason(spec, self.job.runner.environment)
            if reason is None:
                kept.append(move)
            else:
                tries.append(TriedChange(rung, move, current, spec, None, "unsupported", reason))
        return kept

    # Smaller batches

    def _on_smaller_batches(self, loop: TrialSpec, limit: float) -> tuple[list[TrialSpec], bool]:
        """Measure a loop on smaller batches; return those that were, and whether there was time for all."""
        # Those on record first: what a loop holds differs from process to process, and another guess is another trial.
        smaller = (Change(batch_size=size).on(loop) for size in sorted({each.spec.batch_size for each in self.known}))
        tried = [loop, *(spec for spec in smaller if spec.batch_size < loop.batch_size and self._of(spec))]
        self._belong(tried)
        for _ in range(_MOST_SIZES):
            size = next_batch([self._held(loop, spec) for spec in tried], limit)
            spec = None if size is None else Change(batch_size=size).on(loop)
            if spec is None or unsupported_reason(spec, self.job.runner.environment) is not None:
                break
            if not self._has_time_for([loop, spec], keep=0.0):
                return tried[1:], False
            self._rounds([loop, spec], loop)
            tried.append(spec)
        return tried[1:], True

    def _held(self, loop: TrialSpec, spec: TrialSpec) -> BatchPoint:
        ratio = self._ratio(loop, spec)
        rate = 1.0 if spec.configuration == loop.configuration else (None if ratio is None else ratio.value)
        return BatchPoint(spec.batch_size, self._needs(spec), rate)

    def _told_of_sizes(self, rung: int, loop: TrialSpec, sizes: Sequence[TrialSpec], limit: float) -> list[TriedChange]:
        """Return what came of a loop's smaller batches: the fastest of those that fit is taken, whatever it costs."""
        well = [spec for spec in sizes if self._needs(spec) <= limit and self._ratio(loop, spec) is not None]
        best = max(well, key=lambda spec: self._merit(loop, spec, limit), default=None)
        if best is not None:
            self.job.runner.listener.remark(f"batch {best.batch_size} is within the limit")
        found: list[TriedChange] = []
        for spec in sorted(sizes, key=lambda each: (each is not best, -each.batch_size)):
            named: tuple[Outcome, str] = ("taken" if spec is best else "second best", _OF_TURNS)
            outcome, reason = named if spec in well else self._outcome(loop, spec, limit)
            found.append(
                TriedChange(rung, change_between(loop, spec), loop, spec, self._shown(loop, spec), outcome, reason)
            )
        return found

    # The ladder's proof

    def _prove(self, loops: Sequence[TrialSpec], limit: float | None) -> None:
        """Let neighbours whose difference is in doubt sit together again: all of them, or where time is short the top.

        What was measured at the top is what the climb was for: set beside the last rung that is proven, it is known
        whatever the rungs between would have been.
        """
        for _ in range(_MOST_PROOFS):
            every, top = _once(self._in_doubt(loops)), self._top_in_doubt(loops, limit)
            cells = next((cells for cells in (every, top) if cells and self._has_time_for(cells, keep=0.0)), None)
            if not every or cells is None:
                return
            self._sit_again(cells)

    def _in_doubt(self, loops: Sequence[TrialSpec]) -> list[TrialSpec]:
        """Return the loops of all pairs of neighbours whose difference is in doubt."""
        below, found = loops[0], list[TrialSpec]()
        for loop in loops[1:]:
            ratio = self._ratio(below, loop)
            if ratio is not None and ratio.value > PROMISING:  # what is not is set beside the next one up
                found += [] if self._is_answered(below, loop) else [below, loop]
                below = loop
        return found

    def _top_in_doubt(self, loops: Sequence[TrialSpec], limit: float | None) -> list[TrialSpec]:
        """Return the last rung that is proven and the highest loop above it; none where that is proven itself."""
        rung = self._rungs(loops, limit)[-1]
        above = loops[loops.index(rung) + 1 :]
        return [rung, above[-1]] if above and self._pays(rung, above[-1], limit) else []

    def _told(self, loops: Sequence[TrialSpec], tries: Sequence[TriedChange], limit: float | None) -> list[TriedChange]:
        """Return all that was tried, rung by rung.

        A loop that is not proven over the rung below is none; the next one is set beside that rung then, and so is all
        that was tried on it.
        """
        rungs, found, places = [loops[0]], list[TriedChange](), {loops[0].configuration: 0}
        for loop in loops[1:]:
            below = rungs[-1]
            rung = len(rungs) - 1
            if self._is_rung(below, loop, limit):
                rungs.append(loop)
                shown = self._shown(below, loop)
                reason = _OF_TURNS if shown is not None and shown.n == 1 else ""
                found.append(TriedChange(rung, change_between(below, loop), below, loop, shown, "taken", reason))
            else:
                outcome, reason = self._outcome(below, loop, limit)
                outcome, ratio = "unproven" if outcome == "second best" else outcome, self._ratio(below, loop)
                found.append(TriedChange(rung, change_between(below, loop), below, loop, ratio, outcome, reason))
            places[loop.configuration] = len(rungs) - 1
        own = {loop.configuration for loop in loops}
        for each in tries:
            rung = places[each.below.configuration]
            if each.outcome == "unsupported" and not self._of(each.spec):
                found.append(replace(each, rung=rung))
            elif each.outcome != "taken" and each.spec.configuration not in own:
                is_over_rung = each.below.configuration == rungs[rung].configuration
                other = replace(each, rung=rung)
                other = other if is_over_rung else self._over_rung(other, rungs, limit)
                is_alone = other.outcome == "second best" and rung == len(rungs) - 1  # nothing was better
                found.append(replace(other, outcome="unproven") if is_alone else other)
        return sorted(found, key=lambda each: (each.rung, each.outcome != "taken"))

    def _over_rung(self, tried: TriedChange, rungs: Sequence[TrialSpec], limit: float | None) -> TriedChange:
        """Return what came of a move on a loop that is no rung, told over the rung below: no other is in the table."""
        below = rungs[tried.rung]
        ratio = self._ratio(below, tried.spec)
        outcome, reason = self._outcome(below, tried.spec, limit)
        if ratio is not None:
            reason += f"; tried on {loop_name(tried.below)}, which is no rung"
        return replace(tried, ratio=ratio, outcome=outcome, reason=reason, over=below)

    # Measuring

    def _probe(self, loop: TrialSpec) -> None:
        """Measure a loop beside what tells its bounds: half the batch, a CUDA graph, resident data, TF32."""
        wanted = [half_batch(loop), *(Change(techniques=(name,)).on(loop) for name in ("cuda-graph", "resident-data"))]
        if loop.precision == "fp32" and "tf32" in self.ladder.precisions:
            wanted.append(Change(precision="tf32").on(loop))
        probes = [
            spec
            for spec in wanted
            if spec is not None and spec.configuration != loop.configuration and _is_one_more(loop, spec)
        ]
        probes = [spec for spec in probes if unsupported_reason(spec, self.job.runner.environment) is None]
        if self._has_time_for([loop, *probes]) and self._screen(loop, probes):
            self._probes += probes

    def _screen(self, current: TrialSpec, specs: Sequence[TrialSpec], rung: TrialSpec | None = None) -> bool:
        """Measure loops once beside the one below, those that were not yet; return whether there was time for all.

        Args:
            current: The loop below.
            specs: The loops.
            rung: Another that is measured again beside them, where there is room for it and time.
        """
        width = self._width(current)
        below = [current] if rung is None or width == 1 else _once([current, rung])
        self._belong([current, *specs])
        waiting = _once(spec for spec in specs if not self._of(spec))
        if not specs and not self._of(current):
            self._rounds([current], current)
        while waiting:
            group = self._in_time(below, waiting[: width + 1 - len(below)])
            if not group and len(below) > 1:
                below = [current]
                continue
            if not group:
                return False
            waiting = [spec for spec in waiting if spec not in group]
            self._rounds([*below, *group], current, again=len(below) > 1)
        return True

    def _in_time(self, below: Sequence[TrialSpec], group: Sequence[TrialSpec]) -> list[TrialSpec]:
        """Return those of a group, the first of all, that sit beside the loops below before the time is up."""
        found: list[TrialSpec] = []
        for spec in group:
            if self._has_time_for([*below, *found, spec]):
                found.append(spec)
        return found

    def _sit_together(self, specs: Sequence[TrialSpec]) -> None:
        """Let loops sit side by side, unless all have done so."""
        self._belong(specs)
        sittings = [{trial.session_id for trial in self._of(spec)} - {None} for spec in specs]
        if not set.intersection(*sittings):
            self._sit_again(specs)

    def _sit_again(self, specs: Sequence[TrialSpec]) -> None:
        self._rounds(specs, specs[0], again=True)

    def _belong(self, specs: Iterable[TrialSpec]) -> None:
        for spec in specs:
            self._cells.setdefault(spec.configuration, spec)

    def _rounds(self, specs: Sequence[TrialSpec], baseline: TrialSpec, *, again: bool = False) -> None:
        """Let loops sit together, and keep their trials."""
        self._belong(specs)
        began = time.perf_counter()
        recorded = [trial for spec in specs for trial in self._of(spec)]
        rounds = Rounds(self._runner, specs, _ONCE, recorded, baseline)
        compared = rounds.run_once() if again else rounds.run()
        fresh = compared.trials[len(recorded) :]
        self.known += fresh
        self._pace.learn(time.perf_counter() - began, [trial.spec for trial in fresh])
        self._pace.compiled([trial.spec for trial in fresh if trial.status == "ok"])

    def _has_time_for(self, specs: Sequence[TrialSpec], keep: float = 1.0) -> bool:
        return self._pace.has_time_for(specs, keep)

    def _width(self, current: TrialSpec) -> int:
        """Return how many loops may sit beside one: as many as hold what it does fit into the device's memory."""
        most, memory = _SIDE_BY_SIDE[current.device_type], self.job.runner.environment.gpu_memory_bytes
        needs = self._needs(self.start)
        if memory is None or not math.isfinite(needs):
            return most
        return max(1, min(most, int(memory * _USABLE / (needs + _CONTEXT_BYTES)) - 1))


_OF_TURNS = "one process each: the interval is of its turns"


def _once(specs: Iterable[TrialSpec]) -> list[TrialSpec]:
    """Return each loop once, in their order."""
    return list({spec.configuration: spec for spec in specs}.values())


def _is_one_more(loop: TrialSpec, spec: TrialSpec) -> bool:
    """Return whether a loop has all that another has, so that a graph of eight steps is not made one of one."""
    return set(loop.techniques) <= set(spec.techniques) or spec.batch_size != loop.batch_size
