"""What NVML reports of a GPU, by a fake library, and the reasons where it does not answer."""

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_gpu import UUID

from castwise.telemetry.gpu import GpuUnreadableError
from castwise.telemetry.nvml import GpuProcess, NvmlMonitor, compute_processes, driver_version, power_limit
from castwise.telemetry.sampler import open_monitor

NO_SUCH_PID = 2**22 + 1  # over the kernel's greatest (PID_MAX_LIMIT)

# What each query answers, in NVML's units: MHz, mW, mJ, °C.
ANSWERS: dict[str, Any] = {
    "nvmlInit": None,
    "nvmlShutdown": None,
    "nvmlSystemGetDriverVersion": "570.00",
    "nvmlDeviceGetHandleByUUID": "handle",
    "nvmlDeviceGetComputeRunningProcesses": (SimpleNamespace(pid=os.getpid(), usedGpuMemory=7 * 2**30),),
    "nvmlDeviceGetClockInfo": 1755,
    "nvmlDeviceGetTotalEnergyConsumption": 5_000_000_500,
    "nvmlDeviceGetPowerUsage": 512_345,
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
    "nvmlDeviceGetCurrPcieLinkGeneration": 5,
    "nvmlDeviceGetCurrPcieLinkWidth": 16,
    "nvmlDeviceGetTotalEccErrors": 3,
    "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetPersistenceMode": 0,
    "nvmlDeviceGetEccMode": [1, 0],
    "nvmlDeviceGetMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetCount": 4,
}
QUERIES = {
    "energy_joules": "nvmlDeviceGetTotalEnergyConsumption",
    "power_watts": "nvmlDeviceGetPowerUsage",
    "temperature_celsius": "nvmlDeviceGetTemperature",
    "throttle_reasons": "nvmlDeviceGetCurrentClocksEventReasons",
    "pcie_generation": "nvmlDeviceGetCurrPcieLinkGeneration",
    "pcie_width": "nvmlDeviceGetCurrPcieLinkWidth",
    "ecc_errors": "nvmlDeviceGetTotalEccErrors",
    "processes": "nvmlDeviceGetComputeRunningProcesses",
}
NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, GPU_IS_LOST, UNKNOWN = 3, 4, 13, 15, 999


