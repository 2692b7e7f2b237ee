"""What AMD's management library reports of a GPU, the same as NVML's, if `amdsmi` is installed (castwise[amd]).

Throttle reasons are not read: amdsmi's violation counters block for a tenth of a second.

Source: the reference of amdsmi's Python interface, ROCm documentation.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from castwise.records.schema import GpuFacts
from castwise.telemetry.gpu import GpuUnreadableError, Sample

_Getter = Callable[[Any, Any], Any]


class _NotAvailableError(Exception):
    """The library answered "N/A"."""


class AmdMonitor:
    """Reads one AMD GPU, every field by itself.

    Args:
        uuid: The GPU's UUID. torch and amdsmi do not always agree on it, so a lone GPU is taken in any case.

    Raises:
        GpuUnreadableError: amdsmi is missing, or does not know which of several GPUs is meant.
    """

    def __init__(self, uuid: str) -> None:
        try:
            import amdsmi
        except (ImportError, KeyError, OSError) as error:  # it looks for ROCm's library when it is imported
            raise GpuUnreadableError(f"amdsmi cannot be imported: {error}") from None
        self._smi = amdsmi
        self._is_open = False
        try:
            amdsmi.amdsmi_init()
            self._is_open = True
            self._handle = self._find(uuid)
        except amdsmi.AmdSmiException as error:
            self.close()
            raise GpuUnreadableError(str(error)) from None

    def facts(self) -> GpuFacts:
        """Return what does not change while a trial runs."""
        values, missing = self._ask(_FACTS)
        missing["persistence_mode"] = "AMD's driver has none"
        return GpuFacts.model_validate({**values, "missing": missing})

    def read(self) -> Sample:
        """Return what the driver reports now."""
        values, missing = self._ask(_FIELDS)
        missing["throttle_reasons"] = "not read on AMD GPUs"
        return Sample(**values, missing=missing)

    def read_energy(self) -> Sample:
        """Return the energy counter alone."""
        values, missing = self._ask({"energy_joules": _energy})
        return Sample(**values, missing=missing)

    def close(self) -> None:
        """Close the library. May be called again."""
        if self._is_open:
            self._is_open = False
            with suppress(self._smi.AmdSmiException):
                self._smi.amdsmi_shut_down()

    def _find(self, uuid: str) -> Any:
        handles = self._smi.amdsmi_get_processor_handles()
        if len(handles) == 1:
            return handles[0]
        known = {str(self._smi.amdsmi_get_gpu_device_uuid(handle)).lower(): handle for handle in handles}
        handle = known.get(uuid.lower().removeprefix("gpu-"))
        if handle is None:
            self.close()
            raise GpuUnreadableError(f"none of {len(handles)} AMD GPUs has the UUID {uuid}")
        return handle

    def _ask(self, fields: Mapping[str, _Getter]) -> tuple[dict[str, Any], dict[str, str]]:
        values: dict[str, Any] = {}
        missing: dict[str, str] = {}
        for name, getter in fields.items():
            try:
                values[name] = getter(self._smi, self._handle)
            except (self._smi.AmdSmiException, _NotAvailableError) as error:
                missing[name] = str(error)
            except (AttributeError, KeyError) as error:
                missing[name] = f"this amdsmi does not have {error}"
        return values, missing


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _NotAvailableError(str(value))  # "N/A"
    return float(value)


def _clock(smi: Any, handle: Any, kind: str, key: str) -> float:
    info = smi.amdsmi_get_clock_info(handle, getattr(smi.AmdSmiClkType, kind))
    return 1e6 * _number(info[key])  # MHz


def _power(smi: Any, handle: Any) -> float:
    info = smi.amdsmi_get_power_info(handle)
    # MI300 reports the present power, MI200 an average; the other is "N/A". In watts.
    values = [info.get(key) for key in ("current_socket_power", "average_socket_power")]
    return _number(next((value for value in values if isinstance(value, int | float)), "N/A"))


def _energy(smi: Any, handle: Any) -> float:
    count = smi.amdsmi_get_energy_count(handle)
    accumulator = count["energy_accumulator"] if "energy_accumulator" in count else count["power"]  # before 6.2.1
    return _number(accumulator) * _number(count["counter_resolution"]) / 1e6  # counts of so many µJ


def _temperature(smi: Any, handle: Any) -> float:
    kind, metric = smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CURRENT
    return _number(smi.amdsmi_get_temp_metric(handle, kind, metric))


def _process_ids(smi: Any, handle: Any) -> frozenset[int]:
    return frozenset(int(process["pid"]) for process in smi.amdsmi_get_gpu_process_list(handle))


def _ecc_errors(smi: Any, handle: Any) -> int:
    return int(_number(smi.amdsmi_get_gpu_total_ecc_count(handle)["uncorrectable_count"]))


_FIELDS: dict[str, _Getter] = {
    "energy_joules": _energy,
    "sm_clock_hertz": lambda smi, handle: _clock(smi, handle, "GFX", "clk"),
    "memory_clock_hertz": lambda smi, handle: _clock(smi, handle, "MEM", "clk"),
    "power_watts": _power,
    "temperature_celsius": _temperature,
    "pcie_width": lambda smi, handle: int(_number(smi.amdsmi_get_pcie_info(handle)["pcie_metric"]["pcie_width"])),
    "ecc_errors": _ecc_errors,
    "processes": _process_ids,
}

_FACTS: dict[str, _Getter] = {
    "max_sm_clock_hertz": lambda smi, handle: _clock(smi, handle, "GFX", "max_clk"),
    # In µW. Source: amdsmi.h, amdsmi_power_cap_info_t.
    "power_limit_watts": lambda smi, handle: _number(smi.amdsmi_get_power_cap_info(handle)["power_cap"]) / 1e6,
    "ecc_errors": _ecc_errors,
    "max_pcie_width": lambda smi, handle: int(
        _number(smi.amdsmi_get_pcie_info(handle)["pcie_static"]["max_pcie_width"])
    ),
}
