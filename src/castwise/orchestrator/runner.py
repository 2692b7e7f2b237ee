"""Measure trials, each in a process of its own: alone one after another, or several with interleaved blocks.

In an interleaved session, drift (clocks, temperature, other load) falls on all configurations alike, and set-up is paid
once. A lone trial is a session of one that takes every block, or every epoch, that its spec allows.
"""

import math
import random
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from castwise.analysis.decide import CLEAR
from castwise.analysis.statistics import FEWEST_BLOCKS
from castwise.analysis.steady_metrics import units_per_step, warm_step_seconds
from castwise.errors import UsageError
from castwise.orchestrator.block_schedule import BlockSchedule, PriorStats
from castwise.orchestrator.session import BackgroundCloser, Engine, Session, TrialFailedError
from castwise.records.schema import (
    Block,
    EnergyMeasurement,
    Environment,
    Epoch,
    Facts,
    GpuFacts,
    RankSamples,
    StepNumerics,
    StepProfile,
    TelemetrySummary,
    Trial,
)
from castwise.records.store import ResumePolicy, Store, name_of, reusable_trials, stem_of
from castwise.registry.precisions import AS_WRITTEN, lack_of_torchao, precision_row, why_without_torchao
from castwise.registry.technique_fit import why_unsupported
from castwise.registry.techniques import STATE, step_config_of
from castwise.registry.workloads import unit_of
from castwise.spec.loss_scale import is_dynamic
from castwise.spec.recipe import Recipe
from castwise.spec.trial import TrialSpec
from castwise.telemetry.gpu import CounterReading
from castwise.telemetry.sampler import Telemetry
from castwise.telemetry.summary import mean_counters, telemetry_note, unwatched

# Seconds of sustained steps for the energy counter: ten of its ticks for a lone trial, five in a session (H200).
_ENERGY_SECONDS_ALONE = 1.1
_ENERGY_SECONDS = 0.5
# A loop at the power limit is timed in one stretch: after a rest the GPU is too fast for 0.8 s, then too slow for a
# moment. A script on a GPU may reach the limit in its stretch alone. Source: docs/evidence/power-limit.md.
_STRETCH_LEAD_IN_SECONDS = 1.0
_STRETCH_BLOCK_SECONDS = 0.25  # chosen here
_CPU_LEAD_IN_SECONDS = 0.1  # of a script, at least; its loader decides how many steps lead in
_SCRIPT_LEAD_IN_STEPS = 2  # at least
_STRETCH_SECONDS = 1.0  # in a session; a lone trial takes its whole time
# The phases of a session, as they begin.
_STAGES = ("starting", "setting up", "warming up", "timing", "profiling")
# The share of the time to a deadline after which no warm-up begins. If they are set up one by one, also the share of
# what is left of it that the next may be expected to take until it is warm. The rest is for timing.
_SHARE = 0.75
# Of a shorter warm-up the figures are no good, and the result is there soon.
_WORTH_A_FIGURE_SECONDS = 0.5
# How many times as long as the first another may take to set up and warm up, if no equal share of the time is longer.
_TIMES_THE_FIRST = 3.0


class Listener(Protocol):
    def started(self, spec: TrialSpec, index: int, count: int) -> None:
        """Trial `index` (from 1) of `count` begins; `count` is 0 if the number is not known."""

    def phase(self, name: str, done: float) -> None:
        """The running trial is in a phase; `done` is its finished share, of a session the trials it is worth."""

    def ended(self, trial: Trial) -> None:
        """A trial has its record."""

    def remark(self, line: str) -> None:
        """Something is worth a line."""


class NullListener:
    def _ignore(self, *_: Any, **__: Any) -> None: ...

    started = phase = ended = remark = _ignore


