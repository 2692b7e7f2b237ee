"""What AMD's management library reports of a GPU, if `amdsmi` is installed (castwise[amd]).

Source: the reference of amdsmi's Python interface, ROCm documentation.
"""

from functools import partial
from typing import Any

from castwise.telemetry.gpu import GpuUnreadableError, Monitor, Query


class _NotAvailableError(Exception):
    """The library has no answer; the message says why, or is its "N/A"."""


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _NotAvailableError(str(value))
    return float(value)


def _refuse(why: str, *_: Any) -> Any:
    raise _NotAvailableError(why)


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


def _pcie_width(smi: Any, handle: Any, group: str, key: str) -> int:
    return int(_number(smi.amdsmi_get_pcie_info(handle)[group][key]))


def _ecc_errors(smi: Any, handle: Any) -> int:
    return int(_number(smi.amdsmi_get_gpu_total_ecc_count(handle)["uncorrectable_count"]))


_SAMPLE_QUERIES: dict[str, Query] = {
    "energy_joules": _energy,
    "sm_clock_hertz": lambda smi, handle: _clock(smi, handle, "GFX", "clk"),
    "memory_clock_hertz": lambda smi, handle: _clock(smi, handle, "MEM", "clk"),
    "power_watts": _power,
    "temperature_celsius": lambda smi, handle: _number(
        smi.amdsmi_get_temp_metric(handle, smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CURRENT)
    ),
    "pcie_width": lambda smi, handle: _pcie_width(smi, handle, "pcie_metric", "pcie_width"),
    "ecc_errors": _ecc_errors,
    "processes": lambda smi, handle: frozenset(
        int(process["pid"]) for process in smi.amdsmi_get_gpu_process_list(handle)
    ),
    # The violation counters block for a tenth of a second.
    "throttle_reasons": partial(_refuse, "not read on AMD GPUs"),
}

_FACT_QUERIES: dict[str, Query] = {
    "max_sm_clock_hertz": lambda smi, handle: _clock(smi, handle, "GFX", "max_clk"),
    # In µW. Source: amdsmi.h, amdsmi_power_cap_info_t.
    "power_limit_watts": lambda smi, handle: _number(smi.amdsmi_get_power_cap_info(handle)["power_cap"]) / 1e6,
    "ecc_errors": _ecc_errors,
    "max_pcie_width": lambda smi, handle: _pcie_width(smi, handle, "pcie_static", "max_pcie_width"),
    "persistence_mode": partial(_refuse, "AMD's driver has none"),
}


class AmdMonitor(Monitor):
    """Reads the AMD GPU with this UUID. torch and amdsmi do not always agree on it, so a lone GPU is taken anyway."""

    package = "amdsmi"
    sample_queries = _SAMPLE_QUERIES
    fact_queries = _FACT_QUERIES

    def __init__(self, uuid: str) -> None:
        try:
            import amdsmi
        except (ImportError, KeyError, OSError) as error:  # it looks for ROCm's library when it is imported
            raise GpuUnreadableError(f"amdsmi cannot be imported: {error}") from None

        def find() -> Any:
            handles = amdsmi.amdsmi_get_processor_handles()
            if len(handles) == 1:
                return handles[0]
            known = {str(amdsmi.amdsmi_get_gpu_device_uuid(handle)).lower(): handle for handle in handles}
            try:
                return known[uuid.lower().removeprefix("gpu-")]
            except KeyError:
                raise GpuUnreadableError(f"none of {len(handles)} AMD GPUs has the UUID {uuid}") from None

        super().__init__(
            amdsmi,
            (amdsmi.AmdSmiException, _NotAvailableError),
            start=amdsmi.amdsmi_init,
            find=find,
            stop=amdsmi.amdsmi_shut_down,
        )
