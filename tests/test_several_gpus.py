"""What is seen of each GPU, put together: which rule a field goes by, and what is said of those that do not tell."""

import pytest
from fake_gpu import fake_gpu_facts, fake_reading

from castwise.records.schema import EnergyMeasurement, GpuFacts, TelemetrySummary
from castwise.telemetry.aggregate import facts_of, join_reasons, metered_of, reading_of

HOST_S = {"cpu_pressure", "cpu_steal", "cpu_load"}


def together(*readings: TelemetrySummary, why_not: dict[str, str] | None = None) -> TelemetrySummary:
    each = {f"cuda:{index}": reading for index, reading in enumerate(readings)}
    return reading_of(each, why_not or {}, 1.0)


def test_the_slowest_the_hottest_and_the_sum() -> None:
    first = fake_reading(
        sm_clock_hertz=1.9e9,
        min_sm_clock_hertz=1.2e9,
        memory_clock_hertz=3.2e9,
        power_watts=500.0,
        max_temperature_celsius=50.0,
        throttle_reasons=("gpu_idle", "sw_power_cap"),
        energy_joules=480.0,
        pcie_generation=5,
        pcie_width=8,
        ecc_errors=1,
        num_samples=12,
    )
    second = fake_reading(
        sm_clock_hertz=1.5e9,
        min_sm_clock_hertz=1.3e9,
        memory_clock_hertz=2.6e9,
        power_watts=300.0,
        max_temperature_celsius=80.0,
        throttle_reasons=("gpu_idle", "hw_slowdown"),
        energy_joules=300.0,
        pcie_generation=4,
        pcie_width=16,
        ecc_errors=2,
        num_samples=11,
    )
    both = together(first, second)
    assert (both.num_gpus, both.num_samples) == (2, 11)
    assert (both.sm_clock_hertz, both.min_sm_clock_hertz, both.memory_clock_hertz) == (1.5e9, 1.2e9, 2.6e9)
    assert (both.power_watts, both.gpu_power_watts, both.energy_joules) == (800.0, 400.0, 780.0)
    assert (both.max_temperature_celsius, both.ecc_errors) == (80.0, 3)
    assert both.throttle_reasons == ("gpu_idle", "sw_power_cap", "hw_slowdown")
    assert (both.pcie_generation, both.pcie_width) == (4, 8)
    assert both.affected_gpus == {"sw_power_cap": ("cuda:0",), "hw_slowdown": ("cuda:1",)}


def test_every_field_of_a_gpu_goes_by_a_rule() -> None:
    beside = {"seconds", "num_gpus", "missing", "affected_gpus", "foreign_processes"} | HOST_S
    reading = fake_reading(**dict.fromkeys(HOST_S))
    for name in set(TelemetrySummary.model_fields) - beside:
        assert getattr(together(reading), name) == getattr(reading, name) is not None
    for name in set(GpuFacts.model_fields) - {"missing"}:
        facts = fake_gpu_facts()
        assert getattr(facts_of({"cuda:0": facts}, {}), name) == getattr(facts, name) is not None


def test_no_gpu_is_none() -> None:
    assert reading_of({}, {}, 1.0) == TelemetrySummary(seconds=1.0, num_gpus=0)
    lost = reading_of({}, {"cuda:0": "no NVML", "cuda:1": "no NVML"}, 1.0)
    assert lost == TelemetrySummary(seconds=1.0, num_gpus=0, missing={"gpu": "no NVML"})


@pytest.mark.parametrize("name", ["power_watts", "energy_joules"])
def test_a_sum_that_lacks_one_is_none(name: str) -> None:
    lacking = fake_reading(**{name: None, "missing": {name: "Not Supported"}})
    found = together(fake_reading(), lacking)
    assert getattr(found, name) is None
    assert found.missing == {name: "cuda:1: Not Supported"}
    assert found.num_gpus == 2


