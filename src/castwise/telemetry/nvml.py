"""What NVIDIA's management library reports of a GPU; every field may be missing, with the reason."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from castwise.records.schema import GpuFacts
from castwise.telemetry.gpu import GpuUnreadableError, Sample

_Getter = Callable[[Any, Any], Any]


class NvmlUnavailableError(GpuUnreadableError):
    """NVML did not answer; the message says why."""


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory on a GPU.

    Attributes:
        pid: Its process id.
        name: Its program, or "?" if it may not be read.
        memory_bytes: The GPU memory it holds; None if the driver hides it.
    """

    pid: int
    name: str
    memory_bytes: int | None


def driver_version() -> str | None:
    """Return the driver's version, None without NVML."""
    try:
        with _opened() as nvml:
            return str(nvml.nvmlSystemGetDriverVersion())
    except NvmlUnavailableError:
        return None


def compute_processes(uuid: str) -> tuple[GpuProcess, ...]:
    """Return the processes that use the GPU with this UUID ("GPU-...").

    Raises:
        NvmlUnavailableError: NVML is missing, or does not know.
    """
    with _opened() as nvml:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        return tuple(
            GpuProcess(pid=process.pid, name=_process_name(process.pid), memory_bytes=process.usedGpuMemory)
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        )


@contextmanager
def _opened() -> Iterator[Any]:
    pynvml = _library()
    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise NvmlUnavailableError(str(error)) from None


def _library() -> Any:
    try:
        import pynvml
    except ImportError:
        raise NvmlUnavailableError("nvidia-ml-py is not installed (pip install nvidia-ml-py)") from None
    return pynvml


def _process_name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "?"


class GpuMonitor:
    """Reads one NVIDIA GPU, every field by itself: one that the driver hides does not hide others.

    PCIe throughput is left out: its counters block for 20 ms (nvml.h, nvmlDeviceGetPcieThroughput).

    Args:
        uuid: The GPU's UUID as NVML knows it ("GPU-...").

    Raises:
        NvmlUnavailableError: NVML is missing, or knows no such GPU.
    """

    def __init__(self, uuid: str) -> None:
        self._nvml = _library()
        self._hidden: dict[str, str] = {}
        self._is_open = False
        try:
            self._nvml.nvmlInit()
            self._is_open = True
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        except self._nvml.NVMLError as error:
            self.close()
            raise NvmlUnavailableError(str(error)) from None

    def facts(self) -> GpuFacts:
        """Return what does not change while a trial runs."""
        values, missing = self._ask(_FACTS)
        return GpuFacts.model_validate({**values, "missing": missing})

    def read(self) -> Sample:
        """Return what the driver reports now; for a lost GPU, a sample of reasons."""
        return self._sample(_FIELDS)

    def read_energy(self) -> Sample:
        """Return the energy counter alone."""
        return self._sample({"energy_joules": _FIELDS["energy_joules"]})

    def _sample(self, fields: Mapping[str, _Getter]) -> Sample:
        values, missing = self._ask(fields)
        return Sample(**values, missing=missing)

    def close(self) -> None:
        """Close NVML. May be called again."""
        if self._is_open:
            self._is_open = False
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _ask(self, fields: Mapping[str, _Getter]) -> tuple[dict[str, Any], dict[str, str]]:
        values: dict[str, Any] = {}
        missing: dict[str, str] = {}
        for name, getter in fields.items():
            if name in self._hidden:
                missing[name] = self._hidden[name]
                continue
            try:
                values[name] = getter(self._nvml, self._handle)
            except self._nvml.NVMLError as error:
                missing[name] = str(error)
                if _is_final(self._nvml, error):
                    self._hidden[name] = str(error)
            except AttributeError:  # an nvidia-ml-py from before the function
                missing[name] = self._hidden[name] = "this nvidia-ml-py does not have it"
        return values, missing


def _is_final(nvml: Any, error: Exception) -> bool:
    """Return whether the field will stay missing; a lost GPU and an unknown error may pass."""
    final = ("NVML_ERROR_NOT_SUPPORTED", "NVML_ERROR_FUNCTION_NOT_FOUND")
    return getattr(error, "value", None) in {getattr(nvml, name, name) for name in final}


def _reasons(nvml: Any, handle: Any) -> tuple[str, ...]:
    try:
        get = nvml.nvmlDeviceGetCurrentClocksEventReasons
    except AttributeError:  # before nvidia-ml-py 12.535
        get = nvml.nvmlDeviceGetCurrentClocksThrottleReasons
    try:
        mask = get(handle)
    except nvml.NVMLError as error:  # a driver from before the new name has the old one
        if not _is_final(nvml, error):
            raise
        mask = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return throttle_reasons(mask)


def throttle_reasons(mask: int) -> tuple[str, ...]:
    """Return the names of the bits in NVML's bit mask of clock event reasons; a bit without a name as a number."""
    named = [name for bit, name in _REASONS.items() if mask & bit]
    unnamed = mask & ~sum(_REASONS)
    return (*named, f"{unnamed:#x}") if unnamed else tuple(named)


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

# NVML gives MHz, mW, mJ and °C. Source: nvml.h. The counter comes first, so that after a block it is read at once.
_FIELDS: dict[str, _Getter] = {
    "energy_joules": lambda nvml, handle: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3,
    "sm_clock_hertz": lambda nvml, handle: 1e6 * nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
    "memory_clock_hertz": lambda nvml, handle: 1e6 * nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
    "power_watts": lambda nvml, handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
    "temperature_celsius": lambda nvml, handle: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
    "throttle_reasons": _reasons,
    "pcie_generation": lambda nvml, handle: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
    "pcie_width": lambda nvml, handle: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
    "ecc_errors": lambda nvml, handle: nvml.nvmlDeviceGetTotalEccErrors(
        handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    ),
    "processes": lambda nvml, handle: frozenset(
        process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    ),
}

_FACTS: dict[str, _Getter] = {
    "max_sm_clock_hertz": lambda nvml, handle: 1e6 * nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
    "power_limit_watts": lambda nvml, handle: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
    "persistence_mode": lambda nvml, handle: bool(nvml.nvmlDeviceGetPersistenceMode(handle)),
    "ecc_mode": lambda nvml, handle: bool(nvml.nvmlDeviceGetEccMode(handle)[0]),
    "ecc_errors": _FIELDS["ecc_errors"],
    "max_pcie_generation": lambda nvml, handle: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
    "max_pcie_width": lambda nvml, handle: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
}
