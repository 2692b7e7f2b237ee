"""Samples of GPU and host while a block is timed, taken by the parent: the timed process has no part in it.

Nothing here raises into a run: what cannot be read is None in a reading, with the reason next to it.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from castwise.records.schema import EnergyMeasurement, GpuFacts, TelemetrySummary
from castwise.telemetry.amdsmi import AmdMonitor
from castwise.telemetry.gpu import CounterReading, GpuUnreadableError, Monitor, Sample
from castwise.telemetry.host import read_host
from castwise.telemetry.nvml import NvmlMonitor
from castwise.telemetry.summary import Processes, combine_energy, combine_facts, measure_energy, summarize

_PERIOD_SECONDS = 0.1
# A tick of the energy counter is seen this late at most: a hundredth of the time that is metered. Reading a whole
# sample takes 3 ms (NVML, H200); the counter is one of its ten fields.
_METERING_PERIOD_SECONDS = 0.005
# A driver that has lost its GPU may not return from a call. Whole samples take milliseconds.
_PATIENCE_SECONDS = 5.0
_SILENT = f"the driver did not answer for {_PATIENCE_SECONDS:g} s"

# A trial's GPUs: their UUIDs by torch's names for them ("cuda:1"); none on a CPU.
Gpus = Mapping[str, str]

_T = TypeVar("_T")
_AnyTask = TypeVar("_AnyTask", bound="_Task")


def open_monitor(uuid: str) -> Monitor:
    """Return the management library that knows the GPU with this UUID.

    Raises:
        GpuUnreadableError: None knows it.
    """
    try:
        return NvmlMonitor(uuid)
    except GpuUnreadableError as why:
        with suppress(GpuUnreadableError):
            return AmdMonitor(uuid)
        raise why from None


@dataclass
class BlockWatch:
    """What was read in a block; complete when the `with` block has ended."""

    reading: TelemetrySummary
    counters: dict[str, CounterReading] = field(default_factory=dict)  # by torch's names for the GPUs


@dataclass
class EnergyMeter:
    """The energy of sustained steps, without the step time; complete when the `with` block has ended."""

    energy: EnergyMeasurement
    seconds: float = math.inf  # of the metered time only the last so many count; set it within the `with` block


class Telemetry:
    """Watches the GPUs of one job. One thread a GPU samples while something is timed, and only then; none on a CPU.

    A GPU whose driver fails or hangs is given up; the others are watched all the same.
    """

    def __init__(
        self,
        open_monitor: Callable[[str], Monitor] = open_monitor,
        period_seconds: float = _PERIOD_SECONDS,
        patience_seconds: float = _PATIENCE_SECONDS,
    ) -> None:
        """Take a sample each period; the driver may take `patience_seconds` over one."""
        self._open = open_monitor
        self._period, self._patience = period_seconds, patience_seconds
        self._monitors: dict[str, Monitor] = {}
        self._unreadable: dict[str, str] = {}  # why, by UUID
        self._processes = Processes(before=None, own_pid=os.getpid())

    def note_processes(self, gpus: Gpus) -> None:
        """Note which processes use GPUs before the first process of this job does."""
        samples = self._ask(gpus, lambda monitor: monitor.read())
        listed = [sample.processes for sample in samples.values() if sample.processes is not None]
        before = frozenset[int]().union(*listed) if listed else None
        self._processes = Processes(before, own_pid=os.getpid())

    def gpu_facts(self, gpus: Gpus) -> GpuFacts | None:
        """Return what does not change while a trial runs; None on a CPU, or if no GPU can be read."""
        each = self._ask(gpus, lambda monitor: monitor.facts())
        return combine_facts(each, self._given_up(gpus)) if each else None

    @contextmanager
    def watch(self, gpus: Gpus) -> Iterator[BlockWatch]:
        """Watch GPUs, and the host, while the `with` block runs; a sample is taken just before and one just after."""
        watch = BlockWatch(TelemetrySummary(seconds=0.0))
        opened = self._opened(gpus)
        samplers = {device: Sampler(monitor.read, self._period, monitor) for device, monitor in opened.items()}
        host, started = read_host(), time.perf_counter()
        try:
            if samplers:
                self._begin(gpus, samplers)
                host, started = read_host(), time.perf_counter()
            yield watch
        finally:
            seconds = time.perf_counter() - started
            after = read_host()
            read = self._end(gpus, samplers)
            samples = {device: [sample for _, sample in sampler.timed] for device, sampler in read.items()}
            watch.reading = summarize(samples, self._processes, (host, after), seconds, self._given_up(gpus))
            watch.counters = {device: sampler.counters for device, sampler in read.items()}

    def has_counter(self, gpus: Gpus) -> bool:
        """Return whether there are GPUs, and each has an energy counter that can be read."""
        joules = self._ask(gpus, lambda monitor: monitor.read_energy().energy_joules)
        return bool(gpus) and all(joules.get(device) is not None for device in gpus)

    @contextmanager
    def meter(self, gpus: Gpus) -> Iterator[EnergyMeter]:
        """Read the energy counters of GPUs, often, while the `with` block runs."""
        meter = EnergyMeter(EnergyMeasurement(missing="there is no GPU"))
        period_seconds = min(self._period, _METERING_PERIOD_SECONDS)
        samplers = {
            device: Sampler(monitor.read_energy, period_seconds) for device, monitor in self._opened(gpus).items()
        }
        try:
            self._begin(gpus, samplers)
            yield meter
        finally:
            each = self._end(gpus, samplers)
            if gpus:
                # The last sample was taken after the steps had ended.
                energies = {device: measure_energy(_last(meter.seconds, s.timed[:-1])) for device, s in each.items()}
                meter.energy = combine_energy(energies, self._given_up(gpus))

    def close(self) -> None:
        """Close the management libraries. May be called again."""
        monitors = dict(self._monitors)
        self._monitors.clear()
        self._processes = Processes(before=None, own_pid=os.getpid())
        self._run_all({uuid: monitor.close for uuid, monitor in monitors.items()})
        self._unreadable.clear()

    def _given_up(self, gpus: Gpus) -> dict[str, str]:
        """Return the GPUs that are not read any more, each with the reason."""
        return {device: self._unreadable[uuid] for device, uuid in gpus.items() if uuid in self._unreadable}

    def _opened(self, gpus: Gpus) -> dict[str, Monitor]:
        """Return the management library of each GPU that can be read, opened if it was not."""
        if "" in gpus.values():
            self._unreadable[""] = "the GPU's UUID is not known"
        new = [uuid for uuid in gpus.values() if uuid not in self._monitors and uuid not in self._unreadable]
        self._monitors |= self._run_all({uuid: partial(self._open, uuid) for uuid in new})
        return {device: self._monitors[uuid] for device, uuid in gpus.items() if uuid in self._monitors}

    def _ask(self, gpus: Gpus, question: Callable[[Monitor], _T]) -> dict[str, _T]:
        """Return each GPU's answer, by torch's name for it; a GPU that fails has none."""
        monitors = self._opened(gpus)
        answers = self._run_all({gpus[device]: partial(question, monitor) for device, monitor in monitors.items()})
        return {device: answers[uuid] for device, uuid in gpus.items() if uuid in answers}

    def _run_all(self, actions: Mapping[str, Callable[[], _T]]) -> dict[str, _T]:
        """Run an action for each GPU, by UUID, in a thread of its own, and return the results of those that ended."""
        tasks = {uuid: _Task(action) for uuid, action in actions.items()}
        for task in tasks.values():
            task.start()
        self._wait(tasks, _has_ended)
        return {uuid: task.result for uuid, task in tasks.items() if uuid not in self._unreadable}

    def _begin(self, gpus: Gpus, samplers: Mapping[str, "Sampler"]) -> None:
        """Wait until each has taken its first sample."""
        for sampler in samplers.values():
            sampler.start()
        by_uuid = {gpus[device]: sampler for device, sampler in samplers.items()}
        self._wait(by_uuid, lambda sampler, seconds: sampler.has_begun.wait(seconds))

    def _end(self, gpus: Gpus, samplers: Mapping[str, "Sampler"]) -> dict[str, "Sampler"]:
        """Let each take its last sample, and return those that have read their GPUs from first to last."""
        started = {device: sampler for device, sampler in samplers.items() if sampler.ident is not None}
        for sampler in started.values():
            sampler.is_over.set()
        self._wait({gpus[device]: sampler for device, sampler in started.items()}, _has_ended)
        return {device: sampler for device, sampler in started.items() if gpus[device] not in self._unreadable}

    def _wait(self, tasks: Mapping[str, _AnyTask], wait: Callable[[_AnyTask, float], bool]) -> None:
        """Wait for the tasks, by UUID, and give the GPUs up whose library failed or was too slow."""
        deadline = time.monotonic() + self._patience
        for uuid, task in tasks.items():
            if uuid in self._unreadable:
                continue
            is_in_time = wait(task, max(0.0, deadline - time.monotonic()))
            if why := task.failure if is_in_time else _SILENT:
                self._unreadable[uuid] = why
                self._monitors.pop(uuid, None)


def _has_ended(task: "_Task", seconds: float) -> bool:
    task.join(seconds)
    return not task.is_alive()


def _last(seconds: float, timed: list[tuple[float, Sample]]) -> list[tuple[float, Sample]]:
    return [(moment, sample) for moment, sample in timed if moment >= timed[-1][0] - seconds]


class _Task(threading.Thread):
    """Runs an action; what it raises becomes a reason, since no library may end a run.

    It is a daemon thread: a call that never returns does not keep the program from ending.
    """

    def __init__(self, action: Callable[[], object]) -> None:
        super().__init__(name="castwise telemetry", daemon=True)
        self._action = action
        self.result: Any = None  # what the action returned
        self.failure = ""

    def run(self) -> None:
        try:
            self.result = self._action()
        except Exception as error:  # noqa: BLE001  a management library may raise anything
            self.failure = str(error) or type(error).__name__


class Sampler(_Task):
    """Reads a GPU at once, then once a period, and a last time at the end; its counters in between, if it is given."""

    def __init__(self, read: Callable[[], Sample], period_seconds: float, counted: Monitor | None = None) -> None:
        super().__init__(self._sample)
        self._counted = counted
        self.counters = CounterReading()
        self.timed: list[tuple[float, Sample]] = []  # each with the host's clock when it had been read
        self.has_begun = threading.Event()  # the first sample was taken, or has failed
        self.is_over = threading.Event()  # set it to end the thread, after a last sample
        self._read, self._period_seconds = read, period_seconds

    def _sample(self) -> None:
        def read() -> None:
            sample = self._read()
            self.timed.append((time.perf_counter(), sample))

        try:
            read()
            if self._counted is not None:
                self._counted.begin_counters()
        finally:
            self.has_begun.set()
        while not self.is_over.wait(self._period_seconds):
            read()
        if self._counted is not None:
            self.counters = self._counted.read_counters()
        read()
