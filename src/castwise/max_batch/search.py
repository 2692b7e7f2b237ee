"""Find the largest batch of each precision and set of techniques, and the curve below it, in fresh processes.

The largest batch that trains and the first that does not are both tried, not computed.
"""

import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field

from castwise.analysis import steady_metrics
from castwise.errors import UsageError
from castwise.max_batch.options import MaxBatchOptions
from castwise.max_batch.result import (
    GROWTH,
    MULTIPLE,
    START,
    USABLE,
    Ending,
    MaxBatch,
    MaxBatchResult,
    available_bytes,
    has_trained,
    held_bytes,
    is_max_batch_trial,
    is_too_large,
    max_batches_of,
    next_small,
    predict,
)
from castwise.orchestrator.job import Job, prepare
from castwise.orchestrator.machine import FindMachine, detect_machine, may_have_gpu
from castwise.orchestrator.runner import CachedMeasure, Listener
from castwise.orchestrator.session import Engine, Session, TrialFailedError
from castwise.records.schema import Environment, Trial
from castwise.records.store import is_reusable
from castwise.registry.gpus import CONTEXT_BYTES
from castwise.registry.precisions import DEFAULT
from castwise.spec.memory_line import largest_batch, needed_bytes
from castwise.spec.options import check_budget, steps_of
from castwise.spec.trial import FIT, TrialSpec

MOST_TRIALS = 32
# How far above a guess that fits the next size is, as a share of it. Source: chosen here; what fails does so at once.
# Below a guess that fails the next size is its neighbour, since what fits costs all its steps.
_STEP = 0.01
# Around the knee, batches are tried until neighbours differ by no more than this factor.
_KNEE_WITHIN = 2
# How many steps are traced at a time, and for how many cores one: the others are a training step's.
_MOST_TRACES, _CORES_A_TRACE = 8, 4
# How long a trace is waited for, and what is said then: a few small batches take no longer. That of GPT-2 XL took two
# minutes on busy cores.
_TRACE_WAITS = (2.0, "tracing a step, for 20 s at most"), (18.0, "small batches come first, as the trace takes longer")
_NO_LIMIT = (
    "A CPU has no memory limit of its own, and a batch that is too large makes the machine swap: name a limit with "
    "--memory, such as --memory 2GiB."
)


