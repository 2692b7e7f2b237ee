"""What NVML says of a GPU, on a stand-in for its library, and what is said where it does not answer."""

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from castwise.telemetry.gpu import GpuUnreadableError
from castwise.telemetry.monitors import open_monitor
from castwise.telemetry.nvml import (
    GpuMonitor,
    GpuProcess,
    NvmlUnavailableError,
    compute_processes,
    driver_version,
    throttle_reasons,
)

UUID = "GPU-01234567-89ab-cdef-0123-456789abcdef"
NO_SUCH_PID = 2**22 + 1  # over the kernel's greatest (PID_MAX_LIMIT)


# What each query answers, in NVML's units: MHz, mW, mJ, °C.
ANSWERS: dict[str, object] = {
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
}
# The query behind each field.
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
    """A `pynvml` that counts its openings and fails where it is told to."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_FUNCTION_NOT_FOUND = NOT_SUPPORTED, FUNCTION_NOT_FOUND

    class NVMLError(Exception):
        pass

    class NotFoundError(NVMLError):
        pass

    def __init__(
        self, processes: list[tuple[int, int | None]] | None = None, fail_in: str = "", code: int | None = None
    ) -> None:
        super().__init__("pynvml")
        self.num_open = 0
        self._processes = processes or []
        self.fail_in = fail_in
        self.code = code
        self.asked: list[str] = []

    def _called(self, name: str) -> None:
        self.asked.append(name)
        if name == self.fail_in or (self.fail_in == "all" and name not in ("nvmlInit", "nvmlShutdown")):
            error = self.NotFoundError(f"{name} failed")
            error.value = self.code  # type: ignore[attr-defined]
            raise error

    def nvmlInit(self) -> None:
        self._called("nvmlInit")
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self._called("nvmlShutdown")
        self.num_open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        self._called("nvmlSystemGetDriverVersion")
        return "570.00"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._called("nvmlDeviceGetHandleByUUID")
        assert uuid == UUID
        return "handle"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        self._called("nvmlDeviceGetComputeRunningProcesses")
        assert handle == "handle"
        return [SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in self._processes]

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        self._called("nvmlDeviceGetClockInfo")
        return {1: 1755, 2: 3201}[kind]

    def __getattr__(self, name: str) -> Any:
        if name not in ANSWERS:
            raise AttributeError(name)

        def answer(handle: str, *rest: int) -> Any:
            self._called(name)
            assert handle == "handle"
            return ANSWERS[name]

        return answer


def install(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml) -> FakeNvml:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml


def test_the_driver_s_version(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, FakeNvml())
    assert driver_version() == "570.00"
    assert nvml.num_open == 0


def test_processes_with_their_memory_where_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, FakeNvml([(os.getpid(), 7 * 2**30), (NO_SUCH_PID, None)]))
    own, other = compute_processes(UUID)
    assert (own.pid, own.memory_bytes) == (os.getpid(), 7 * 2**30)
    assert own.name not in ("", "?")
    assert other == GpuProcess(pid=NO_SUCH_PID, name="?", memory_bytes=None)
    assert nvml.num_open == 0


def test_an_idle_gpu_has_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeNvml())
    assert compute_processes(UUID) == ()


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlSystemGetDriverVersion"])
def test_no_version_where_nvml_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, FakeNvml(fail_in=name))
    assert driver_version() is None
    assert nvml.num_open == 0


@pytest.mark.parametrize(
    "name", ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetComputeRunningProcesses", "nvmlShutdown"]
)
def test_what_nvml_says_when_it_fails_is_passed_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, FakeNvml(fail_in=name))
    with pytest.raises(NvmlUnavailableError, match=f"^{name} failed$"):
        compute_processes(UUID)
    assert nvml.num_open == (1 if name == "nvmlShutdown" else 0)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert driver_version() is None
    with pytest.raises(NvmlUnavailableError, match=r"pip install nvidia-ml-py"):
        compute_processes(UUID)


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        assert driver_version() is None
        with pytest.raises(NvmlUnavailableError, match=r"."):
            compute_processes(UUID)
    else:
        pynvml.nvmlShutdown()
        pytest.skip("this machine has a driver")


each_field = pytest.mark.parametrize("field", list(QUERIES))


def test_a_sample_in_units_without_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeNvml([(7, None), (9, 5)]))
    sample = GpuMonitor(UUID).read()
    assert (sample.sm_clock_hertz, sample.memory_clock_hertz) == (1.755e9, 3.201e9)
    assert (sample.power_watts, sample.temperature_celsius) == (512.345, 61.0)
    assert sample.energy_joules == 5_000_000.5
    assert (sample.pcie_generation, sample.pcie_width, sample.ecc_errors) == (5, 16, 3)
    assert (sample.processes, sample.throttle_reasons) == (frozenset({7, 9}), ("sw_power_cap",))
    assert sample.missing == {}


def test_facts_are_those_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeNvml())
    facts = GpuMonitor(UUID).facts()
    assert (facts.max_sm_clock_hertz, facts.power_limit_watts) == (1.98e9, 700.0)
    assert (facts.persistence_mode, facts.ecc_mode, facts.ecc_errors) == (False, True, 3)
    assert (facts.max_pcie_generation, facts.max_pcie_width, facts.missing) == (5, 16, {})


@each_field
@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION, GPU_IS_LOST, UNKNOWN])
def test_a_field_that_is_denied_takes_no_other_with_it(field: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, FakeNvml(fail_in=QUERIES[field], code=code))
    monitor = GpuMonitor(UUID)
    sample = monitor.read()
    asked_again = nvml.asked.count(QUERIES[field])
    assert getattr(sample, field) is None
    assert set(sample.missing) == {field}
    nvml.fail_in = ""
    again = monitor.read()
    # What is not supported is not asked for again; all else may pass.
    assert (getattr(again, field) is None) == (code == NOT_SUPPORTED)
    assert (field in again.missing) == (code == NOT_SUPPORTED)
    assert (nvml.asked.count(QUERIES[field]) == asked_again) == (code == NOT_SUPPORTED)


@each_field
def test_a_binding_from_before_a_query_says_so(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeNvml())
    if field == "processes":
        monkeypatch.delattr(FakeNvml, QUERIES[field])
    else:
        monkeypatch.delitem(ANSWERS, QUERIES[field])
    sample = GpuMonitor(UUID).read()
    assert getattr(sample, field) is None
    assert sample.missing == {field: "this nvidia-ml-py does not have it"}


def test_a_gpu_that_is_lost_gives_reasons_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, FakeNvml())
    monitor = GpuMonitor(UUID)
    nvml.fail_in, nvml.code = "all", GPU_IS_LOST
    lost = monitor.read()
    assert len(lost.missing) == 10
    assert all(getattr(lost, field) is None for field in lost.missing)
    assert len(monitor.facts().missing) == 7
    nvml.fail_in = ""
    assert monitor.read().missing == {}
    monitor.close()
    assert nvml.num_open == 0


@pytest.mark.parametrize("code", [NOT_SUPPORTED, FUNCTION_NOT_FOUND])
def test_a_driver_from_before_the_new_name_has_its_reasons_under_the_old(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, FakeNvml(fail_in=QUERIES["throttle_reasons"], code=code))
    monkeypatch.setitem(ANSWERS, "nvmlDeviceGetCurrentClocksThrottleReasons", 0x40)
    assert GpuMonitor(UUID).read().throttle_reasons == ("hw_thermal_slowdown",)


def test_a_binding_from_before_the_new_name_has_its_reasons_under_the_old(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeNvml())
    monkeypatch.delitem(ANSWERS, QUERIES["throttle_reasons"])
    monkeypatch.setitem(ANSWERS, "nvmlDeviceGetCurrentClocksThrottleReasons", 0x1)
    assert GpuMonitor(UUID).read().throttle_reasons == ("gpu_idle",)


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        (0, ()),
        (0x1, ("gpu_idle",)),
        (0x6, ("applications_clocks_setting", "sw_power_cap")),
        (0x1F8 & ~0x10, ("hw_slowdown", *("sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"))),
        (0x8000_0000_0000_0010, ("sync_boost", "0x8000000000000000")),
    ],
)
def test_reasons_are_named_as_nvidia_smi_does(mask: int, names: tuple[str, ...]) -> None:
    expected = names + (("display_clock_setting",) if mask & 0x100 else ())
    assert throttle_reasons(mask) == expected


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_a_monitor_that_cannot_be_opened_leaves_nvml_closed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, FakeNvml(fail_in=name))
    with pytest.raises(GpuUnreadableError, match=f"^{name} failed$"):
        GpuMonitor(UUID)
    assert nvml.num_open == 0


def test_a_monitor_may_be_closed_twice_also_where_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, FakeNvml(fail_in="nvmlShutdown"))
    monitor = GpuMonitor(UUID)
    monitor.close()
    monitor.close()
    assert nvml.asked.count("nvmlShutdown") == 1


def test_without_either_library_the_first_one_s_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    with pytest.raises(GpuUnreadableError, match="nvidia-ml-py is not installed"):
        open_monitor(UUID)