class UnboundedProgress:
    """Passes progress on when the number of trials is not known beforehand."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._num_ended = 0
        self.phase = listener.phase
        self.remark = listener.remark

    def started(self, spec: TrialSpec, index: int, count: int) -> None:
        del index, count
        self._listener.started(spec, self._num_ended + 1, 0)

    def ended(self, trial: Trial) -> None:
        self._num_ended += 1
        self._listener.ended(trial)


@dataclass(frozen=True)
class TrialRunner:
    """Measures trials, saves their records and reports progress."""

    engine: Engine
    store: Store | None
    environment: Environment  # for the record of a process that failed before it described its own
    listener: Listener
    data_note: str | None = None  # goes into every record's facts
    telemetry: Telemetry = field(default_factory=Telemetry, compare=False)
    # Ends the processes of measured trials in the background.
    closer: BackgroundCloser = field(default_factory=BackgroundCloser, compare=False)
    weights: Path | None = None  # the folder for trained models' weights; None keeps none
    # For Perfetto: the file for the trace of profiled steps, or a folder for several; None writes none.
    traces: Path | None = None
    policy: ResumePolicy = field(default_factory=ResumePolicy)  # what is measured although it is on record
    # The process that has looked at a script: it waits to be the first trial of the script as written.
    begun: list[Session] = field(default_factory=list, compare=False)

    @contextmanager
    def claim(self, specs: Sequence[TrialSpec]) -> Iterator[list[Trial]]:
        """Keep other commands from measuring these configurations; yield what is on record by now.

        Waits while another command measures one of them.
        """
        if self.store is None:
            yield []
            return
        with self.store.claim(specs, self.environment, self.listener.remark):
            if self.policy.again:
                for spec in specs:
                    self.store.checkpoint(spec, self.environment).unlink(missing_ok=True)
            known, _ = self.store.load_more(self.environment)
            yield list(reusable_trials(specs, known, self.policy).values())

    def run(self, specs: Sequence[TrialSpec]) -> list[Trial]:
        """Measure each spec alone, in order; each record is saved before the next trial starts."""
        trials: list[Trial] = []
        self.note_gpu_processes(specs)
        try:
            for index, spec in enumerate(specs, start=1):
                self.listener.started(spec, index, len(specs))
                reason = unsupported_reason(spec, self.environment)
                if reason is not None:  # not saved: with more GPUs visible it can be measured
                    trial = Trial(
                        spec=spec,
                        status="unsupported",
                        message=reason,
                        environment=self.environment,
                        started_at=_now(),
                        duration_seconds=0.0,
                    )
                else:
                    with self.claim([spec]) as found:
                        known = [each for each in found if each.spec.key == spec.key]
                        (trial,) = known or InterleavedSession(self, [spec]).run()
                        if self.store is not None and not known:
                            self.store.save(trial)
                trials.append(trial)
                self.listener.ended(trial)
        finally:
            self.telemetry.close()
        return trials

    def note_gpu_processes(self, specs: Sequence[TrialSpec]) -> None:
        """Note which processes use the GPUs of these specs, before a process of this job does."""
        gpus = {device: uuid for spec in specs for device, uuid in self.environment.gpus_of(spec).items()}
        self.telemetry.note_processes({device: uuid for device, uuid in gpus.items() if uuid})


class CachedMeasure:
    """Returns the trial of a spec: its record if there is one, else measured; for searches of unknown length.

    Attributes:
        known: What was on record when the search began, by spec key.
    """

    def __init__(self, runner: TrialRunner) -> None:
        self._runner = replace(runner, listener=UnboundedProgress(runner.listener))
        self.known: dict[str, Trial] = {} if runner.store is None else runner.store.load(runner.environment)[0]

    def __call__(self, spec: TrialSpec) -> Trial:
        return reusable_trials([spec], self.known, self._runner.policy).get(spec.key) or self._runner.run([spec])[0]


# How the configurations of a session are set up: all at once; the first alone and then the others at once; or one by
# one, if they would slow each other down.
SetupOrder = Literal["together", "first alone", "one by one"]


@dataclass
class InterleavedSession:
    """A session of several configurations, whose blocks are interleaved until each is known well enough.

    The processes of the previous session may still be ending while this one's start; this one's end in the background
    once all is measured (`runner.closer`).

    Attributes:
        runner: Starts the processes and reports progress.
        specs: The configurations, the baseline first: it is the last to run out of memory.
        round_number: For progress and for the random order of blocks. None measures a single spec alone.
        setup_order: How they are set up. If the first does not fit next to the others, all start again with the first
            alone. They are always warmed up one by one.
        earlier: What earlier processes of a configuration measured, if there were any, by configuration. The energy of
            others is measured.
        baseline: The configuration that the others are compared with, if one is.
        deadline: The value of `time.perf_counter` at which no further block is timed; the first configuration that
            does not fail always has one, unless it is a baseline that was measured earlier and is the only one left.
        fits_deadline: Whether it should end before the deadline, as earlier sessions did: no time is kept for timing.
        grace_seconds: For how long after the deadline set-up and warm-up are waited for, unless they are the baseline's
            first.
        looked_at: The configurations of which one block is enough, if it shows them far slower than the baseline.
            Others wait for them: they get no equal share of the time to the deadline.
        seed: Decides the order of blocks, with the round's number.
        seconds_given_up: That the next session would not take, as no time was left for trials; less what it would take
            more, as a script had begun before.
    """

    runner: TrialRunner
    specs: Sequence[TrialSpec]
    _: KW_ONLY
    round_number: int | None = None
    setup_order: SetupOrder = "together"
    earlier: Mapping[str, PriorStats | None] = field(default_factory=dict)
    baseline: str | None = None
    deadline: float | None = None
    fits_deadline: bool = False
    grace_seconds: float = 0.0
    looked_at: Collection[str] = ()
    seed: str = field(default_factory=lambda: secrets.token_hex(6))
    seconds_given_up: float = field(default=0.0, init=False)
    began: float = field(default=0.0, init=False)
    stage_seconds: dict[str, float] = field(default_factory=dict, init=False)  # up to now, by what is reported
    _stage: tuple[str, float] = field(default=("", 0.0), init=False)  # the present one, and when it began
    trials: "list[_RunningTrial]" = field(default_factory=list, init=False)

    def run(self) -> list[Trial]:
        """Return a record for each, in the order of the specs, except for those that no time was left for.

        One that ran out of memory next to others may yet fit alone.
        """
        self.began = time.perf_counter()
        try:
            with self.cut_off():
                self.get_ready()
            self.measure()
        except BaseException:
            _close(self.trials)
            raise
        self.begin_stage("")
        self.runner.closer.close([trial.session for trial in self.trials])
        if self.round_number is None:
            self.runner.closer.wait()  # a lone trial's duration includes the end of its process
        session_id = secrets.token_hex(6) if sum(trial.can_continue for trial in self.trials) > 1 else None
        return [trial.record(session_id) for trial in self.trials if not trial.is_dropped]

    def get_ready(self) -> None:
        self.set_up(self.setup_order)
        # If memory was short, a library may report the first one's failure as another error.
        failures = [trial.failure for trial in self.trials if trial.failure is not None]
        lacks_memory = len(self.specs) > 1 and any(failure.status == "oom" for failure in failures)
        if self.setup_order == "together" and lacks_memory and not self.trials[0].can_continue:
            _close(self.trials)
            self.trials.clear()
            self.set_up("first alone")
        self.warm_up()
        self.seconds_given_up -= sum(trial.seconds_before for trial in self.trials)
        ready = [trial for trial in self.trials if trial.can_continue]
        num_failed = sum(not trial.can_continue and not trial.is_dropped for trial in self.trials)
        if len(ready) == 1 and ready[0].is_baseline and ready[0].has_prior and num_failed < len(self.specs) - 1:
            ready[0].drop()  # no time was left for what it would be compared with

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """Drop what is not ready some time after the deadline: on a busy machine a set-up may take any time."""

        def drop_late() -> None:
            for trial in list(self.trials):
                if not trial.is_warm and (self.fits_deadline or not trial.is_baseline):
                    trial.drop()

        left = self.seconds_left()
        timer = threading.Timer(max(0.0, left + self.grace_seconds), drop_late) if math.isfinite(left) else None
        if timer is not None:
            timer.daemon = True
            timer.start()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()

    def measure(self) -> None:
        """Time what is ready, then measure its energy and profile it."""
        interleaved = [trial for trial in self.trials if not trial.is_timed_in_stretch]
        self.time_interleaved(interleaved)
        # After the others: a GPU at its power limit needs a while to recover its clock.
        self.time_stretches()
        for trial in interleaved:
            if not trial.has_prior and self.seconds_left() > 0:
                trial.attempt(trial.measure_energy)
        self.begin_stage("ending")
        _all_at_once(_RunningTrial.finish, self.trials)
        for trial in self.trials:
            if trial.spec.protocol.profile_steps and trial.failure is None and trial.spec.recipe is None:
                self.report(f"profiling {trial.spec.precision}", 1.0)
                trial.profile()

    @property
    def share(self) -> float:
        """Return the share of the time to the deadline that is not kept for timing."""
        return 1.0 if self.fits_deadline else _SHARE

    def seconds_left(self, share: float = 1.0) -> float:
        if self.deadline is None:
            return math.inf
        return self.began + share * (self.deadline - self.began) - time.perf_counter()

    def report(self, phase: str, share: float) -> None:
        self.begin_stage(next(stage for stage in _STAGES if phase.startswith(stage)))
        prefix = "" if self.round_number is None else f"round {self.round_number}: "
        self.runner.listener.phase(prefix + phase, share * len(self.specs))

    def begin_stage(self, name: str) -> None:
        (before, began), self._stage = self._stage, (name, time.perf_counter())
        if before:
            self.stage_seconds[before] = self.stage_seconds.get(before, 0.0) + self._stage[1] - began

    def start(self, spec: TrialSpec) -> "_RunningTrial":
        self.trials.append(_RunningTrial(self, spec))
        return self.trials[-1]

    def set_up(self, order: SetupOrder) -> None:
        """Build the trials; one by one, they are warmed up, too."""
        self.report("starting", 0.0)
        if order == "one by one":
            self.runner.closer.wait()
            self.get_ready_one_by_one()
            return
        for spec in self.specs:
            self.start(spec)
        _all_at_once(_RunningTrial.open_device, self.trials)
        self.runner.closer.wait()  # the memory of the previous session's processes is needed now
        self.report("setting up", 0.05)
        num_alone = 1 if order == "first alone" else 0
        for trial in self.trials[:num_alone]:
            trial.attempt(trial.set_up)
        _all_at_once(_RunningTrial.set_up, self.trials[num_alone:])

    def get_ready_one_by_one(self) -> None:
        """Start, set up and warm up one after another while there is time; the others are not even started.

        One that takes much longer than the first would leave no time for the others: it is given up.
        """
        first = 0.0  # seconds
        for index, spec in enumerate(self.specs):
            is_first = not any(other.can_continue for other in self.trials)
            if not is_first and first > self.share * self.seconds_left():
                return
            self.report(f"setting up {spec.precision}", 0.05 + 0.35 * index / len(self.specs))
            trial, started_at = self.start(spec), time.perf_counter()
            thread = threading.Thread(target=trial.get_ready, daemon=True)
            thread.start()
            equal_share = self.seconds_left() / (len(self.specs) - index + 1)  # one of them for timing
            if spec.configuration in self.looked_at and math.isfinite(equal_share):
                equal_share = 0.0
            longest = max(0.0, equal_share, min(_TIMES_THE_FIRST * first, self.seconds_left()))
            thread.join(None if is_first or math.isinf(longest) else longest)
            if thread.is_alive():
                trial.drop()
                thread.join()
                self.seconds_given_up += time.perf_counter() - started_at
            elif trial.can_continue and is_first:
                first = time.perf_counter() - started_at + trial.seconds_before
            failures = ((t.spec.precision, None if t.failure is None else t.failure.message) for t in self.trials)
            if fails_alike(failures):
                return

    def warm_up(self) -> None:
        """Warm up one by one: while others compute, no step time settles."""
        cold = [trial for trial in self.trials if not trial.is_warm]
        for index, trial in enumerate(cold):
            if self.seconds_left(self.share) < 0 and any(other.can_continue for other in cold[:index]):
                trial.drop()
            if trial.can_continue and not trial.runs_all_epochs:
                name = f"warming up {trial.spec.precision}" if len(self.specs) > 1 else "warming up"
                self.report(name, 0.1 + 0.3 * index / len(self.specs))
            trial.attempt(trial.warm_up)

    def time_interleaved(self, trials: "Sequence[_RunningTrial]") -> None:
        """Time blocks, one of each configuration in a random order, and again until none needs another.

        All that need a block take the next one, and the baseline, whose blocks every ratio needs. While the baseline
        needs blocks, no ratio is known well enough, and all take them. One that was left out stays out: a ratio pairs
        the blocks of both sides one by one from the first.
        """
        rng = random.Random(f"{self.seed} {self.round_number}")
        while order := self._next_blocks(trials):
            rng.shuffle(order)
            if not all(trial.runs_all_epochs for trial in order):
                self.report("timing", 0.4 + 0.6 * min(trial.schedule.share for trial in order))
            # Longer blocks of the others save blocks of a baseline that needs few itself.
            may_be_long = all(trial.schedule.is_quiet for trial in order if trial.is_baseline)
            for trial in order:
                if not trial.has_blocks or trial.block_seconds < self.seconds_left():
                    trial.attempt(partial(trial.measure_next, may_be_long=may_be_long))
                else:
                    trial.is_done = True

    def _next_blocks(self, trials: "Sequence[_RunningTrial]") -> "list[_RunningTrial]":
        """Return those that take another block; none if that would tell nothing, or no time is left."""
        for trial in trials:
            trial.is_done |= trial.has_no_time(self.seconds_left())
        self._end_looks(trials)
        if not any(trial.goes_on for trial in trials if trial.is_baseline and not trial.is_done):
            for trial in trials:
                trial.is_done |= not trial.is_baseline and not trial.goes_on
        order = [trial for trial in trials if not trial.is_done]
        others = [trial for trial in trials if trial.is_done]
        is_alone = all(trial.is_baseline for trial in order) and any(trial.can_continue for trial in others)
        return order if not is_alone and any(trial.goes_on for trial in order) else []

    def _end_looks(self, trials: "Sequence[_RunningTrial]") -> None:
        timed = [trial for trial in trials if trial.has_blocks] if self.looked_at else []
        baseline = min((trial.seconds_of_a_step for trial in timed if trial.is_baseline), default=math.inf)
        for trial in timed:
            is_clear = CLEAR * baseline < trial.seconds_of_a_step
            trial.is_done |= is_clear and trial.spec.configuration in self.looked_at

    def time_stretches(self) -> None:
        """Time loops that are timed in one stretch, one after another, each in its share of the time that is left.

        Their order is random, and the next round has it from the end: what changes with time hits all alike.
        """
        number = self.round_number or 1

        def place(trial: "_RunningTrial") -> float:
            return random.Random(f"{self.seed} {(number + 1) // 2} {trial.spec.configuration}").random()

        stretches = [trial for trial in self.trials if trial.is_timed_in_stretch]
        order = sorted(stretches, key=place, reverse=number % 2 == 0)
        for index, trial in enumerate(order):
            phase = "timing" if trial.spec.is_script else "timing at the power limit"
            self.report(phase, 0.4 + 0.6 * index / len(order))
            if index and not trial.is_baseline and self.seconds_left() < 0:
                trial.drop()
            trial.attempt(partial(trial.time_stretch, self.seconds_left() / (len(order) - index)))


def fails_alike(failures: Iterable[tuple[str, str | None]]) -> bool:
    """Return whether all failed with one error, in float32 and in a 16-bit precision: others will fail with it, too.

    Args:
        failures: The precision of each trial and its message, None if it has not failed.
    """
    found = list(failures)
    is_one = len({message for _, message in found}) == 1 and bool(found[0][1])
    return is_one and len({precision_row(precision).is_16_bit for precision, _ in found}) > 1


class _RunningTrial:
    """One trial of a session, in its process: what was measured before a failure is in its record, too."""

    def __init__(self, among: InterleavedSession, spec: TrialSpec) -> None:
        self.spec = spec
        self.is_baseline = spec.configuration == among.baseline
        self.is_done = False  # whether it takes no further blocks
        self.is_dropped = False  # whether no time was left for it
        self.block_seconds = 0.0  # that the last block or epoch took
        self.failure: TrialFailedError | None = None
        self._runner, self._among = among.runner, among
        self._prior = among.earlier.get(spec.configuration)
        self._is_alone = among.round_number is None
        self.schedule = BlockSchedule(spec.protocol, self._prior, adaptive=not self._is_alone)
        self._is_at_power_limit = self._prior is not None and self._prior.is_at_power_limit
        self._has_led_in = False
        self._environment = self._runner.environment
        self._facts: Facts | None = None
        self._blocks: list[Block] = []
        self._epochs: list[Epoch] = []
        self._samples: tuple[RankSamples, ...] = ()
        self._readings: list[TelemetrySummary] = []
        self._counters: list[dict[str, CounterReading]] = []
        self._gpu_facts: GpuFacts | None = None
        self._energy: EnergyMeasurement | None = None
        self._profile: StepProfile | None = None
        self._started_at = _now()
        self._started = time.perf_counter()
        self._seconds_to_failure: float | None = None
        may_have_begun = spec.is_script and spec.precision == AS_WRITTEN and not spec.techniques
        self._is_begun = may_have_begun and bool(self._runner.begun)
        if self._is_begun:
            self.session = self._runner.begun.pop()
            self.session.timeout_seconds = spec.protocol.timeout_seconds
        else:
            self.session = self._runner.engine.start(spec.protocol.timeout_seconds, spec.num_processes)

    @property
    def can_continue(self) -> bool:
        """Return whether it has neither failed nor diverged in training."""
        return self.failure is None and not (self._epochs and self._epochs[-1].diverged)

    @property
    def is_warm(self) -> bool:
        return self._facts is not None

    @property
    def seconds_before(self) -> float:
        """Return what its set-up took before the session began."""
        return (self._facts.set_up_seconds or 0.0) if self._is_begun and self._facts is not None else 0.0

    @property
    def has_blocks(self) -> bool:
        """Return whether it has a timed block, or an epoch that counts."""
        return self.schedule.share > 0

    @property
    def has_prior(self) -> bool:
        """Return whether earlier processes measured it; their energy is known, too."""
        return self._prior is not None

    def drop(self) -> None:
        """End the process, unless it failed before: no time is left for it."""
        if self.failure is None:
            self.is_dropped = True
            self.failure = TrialFailedError("timeout", "no time was left")
            self.session.close()

    @property
    def goes_on(self) -> bool:
        """Return whether it needs another block or epoch."""
        if not self.can_continue:
            return False
        if self._is_alone and self.spec.recipe is not None:
            return len(self._epochs) < self.spec.recipe.num_epochs
        return self.schedule.goes_on

    @property
    def seconds_of_a_step(self) -> float:
        """Return the step time of the last block."""
        return self._blocks[-1].seconds / self._blocks[-1].num_steps

    def has_no_time(self, seconds_left: float) -> bool:
        """Return whether another block is impossible, or has no time."""
        # Of a slow one a few long blocks say enough.
        is_spent = not self.is_baseline and not self.goes_on and self.schedule.share >= 1
        is_too_long = self.has_blocks and self.block_seconds > seconds_left
        return not self.can_continue or is_spent or is_too_long

    @property
    def runs_all_epochs(self) -> bool:
        """Return whether it is a lone training run, which is run to its end."""
        return self._is_alone and self.spec.recipe is not None

    @property
    def _gpus(self) -> dict[str, str]:
        return self._environment.gpus_of(self.spec)

    def attempt(self, step: Callable[[], None]) -> None:
        """Run a step unless an earlier one failed. A failure ends the process and frees its memory for the others."""
        if self.failure is not None:
            return
        try:
            step()
        except TrialFailedError as failure:
            self.failure = failure
            self.session.close()
            self._seconds_to_failure = time.perf_counter() - self._started

    def open_device(self) -> None:
        # A script that has begun is in another state than those whose devices are opened before it: torchrun's ranks,
        # and scripts that ask for it, have fewer threads, and their records would be of another machine.
        if not self._is_begun:
            self._environment = self.session.open(self.spec.device)

    def get_ready(self) -> None:
        """Open the device, build the trial and warm up, and say how fast it is about: the user waits for a figure."""
        for step in (self.open_device, self.set_up, self.warm_up):
            self.attempt(step)
        step_seconds = warm_step_seconds(self._facts)
        if self._prior is not None or self.failure is not None or self._facts is None or step_seconds is None:
            return
        if self._facts.warm_up_seconds >= _WORTH_A_FIGURE_SECONDS:
            rate, unit = units_per_step(self.spec, self._facts) / step_seconds, self._facts.unit
            rounded = f"{float(f'{rate:.2g}'):,g} {unit or unit_of(self.spec.workload)}/s"
            self._runner.listener.remark(f"{self.spec.label}: about {rounded}")

    def set_up(self) -> None:
        checkpoint, store = None, self._runner.store
        # Without a lock it may be another command's, which still runs.
        if self._is_alone and store is not None and store.has_locks:
            checkpoint = store.checkpoint(self.spec, self._environment)
        self.session.set_up(self.spec, checkpoint)
        self._gpu_facts = self._runner.telemetry.gpu_facts(self._gpus)

    def warm_up(self) -> None:
        """Run until the step time has settled; a training run resumes, and runs the epochs that are not counted."""
        recipe = self.spec.recipe
        if recipe is None:
            may_be_in_stretch = self.spec.protocol.lead_in_seconds > 0
            with self._runner.telemetry.watch(self._gpus if may_be_in_stretch else {}) as watch:
                facts = self.session.warm_up(None if self._prior is None else self._prior.step_seconds)
            self._is_at_power_limit |= watch.reading.is_at_power_limit
        else:
            resumed = self.session.resume()
            facts = resumed.facts
            self._epochs += resumed.epochs
            self._readings += unwatched(len(resumed.epochs))
        update = {"ready_seconds": self.session.ready_seconds, "data_note": self._runner.data_note}
        self._facts = facts.model_copy(update=update)
        if facts.refused_allocations and len(self._among.specs) > 1:
            raise TrialFailedError("oom", "too little memory was left next to others for the kernels it has alone")
        if recipe is not None and not self._is_alone:
            for _ in range(recipe.skip_epochs):
                if self.can_continue:
                    self._run_epoch(recipe)

    def measure_next(self, *, may_be_long: bool) -> None:
        """Time one block, longer than usual if it may be and that saves blocks; of a training run, run one epoch."""
        started = time.perf_counter()
        if self.spec.recipe is not None:
            self._run_epoch(self.spec.recipe)
            self.block_seconds = time.perf_counter() - started
            return
        length = self.schedule.length if may_be_long else 1
        if not self._has_led_in:
            self._lead_in()
        self._has_led_in = False
        try:
            with self._runner.telemetry.watch(self._gpus) as watch:
                block = self.session.run_block(length)
                self._blocks.append(block)
                self.schedule.add(block.seconds, block.num_steps, length)
                # Alone, the next steps start before the last look at the GPU, which takes milliseconds. In a session
                # that look must not see another configuration's steps: each leads in right before its own block.
                if self._is_alone and self.goes_on:
                    self._lead_in()
        finally:
            if len(self._blocks) > len(self._readings):
                self._readings.append(watch.reading)
                self._counters.append(watch.counters)
        self.block_seconds = time.perf_counter() - started

    @property
    def is_timed_in_stretch(self) -> bool:
        """Return whether it is timed in one stretch of steps, not in turn with the others."""
        is_led_in = self._is_at_power_limit and self.spec.recipe is None and self.spec.protocol.lead_in_seconds > 0
        return is_led_in or self.spec.is_script  # whose loader prepares batches while it waits for its turn

    def time_stretch(self, seconds_left: float) -> None:
        """Time all blocks in one stretch, led in by steps that bring the GPU to its steady clock.

        Of a script whose steps are slow as many blocks as there is time for, one at least.
        """
        protocol, telemetry = self.spec.protocol, self._runner.telemetry
        whole = min(protocol.num_blocks * protocol.block_seconds, protocol.max_seconds)
        seconds = whole if self._is_alone else min(whole, _STRETCH_SECONDS)
        num_blocks = max(FEWEST_BLOCKS, round(seconds / _STRETCH_BLOCK_SECONDS))
        length = seconds / num_blocks
        lead_in = _CPU_LEAD_IN_SECONDS if self.spec.device_type == "cpu" else _STRETCH_LEAD_IN_SECONDS
        if self.spec.is_script and math.isfinite(seconds_left):
            each = max(length, warm_step_seconds(self._facts) or 0.0)
            num_blocks = min(num_blocks, max(1, int((seconds_left - lead_in) / each) - _SCRIPT_LEAD_IN_STEPS))
        with telemetry.watch(self._gpus) as watch, telemetry.meter(self._gpus) as meter:
            self._blocks += self.session.run_stretch(lead_in, num_blocks, length)
            meter.seconds = sum(block.seconds for block in self._blocks)
        for block in self._blocks:
            self.schedule.add(block.seconds, block.num_steps)
        if self.spec.is_script and meter.seconds > watch.reading.seconds:
            self._readings += unwatched(len(self._blocks), "the script is too short: its steps of warm-up were timed")
            return
        joules, num_blocks = watch.reading.energy_joules, len(self._blocks)  # a script may give fewer
        share = {
            "seconds": watch.reading.seconds / num_blocks,
            "energy_joules": None if joules is None else joules / num_blocks,
        }
        self._readings += [watch.reading.model_copy(update=share)] * num_blocks
        self._counters.append(watch.counters)
        num_steps = sum(block.num_steps for block in self._blocks)
        self._energy = meter.energy.model_copy(update={"step_seconds": meter.seconds / num_steps})

    def _lead_in(self) -> None:
        if self.spec.protocol.lead_in_seconds:
            self.session.lead_in()
            self._has_led_in = True

    def _run_epoch(self, recipe: Recipe) -> None:
        number = len(self._epochs) + 1

        def report(share: float) -> None:
            done = (number - 1 + share) / recipe.num_epochs
            self._runner.listener.phase(f"epoch {number} of {recipe.num_epochs}", 0.05 + 0.95 * done)

        if self._is_alone:
            report(0.0)
        with self._runner.telemetry.watch(self._gpus) as watch:
            epoch = self.session.run_epoch(report if self._is_alone else None)
        self._epochs.append(epoch)
        self._readings.append(watch.reading)
        self._counters.append(watch.counters)
        if number > recipe.skip_epochs:
            self.schedule.add(epoch.seconds, epoch.num_steps)

    def measure_energy(self) -> None:
        """Run sustained steps for the energy counter, if the GPUs have one; readings cover a training run's epochs."""
        if self.spec.recipe is not None or not self._runner.telemetry.has_counter(self._gpus):
            return
        self._runner.listener.phase("metering", 1.0)
        with self._runner.telemetry.meter(self._gpus) as meter:
            steps = self.session.run_sustained(_ENERGY_SECONDS_ALONE if self._is_alone else _ENERGY_SECONDS)
        self._energy = meter.energy.model_copy(update={"step_seconds": steps.seconds / steps.num_steps})

    def finish(self) -> None:
        """Fetch what the process measured; keep a trained model's weights."""
        weights = None
        if self._is_alone and self._runner.weights is not None and self.spec.kind == "training":
            weights = self._runner.weights / name_of(self._environment) / f"{stem_of(self.spec)}.pt"
        self._samples = self.session.finish(weights)
        if weights is not None and not weights.is_file():
            self._runner.listener.remark(f"{self.spec.label}: its weights could not be written to '{weights}'")

    def profile(self) -> None:
        """Profile steps of the process, which has measured all else: whatever goes wrong costs the profile alone."""
        traces = self._runner.traces
        path = None if traces is None else traces.resolve()
        if path is not None and path.suffix != ".json":
            path /= f"{stem_of(self.spec)}.json"
        try:
            self._profile = self.session.profile(self.spec.protocol.profile_steps, path)
        except TrialFailedError as failure:
            why = f"the profile failed: {failure.message}"
            self._profile = StepProfile(
                device_type="cpu" if self.spec.device_type == "cpu" else "cuda",
                numerics=StepNumerics(missing=why) if self.spec.protocol.numerics else None,
                missing=why,
            )

    def record(self, session_id: str | None) -> Trial:
        """Return the trial's record.

        Raises:
            UsageError: castwise refused the user's model: a mistake in it is not a trial's result.
        """
        failure, seconds = self.failure, self._seconds_to_failure
        spec = self.spec
        # A script that takes its first step as written may fail in another precision alone.
        is_mistake = spec.user_model is not None and not (spec.is_script and spec.precision != AS_WRITTEN)
        if is_mistake and failure is not None and failure.refused:
            raise UsageError(failure.message, failure.log)
        samples = self._samples
        if not samples and (self._blocks or self._epochs):
            samples = (RankSamples(blocks=tuple(self._blocks), epochs=tuple(self._epochs)),)
        counters, why_no_counters = mean_counters(self._counters)
        trial = Trial(
            spec=self.spec,
            status="ok" if failure is None else failure.status,
            message="" if failure is None else failure.message,
            facts=self._facts,
            ranks=samples,
            environment=self._environment,
            started_at=self._started_at,
            duration_seconds=time.perf_counter() - self._started if seconds is None else seconds,
            log="" if failure is None else failure.log,
            session_id=session_id,
            stage_seconds=self._among.stage_seconds,
            readings=tuple(self._readings),
            energy_measurement=self._energy,
            gpu_facts=self._gpu_facts,
            counters=counters,
            profile=self._profile,
            shortfall=None if failure is None else failure.shortfall,
            telemetry_note=telemetry_note(self._readings, self._gpu_facts, self._energy, why_no_counters),
        )
        return status_of(trial) if failure is None else trial


