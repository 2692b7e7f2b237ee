"""What GPU and host do while a block is timed, watched from the parent: the timed process knows nothing of it.

Nothing here raises into the sweep: what cannot be read is None in a reading, with the reason beside it.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from castwise.gpu import Monitor, Sample
from castwise.host import HostSample, read_host
from castwise.monitors import open_monitor
from castwise.record import Environment, GpuFacts, Metered, Reading
from castwise.sweep.readings import Processes, make_reading, metered

_PERIOD_SECONDS = 0.1
# A tick of the counter is seen so late at the most, but for what asking takes: a hundredth of a stretch. A whole sample
# takes 3 ms (NVML, H200), the counter alone is one of its ten fields.
_METERING_PERIOD_SECONDS = 0.005
# A driver that has lost its GPU may not come back from a call. Whole samples take milliseconds.
_PATIENCE_SECONDS = 5.0
_SILENT = f"the driver did not answer for {_PATIENCE_SECONDS:g} s"

OpenMonitor = Callable[[str], Monitor]


class Watch:
    """One stretch of time that is watched.

    Attributes:
        reading: What was seen; complete when the `with` block has ended.
    """

    def __init__(self) -> None:
        self.reading = Reading(seconds=0.0)


class Meter:
    """A stretch of time in which the energy counter is read often.

    Attributes:
        metered: What it said, but for the step time; complete when the `with` block has ended.
    """

    def __init__(self) -> None:
        self.metered = Metered(missing="there is no GPU")


class Telemetry:
    """Watches the GPUs of one job. A thread samples while something is timed, and only then, and never on a CPU.

    Args:
        open_monitor: Opens a GPU's management library by its UUID.
        period_seconds: Time between samples.
        patience_seconds: How long the driver may take over one.
    """

    def __init__(
        self,
        open_monitor: OpenMonitor = open_monitor,
        period_seconds: float = _PERIOD_SECONDS,
        patience_seconds: float = _PATIENCE_SECONDS,
    ) -> None:
        self._open = open_monitor
        self._period, self._patience = period_seconds, patience_seconds
        self._metering_period = min(period_seconds, _METERING_PERIOD_SECONDS)
        self._monitors: dict[str, Monitor] = {}
        self._why_not: dict[str, str] = {}
        self._processes: dict[str, Processes] = {}

    def look(self, environment: Environment) -> None:
        """See who computes on the GPU before the first process of this job does."""
        uuid, monitor = self._monitor(environment)
        if uuid is None or monitor is None:
            return
        samples: list[Sample] = []
        if self._within_patience(uuid, lambda: samples.append(monitor.read())):
            self._processes[uuid] = Processes(before=samples[0].processes, own_pid=os.getpid())

    def gpu_facts(self, environment: Environment) -> GpuFacts | None:
        """Return what the driver says of the GPU by itself; None on a CPU and where it says nothing."""
        uuid, monitor = self._monitor(environment)
        if uuid is None or monitor is None:
            return None
        facts: list[GpuFacts] = []
        return facts[0] if self._within_patience(uuid, lambda: facts.append(monitor.facts())) else None

    @contextmanager
    def watch(self, environment: Environment) -> Iterator[Watch]:
        """Watch the device that an environment is of, and the host, while the `with` block runs.

        There is always a sample just before and one just after.
        """
        watch = Watch()
        uuid, monitor = self._monitor(environment)
        sampler = None if monitor is None else _Sampler(monitor.read, self._period)
        host, started = read_host(), time.perf_counter()
        try:
            if sampler is not None and uuid is not None:
                self._has_answered(uuid, sampler.begin(self._patience), sampler)
                host, started = read_host(), time.perf_counter()
            yield watch
        finally:
            seconds = time.perf_counter() - started
            after = read_host()
            if sampler is not None and uuid is not None:
                self._has_answered(uuid, sampler.end(self._patience), sampler)
            samples = sampler.samples if sampler is not None else ()
            watch.reading = self._reading(environment, samples, (host, after), seconds)

    def has_counter(self, environment: Environment) -> bool:
        """Return whether the GPU that an environment is of has an energy counter, as far as it is known to tell."""
        uuid, monitor = self._monitor(environment)
        if uuid is None or monitor is None:
            return False
        samples: list[Sample] = []
        return (
            self._within_patience(uuid, lambda: samples.append(monitor.read())) and samples[0].energy_joules is not None
        )

    @contextmanager
    def meter(self, environment: Environment) -> Iterator[Meter]:
        """Read a GPU's energy counter, often, while the `with` block runs."""
        meter = Meter()
        uuid, monitor = self._monitor(environment)
        sampler = None if monitor is None else _Sampler(monitor.read_energy, self._metering_period)
        try:
            if sampler is not None and uuid is not None:
                self._has_answered(uuid, sampler.begin(self._patience), sampler)
            yield meter
        finally:
            if sampler is not None and uuid is not None:
                self._has_answered(uuid, sampler.end(self._patience), sampler)
                # The last sample is taken when the steps have ended.
                meter.metered = metered(tuple(zip(sampler.times[:-1], sampler.samples[:-1], strict=False)))

    def close(self) -> None:
        """Let go of the management libraries. May be called again."""
        monitors = dict(self._monitors)
        self._monitors.clear()
        self._processes.clear()
        for uuid, monitor in monitors.items():
            self._within_patience(uuid, monitor.close)
        self._why_not.clear()

    def _reading(
        self, environment: Environment, samples: Iterable[Sample], host: tuple[HostSample, HostSample], seconds: float
    ) -> Reading:
        uuid = environment.gpu_uuid or ""
        processes = self._processes.get(uuid) or Processes(before=None, own_pid=os.getpid())
        reading = make_reading(tuple(samples), processes, host, seconds)
        if environment.gpu is None or uuid not in self._why_not:
            return reading
        return reading.model_copy(update={"missing": {"gpu": self._why_not[uuid], **reading.missing}})

    def _monitor(self, environment: Environment) -> tuple[str | None, Monitor | None]:
        if environment.gpu is None:
            return None, None
        uuid = environment.gpu_uuid or ""
        if uuid in self._why_not:
            return uuid, None
        if not uuid:
            self._why_not[uuid] = "the GPU's UUID is not known"
        elif uuid not in self._monitors:
            self._within_patience(uuid, lambda: self._monitors.update({uuid: self._open(uuid)}))
        return uuid, self._monitors.get(uuid)

    def _within_patience(self, uuid: str, action: Callable[[], None]) -> bool:
        """Carry something out in a thread of its own, and return whether it ended well; remember why not."""
        task = _Task(action)
        task.start()
        task.join(self._patience)
        return self._has_answered(uuid, not task.is_alive(), task)

    def _has_answered(self, uuid: str, is_in_time: bool, task: "_Task") -> bool:
        """Return whether the library did its part; where it did not, give the GPU up and remember why."""
        why = task.failure if is_in_time else _SILENT
        if why:
            self._why_not.setdefault(uuid, why)
            self._monitors.pop(uuid, None)
        return not why


