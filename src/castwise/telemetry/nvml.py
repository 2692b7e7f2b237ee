"""What NVIDIA's management library reports of a GPU. NVML gives MHz, mW, mJ and °C (source: nvml.h)."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from castwise.telemetry.gpm import GpmCounters
from castwise.telemetry.gpu import CounterReading, GpuUnreadableError, Monitor, Query
from castwise.telemetry.host import text_of


class GpuProcess(NamedTuple):
    """A process that computes on a GPU."""

    pid: int
    name: str  # "?" if it may not be read
    memory_bytes: int | None  # None if the driver hides it


def driver_version() -> str | None:
    """Return the driver's version, None without NVML."""
    try:
        with _opened() as nvml:
            return str(nvml.nvmlSystemGetDriverVersion())
    except GpuUnreadableError:
        return None


def power_limit(uuid: str) -> float | None:
    """Return the power limit in force of the GPU with this UUID in whole watts, None if it cannot be read."""
    try:
        with _opened() as nvml:
            return float(round(nvml.nvmlDeviceGetEnforcedPowerLimit(nvml.nvmlDeviceGetHandleByUUID(uuid)) / 1e3))
    except GpuUnreadableError:
        return None


def compute_processes(uuid: str) -> tuple[GpuProcess, ...]:
    """Return the processes that use the GPU with this UUID ("GPU-...").

    Raises:
        GpuUnreadableError: NVML is missing, or does not know.
    """
    with _opened() as nvml:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByUUID(uuid))
        return tuple(
            GpuProcess(found.pid, text_of(Path(f"/proc/{found.pid}/comm")).strip() or "?", found.usedGpuMemory)
            for found in processes
        )


@contextmanager
def _opened() -> Iterator[Any]:
    nvml = _library()
    try:
        nvml.nvmlInit()
        try:
            yield nvml
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise GpuUnreadableError(str(error)) from None


def _library() -> Any:
    try:
        import pynvml
    except ImportError:
        raise GpuUnreadableError("nvidia-ml-py is not installed (pip install nvidia-ml-py)") from None
    return pynvml


def _final_codes(nvml: Any) -> frozenset[Any]:
    """Return the errors that stay; a lost GPU and an unknown error may pass."""
    names = ("NVML_ERROR_NOT_SUPPORTED", "NVML_ERROR_FUNCTION_NOT_FOUND")
    return frozenset(getattr(nvml, name, name) for name in names)


# Source: nvml.h, nvmlClocksEventReason*; the names are nvidia-smi's, clocks_event_reasons.*.
_REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}


def throttle_reasons(nvml: Any, handle: Any) -> tuple[str, ...]:
    """Return the names of what limits the clock; a bit without a name as a number."""
    try:
        mask = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except nvml.NVMLError as error:  # a driver from before the new name has the old one
        if getattr(error, "value", None) not in _final_codes(nvml):
            raise
        mask = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    unnamed = mask & ~sum(_REASONS)
    return (*(name for bit, name in _REASONS.items() if mask & bit), *([f"{unnamed:#x}"] if unnamed else []))


def _ecc_errors(nvml: Any, handle: Any) -> Any:
    return nvml.nvmlDeviceGetTotalEccErrors(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)


def _nvlinked_gpus(nvml: Any, handle: Any) -> int:
    """Return to how many GPUs of the host a GPU has NVLink, also through switches."""
    others = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
    own = nvml.nvmlDeviceGetIndex(handle)
    states = [
        nvml.nvmlDeviceGetP2PStatus(handle, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        for other in others
        if nvml.nvmlDeviceGetIndex(other) != own
    ]
    return states.count(nvml.NVML_P2P_STATUS_OK)


# The counter comes first, so that after a block it is read at once. PCIe throughput is left out: its counters block for
# 20 ms (source: nvml.h, nvmlDeviceGetPcieThroughput).
_SAMPLE_QUERIES: dict[str, Query] = {
    "energy_joules": lambda nvml, handle: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3,
    "sm_clock_hertz": lambda nvml, handle: 1e6 * nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
    "memory_clock_hertz": lambda nvml, handle: 1e6 * nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
    "power_watts": lambda nvml, handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
    "temperature_celsius": lambda nvml, handle: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
    "throttle_reasons": throttle_reasons,
    "pcie_generation": lambda nvml, handle: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
    "pcie_width": lambda nvml, handle: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
    "ecc_errors": _ecc_errors,
    "processes": lambda nvml, handle: frozenset(
        process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    ),
}

_FACT_QUERIES: dict[str, Query] = {
    "max_sm_clock_hertz": lambda nvml, handle: 1e6 * nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
    "power_limit_watts": lambda nvml, handle: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
    "persistence_mode": lambda nvml, handle: bool(nvml.nvmlDeviceGetPersistenceMode(handle)),
    "ecc_mode": lambda nvml, handle: bool(nvml.nvmlDeviceGetEccMode(handle)[0]),
    "ecc_errors": _ecc_errors,
    "max_pcie_generation": lambda nvml, handle: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
    "max_pcie_width": lambda nvml, handle: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
    "nvlinked_gpus": _nvlinked_gpus,
}


class NvmlMonitor(Monitor):
    """Reads the NVIDIA GPU with this UUID ("GPU-...")."""

    package = "nvidia-ml-py"
    sample_queries = _SAMPLE_QUERIES
    fact_queries = _FACT_QUERIES

    def __init__(self, uuid: str) -> None:
        nvml = _library()
        self._counters = GpmCounters(nvml, _final_codes(nvml))
        super().__init__(
            nvml,
            (nvml.NVMLError,),
            start=nvml.nvmlInit,
            find=lambda: nvml.nvmlDeviceGetHandleByUUID(uuid),
            stop=nvml.nvmlShutdown,
            final_codes=_final_codes(nvml),
        )

    def begin_counters(self) -> None:
        self._counters.begin(self._handle)

    def read_counters(self) -> CounterReading:
        return self._counters.read(self._handle)

    def close(self) -> None:
        """Close the library, and give its buffers back before. May be called again."""
        self._counters.close()
        super().close()
