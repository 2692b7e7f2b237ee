"""Whether a session would end within the time that is left, by what sessions and first steps took so far."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from castwise.analysis import steady_metrics
from castwise.analysis.training_metrics import epochs_of
from castwise.records.schema import Trial
from castwise.registry.techniques import rows_of, searches_kernels, times_kernels_while_compiling
from castwise.registry.workloads import find_workload
from castwise.spec.trial import TrialSpec
from castwise.tune.measurements import FINAL_ROUNDS, Measurements

BUDGET_SECONDS, SHORT_BUDGET_SECONDS = 540.0, 160.0
FIRST_PROCESS_SECONDS = 5.0  # what a configuration takes in a session before any was measured. Source: chosen here
_SHORT_STEP = 0.01  # of the plain loop; a search has the short budget then. Source: chosen here.
_MIN_PHASE_SECONDS = 180.0  # that a phase of a trial may take, whatever the budget

# What `compile` takes a first step before anything was compiled. Source: an H200's host: ResNet-50 38 s, MNIST 14 s, an
# LSTM language model 6 s, since torch compiles no recurrent layer.
_COMPILE_SECONDS, _SHORT_COMPILE_SECONDS = 40.0, 15.0
_FEW_KERNELS = ("mlp", "mnist_cnn", "rnn_lm")
# The share of it that a later process takes: Inductor keeps what it compiled on disk. Source: the same host; 0.07 to
# 0.21 in seven convolutional networks, 0.17 to 0.37 in three small ones.
_FROM_DISK = 0.2
# What a search for kernels takes a first step before it was measured. Source: the same host, ResNet-50: 3 to 11 s.
_SEARCH_SECONDS, _SHORT_SEARCH_SECONDS = 5.0, 0.5


@dataclass(frozen=True)
class TimeLeft:
    seconds: float
    # What a configuration took in the last session in which nothing was compiled or searched for; before, a guess.
    # Earlier sessions also loaded what a command loads once.
    process_seconds: float = 0.0
    is_short: bool = False  # whether the plain loop's step is short
    most_kept: float = math.inf  # seconds for the final session: on a slow machine nothing would be tried else

    def fits(self, specs: Sequence[TrialSpec], measured: Measurements, final: Sequence[TrialSpec] = ()) -> bool:
        """Return whether a session of configurations would end in time, and the final session of others after it."""
        last = self.session_seconds(final, measured, is_repeated=True) if final else 0.0
        return self.session_seconds(specs, measured) + min(FINAL_ROUNDS * last, self.most_kept) <= self.seconds

    def session_seconds(
        self, specs: Sequence[TrialSpec], measured: Measurements, *, is_repeated: bool = False
    ) -> float:
        """Return what a session takes: kernels are searched for one after another, and compiled side by side."""
        searching = sum(searches_kernels(spec.techniques) for spec in specs)
        seconds = self.process_seconds * len(specs) + searching * self._search_seconds(specs[0], measured)
        compiled = [spec for spec in specs if compile_cost(spec.techniques)]
        compiling = [self._compile_seconds(spec, measured, is_repeated=is_repeated) for spec in compiled]
        if any(times_kernels_while_compiling(spec.techniques) for spec in specs):
            return seconds + sum(compiling)
        return seconds + sum(compiling[:1]) + max(compiling[1:], default=0.0)

    def _compile_seconds(self, spec: TrialSpec, measured: Measurements, *, is_repeated: bool) -> float:
        """Return what compiling a configuration takes: what its last process took, or by what others took."""
        own = [seconds for trial in measured.of(spec) if (seconds := first_step_seconds(trial))]
        if len(own) > 1:
            return own[-1]
        units = [
            seconds / compile_cost(trials[0].spec.techniques)
            for trials in measured.by_key.values()
            # With less than a unit a first step waits for its neighbours rather than for its own compilation.
            if compile_cost(trials[0].spec.techniques) >= 1 and (seconds := first_step_seconds(trials[0]))
        ]
        is_small = self.is_short or find_workload(spec.workload).family in _FEW_KERNELS
        guess = _SHORT_COMPILE_SECONDS if is_small else _COMPILE_SECONDS
        unit = max(units, default=guess if spec.device_type == "cuda" else 0.0)
        return compile_cost(spec.techniques) * unit * (_FROM_DISK if own or is_repeated else 1.0)

    def _search_seconds(self, spec: TrialSpec, measured: Measurements) -> float:
        known = [
            trial
            for trials in measured.by_key.values()
            if searches_kernels(trials[0].spec.techniques) and not compile_cost(trials[0].spec.techniques)
            for trial in trials
            if first_step_seconds(trial)
        ]
        if known:  # the first search also compiles kernels, which the driver keeps
            return first_step_seconds(max(known, key=lambda trial: trial.started_at))
        guess = _SHORT_SEARCH_SECONDS if self.is_short else _SEARCH_SECONDS
        return guess if spec.device_type == "cuda" else 0.0


def has_long_first_step(spec: TrialSpec) -> bool:
    """Return whether a configuration's first step searches for kernels or compiles them."""
    return searches_kernels(spec.techniques) or compile_cost(spec.techniques) > 0


def compile_cost(techniques: Sequence[str]) -> float:
    """Return how many times as long as with `compile` a first step takes."""
    return sum(row.compile_cost for row in rows_of(techniques))


def first_step_seconds(trial: Trial) -> float:
    """Return what a process's first step took; 0 if it is not known."""
    if trial.status != "ok" or trial.facts is None:
        return 0.0
    if trial.spec.recipe is None:
        return trial.facts.first_step_seconds
    return next((epoch.first_step_seconds or 0.0 for epoch in epochs_of(trial)), 0.0)


def is_short(trials: Sequence[Trial]) -> bool:
    """Return whether a configuration's step is short on a GPU: it has few kernels, and little to compile."""
    ok = [trial for trial in trials if trial.status == "ok" and trial.spec.device_type == "cuda"]
    step = steady_metrics.step_seconds(ok[0]) if ok else None
    return step is not None and step < _SHORT_STEP


def default_budget(plain: Sequence[Trial]) -> float:
    """Return the budget of a search if none is named, by the trials of its plain loop.

    Short steps make short epochs, too: nobody waits nine minutes to shorten those.
    """
    return SHORT_BUDGET_SECONDS if is_short(plain) else BUDGET_SECONDS


def phase_limit(budget_seconds: float | None) -> float:
    """Return how long a phase of a trial may take within a budget: half of it, at least three minutes or all of it.

    A large network compiles for minutes; a compilation that hangs must leave time for the rest.
    """
    budget = BUDGET_SECONDS if budget_seconds is None else budget_seconds
    return min(budget, max(_MIN_PHASE_SECONDS, budget / 2))
