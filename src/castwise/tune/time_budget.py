"""What the sittings of a climb took so far, and whether a further one would end within its budget."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from castwise.analysis import steady_metrics
from castwise.records.schema import Trial
from castwise.registry.techniques import GRAPHS, TECHNIQUES, times_kernels_while_compiling
from castwise.registry.workloads import find_workload
from castwise.spec.trial import TrialSpec

BUDGET_SECONDS, SHORT_BUDGET_SECONDS = 540.0, 160.0
_SHORT_STEP = 0.01  # the plain loop's, for which a climb has the short budget. Source: chosen here.
# Before anything was compiled, what compiling takes a process. Source: an H200's host: ResNet-50 38 s, MNIST 14 s, an
# LSTM language model 6 s, since torch compiles no recurrent layer.
_COMPILE_SECONDS, _SHORT_COMPILE_SECONDS = 40.0, 15.0
_FEW_KERNELS = ("mlp", "mnist_cnn", "rnn_lm")
# Before any kernel was searched for, what that takes one. Source: the same host, ResNet-50: 3 to 11 s.
_SEARCH_SECONDS, _SHORT_SEARCH_SECONDS = 5.0, 0.5
# What each technique takes, in times that.
_COMPILES = {"compile": 1.0, "compile-max-autotune": 4.0, "compiled-update": 0.5}
# What a later process takes of it for what an earlier one compiled: Inductor keeps that on disk. Source: the same host;
# later first steps took 0.07 to 0.21 of the first in seven convolutional networks, 0.17 to 0.37 in three small ones.
_AGAIN = 0.2
# What else makes of a step, and of an update, another one to compile.
_PADS = frozenset(row.name for row in TECHNIQUES if row.name.startswith("pad-"))
_OF_STEP = _PADS | {"channels-last", "space-to-depth", "matmul-stem", "max-pool-kernel", "batch-norm-kernel"}
_OF_STEP |= {"chunked-loss", "compile", "compile-max-autotune"}
_OF_UPDATE = _PADS | {"channels-last", *GRAPHS}
_LIMIT_SECONDS = 180.0  # the least that a phase of a trial may take, whatever the budget

_Part = tuple[float, tuple[object, ...]]  # of a loop that is compiled by itself: what it takes, and what it depends on


@dataclass
class TimeBudget:
    """A climb's time.

    Attributes:
        named_seconds: The budget that was asked for; None takes what the plain step suggests.
        short: Whether the plain loop's step is short on a GPU.
    """

    named_seconds: float | None
    short: bool = False

    def __post_init__(self) -> None:
        self._loop_seconds = self._compile_seconds = self._search_seconds = self._again_seconds = 0.0
        self._compiled: set[tuple[object, ...]] = set()
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Return the wall time so far."""
        return time.perf_counter() - self._began

    @property
    def budget_seconds(self) -> float:
        """Return the wall time after which nothing further is tried.

        Where a step is short an epoch is, too: nobody waits nine minutes for it to be shorter.
        """
        if self.named_seconds is not None:
            return self.named_seconds
        return SHORT_BUDGET_SECONDS if self.short else BUDGET_SECONDS

    def learn(self, seconds: float, specs: Sequence[TrialSpec]) -> None:
        """Take note of what a sitting took for each of the loops that it measured, and of what their first steps did.

        Loops that search and loops that compile take long because of that, and say nothing of what others will take.

        Args:
            seconds: Its wall time.
            specs: The loops, those that failed among them.
        """
        fresh, known = self._units(specs)
        searches = _searches(specs)
        rest = seconds - self._loop_seconds * len(specs)
        if fresh or known:
            rest -= self._search_seconds * searches
            if fresh:
                rest -= known * self._known_seconds(specs)
                self._compile_seconds = max(self._compile_seconds, rest / fresh)
            else:
                self._again_seconds = max(self._again_seconds, rest / known)
        elif searches and self._loop_seconds:
            self._search_seconds = max(self._search_seconds, rest / searches)
        elif specs:
            self._loop_seconds = max(self._loop_seconds, seconds / len(specs))

    def compiled(self, specs: Sequence[TrialSpec]) -> None:
        """Take note of loops whose processes ended well: what they compiled is on disk."""
        self._compiled |= {key for spec in specs for _, key in _parts(spec)}

    def recall(self, trials: Sequence[Trial], start: TrialSpec) -> None:
        """Take note of what loops on record compiled, and how long their first steps took for it.

        Args:
            trials: Trials, of any workload; those of the same model on as many GPUs count.
            start: The climb's plain loop.
        """
        for trial in trials:
            if trial.status != "ok" or trial.facts is None or _model_of(trial.spec) != _model_of(start):
                continue
            units = sum(units for units, _ in _parts(trial.spec))
            if units >= 1:  # an update alone waits for neighbours that compile more
                self._compile_seconds = max(self._compile_seconds, trial.facts.first_step_seconds / units)
            self.compiled([trial.spec])

    def has_time_for(self, specs: Sequence[TrialSpec], keep: float = 1.0) -> bool:
        """Return whether a sitting would end in time, and leave some for the proof: `keep` sittings like it.

        What it compiles is on disk by then.
        """
        on_gpu = any(spec.device_type == "cuda" for spec in specs)
        fresh, known = self._units(specs) if on_gpu or self._compile_seconds else (0.0, 0.0)
        searches = _searches(specs) if on_gpu or self._search_seconds else 0
        search = self._search_seconds or (_SHORT_SEARCH_SECONDS if self.short else _SEARCH_SECONDS)
        again = self._loop_seconds * len(specs) + search * searches
        on_disk = self._known_seconds(specs)
        proof = again + (fresh + known) * on_disk
        seconds = again + fresh * (self._compile_seconds or self._guess(specs)) + known * on_disk + keep * proof
        return seconds <= self.budget_seconds - self.seconds

    def _known_seconds(self, specs: Sequence[TrialSpec]) -> float:
        """Return what compiling takes a process where the like is on disk."""
        return self._again_seconds or _AGAIN * (self._compile_seconds or self._guess(specs))

    def _units(self, specs: Sequence[TrialSpec]) -> tuple[float, float]:
        """Return how many times what `compile` takes a sitting's set-up takes, for what is new and what is on disk."""
        parts = [_parts(spec) for spec in specs]
        fresh = [sum(units for units, key in each if key not in self._compiled) for each in parts]
        known = [sum(units for units, key in each if key in self._compiled) for each in parts]
        if any(times_kernels_while_compiling(spec.techniques) for spec in specs):
            return sum(fresh), sum(known)
        return _side_by_side(fresh), _side_by_side(known)

    def _guess(self, specs: Sequence[TrialSpec]) -> float:
        few = self.short or all(find_workload(spec.workload).family in _FEW_KERNELS for spec in specs)
        return _SHORT_COMPILE_SECONDS if few else _COMPILE_SECONDS