def _all_at_once(step: Callable[[_RunningTrial], None], trials: Sequence[_RunningTrial]) -> None:
    if len(trials) == 1:
        trials[0].attempt(partial(step, trials[0]))
    elif trials:
        with ThreadPoolExecutor(max_workers=len(trials)) as pool:
            try:
                list(pool.map(lambda trial: trial.attempt(partial(step, trial)), trials))
            except BaseException:
                _close(trials)  # the pool waits for its threads before it raises, and they wait for the processes
                raise


def _close(trials: Sequence[_RunningTrial]) -> None:
    """End all processes in parallel: each takes a while to release its device."""
    closer = BackgroundCloser()
    closer.close([trial.session for trial in trials])
    closer.wait()


def unsupported_reason(spec: TrialSpec, environment: Environment) -> str | None:
    """Return why a machine cannot run a spec (for techniques, packages, the number of GPUs), or None."""
    reason = why_unsupported(spec, environment.capability)
    reason = reason or why_without_torchao(precision_row(spec.precision), environment.torchao)
    if (state := step_config_of(spec.techniques).optimizer_state) and reason is None:
        reason = lack_of_torchao(f"{STATE}{state}", environment.torchao)
    if reason is not None or spec.device_type == "cpu" or spec.world_size == 1:
        return reason
    if spec.device_type != "cuda":
        return f"castwise spreads a step over GPUs of CUDA and over CPUs, not over {spec.device_type}"
    first = int(spec.device.partition(":")[2] or 0)
    on_node = spec.world_size // spec.num_nodes
    if first + on_node <= environment.num_gpus:
        return None
    start = f" from {spec.device} on" if first else ""
    return f"{on_node} GPUs are asked for{start}, and this machine has {environment.num_gpus}"


def status_of(trial: Trial) -> Trial:
    """Return the trial, marked `diverged` if its last loss is not finite or its training was given up."""
    epochs, blocks = trial.ranks[0].epochs, trial.ranks[0].blocks
    message = ""
    if epochs:
        message = epochs[-1].diverged or ""
    else:
        loss, loss_scale = blocks[-1].loss, blocks[-1].loss_scale
        num_steps = sum(block.all_steps for block in blocks)
        if loss is not None and not math.isfinite(loss):
            message = f"the loss was {loss} {num_steps} steps after warm-up: its speed means nothing"
            if loss_scale is not None and is_dynamic(trial.spec.loss_scale):
                message += f" (loss scale {loss_scale:g}: not a skipped step here and there, the loss itself broke)"
        elif sum(block.skipped_steps for block in blocks) >= num_steps:
            message = f"loss scaling skipped every one of {num_steps} steps after warm-up: the optimizer never ran"
    return trial.model_copy(update={"status": "diverged", "message": message}) if message else trial


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
