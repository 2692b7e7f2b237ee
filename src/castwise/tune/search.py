"""The search from the plain loop to the fastest that computes the same: measure what is decided, until it is done."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from castwise.orchestrator.job import Job
from castwise.orchestrator.rounds import Rounds, StopRule
from castwise.orchestrator.runner import TrialRunner
from castwise.orchestrator.trial import UnboundedProgress
from castwise.records.schema import Trial
from castwise.spec.trial import TrialSpec
from castwise.tune.candidates import SearchSpace, TriedChange
from castwise.tune.decide import Done, Ending, Session, decide
from castwise.tune.measurements import Measurements
from castwise.tune.time_budget import TimeLeft, default_budget, has_long_first_step, is_short

_ONCE = StopRule(min_rounds=1, max_rounds=1)


@dataclass(frozen=True)
class TuningResult:
    """The end of a search.

    Attributes:
        start: The plain loop.
        tried: All that was tried, stage by stage; what was tried for a memory limit alone comes last.
        trials: Every trial.
        probes: Configurations measured only to tell what bounds the plain loop and the fastest one.
        ending: Why nothing further was tried.
        seconds: Wall time.
        num_recorded: How many of the trials were on record before, and are not in the wall time.
        budget_seconds: The wall time after which nothing further was tried.
    """

    start: TrialSpec
    tried: tuple[TriedChange, ...]
    trials: tuple[Trial, ...]
    probes: tuple[TrialSpec, ...]
    ending: Ending
    seconds: float
    num_recorded: int = 0
    budget_seconds: float | None = None

    @property
    def path(self) -> list[TrialSpec]:
        """Return the accepted configurations, the plain loop first."""
        return [self.start, *(each.spec for each in self.tried if each.outcome == "taken" and not each.limited)]

    @property
    def winner(self) -> TrialSpec:
        """Return the last accepted configuration."""
        return self.path[-1]

    @cached_property
    def measured(self) -> Measurements:
        """Return the trials by configuration."""
        return Measurements().plus(self.trials)


@dataclass(frozen=True)
class TuningSearch:
    """A search on this machine.

    Attributes:
        space: What may be tried.
        job: The machine, its records, and where progress is reported.
        budget_seconds: Wall time after which nothing further is tried; None takes what suits the plain loop.
        recorded: The trials on record that need not be measured again.
        clock: Returns seconds.
    """

    space: SearchSpace
    job: Job = field(repr=False)
    budget_seconds: float | None = None
    recorded: tuple[Trial, ...] = field(default=(), repr=False)
    clock: Callable[[], float] = field(default=time.perf_counter, repr=False)

    def run(self) -> TuningResult:
        """Measure what is decided until nothing is left to try, or no time for it."""
        began = self.clock()
        start = self.space.start
        # How many trials there will be is not known, and why a single round ends is no news.
        runner = replace(self.job.runner, listener=UnboundedProgress(self.job.runner.listener, remarks=False))
        measured = Measurements.from_records(self.recorded, start)
        process_seconds = 0.0
        while True:
            plain = measured.of(start)
            budget = default_budget(plain) if self.budget_seconds is None else self.budget_seconds
            left = TimeLeft(budget - (self.clock() - began), process_seconds, is_short(plain))
            decision = decide(self.space, measured, left)
            if isinstance(decision, Done):
                return self._result(decision, measured, self.clock() - began, budget)
            session_began = self.clock()
            self.job.runner.listener.remark(decision.purpose)
            measured = measured.plus(_measure(runner, decision, measured), decision.specs)
            if not any(map(has_long_first_step, decision.specs)):
                process_seconds = (self.clock() - session_began) / len(decision.specs)

    def _result(self, done: Done, measured: Measurements, seconds: float, budget: float) -> TuningResult:
        trials = tuple(trial for spec in done.used for trial in measured.of(spec))
        recorded = {id(trial) for trial in self.recorded}
        return TuningResult(
            start=self.space.start,
            tried=done.tried,
            trials=trials,
            probes=done.probes,
            ending=done.ending,
            seconds=seconds,
            num_recorded=sum(id(trial) in recorded for trial in trials),
            budget_seconds=budget,
        )


def _measure(runner: TrialRunner, session: Session, measured: Measurements) -> list[Trial]:
    """Measure a session's configurations once, in fresh processes that are interleaved; return the new trials."""
    recorded = [trial for spec in session.specs for trial in measured.of(spec)]
    compared = Rounds(runner, session.specs, _ONCE, recorded, session.specs[0]).run_once()
    return list(compared.trials[len(recorded) :])
