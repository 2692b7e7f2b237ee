"""From samples to a reading, a trial's facts and its energy; and whose processes are whose."""

import os
import subprocess
import sys

import pytest
from fake_gpu import fake_gpu_facts, fake_reading, fake_sample

from castwise.records.schema import EnergyMeasurement, GpuFacts, TelemetrySummary
from castwise.telemetry.gpu import Sample
from castwise.telemetry.host import HostSample
from castwise.telemetry.summary import (
    Processes,
    combine_energy,
    combine_facts,
    combine_readings,
    join_reasons,
    measure_energy,
    summarize,
    telemetry_note,
)

QUIET = HostSample(pressure_seconds=None, steal_ticks=None, total_ticks=None, load=None)
OWN = os.getpid()
OTHER = 2**22 + 1  # over the kernel's greatest (PID_MAX_LIMIT)


def reading_of(*samples: Sample, host: tuple[HostSample, HostSample] = (QUIET, QUIET)) -> TelemetrySummary:
    return summarize({"cuda:0": samples} if samples else {}, Processes(before=frozenset(), own_pid=OWN), host, 2.0)


def test_a_block_s_samples_become_its_reading() -> None:
    reading = reading_of(
        fake_sample(sm_clock_hertz=210e6, power_watts=100.0, temperature_celsius=40.0, throttle_reasons=("gpu_idle",)),
        fake_sample(sm_clock_hertz=1900e6, power_watts=600.0, temperature_celsius=60.0, pcie_generation=1),
        fake_sample(sm_clock_hertz=1800e6, power_watts=700.0, throttle_reasons=("sw_power_cap",), ecc_errors=2),
        fake_sample(sm_clock_hertz=345e6, power_watts=90.0, throttle_reasons=("gpu_idle",)),
    )
    assert (reading.sm_clock_hertz, reading.min_sm_clock_hertz, reading.power_watts) == (1850e6, 1800e6, 650.0)
    assert (reading.max_temperature_celsius, reading.pcie_generation, reading.ecc_errors) == (60.0, 5, 2)
    assert reading.throttle_reasons == ("gpu_idle", "sw_power_cap")
    assert (reading.num_samples, reading.seconds) == (4, 2.0)


def test_a_block_too_short_for_samples_has_those_beside_it() -> None:
    reading = reading_of(fake_sample(sm_clock_hertz=1e9), fake_sample(sm_clock_hertz=2e9))
    assert (reading.sm_clock_hertz, reading.min_sm_clock_hertz) == (1.5e9, 1e9)


@pytest.mark.parametrize(
    ("before", "after", "joules"),
    [
        (1000.0, 1250.5, 250.5),
        (1000.0, 1000.0, None),  # it has not ticked
        (2.0**32 / 1e3 - 1, 2.0**32 / 1e3 + 1, 2.0),  # beyond 32 bits of mJ: no wrap is assumed
        (1000.0, 3.0, None),  # the driver was loaded anew
        (None, 1000.0, None),
        (1000.0, None, None),
    ],
)
def test_energy_is_what_the_counter_went_up_by(before: float | None, after: float | None, joules: float | None) -> None:
    reading = reading_of(fake_sample(energy_joules=before), fake_sample(energy_joules=after))
    assert reading.energy_joules == (None if joules is None else pytest.approx(joules))
    assert ("energy_joules" in reading.missing) == (joules is None)


def test_a_missing_field_has_a_reason_and_the_values_there_were() -> None:
    hidden = {"temperature_celsius": "Not Supported", "power_watts": "GPU is lost"}
    bare = fake_sample(temperature_celsius=None, power_watts=None, missing=hidden)
    reading = reading_of(bare, bare)
    assert (reading.max_temperature_celsius, reading.power_watts) == (None, None)
    assert reading.missing["max_temperature_celsius"] == "Not Supported"
    assert set(reading.missing) <= set(TelemetrySummary.model_fields)
    reading = reading_of(fake_sample(), fake_sample(power_watts=300.0), bare, bare)
    assert (reading.power_watts, reading.missing["power_watts"]) == (300.0, "GPU is lost")


def test_the_host_s_share_is_over_the_watched_time() -> None:
    before = HostSample(pressure_seconds=10.0, steal_ticks=5, total_ticks=1000, load=0.1)
    after = HostSample(pressure_seconds=10.5, steal_ticks=25, total_ticks=1400, load=0.75)
    reading = reading_of(host=(before, after))
    assert (reading.cpu_pressure, reading.cpu_steal, reading.cpu_load) == (0.25, 0.05, 0.75)
    assert reading.missing == {}