def limit_of(budget_seconds: float | None) -> float:
    """Return how long a phase of a trial may take within a budget: half of it, three minutes at the least.

    A large network compiles for minutes; a compilation that hangs must leave time for the rest.

    Args:
        budget_seconds: The budget; None where it is not known before the plain loop is.
    """
    return max(_LIMIT_SECONDS, (BUDGET_SECONDS if budget_seconds is None else budget_seconds) / 2)


def is_short(plain: Sequence[Trial]) -> bool:
    """Return whether a plain loop's step is short on a GPU, by its trials: few kernels, and little to compile."""
    well = [trial for trial in plain if trial.status == "ok" and trial.spec.device_type == "cuda"]
    step = steady_metrics.step_seconds(well[0]) if well else None
    return step is not None and step < _SHORT_STEP


def _side_by_side(units: Sequence[float]) -> float:
    """Return what loops that compile side by side take together: the first comes before the others."""
    return sum(units[:1]) + max(units[1:], default=0.0)


def _parts(spec: TrialSpec) -> list[_Part]:
    """Return what is compiled of a loop, and what makes it another one: a step and an update are apart."""
    found: list[_Part] = []
    for name in spec.techniques:
        if name in _COMPILES:
            which = _OF_UPDATE if name == "compiled-update" else _OF_STEP
            others = tuple(other for other in spec.techniques if other in which)
            found.append((_COMPILES[name], (name, spec.precision, spec.batch_size, others)))
    return found


def _model_of(spec: TrialSpec) -> tuple[object, ...]:
    """Return what else makes of a step another one to compile, and is the same all through a climb."""
    return spec.workload, spec.redacted.user_model, spec.world_size, spec.parallelism


def _searches(specs: Sequence[TrialSpec]) -> int:
    """Return in how many loops of a sitting cuDNN searches: one after another."""
    return sum("cudnn-search" in spec.techniques for spec in specs)
