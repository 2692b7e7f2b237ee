"""What the sittings of a climb took so far, and whether a further one would end within its budget."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from castwise.analyze import metrics
from castwise.plan import TrialSpec
from castwise.record import Trial
from castwise.techniques import times_kernels_while_compiling
from castwise.workloads import find_workload

BUDGET_SECONDS, SHORT_BUDGET_SECONDS = 540.0, 160.0
_SHORT_STEP = 0.01  # the plain loop's, for which a climb has the short budget. Source: chosen here.
# Before anything was compiled, what compiling takes a process. Source: an H200's host: ResNet-50 38 s, MNIST 14 s, an
# LSTM language model 6 s, since torch compiles no recurrent layer.
_COMPILE_SECONDS, _SHORT_COMPILE_SECONDS = 40.0, 15.0
_FEW_KERNELS = ("mlp", "mnist_cnn", "rnn_lm")
# Before any kernel was searched for, what that takes one. Source: the same host, ResNet-50: 3 to 11 s.
_SEARCH_SECONDS, _SHORT_SEARCH_SECONDS = 5.0, 0.5
_COMPILES = {"compile": 1.0, "compile-max-autotune": 4.0, "compiled-update": 0.5}  # times that


@dataclass
class Pace:
    """A climb's time.

    Attributes:
        named_seconds: The budget that was asked for; None takes what the plain step suggests.
        short: Whether the plain loop's step is short on a GPU.
    """

    named_seconds: float | None
    short: bool = False

    def __post_init__(self) -> None:
        self._loop_seconds = self._compile_seconds = self._search_seconds = 0.0
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
        """
        compiled, searches = _compilations(specs), _searches(specs)
        rest = seconds - self._loop_seconds * len(specs)
        if compiled:
            rest -= self._search_seconds * searches
            self._compile_seconds = max(self._compile_seconds, rest / compiled)
        elif searches and self._loop_seconds:
            self._search_seconds = max(self._search_seconds, rest / searches)
        elif specs:
            self._loop_seconds = max(self._loop_seconds, seconds / len(specs))

    def has_time_for(self, specs: Sequence[TrialSpec], keep: float = 1.0) -> bool:
        """Return whether a sitting would end in time, and leave some for the proof: `keep` sittings like it."""
        on_gpu = any(spec.device_type == "cuda" for spec in specs)
        compiled = _compilations(specs) if on_gpu or self._compile_seconds else 0.0
        searches = _searches(specs) if on_gpu or self._search_seconds else 0
        search = self._search_seconds or (_SHORT_SEARCH_SECONDS if self.short else _SEARCH_SECONDS)
        again = self._loop_seconds * len(specs) + search * searches
        seconds = again * (1 + keep) + compiled * (self._compile_seconds or self._guess(specs))
        return seconds <= self.budget_seconds - self.seconds

    def _guess(self, specs: Sequence[TrialSpec]) -> float:
        few = self.short or all(find_workload(spec.workload).family in _FEW_KERNELS for spec in specs)
        return _SHORT_COMPILE_SECONDS if few else _COMPILE_SECONDS


def is_short(plain: Sequence[Trial]) -> bool:
    """Return whether a plain loop's step is short on a GPU, by its trials: few kernels, and little to compile."""
    well = [trial for trial in plain if trial.status == "ok" and trial.spec.device_type == "cuda"]
    step = metrics.step_seconds(well[0]) if well else None
    return step is not None and step < _SHORT_STEP


def _compilations(specs: Sequence[TrialSpec]) -> float:
    """Return how many times what `compile` takes a sitting's set-up takes: its loops compile side by side."""
    each = [sum(_COMPILES.get(name, 0.0) for name in spec.techniques) for spec in specs]
    if any(times_kernels_while_compiling(spec.techniques) for spec in specs):
        return sum(each)
    return sum(each[:1]) + max(each[1:], default=0.0)


def _searches(specs: Sequence[TrialSpec]) -> int:
    """Return in how many loops of a sitting cuDNN searches: one after another."""
    return sum("cudnn-search" in spec.techniques for spec in specs)