class FakeNvml(ModuleType):
    """A `pynvml` that counts its openings and fails in `fail_in` ("all": wherever a GPU is asked for)."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0
    has_no_nvlink: object = None  # the GPU that the trial's does not reach
    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_FUNCTION_NOT_FOUND = NOT_SUPPORTED, FUNCTION_NOT_FOUND

    class NVMLError(Exception):
        value: int | None = None

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.answers = dict(ANSWERS)
        self.fail_in, self.code = "", UNKNOWN
        self.asked: list[str] = []

    @property
    def num_open(self) -> int:
        return self.asked.count("nvmlInit") - self.asked.count("nvmlShutdown")

    def __getattr__(self, name: str) -> Any:
        paired = ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetIndex", "nvmlDeviceGetP2PStatus")
        if name not in (*self.answers, *paired):
            raise AttributeError(name)

        def answer(*arguments: Any) -> Any:
            if name == self.fail_in or (self.fail_in == "all" and name.startswith("nvmlDevice")):
                error = self.NVMLError(f"{name} failed")
                error.value = self.code
                raise error
            self.asked.append(name)
            if name in ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetIndex"):  # the first GPU is the trial's
                return ("handle", 1, 2, 3)[arguments[0]] if name.endswith("ByIndex") else arguments[0]
            if name == "nvmlDeviceGetP2PStatus":
                return arguments[1] == self.has_no_nvlink
            assert arguments[:1] in ((), (UUID,), ("handle",))
            return 3201 if arguments[1:] == (self.NVML_CLOCK_MEM,) else self.answers[name]

        return answer


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    library = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return library


def test_driver_version_and_processes(nvml: FakeNvml) -> None:
    assert (driver_version(), power_limit(UUID)) == ("570.00", 700.0)
    nvml.answers["nvmlDeviceGetComputeRunningProcesses"] += (SimpleNamespace(pid=NO_SUCH_PID, usedGpuMemory=None),)
    own, other = compute_processes(UUID)
    assert (own.pid, own.memory_bytes) == (os.getpid(), 7 * 2**30)
    assert own.name not in ("", "?")
    assert other == GpuProcess(pid=NO_SUCH_PID, name="?", memory_bytes=None)
    assert nvml.num_open == 0


@pytest.mark.parametrize(
    "name", ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetComputeRunningProcesses", "nvmlShutdown"]
)
def test_errors_are_passed_on_with_nvml_closed(name: str, nvml: FakeNvml) -> None:
    nvml.fail_in = name
    with pytest.raises(GpuUnreadableError, match=f"^{name} failed$"):
        compute_processes(UUID)
    assert (driver_version() is None) == (name in ("nvmlInit", "nvmlShutdown"))
    assert nvml.num_open == (2 if name == "nvmlShutdown" else 0)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    assert (driver_version(), power_limit(UUID)) == (None, None)
    for ask in (compute_processes, open_monitor):
        with pytest.raises(GpuUnreadableError, match=r"pip install nvidia-ml-py"):
            ask(UUID)


@pytest.mark.usefixtures("nvml")
def test_sample_and_facts_in_units_without_prefixes() -> None:
    sample, facts = NvmlMonitor(UUID).read(), NvmlMonitor(UUID).facts()
    assert (sample.sm_clock_hertz, sample.memory_clock_hertz) == (1.755e9, 3.201e9)
    assert (sample.power_watts, sample.temperature_celsius) == (512.345, 61.0)
    assert sample.energy_joules == NvmlMonitor(UUID).read_energy().energy_joules == 5_000_000.5
    assert (sample.pcie_generation, sample.pcie_width, sample.ecc_errors) == (5, 16, 3)
    assert (sample.processes, sample.throttle_reasons) == (frozenset({os.getpid()}), ("sw_power_cap",))
    assert (facts.max_sm_clock_hertz, facts.power_limit_watts) == (1.98e9, 700.0)
    assert (facts.persistence_mode, facts.ecc_mode, facts.ecc_errors) == (False, True, 3)
    assert (facts.max_pcie_generation, facts.max_pcie_width) == (5, 16)
    assert sample.missing == facts.missing == {}


def test_gpus_that_nvlink_reaches_are_counted(nvml: FakeNvml) -> None:
    assert NvmlMonitor(UUID).facts().nvlinked_gpus == 3
    nvml.has_no_nvlink = 2
    assert NvmlMonitor(UUID).facts().nvlinked_gpus == 2


@pytest.mark.parametrize("field", list(QUERIES))
@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION, GPU_IS_LOST, UNKNOWN])
def test_a_missing_field_does_not_hide_others(field: str, code: int, nvml: FakeNvml) -> None:
    monitor = NvmlMonitor(UUID)
    nvml.fail_in, nvml.code = QUERIES[field], code
    sample = monitor.read()
    assert getattr(sample, field) is None
    assert set(sample.missing) == {field}
    nvml.fail_in = ""
    # What is not supported is not asked for again; all else may pass.
    is_final = code == NOT_SUPPORTED
    again = monitor.read()
    assert (getattr(again, field) is None) == (field in again.missing) == is_final
    assert (QUERIES[field] not in nvml.asked) == is_final


@pytest.mark.parametrize("field", list(QUERIES))
def test_an_old_package_without_a_query(field: str, nvml: FakeNvml) -> None:
    del nvml.answers[QUERIES[field]]
    sample = NvmlMonitor(UUID).read()
    assert getattr(sample, field) is None
    assert sample.missing == {field: "this nvidia-ml-py does not have it"}


def test_a_lost_gpu_gives_reasons_and_comes_back(nvml: FakeNvml) -> None:
    monitor = NvmlMonitor(UUID)
    nvml.fail_in, nvml.code = "all", GPU_IS_LOST
    lost = monitor.read()
    assert len(lost.missing) == 10
    assert all(getattr(lost, field) is None for field in lost.missing)
    assert len(monitor.facts().missing) == 8
    nvml.fail_in = ""
    assert monitor.read().missing == {}
    monitor.close()
    assert nvml.num_open == 0


@pytest.mark.parametrize("code", [NOT_SUPPORTED, FUNCTION_NOT_FOUND])
def test_throttle_reasons_of_an_old_driver(code: int, nvml: FakeNvml) -> None:
    nvml.answers["nvmlDeviceGetCurrentClocksThrottleReasons"] = 0x40
    nvml.fail_in, nvml.code = QUERIES["throttle_reasons"], code
    assert NvmlMonitor(UUID).read().throttle_reasons == ("hw_thermal_slowdown",)


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        (0, ()),
        (0x6, ("applications_clocks_setting", "sw_power_cap")),
        (0x8000_0000_0000_0010, ("sync_boost", "0x8000000000000000")),
    ],
)
def test_throttle_reasons_have_nvidia_smi_s_names(mask: int, names: tuple[str, ...], nvml: FakeNvml) -> None:
    nvml.answers[QUERIES["throttle_reasons"]] = mask
    assert NvmlMonitor(UUID).read().throttle_reasons == names


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_a_monitor_that_cannot_be_opened_leaves_nvml_closed(name: str, nvml: FakeNvml) -> None:
    nvml.fail_in = name
    with pytest.raises(GpuUnreadableError, match=f"^{name} failed$"):
        NvmlMonitor(UUID)
    assert nvml.num_open == 0


def test_closing_twice_or_with_an_error(nvml: FakeNvml) -> None:
    monitors = [NvmlMonitor(UUID), NvmlMonitor(UUID)]
    monitors[0].close()
    monitors[0].close()
    assert nvml.num_open == 1
    nvml.fail_in = "nvmlShutdown"
    monitors[1].close()