def test_own_processes_are_this_one_and_its_descendants() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        processes = Processes(before=frozenset(), own_pid=OWN)
        assert processes.count_foreign(frozenset({OWN, child.pid})) == (0, "")
        assert processes.count_foreign(frozenset({child.pid, 1, OTHER})) == (2, "")
        child.communicate(b"\n")
    # One that has ended is remembered while the driver still lists it.
    assert processes.count_foreign(frozenset({child.pid})) == (0, "")


@pytest.mark.parametrize(
    ("before", "present", "count", "why"),
    [
        (None, {OTHER}, None, "the driver's process ids are not this container's"),
        (set(), {OTHER}, None, "the driver's process ids are not this container's"),
        ({OTHER, OTHER + 1}, {OTHER, OTHER + 2}, 1, ""),  # who was there before is another's whatever the ids mean
        (set(), set(), None, "the driver shows no process on the GPU, not even the trial's own"),
    ],
)
def test_processes_whose_ids_may_be_another_container_s(
    before: set[int] | None, present: set[int], count: int | None, why: str
) -> None:
    processes = Processes(None if before is None else frozenset(before), own_pid=OWN)
    assert processes.count_foreign(frozenset(present)) == (count, why)


def test_the_most_foreign_processes_at_once_count() -> None:
    seen = (frozenset({OWN}), frozenset({OWN, OTHER, OTHER + 1}), frozenset({OWN, OTHER}))
    reading = reading_of(*(fake_sample(processes=processes) for processes in seen))
    assert reading.foreign_processes == 2
    assert "foreign_processes" not in reading.missing


def test_processes_that_may_not_be_listed_are_said_to_be_missing() -> None:
    hidden = fake_sample(processes=None, missing={"processes": "Insufficient Permissions"})
    reading = reading_of(hidden, hidden)
    assert (reading.foreign_processes, reading.missing) == (
        None,
        {"foreign_processes": "Insufficient Permissions", "energy_joules": "the driver's counter did not move"},
    )


def test_a_note_gives_each_reason_once() -> None:
    readings = [
        fake_reading(missing={"power_watts": "Not Supported", "sm_clock_hertz": "Not Supported"}),
        fake_reading(missing={"power_watts": "Not Supported", "energy_joules": "GPU is lost"}),
    ]
    facts = fake_gpu_facts(missing={"persistence_mode": "Not Supported"})
    assert telemetry_note(readings, facts) == (
        "not available: power_watts, sm_clock_hertz, persistence_mode (Not Supported); energy_joules (GPU is lost)"
    )
    assert telemetry_note([fake_reading()], fake_gpu_facts()) == telemetry_note([], None) == ""
    still = [fake_reading(missing={"energy_joules": "the driver's counter did not move"})]
    assert telemetry_note(still, None) == "not available: energy_joules (the driver's counter did not move)"
    assert telemetry_note(still, None, EnergyMeasurement(missing="nothing was read")) == telemetry_note(still, None)
    assert not telemetry_note(still, None, EnergyMeasurement(joules=500.0, seconds=1.0, num_ticks=10))


def ticking(*joules: float | None, period: float = 0.02) -> list[tuple[float, Sample]]:
    return [(index * period, fake_sample(energy_joules=each)) for index, each in enumerate(joules)]


def test_energy_is_taken_from_tick_to_tick() -> None:
    samples = ticking(7.0, 7.0, 50.0, 50.0, 50.0, 100.0, 100.0, 150.0, 150.0, 200.0, 200.0)
    found = measure_energy(samples)
    assert (found.joules, found.num_ticks, found.missing) == (150.0, 3, "")
    assert found.seconds == pytest.approx(0.14)
    assert found.late_seconds == pytest.approx(0.02)


def test_a_tick_may_have_come_any_time_since_the_last_look() -> None:
    looks = [(0.0, 1.0), (0.005, 2.0), (0.1, 3.0), (0.2, 4.0), (0.3, 4.0), (0.312, 5.0)]
    found = measure_energy([(when, fake_sample(energy_joules=joules)) for when, joules in looks])
    assert found.late_seconds == pytest.approx(0.012), "of the first and the last tick; others do not matter"


@pytest.mark.parametrize(
    ("samples", "why"),
    [
        (ticking(1.0, 1.0, 2.0, 3.0, 4.0), "the driver's counter ticked 3 times in 0.08 s"),
        ([(0.0, fake_sample(energy_joules=None, missing={"energy_joules": "Not Supported"}))], "Not Supported"),
        ([(0.0, fake_sample(energy_joules=None))], "nothing was read"),
        ([], "nothing was read"),
    ],
)
def test_where_too_little_was_read_it_says_so(samples: list[tuple[float, Sample]], why: str) -> None:
    assert measure_energy(samples) == EnergyMeasurement(missing=why)


