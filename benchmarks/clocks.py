"""A GPU's clock and power while something ran, watched from outside: of a script, too, which knows nothing of it."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from castwise.telemetry.gpu import GpuUnreadableError, Sample
from castwise.telemetry.monitors import open_monitor
from castwise.telemetry.sampler import Sampler

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_PERIOD_SECONDS = 0.05
_BUSY = 0.9  # of the most power that was seen
_IDLE = "gpu_idle"

_T = TypeVar("_T")
_Timed = TypeVar("_Timed", bound="DataclassInstance")


@dataclass(frozen=True)
class Busy:
    """A GPU's clock and power in the time in which it drew most.

    Attributes:
        clock_hertz: The middle clock of the streaming multiprocessors.
        power_watts: The middle power.
        num_samples: Of how many samples.
    """

    clock_hertz: float
    power_watts: float
    num_samples: int


def watched(uuid: str | None, action: Callable[[], _T]) -> tuple[_T, Busy | None]:
    """Do something, and return what comes of it beside what a GPU did; None where it cannot be watched.

    Args:
        uuid: The GPU's; None without one.
        action: What to do. What it raises is raised.
    """
    if not uuid:
        return action(), None
    try:
        monitor = open_monitor(uuid)
    except GpuUnreadableError:
        return action(), None
    sampler = Sampler(monitor.read, _PERIOD_SECONDS)
    sampler.start()
    try:
        done = action()
    finally:
        sampler.is_over.set()
        sampler.join()
        monitor.close()
    return done, busy_of(sampler.samples)


def with_clock(uuid: str | None, measure: Callable[[], _Timed]) -> _Timed:
    """Measure something, and return what comes of it with the clock and power that the GPU had; as it is without one.

    Args:
        uuid: The GPU's; None without one.
        measure: Returns a dataclass with `clock_hertz` and `power_watts`.
    """
    timed, busy = watched(uuid, measure)
    return timed if busy is None else replace(timed, clock_hertz=busy.clock_hertz, power_watts=busy.power_watts)


def busy_of(samples: Sequence[Sample]) -> Busy | None:
    """Return clock and power of the samples that draw within a tenth of the most; None without any.

    The power of a sample is the mean of the last second, so that some of these may be of a GPU at rest: those whose
    clock is down because the GPU is idle do not count.
    """
    told = [
        (sample.power_watts, sample.sm_clock_hertz)
        for sample in samples
        if sample.power_watts and sample.sm_clock_hertz and _IDLE not in (sample.throttle_reasons or ())
    ]
    if not told:
        return None
    limit = _BUSY * max(power for power, _ in told)
    busy = [(power, clock) for power, clock in told if power >= limit]
    powers, clocks = zip(*busy, strict=True)
    return Busy(statistics.median(clocks), statistics.median(powers), len(busy))