class _Task(threading.Thread):
    """Does one thing; what it raises becomes a reason, since no library may end a sweep.

    It is a daemon: a call that never comes back does not keep the program from ending.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        super().__init__(name="castwise telemetry", daemon=True)
        self._action = action
        self.failure = ""

    def run(self) -> None:
        try:
            self._action()
        except Exception as error:  # noqa: BLE001  a management library may raise anything
            self.failure = str(error) or type(error).__name__


class _Sampler(_Task):
    """Reads a GPU at once, then once a period, and a last time when it is told to end."""

    def __init__(self, read: Callable[[], Sample], period_seconds: float) -> None:
        super().__init__(self._sample)
        self.samples: list[Sample] = []
        self.times: list[float] = []
        self._take = read
        self._period = period_seconds
        self._has_begun, self._is_over = threading.Event(), threading.Event()

    def begin(self, patience_seconds: float) -> bool:
        """Start, and return whether the first sample was there in time."""
        self.start()
        return self._has_begun.wait(patience_seconds)

    def end(self, patience_seconds: float) -> bool:
        """Take the last sample and stop, and return whether that took no longer than it may."""
        self._is_over.set()
        if self.ident is not None:
            self.join(patience_seconds)
        return not self.is_alive()

    def _sample(self) -> None:
        try:
            self._read()
        finally:
            self._has_begun.set()
        while not self._is_over.wait(self._period):
            self._read()
        self._read()

    def _read(self) -> None:
        self.samples.append(self._take())
        self.times.append(time.perf_counter())