def test_of_gpus_that_cannot_be_read_nothing_is_pretended() -> None:
    found = together(fake_reading(sm_clock_hertz=1.7e9), why_not={"cuda:1": "GPU is lost"})
    assert (found.num_gpus, found.sm_clock_hertz) == (1, 1.7e9)
    assert (found.power_watts, found.gpu_power_watts, found.energy_joules) == (None, None, None)
    assert found.missing == {"gpu": "cuda:1: GPU is lost"}


def test_what_is_missing_of_one_does_not_hide_the_others() -> None:
    bare = fake_reading(sm_clock_hertz=None, throttle_reasons=None, ecc_errors=None, max_temperature_celsius=None)
    found = together(bare, fake_reading(throttle_reasons=("hw_slowdown",), ecc_errors=4))
    assert (found.sm_clock_hertz, found.max_temperature_celsius, found.ecc_errors) == (1.98e9, 50.0, 4)
    assert found.throttle_reasons == ("hw_slowdown",)
    assert found.affected_gpus == {"hw_slowdown": ("cuda:1",), "ecc_errors": ("cuda:1",)}
    assert together(bare, bare).throttle_reasons is None


def test_what_is_of_all_needs_no_names() -> None:
    capped = fake_reading(throttle_reasons=("sw_power_cap",), foreign_processes=1)
    assert together(capped, capped).affected_gpus == {}
    assert together(capped).affected_gpus == {}


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        ({"cuda:0": "denied", "cuda:1": "denied", "cuda:2": "denied"}, "denied"),
        ({"cuda:1": "denied"}, "cuda:1: denied"),
        ({"cuda:0": "denied", "cuda:2": "denied"}, "cuda:0 and cuda:2: denied"),
        ({"cuda:0": "denied", "cuda:1": "lost", "cuda:2": "denied"}, "cuda:0 and cuda:2: denied, cuda:1: lost"),
        ({}, ""),
    ],
)
def test_reasons_name_their_gpus(reasons: dict[str, str], said: str) -> None:
    assert join_reasons(reasons, 3) == said


def test_facts_that_hold_of_any_hold_of_all() -> None:
    healthy = fake_gpu_facts()
    other = fake_gpu_facts(
        max_sm_clock_hertz=1.7e9,
        power_limit_watts=600.0,
        persistence_mode=False,
        ecc_mode=False,
        ecc_errors=3,
        max_pcie_width=8,
    )
    for pair in ((healthy, other), (other, healthy)):
        found = facts_of({"cuda:0": pair[0], "cuda:1": pair[1]}, {})
        assert (found.persistence_mode, found.ecc_mode, found.ecc_errors) == (False, False, 3)
        assert (found.max_sm_clock_hertz, found.power_limit_watts, found.max_pcie_width) == (1.7e9, 600.0, 8)
    assert facts_of({"cuda:0": healthy}, {"cuda:1": "lost"}).missing == {"gpu": "cuda:1: lost"}


def test_powers_add_up_though_counters_tick_apart() -> None:
    first = EnergyMeasurement(joules=500.0, seconds=1.0, num_ticks=10, late_seconds=0.004)
    second = EnergyMeasurement(joules=270.0, seconds=0.9, num_ticks=9, late_seconds=0.006)
    found = metered_of({"cuda:0": first, "cuda:1": second}, {})
    assert found.joules / found.seconds == pytest.approx(500.0 + 300.0)
    assert (found.seconds, found.num_ticks, found.late_seconds, found.num_gpus) == (0.9, 9, 0.006, 2)
    assert metered_of({"cuda:0": first}, {}) == first


def test_energy_of_some_is_none() -> None:
    told = EnergyMeasurement(joules=500.0, seconds=1.0, num_ticks=10)
    still = EnergyMeasurement(missing="the driver's counter ticked 1 times in 0.5 s")
    found = metered_of({"cuda:0": told, "cuda:1": still}, {})
    assert (found.joules, found.missing) == (0.0, "cuda:1: the driver's counter ticked 1 times in 0.5 s")
    assert metered_of({"cuda:0": told}, {"cuda:1": "lost"}).missing == "cuda:1: lost"
    assert metered_of({"cuda:0": still, "cuda:1": still}, {}).missing == still.missing
