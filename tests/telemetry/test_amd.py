"""What amdsmi reports of a GPU, by a fake library."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_gpu import UUID

from castwise.telemetry.amdsmi import AmdMonitor
from castwise.telemetry.gpu import GpuUnreadableError
from castwise.telemetry.sampler import open_monitor

ANSWERS: dict[str, Any] = {
    "amdsmi_get_energy_count": {"energy_accumulator": 2_000_000, "counter_resolution": 15.3, "timestamp": 1},
    "amdsmi_get_power_info": {"current_socket_power": "N/A", "average_socket_power": 560, "power_limit": 1},
    "amdsmi_get_temp_metric": 71,
    "amdsmi_get_clock_info": {"clk": 2100, "min_clk": 500, "max_clk": 2400},
    "amdsmi_get_pcie_info": {"pcie_metric": {"pcie_width": 16}, "pcie_static": {"max_pcie_width": 16}},
    "amdsmi_get_gpu_total_ecc_count": {"correctable_count": 5, "uncorrectable_count": 1},
    "amdsmi_get_gpu_process_list": [{"pid": 11, "name": "python"}, {"pid": 12, "name": "python"}],
    "amdsmi_get_power_cap_info": {"power_cap": 750_000_000},
}
FIELDS = {
    "amdsmi_get_energy_count": "energy_joules",
    "amdsmi_get_power_info": "power_watts",
    "amdsmi_get_temp_metric": "temperature_celsius",
    "amdsmi_get_pcie_info": "pcie_width",
    "amdsmi_get_gpu_total_ecc_count": "ecc_errors",
    "amdsmi_get_gpu_process_list": "processes",
}


class FakeAmdSmi(ModuleType):
    """An `amdsmi` of GPUs with these UUIDs that fails in `fail_in`."""

    AmdSmiClkType = SimpleNamespace(GFX="GFX", MEM="MEM")
    AmdSmiTemperatureType = SimpleNamespace(HOTSPOT="HOTSPOT")
    AmdSmiTemperatureMetric = SimpleNamespace(CURRENT="CURRENT")

    class AmdSmiException(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("amdsmi")
        self.answers = dict(ANSWERS)
        self.num_open, self.fail_in = 0, ""
        self.uuids: tuple[str, ...] = ("ff",)

    def _called(self, name: str) -> None:
        if name == self.fail_in:
            raise self.AmdSmiException(f"{name} failed")

    def amdsmi_init(self) -> None:
        self._called("amdsmi_init")
        self.num_open += 1

    def amdsmi_shut_down(self) -> None:
        self.num_open -= 1
        self._called("amdsmi_shut_down")

    def amdsmi_get_processor_handles(self) -> list[str]:
        return list(self.uuids)

    def amdsmi_get_gpu_device_uuid(self, handle: str) -> str:
        return handle

    def __getattr__(self, name: str) -> Any:
        if name not in self.answers:
            raise AttributeError(name)

        def answer(handle: str, *_: str) -> Any:
            self._called(name)
            assert handle == self.uuids[-1]
            return self.answers[name]

        return answer


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch) -> FakeAmdSmi:
    library = FakeAmdSmi()
    monkeypatch.setitem(sys.modules, "amdsmi", library)
    return library


@pytest.mark.usefixtures("smi")
def test_sample_and_facts() -> None:
    sample, facts = AmdMonitor(UUID).read(), AmdMonitor(UUID).facts()
    assert sample.energy_joules == pytest.approx(30.6)
    assert (sample.power_watts, sample.temperature_celsius, sample.sm_clock_hertz) == (560.0, 71.0, 2.1e9)
    assert (sample.pcie_width, sample.ecc_errors, sample.processes) == (16, 1, frozenset({11, 12}))
    assert sample.missing == {"throttle_reasons": "not read on AMD GPUs"}
    assert (facts.max_sm_clock_hertz, facts.power_limit_watts, facts.max_pcie_width) == (2.4e9, 750.0, 16)
    assert set(facts.missing) == {"persistence_mode"}


@pytest.mark.parametrize(
    ("query", "answer"),
    [
        ("amdsmi_get_power_info", {"current_socket_power": "N/A", "average_socket_power": "N/A"}),
        ("amdsmi_get_temp_metric", "N/A"),
        ("amdsmi_get_gpu_total_ecc_count", {}),
        ("amdsmi_get_energy_count", {}),
    ],
)
def test_answers_without_a_number(query: str, answer: object, smi: FakeAmdSmi) -> None:
    smi.answers[query] = answer
    sample = AmdMonitor(UUID).read()
    assert getattr(sample, FIELDS[query]) is None
    assert FIELDS[query] in sample.missing


def test_older_name_of_the_energy_counter(smi: FakeAmdSmi) -> None:
    smi.answers["amdsmi_get_energy_count"] = {"power": 1_000_000, "counter_resolution": 2.0}
    assert AmdMonitor(UUID).read().energy_joules == 2.0


def test_the_gpu_is_found_by_its_uuid(smi: FakeAmdSmi) -> None:
    smi.uuids = ("ff", UUID.removeprefix("GPU-").upper())
    assert AmdMonitor(UUID).read().power_watts == 560.0
    smi.uuids = ("aa", "bb")
    num_open = smi.num_open
    with pytest.raises(GpuUnreadableError, match="none of 2 AMD GPUs"):
        AmdMonitor(UUID)
    assert smi.num_open == num_open


def test_amdsmi_is_used_without_nvml(smi: FakeAmdSmi, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.fail_in = "amdsmi_shut_down"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monitor = open_monitor(UUID)
    assert isinstance(monitor, AmdMonitor)
    monitor.close()
    monitor.close()
    assert smi.num_open == 0
