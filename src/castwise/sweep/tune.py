"""The climb from the plain loop to the fastest that computes the same: one move after the other, each measured."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from castwise.analyze.climb import Attempt, Climbed, Ending, Ladder, Move, Outcome, allowed_techniques
from castwise.analyze.estimates import Estimate, judge
from castwise.analyze.speedups import speedup_estimate
from castwise.plan import SYNTHETIC, Axes, TrialSpec
from castwise.precisions import find_precision
from castwise.record import Trial
from castwise.sweep.bench import EngineFactory
from castwise.sweep.job import Job, Request, is_of, prepare
from castwise.sweep.rounds import Rounds, Rule
from castwise.sweep.runner import FAILED, Listener, Uncounted, why_lacking
from castwise.techniques import Numerics

# A compilation that hangs must leave time for the rest.
TIMEOUT_SECONDS = 180.0
BUDGET_SECONDS = 540.0
# Loops that sit beside the one below: more would leave cuDNN's search no workspace on a GPU, and a CPU no cores.
_SIDE_BY_SIDE = {"cuda": 4, "cpu": 1}
_SCREEN = Rule(min_rounds=1, max_rounds=1)
_PROOF = Rule(half_width=0.02, min_rounds=3, max_rounds=6)
_PROBE = Rule(half_width=0.05, min_rounds=2, max_rounds=2)
_MOST_PROOFS = 3  # of the moves of a rung: the promising ones, the best first


@dataclass(frozen=True)
class TuneRequest:
    """What a user asked for; None stands for "what suits the machine".

    Attributes:
        workload: The workload.
        precisions: Precisions, the first of them the plain loop's; None takes float32 and all that keep float32
            weights, which the device has.
        numerics: The most that a technique may do to the numbers.
        batch_size: Samples a step.
        device: "cpu", "cuda" or "cuda:N".
        data_set: `synthetic` or the name of a real data set.
        data_dir: Where real data lies.
        results: The results folder; None keeps no records.
        budget_seconds: Wall time after which nothing further is tried.
        timeout_seconds: Seconds one phase of a trial, a compilation for one, may take before it is given up.
        seed: Seeds weights, data and dropout.
        retry: Measure crashed and timed-out trials again.
        again: Measure everything again, whatever is recorded.
    """

    workload: str
    precisions: tuple[str, ...] | None = None
    numerics: Numerics = "draws"
    batch_size: int | None = None
    device: str | None = None
    data_set: str = SYNTHETIC
    data_dir: Path | None = None
    results: Path | None = None
    budget_seconds: float = BUDGET_SECONDS
    timeout_seconds: float = TIMEOUT_SECONDS
    seed: int = 0
    retry: bool = False
    again: bool = False


@dataclass
class Tuning:
    """A climb made concrete on this machine.

    Attributes:
        start: The plain loop.
        ladder: What may be tried.
        job: The machine, its records, and where to tell of progress.
        budget_seconds: Wall time after which nothing further is tried.
        known: The recorded trials that stand.
    """

    start: TrialSpec
    ladder: Ladder
    job: Job = field(repr=False)
    budget_seconds: float
    known: list[Trial] = field(repr=False, default_factory=list)

    def __post_init__(self) -> None:
        self._attempts: list[Attempt] = []
        self._cells: list[TrialSpec] = [self.start]  # all that belongs to the climb
        self._began = time.perf_counter()
        self._cell_seconds = 0.0
        self._probes: list[TrialSpec] = []
        # How many trials a climb takes nobody knows, and why rounds of its own end is no news.
        self._sweep = replace(self.job.sweep, listener=Uncounted(self.job.sweep.listener, remarks=False))

    def run(self) -> Climbed:
        """Climb until nothing left pays, or the time is up."""
        self._began = time.perf_counter()
        self._probe(self.start)
        current = self.start
        ending: Ending | None = None if self._is_well(current) else "failed"
        while ending is None:
            moves = self._supported(current, self.ladder.moves(current, self._attempts))
            if not moves:
                if self.ladder.moves(current, self._attempts):
                    continue  # what cannot be had is noted; the next rank's turn
                ending = "nothing left"
            elif not self._has_time_for(2):
                ending = "budget"
            else:
                current, ending = self._step_up(current, moves)
        if current != self.start:
            self._probe(current)
        own = {spec.cell: spec for spec in (*self._cells, *self._probes)}
        trials = tuple(trial for spec in own.values() for trial in self._of(spec))
        seconds = time.perf_counter() - self._began
        return Climbed(self.start, tuple(self._attempts), trials, tuple(self._probes), ending, seconds)

    def _step_up(self, current: TrialSpec, moves: Sequence[Move]) -> tuple[TrialSpec, Ending | None]:
        """Try moves; return the loop that the best makes, or the same one where none pays."""
        rung = sum(each.outcome == "taken" for each in self._attempts)
        tried = [move for move in moves if self._screen(current, move, moves)]
        ratios = {move: self._ratio(current, move) for move in tried}
        order = sorted(tried, key=lambda move: -_value(ratios[move]))
        taken = None
        for move in [each for each in order if _value(ratios[each]) > 1][:_MOST_PROOFS]:
            self._rounds(current, [move.on(current)], _PROOF)
            ratios[move] = self._ratio(current, move)
            if self._is_proven(ratios[move]):
                taken = move
                break
        for move in sorted(tried, key=lambda each: each is not taken):
            self._note(rung, move, current, ratios[move], taken)
        reached = current if taken is None else taken.on(current)
        if taken is not None:
            self.job.sweep.listener.remark(f"rung {rung + 1}: {taken.name}, {_value(ratios[taken]):.2f}×")
        return reached, "budget" if len(tried) < len(moves) else None

    def _screen(self, current: TrialSpec, move: Move, moves: Sequence[Move]) -> bool:
        """Measure a move once, with those that sit beside it; return whether there was time for it."""
        spec = move.on(current)
        if not self._of(spec):
            width = _SIDE_BY_SIDE[current.device_type]
            waiting = [each for other in moves[moves.index(move) :] if not self._of(each := other.on(current))]
            group = list({each.cell: each for each in waiting}.values())[:width]
            if not self._has_time_for(1 + len(group)):
                return False
            self._rounds(current, group, _SCREEN)
        self._cells.append(spec)
        return True

    def _note(self, rung: int, move: Move, current: TrialSpec, ratio: Estimate | None, taken: Move | None) -> None:
        spec = move.on(current)
        outcome, reason = self._outcome(spec, ratio, is_taken=move is taken)
        self._attempts.append(Attempt(rung, move, current, spec, ratio, outcome, reason))

    def _outcome(self, spec: TrialSpec, ratio: Estimate | None, *, is_taken: bool) -> tuple[Outcome, str]:
        failed = next((t for t in self._of(spec) if t.status != "ok"), None)
        if failed is not None:
            return "failed", f"{failed.status}: {failed.message}"
        if ratio is None:
            return "failed", "the loop below could not be timed beside it"
        if is_taken:
            return "taken", ""
        if ratio.n == 1:
            return ("slower" if ratio.value <= 1 else "second best"), "one process: no interval"
        verdict = judge(ratio)
        named: dict[str, Outcome] = {"faster": "second best", "same": "same", "slower": "slower"}
        return named.get(verdict.kind, "unproven"), verdict.reason

    def _supported(self, current: TrialSpec, moves: Sequence[Move]) -> list[Move]:
        """Return the moves that the loop can have; note why of those it cannot, pairs aside."""
        rung = sum(each.outcome == "taken" for each in self._attempts)
        kept: list[Move] = []
        for move in moves:
            spec = move.on(current)
            reason = why_lacking(spec, self.job.sweep.environment)
            if reason is None:
                kept.append(move)
            else:
                self._attempts.append(Attempt(rung, move, current, spec, None, "unsupported", reason))
        return kept

    def _probe(self, loop: TrialSpec) -> None:
        """Measure a loop beside what tells its bounds: half the batch, and the step as a CUDA graph."""
        wanted = [half_batch(loop), Move(techniques=("cuda-graph",)).on(loop)]
        probes = [spec for spec in wanted if spec is not None and spec.cell != loop.cell]
        probes = [spec for spec in probes if why_lacking(spec, self.job.sweep.environment) is None]
        if self._has_time_for(2 * (1 + len(probes))):
            self._rounds(loop, probes, _PROBE)
            self._probes += probes

    def _rounds(self, baseline: TrialSpec, cells: Sequence[TrialSpec], rule: Rule) -> None:
        """Let loops sit with the one below, and keep their trials."""
        before, began = len(self.known), time.perf_counter()
        specs = [baseline, *cells]
        recorded = [trial for spec in specs for trial in self._of(spec)]
        rule = replace(rule, budget_seconds=self._left())
        compared = Rounds(self._sweep, specs, rule, recorded, baseline).run()
        self.known += compared.trials[len(recorded) :]
        measured = len(self.known) - before
        if measured:
            self._cell_seconds = max(self._cell_seconds, (time.perf_counter() - began) / measured)

    def _left(self) -> float:
        return self.budget_seconds - (time.perf_counter() - self._began)

    def _has_time_for(self, num_cells: int) -> bool:
        return self._cell_seconds * num_cells <= self._left()

    def _ratio(self, current: TrialSpec, move: Move) -> Estimate | None:
        """Return a move's speed-up; None where it was not measured, or computed no numbers."""
        spec = move.on(current)
        return speedup_estimate(self._of(current), self._of(spec)) if self._is_well(spec) else None

    def _is_proven(self, ratio: Estimate | None) -> bool:
        return ratio is not None and judge(ratio).kind == "faster"

    def _is_well(self, spec: TrialSpec) -> bool:
        own = self._of(spec)
        return bool(own) and all(trial.status == "ok" for trial in own)

    def _of(self, spec: TrialSpec) -> list[Trial]:
        return [trial for trial in self.known if is_of(trial, spec)]