@dataclass(frozen=True)
class BatchGrid:
    """Which batch sizes are tried."""

    multiple: int  # sizes are multiples of this, as long as one fits
    finest: int = 1  # if the smallest does not fit, multiples of this
    start: int = START  # the first size

    def aligned(self, size: int) -> int:
        """Return the largest multiple up to a size; the smallest multiple if the size is below it."""
        return max(self.multiple, size // self.multiple * self.multiple)


@dataclass
class _Bisection:
    """A running search: what fits, what does not, and how often a guess was too low or too high."""

    measure: Callable[[TrialSpec], Trial]
    template: TrialSpec
    grid: BatchGrid
    usable: float
    line: Mapping[int, int] = field(default_factory=dict)  # bytes by batch size, of a traced step; empty if unknown
    trials: list[Trial] = field(default_factory=list)
    fits: int = 0
    fails: int | None = None
    rises: int = 0
    falls: int = 0

    def measure_size(self, size: int) -> bool:
        """Try a size; return whether the search can go on."""
        trial = self.measure(self.template.model_copy(update={"batch_size": size}))
        return self.learn(trial) and len(self.trials) < MOST_TRIALS

    def learn(self, trial: Trial) -> bool:
        """Note what a trial shows of its size; return whether it shows anything."""
        size = trial.spec.batch_size
        self.trials.append(trial)
        if has_trained(trial):
            self.fits = max(self.fits, size)
        elif is_too_large(trial, self.fits):
            self.fails = size if self.fails is None else min(self.fails, size)
        else:
            return False
        return True

    @property
    def step(self) -> int:
        """Return the distance of neighbours."""
        return self.grid.finest if self.fails is not None and self.fails <= self.grid.multiple else self.grid.multiple

    @property
    def is_done(self) -> bool:
        """Return whether what fits and what does not are neighbours."""
        return self.fails is not None and self.fails - self.fits <= self.step

    def guess(self) -> int | None:
        """Return what the two largest batches that fit predict; None if they predict nothing.

        Of a traced step one batch that fits shows by how much it is off.
        """
        trained = [trial for trial in self.trials if has_trained(trial) and held_bytes(trial)]
        if self.line and trained:
            last = max(trained, key=lambda trial: trial.spec.batch_size)
            missed = (held_bytes(last) or 0) - needed_bytes(self.line, last.spec.batch_size)
            size = largest_batch(self.line, (available_bytes(last) or 0) * self.usable - missed)
            return None if size is None else self.grid.aligned(size)
        prediction = predict(self.trials, self.usable)
        if prediction is None or prediction.batch_size is None:
            return None
        return self.grid.aligned(prediction.batch_size)

    def next_size(self, guess: int | None) -> int:
        """Return the next size between, or beyond, what is known."""
        by_line = self.guess() if self.line else None
        for each in (guess, by_line):
            if each is not None and self.fits < each < (self.fails or math.inf):
                return each
        if self.fails is None:
            return self._larger(guess, by_line)
        middle = (self.fits + self.fails) // 2 // self.step * self.step
        if self.template.device_type == "cpu":  # where what fails has run a whole step, and memory is guessed less well
            better_guess = self.guess() if has_trained(self.trials[-1]) else None
            size = middle if better_guess is None or better_guess >= self.fails else better_guess
            return max(size, self.fits + self.step)
        is_near = guess and (by_line is not None or not self.rises)
        low = self.fails - self.step * 4**self.falls if is_near else 0
        self.falls += 1
        return max(low, middle, self.fits + self.step)

    def _larger(self, guess: int | None, by_line: int | None) -> int:
        """Return a size beyond all that fit; from one that a traced step says is at the limit, the next one."""
        near = self.grid.aligned(round(_STEP * (guess or self.fits))) if by_line is None else 0
        stride = max(self.step, near)
        size = self.fits + stride * 2**self.rises if guess else 2 * self.fits
        # The guess that fitted predicts better than the small batches did.
        better_guess = self.guess() if guess and not self.rises else None
        self.rises += 1
        return max(size, better_guess or 0)


def find_limit(
    measure: Callable[[TrialSpec], Trial],
    template: TrialSpec,
    grid: BatchGrid,
    usable: float = USABLE,
    traced: "Traced | None" = None,
    earlier: Sequence[Trial] = (),
) -> list[Trial]:
    """Return the trials of a search; the largest that trained and the smallest `oom` one are its answer.

    A few small batches tell what a sample takes, or a traced step does. The prediction is tried, and then sizes between
    the largest batch that fits and the smallest that does not, until they are neighbours. If the smallest does not fit,
    smaller ones are tried, down to one sample. It goes on from the trials of an earlier search.

    Trials are returned in the order they were run; if the search failed, the last one says why. Tensors are expected
    to fill the share `usable` of a GPU's memory.
    """
    search = _Bisection(measure, template, grid, usable, traced.line if traced else {})
    for trial in sorted(earlier, key=lambda each: each.spec.batch_size):
        search.learn(trial)
    most = traced and (traced.largest or largest_batch(traced.line, traced.room_bytes * usable))
    guess = grid.aligned(most) if most else None
    if guess is not None and not search.measure_size(guess):  # it may be too large for more than memory
        guess, search.line = None, {}
    size: int | None = grid.aligned(grid.start) if guess is None and not search.fits else None
    while size is not None:
        if not search.measure_size(size):
            return search.trials
        size = next_small(search.trials)
    guess = guess or search.guess()
    while not search.is_done:
        if not search.measure_size(search.next_size(guess)):
            break
    return search.trials


@dataclass(frozen=True)
class Traced:
    line: Mapping[int, int]  # bytes of a step by batch size
    room_bytes: int
    largest: int | None = None  # the largest batch that fits between the allocator's gaps, if that is known


class _Traces:
    """What steps take, traced in processes of their own while other loops are measured."""

    def __init__(self, engine: Engine, trace: Callable[[TrialSpec, Session], Traced | None]) -> None:
        self._engine, self._trace = engine, trace
        self._pool = ThreadPoolExecutor(max(1, min(_MOST_TRACES, (os.cpu_count() or 1) // _CORES_A_TRACE)))
        self._sessions: list[Session] = []
        self._is_closed = False
        self._found: dict[str, Future[Traced | None]] = {}

    def begin(self, templates: Sequence[TrialSpec]) -> None:
        self._found = {template.key: self._pool.submit(self._run, template) for template in templates}

    def of(self, template: TrialSpec, say: Callable[[str], None]) -> Traced | None:
        """Wait a while for what a step takes; None if it is not known."""
        for seconds, line in _TRACE_WAITS if template.key in self._found else ():
            with suppress(TimeoutError):
                return self._found[template.key].result(seconds)
            say(f"{template.loop_name}: {line}")
        return None

    def _run(self, template: TrialSpec) -> Traced | None:
        with closing(self._engine.start(template.protocol.timeout_seconds)) as session:
            self._sessions.append(session)
            try:
                if self._is_closed:
                    return None
                session.open("cpu")
                return self._trace(template, session)
            except TrialFailedError:
                return None

    def close(self) -> None:
        """End what still runs."""
        self._is_closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        for session in self._sessions:
            session.close()


class _BudgetEndedError(Exception):
    """No time is left for a further trial."""


@dataclass(frozen=True)
class MaxBatchJob:
    templates: tuple[TrialSpec, ...]  # a trial of each loop, whatever its batch size
    grid: BatchGrid
    curve: bool  # whether batches below the largest are measured
    job: Job = field(repr=False)
    budget_seconds: float = math.inf  # what is left of it

    def run(self) -> MaxBatchResult:
        """Search for each loop's largest batch, and fill in its curve, until the budget ends, or until Ctrl-C.

        KeyboardInterrupt is raised if it came before any batch was tried.
        """
        began = time.perf_counter()
        measure = CachedMeasure(self.job.runner)
        known = set[str]() if self.job.runner.policy.again else set(measure.known)
        found: list[MaxBatch] = []
        tried: dict[str, Trial] = {}
        longest = 0.0  # trial of this loop

        def run_trial(spec: TrialSpec) -> Trial:
            nonlocal longest
            if spec.key not in known and time.perf_counter() - began + longest > self.budget_seconds:
                raise _BudgetEndedError
            trial = tried[spec.key] = measure(spec)
            longest = max(longest, 0.0 if spec.key in known else trial.duration_seconds)
            return trial

        earlier = self._earlier(measure.known.values())
        ending: Ending = "done"
        with closing(_Traces(self.job.runner.engine, self._trace)) as traces:
            traces.begin([each for each in self.templates if not earlier[each.key] and self._can_trace(each)])
            for template in self.templates:
                # How much of this device fragmentation takes is known once one search has ended.
                usable = next((share for each in reversed(found) if (share := each.usable) is not None), USABLE)
                own = earlier[template.key]
                tried, longest = {trial.spec.key: trial for trial in own}, 0.0
                try:
                    traced = traces.of(template, self.job.runner.listener.remark)
                    find_limit(run_trial, template, self.grid, usable, traced, own)
                    self._fill_curve(template, run_trial, tried)
                except _BudgetEndedError:
                    ending = "budget"
                except KeyboardInterrupt:
                    ending = "interrupted"
                    if not tried and not found:
                        raise
                found += max_batches_of(tried.values())
                if ending != "done":
                    break
        recorded = {id(trial) for trial in measure.known.values()}
        num_recorded = sum(id(trial) in recorded for each in found for trial in each.trials)
        left = () if ending == "done" else self.templates[self.templates.index(template) :]
        return MaxBatchResult(tuple(found), time.perf_counter() - began, num_recorded, ending, left)

    def _earlier(self, known: Collection[Trial]) -> dict[str, list[Trial]]:
        """Return the trials of earlier searches by the key of their template: they are gone on from."""
        on_record = () if self.job.runner.policy.again else known
        return {each.key: [trial for trial in on_record if _is_of(trial, each)] for each in self.templates}

    def _fill_curve(
        self, template: TrialSpec, run_trial: Callable[[TrialSpec], Trial], tried: Mapping[str, Trial]
    ) -> None:
        while self.curve and (size := self._next_of_curve(max_batches_of(tried.values())[0])) is not None:
            run_trial(template.model_copy(update={"batch_size": size}))

    def _can_trace(self, template: TrialSpec) -> bool:
        """Return whether a traced step can spare small batches, which the curve needs anyway."""
        is_on_one_gpu = template.device_type == "cuda" and template.world_size == 1
        return not self.curve and is_on_one_gpu and self.job.runner.environment.gpu_memory_bytes is not None

    def _trace(self, template: TrialSpec, session: Session) -> Traced | None:
        """Return what a traced step takes up to the largest batch that has room; None if that is not known."""
        most = (self.job.runner.environment.gpu_memory_bytes or 0) - CONTEXT_BYTES
        room = min(most, template.memory_limit_bytes or most)
        sizes = (self.grid.start, GROWTH * self.grid.start)
        found = session.trace_memory(template, sizes, (room,), may_compute=False)
        line = {size: parts.peak_bytes for size, parts in found.batches.items()}
        return Traced(line, room, found.largest.get(room)) if len(line) > 2 else None

    def _next_of_curve(self, found: MaxBatch) -> int | None:
        """Return a batch below the largest that the curve lacks: one of the small ones, or one below the knee."""
        if found.largest is None or found.failing is None:
            return None
        tried = [trial.spec.batch_size for trial in found.trials]
        size = self.grid.aligned(START)
        while 2 * size <= found.largest.spec.batch_size:  # nearer ones only where the knee may lie there
            if size not in tried:
                return size
            size *= GROWTH
        knee = found.knee
        if knee is None or steady_metrics.throughput(knee) is None:
            return None
        at = knee.spec.batch_size
        below = max((each for each in tried if each < at), default=at)
        middle = self.grid.aligned(math.isqrt(below * at))
        return middle if at > _KNEE_WITHIN * below and middle not in tried and below < middle < at else None


def prepare_max_batch(
    request: MaxBatchOptions, listener: Listener | None = None, find_machine: FindMachine = detect_machine
) -> MaxBatchJob:
    """Check a request against the machine, and return the search that answers it."""
    began = time.perf_counter()
    least = 1 + FIT.min_blocks
    steps = FIT.warm_up_steps + FIT.min_blocks if request.steps is None else request.steps
    if steps < least:
        raise UsageError(f"{steps} are too few steps to see whether a batch trains: name at least {least}.")
    check_budget(request.budget_seconds)
    if request.memory_bytes is None and not may_have_gpu(request.device):
        raise UsageError(_NO_LIMIT)
    run_options = steps_of(request, workloads=(request.workload,), batch_sizes=(START,))
    job = prepare(run_options, listener, find_machine)
    limit = _limit(request, job.runner.environment)
    protocol = FIT.model_copy(update={"warm_up_steps": steps - FIT.min_blocks})
    if request.timeout_seconds is not None:
        protocol = protocol.model_copy(update={"timeout_seconds": request.timeout_seconds})
    update = {"protocol": protocol, "memory_limit_bytes": limit}
    # PyTorch's default needs as much memory as fp32 or tf32.
    specs = [spec for spec in job.specs if request.precisions or spec.precision != DEFAULT]
    templates = tuple(spec.model_copy(update=update) for spec in specs)
    finest = max((own.accumulate for own in job.user_workloads.values()), default=1)
    multiple = finest if request.exact else math.lcm(MULTIPLE, finest)
    left = math.inf if request.budget_seconds is None else request.budget_seconds - (time.perf_counter() - began)
    return MaxBatchJob(templates, BatchGrid(multiple, finest, math.lcm(START, finest)), request.curve, job, left)


def _limit(request: MaxBatchOptions, environment: Environment) -> int | None:
    """Return the most memory that a trial may take; None if the device alone decides."""
    whole = environment.gpu_memory_bytes if environment.gpu is not None else None
    asked = request.memory_bytes
    if whole is None and asked is None:
        raise UsageError(_NO_LIMIT)
    if whole is not None and asked is not None and asked > whole:
        raise UsageError(
            f"--memory {asked / 2**30:.3g} GiB is more than {environment.device_name} has ({whole / 2**30:.1f} GiB)."
        )
    if asked is None and request.margin is None:
        return None
    return max(1, int((asked if asked is not None else whole or 0) * (1 - (request.margin or 0.0))))


def _is_of(trial: Trial, template: TrialSpec) -> bool:
    own = template.without_extras.model_copy(update={"batch_size": trial.spec.batch_size})
    limit = template.protocol.timeout_seconds
    return is_max_batch_trial(trial) and trial.spec.without_extras == own and is_reusable(trial, limit)
