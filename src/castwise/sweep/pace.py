"""What the sittings of a climb took so far, and whether a further one would end within its budget."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from castwise.analyze import metrics
from castwise.plan import TrialSpec
from castwise.record import Trial
from castwise.techniques import times_kernels_while_compiling

BUDGET_SECONDS, SHORT_BUDGET_SECONDS = 540.0, 160.0
_SHORT_STEP = 0.01  # the plain loop's, for which a climb has the short budget. Source: chosen here.
# Before anything was compiled, what compiling takes a process. Source: an H200's host: ResNet-50 38 s, MNIST 14 s.
_COMPILE_SECONDS, _SHORT_COMPILE_SECONDS = 40.0, 15.0
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
        self._loop_seconds = self._compile_seconds = 0.0
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
        """Take note of what a sitting took for each of the loops that it measured, and of that what compiling did."""
        compiled = _compilations(specs)
        if not compiled and specs:
            self._loop_seconds = max(self._loop_seconds, seconds / len(specs))
        elif compiled:
            rest = seconds - self._loop_seconds * len(specs)
            self._compile_seconds = max(self._compile_seconds, rest / compiled)

    def has_time_for(self, specs: Sequence[TrialSpec], keep: float = 1.0) -> bool:
        """Return whether a sitting would end in time, and leave some for the proof: `keep` sittings like it."""
        on_gpu = any(spec.device_type == "cuda" for spec in specs)
        compiled = _compilations(specs) if on_gpu or self._compile_seconds else 0.0
        unknown = _SHORT_COMPILE_SECONDS if self.short else _COMPILE_SECONDS
        seconds = self._loop_seconds * len(specs) * (1 + keep) + compiled * (self._compile_seconds or unknown)
        return seconds <= self.budget_seconds - self.seconds


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
