"""From samples to a reading, and whose processes are whose."""

import os
import subprocess
import sys

import pytest
from fake_gpu import fake_gpu_facts, fake_reading, fake_sample

from castwise.records.schema import EnergyMeasurement, TelemetrySummary
from castwise.telemetry.gpu import Sample
from castwise.telemetry.host import HostSample
from castwise.telemetry.summarize import Processes, make_reading, metered, note_of, unwatched

QUIET = HostSample(pressure_seconds=None, steal_ticks=None, total_ticks=None, load=None)
OWN = os.getpid()
OTHER = 2**22 + 1  # over the kernel's greatest (PID_MAX_LIMIT)


def reading_of(*samples: Sample, host: tuple[HostSample, HostSample] = (QUIET, QUIET)) -> TelemetrySummary:
    return make_reading({"cuda:0": samples} if samples else {}, Processes(before=frozenset(), own_pid=OWN), host, 2.0)


def test_clocks_and_power_are_those_while_the_gpu_was_at_work() -> None:
    rates = [(210e6, 100.0), (1900e6, 600.0), (1800e6, 700.0), (345e6, 90.0)]
    reading = reading_of(*(fake_sample(sm_clock_hertz=clock, power_watts=power) for clock, power in rates))
    assert (reading.sm_clock_hertz, reading.min_sm_clock_hertz, reading.power_watts) == (1850e6, 1800e6, 650.0)
    assert reading.num_samples == 4
    assert reading.seconds == 2.0


def test_a_block_too_short_for_samples_has_those_beside_it() -> None:
    reading = reading_of(fake_sample(sm_clock_hertz=1e9), fake_sample(sm_clock_hertz=2e9))
    assert (reading.sm_clock_hertz, reading.min_sm_clock_hertz) == (1.5e9, 1e9)


def test_what_is_highest_and_what_was_seen_at_all() -> None:
    reading = reading_of(
        fake_sample(temperature_celsius=40.0, throttle_reasons=("gpu_idle",), pcie_generation=1, ecc_errors=0),
        fake_sample(temperature_celsius=60.0, throttle_reasons=("sw_power_cap",), pcie_generation=5, ecc_errors=1),
        fake_sample(temperature_celsius=55.0, throttle_reasons=("gpu_idle",), pcie_generation=5, ecc_errors=2),
    )
    assert reading.max_temperature_celsius == 60.0
    assert reading.throttle_reasons == ("gpu_idle", "sw_power_cap")
    assert (reading.pcie_generation, reading.ecc_errors) == (5, 2)


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


def test_a_field_that_is_missing_says_why_under_the_reading_s_name() -> None:
    hidden = {"temperature_celsius": "Not Supported", "power_watts": "Insufficient Permissions"}
    bare = fake_sample(temperature_celsius=None, power_watts=None, missing=hidden)
    reading = reading_of(bare, bare)
    assert (reading.max_temperature_celsius, reading.power_watts) == (None, None)
    assert reading.missing["max_temperature_celsius"] == "Not Supported"
    assert reading.missing["power_watts"] == "Insufficient Permissions"
    assert set(reading.missing) <= set(TelemetrySummary.model_fields)


def test_a_field_lost_on_the_way_says_so_and_keeps_what_there_was() -> None:
    lost = fake_sample(power_watts=None, missing={"power_watts": "GPU is lost"})
    reading = reading_of(fake_sample(), fake_sample(power_watts=300.0), lost, lost)
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


def test_ids_that_are_not_this_container_s_raise_no_alarm() -> None:
    unknown = Processes(before=None, own_pid=OWN).count_foreign(frozenset({OTHER}))
    alone = Processes(before=frozenset(), own_pid=OWN).count_foreign(frozenset({OTHER}))
    assert unknown == alone == (None, "the driver's process ids are not this container's")


def test_who_was_there_before_is_another_s_whatever_the_ids_mean() -> None:
    processes = Processes(before=frozenset({OTHER, OTHER + 1}), own_pid=OWN)
    assert processes.count_foreign(frozenset({OTHER, OTHER + 2})) == (1, "")


def test_a_driver_that_shows_not_even_our_own_tells_nothing() -> None:
    count, why = Processes(before=frozenset(), own_pid=OWN).count_foreign(frozenset())
    assert count is None
    assert "not even the trial's own" in why


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
    assert note_of(readings, facts) == (
        "not available: power_watts, sm_clock_hertz, persistence_mode (Not Supported); energy_joules (GPU is lost)"
    )
    assert note_of([fake_reading()], fake_gpu_facts()) == note_of([], None) == ""
    still = [fake_reading(missing={"energy_joules": "the driver's counter did not move"})]
    assert note_of(still, None) == "not available: energy_joules (the driver's counter did not move)"
    assert note_of(still, None, EnergyMeasurement(missing="nothing was read")) == note_of(still, None)
    assert not note_of(still, None, EnergyMeasurement(joules=500.0, seconds=1.0, num_ticks=10))


def test_epochs_of_an_earlier_process_have_empty_readings() -> None:
    assert [reading.seconds for reading in unwatched(2)] == [0.0, 0.0]


def ticking(*joules: float | None, period: float = 0.02) -> list[tuple[float, Sample]]:
    return [(index * period, fake_sample(energy_joules=each)) for index, each in enumerate(joules)]


def test_energy_is_taken_from_tick_to_tick() -> None:
    samples = ticking(7.0, 7.0, 50.0, 50.0, 50.0, 100.0, 100.0, 150.0, 150.0, 200.0, 200.0)
    found = metered(samples)
    assert (found.joules, found.num_ticks, found.missing) == (150.0, 3, "")
    assert found.seconds == pytest.approx(0.14)
    assert found.late_seconds == pytest.approx(0.02)


def test_a_tick_may_have_come_any_time_since_the_last_look() -> None:
    looks = [(0.0, 1.0), (0.005, 2.0), (0.1, 3.0), (0.2, 4.0), (0.3, 4.0), (0.312, 5.0)]
    found = metered([(when, fake_sample(energy_joules=joules)) for when, joules in looks])
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
    assert metered(samples) == EnergyMeasurement(missing=why)
