"""What a GPU's management library reports, whichever vendor's it is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from castwise.records.schema import GpuFacts


class GpuUnreadableError(Exception):
    """A GPU's management library is not there or does not know the GPU; the message says why."""


@dataclass(frozen=True)
class Sample:
    """What the driver reports at one moment; a field is None if it is not known, and `missing` says why.

    Attributes:
        sm_clock_hertz: The clock of the streaming multiprocessors (AMD: of the graphics engine).
        memory_clock_hertz: The memory's clock.
        power_watts: The board's power: on GPUs since Ampere, but the A100 and A30, the mean of the last second; on
            those and older ones the power at that moment. Source: nvml.h, nvmlDeviceGetPowerUsage.
        temperature_celsius: The core's temperature.
        throttle_reasons: What limits the clock, by nvidia-smi's names (clocks_event_reasons); empty for nothing.
        energy_joules: All energy since the driver was loaded.
        pcie_generation: The PCIe link's present generation; an idle link uses a low one to save power.
        pcie_width: The PCIe link's present number of lanes.
        ecc_errors: Memory errors that ECC could not correct, since the driver was loaded.
        processes: The ids of the processes that use the GPU.
        missing: Why a field is None, by its name.
    """

    sm_clock_hertz: float | None = None
    memory_clock_hertz: float | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    energy_joules: float | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    ecc_errors: int | None = None
    processes: frozenset[int] | None = None
    missing: Mapping[str, str] = field(default_factory=dict)


class Monitor(Protocol):
    """One GPU's management library, opened. No method raises because a field is not available."""

    def facts(self) -> GpuFacts:
        """Return what does not change while a trial runs."""

    def read(self) -> Sample:
        """Return what the driver reports now."""

    def read_energy(self) -> Sample:
        """Return the energy counter alone, which takes a fraction of the time."""

    def close(self) -> None:
        """Close the library. May be called again."""
