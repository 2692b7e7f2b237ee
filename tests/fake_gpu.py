"""A GPU's management library without a GPU: readings, facts and samples of a made-up healthy one."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from castwise.records.schema import GpuFacts, TelemetrySummary
from castwise.telemetry.gpu import CounterReading, Monitor, Sample

UUID = "GPU-01234567-89ab-cdef-0123-456789abcdef"
SECOND_UUID = "GPU-fedcba98-7654-3210-fedc-ba9876543210"


def fake_reading(**changes: object) -> TelemetrySummary:
    """Return a reading of one second that gives no cause for a warning."""
    fields: dict[str, object] = {
        "seconds": 1.0,
        "num_samples": 12,
        "sm_clock_hertz": 1.98e9,
        "min_sm_clock_hertz": 1.965e9,
        "memory_clock_hertz": 3.2e9,
        "power_watts": 500.0,
        "max_temperature_celsius": 50.0,
        "throttle_reasons": (),
        "foreign_processes": 0,
        "energy_joules": 480.0,
        "pcie_generation": 5,
        "pcie_width": 16,
        "ecc_errors": 0,
        "cpu_pressure": 0.01,
        "cpu_steal": 0.0,
        "cpu_load": 0.5,
    }
    return TelemetrySummary.model_validate(fields | changes)


def fake_gpu_facts(**changes: object) -> GpuFacts:
    """Return the facts of a healthy GPU."""
    fields: dict[str, object] = {
        "max_sm_clock_hertz": 1.98e9,
        "power_limit_watts": 700.0,
        "persistence_mode": True,
        "ecc_mode": True,
        "ecc_errors": 0,
        "max_pcie_generation": 5,
        "max_pcie_width": 16,
        "nvlinked_gpus": 3,
    }
    return GpuFacts.model_validate(fields | changes)


def fake_sample(**changes: object) -> Sample:
    """Return a sample of a GPU at work."""
    fields: dict[str, object] = {
        "sm_clock_hertz": 1.98e9,
        "memory_clock_hertz": 3.2e9,
        "power_watts": 500.0,
        "temperature_celsius": 50.0,
        "throttle_reasons": (),
        "energy_joules": 1000.0,
        "pcie_generation": 5,
        "pcie_width": 16,
        "ecc_errors": 0,
        "processes": frozenset[int](),
    }
    return Sample(**(fields | changes))  # type: ignore[arg-type]


COUNTERS = {"sm_share": 0.9, "tensor_share": 0.1, "dram_share": 0.5}


@dataclass
class FakeMonitor(Monitor):
    """Makes samples up, counts them, and notes the threads that asked; `sample` and `on_facts` may raise."""

    # Makes the next sample from the number of those before.
    sample: Callable[[int], Sample] = lambda index: fake_sample(energy_joules=1000.0 + 100 * index)
    on_facts: Callable[[], None] = lambda: None
    # Makes the counters of a block from the number of those before.
    counters: Callable[[int], CounterReading] = lambda _: CounterReading(seconds=1.0, shares=COUNTERS)
    num_reads: int = 0
    num_counted: int = 0  # blocks whose counters were begun
    readers: list[threading.Thread] = field(default_factory=list)
    was_closed: bool = False

    def facts(self) -> GpuFacts:
        self.on_facts()
        return fake_gpu_facts()

    def read(self) -> Sample:
        self.readers.append(threading.current_thread())
        self.num_reads += 1
        return self.sample(self.num_reads - 1)

    def read_energy(self) -> Sample:
        return self.read()

    def begin_counters(self) -> None:
        self.readers.append(threading.current_thread())
        self.num_counted += 1

    def read_counters(self) -> CounterReading:
        self.readers.append(threading.current_thread())
        return self.counters(self.num_counted - 1)

    def close(self) -> None:
        self.was_closed = True