# Several GPUs

HOST_S = {"cpu_pressure", "cpu_steal", "cpu_load"}


def together(*readings: TelemetrySummary, why_not: dict[str, str] | None = None) -> TelemetrySummary:
    each = {f"cuda:{index}": reading for index, reading in enumerate(readings)}
    return combine_readings(each, why_not or {}, 1.0)


def test_readings_of_gpus_are_combined() -> None:
    first = fake_reading(
        sm_clock_hertz=1.9e9,
        min_sm_clock_hertz=1.2e9,
        throttle_reasons=("gpu_idle", "sw_power_cap"),
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
    assert [(each.device, each.sm_clock_hertz) for each in both.each_gpu] == [("cuda:0", 1.9e9), ("cuda:1", 1.5e9)]
    assert both.each_gpu[0].throttle_reasons == ("gpu_idle", "sw_power_cap")
    assert together(first).each_gpu == (), "one GPU's reading says it already"
    assert both.affected_gpus["sw_power_cap"] == ("cuda:0",)
    assert both.affected_gpus["hw_slowdown"] == ("cuda:1",)
    assert "gpu_idle" not in both.affected_gpus, "what all have in common needs no names"
    assert together(first).affected_gpus == {}


def test_every_field_is_combined() -> None:
    beside = {"seconds", "num_gpus", "missing", "affected_gpus", "foreign_processes"} | HOST_S
    reading = fake_reading(**dict.fromkeys(HOST_S))
    for name in set(TelemetrySummary.model_fields) - beside:
        assert getattr(together(reading), name) == getattr(reading, name) is not None
    for name in set(GpuFacts.model_fields) - {"missing"}:
        facts = fake_gpu_facts()
        assert getattr(combine_facts({"cuda:0": facts}, {}), name) == getattr(facts, name) is not None


@pytest.mark.parametrize("name", ["power_watts", "energy_joules"])
def test_a_sum_needs_all_gpus(name: str) -> None:
    lacking = fake_reading(**{name: None, "missing": {name: "Not Supported"}})
    found = together(fake_reading(), lacking)
    assert getattr(found, name) is None
    assert (found.num_gpus, found.missing) == (2, {name: "cuda:1: Not Supported"})
    found = together(fake_reading(sm_clock_hertz=1.7e9), why_not={"cuda:1": "GPU is lost"})
    assert getattr(found, name) is found.gpu_power_watts is None
    assert (found.num_gpus, found.sm_clock_hertz, found.missing) == (1, 1.7e9, {"gpu": "cuda:1: GPU is lost"})


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


def test_facts_of_gpus_are_combined() -> None:
    healthy = fake_gpu_facts()
    other = fake_gpu_facts(
        max_sm_clock_hertz=1.7e9,
        power_limit_watts=600.0,
        persistence_mode=False,
        ecc_mode=False,
        ecc_errors=3,
        max_pcie_width=8,
        nvlinked_gpus=0,
    )
    for pair in ((healthy, other), (other, healthy)):
        found = combine_facts({"cuda:0": pair[0], "cuda:1": pair[1]}, {})
        assert (found.persistence_mode, found.ecc_mode, found.ecc_errors) == (False, False, 3)
        assert (found.max_sm_clock_hertz, found.power_limit_watts, found.max_pcie_width) == (1.7e9, 600.0, 8)
        assert found.nvlinked_gpus == 0
    assert combine_facts({"cuda:0": healthy}, {"cuda:1": "lost"}).missing == {"gpu": "cuda:1: lost"}


def test_energies_of_gpus_are_combined() -> None:
    first = EnergyMeasurement(joules=500.0, seconds=1.0, num_ticks=10, late_seconds=0.004)
    second = EnergyMeasurement(joules=270.0, seconds=0.9, num_ticks=9, late_seconds=0.006)
    found = combine_energy({"cuda:0": first, "cuda:1": second}, {})
    assert found.joules / found.seconds == pytest.approx(500.0 + 300.0), "powers add up, though counters tick apart"
    assert (found.seconds, found.num_ticks, found.late_seconds, found.num_gpus) == (0.9, 9, 0.006, 2)
    assert combine_energy({"cuda:0": first}, {}) == first
    still = EnergyMeasurement(missing="the driver's counter ticked 1 times in 0.5 s")
    found = combine_energy({"cuda:0": first, "cuda:1": still}, {})
    assert (found.joules, found.missing) == (0.0, f"cuda:1: {still.missing}")
    assert combine_energy({"cuda:0": first}, {"cuda:1": "lost"}).missing == "cuda:1: lost"
    assert combine_energy({"cuda:0": still, "cuda:1": still}, {}).missing == still.missing