def prepare_tuning(
    request: TuneRequest, listener: Listener | None = None, make_engine: EngineFactory | None = None
) -> Tuning:
    """Check a request against the machine, and return the climb that answers it.

    Raises:
        UsageError: The request cannot be carried out as it stands.
        StoreError: The results folder cannot be written.
        EngineError: No measuring process could be started.
    """
    job = prepare(
        Request(
            axes=Axes(
                workloads=(request.workload,),
                precisions=request.precisions,
                batch_sizes=None if request.batch_size is None else (request.batch_size,),
            ),
            device=request.device,
            data_set=request.data_set,
            data_dir=request.data_dir,
            results=request.results,
            timeout_seconds=request.timeout_seconds,
            seed=request.seed,
            rule=Rule(),
            retry=request.retry,
            again=request.again,
        ),
        listener,
        make_engine,
    )
    specs = [spec for spec in job.plan.specs if request.precisions or keeps_float32(spec.precision)]
    ladder = Ladder(tuple(spec.precision for spec in specs), allowed_techniques(request.numerics))
    return Tuning(specs[0], ladder, job, request.budget_seconds, _standing(job, request))


def keeps_float32(precision: str) -> bool:
    """Return whether a precision keeps float32 weights, or masters of them, so that it trains what float32 does."""
    row = find_precision(precision)
    return row.param_dtype == "float32" or row.master_weights


def half_batch(spec: TrialSpec) -> TrialSpec | None:
    """Return the same loop on half the batch, None where that is no whole number."""
    if spec.batch_size % 2:
        return None
    return spec.model_copy(update={"batch_size": spec.batch_size // 2})


def _standing(job: Job, request: TuneRequest) -> list[Trial]:
    """Return the records of this machine that need not be measured again."""
    if request.again or job.sweep.store is None:
        return []
    trials = job.sweep.store.load(job.sweep.environment)[0].values()
    refused = FAILED if request.retry else ()
    return sorted((t for t in trials if t.status not in refused), key=lambda trial: trial.started_at)


def _value(ratio: Estimate | None) -> float:
    return 0.0 if ratio is None else ratio.value
