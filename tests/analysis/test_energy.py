"""Energy and cost, on made-up readings."""

import pytest
import scipy.stats
from fake_engine import fake_environment, fake_facts, fake_spec, fake_trial
from fake_gpu import fake_reading

from castwise.analysis.energy import Prices, cost_of, energy_of, gpus_read, joules_per_unit, power_watts
from castwise.errors import UsageError
from castwise.records.schema import EnergyMeasurement, Epoch, RankSamples, TelemetrySummary, Trial


def watched(*readings: TelemetrySummary, units_per_sample: int = 1, **changes: object) -> Trial:
    """Return a trial of one step of 256 samples and 0.1 s a block."""
    spec = fake_spec(**changes)
    facts = fake_facts(units_per_sample=units_per_sample)
    trial = fake_trial(spec, step_seconds=(0.1,) * len(readings), facts=facts)
    return trial.model_copy(update={"readings": readings})


def counted(*joules: float | None) -> Trial:
    return watched(*(fake_reading(energy_joules=each, power_watts=500.0, seconds=0.1) for each in joules))


def test_the_counter_s_energy_over_all_units() -> None:
    energy = energy_of(counted(256.0, 512.0))
    assert energy is not None
    assert (energy.joules_per_unit, energy.source) == (1.5, "counter")
    assert energy.power_watts == pytest.approx(3840.0)
    assert (energy.low, energy.high) == (None, None)
    tokens = watched(fake_reading(energy_joules=256.0, seconds=0.1), units_per_sample=35)
    assert joules_per_unit(tokens) == pytest.approx(1 / 35)


def test_where_the_counter_stood_still_in_a_block_power_is_taken_for_all() -> None:
    energy = energy_of(counted(256.0, None, 512.0))
    assert energy is not None
    assert (energy.joules_per_unit, energy.source) == (50.0 / 256, "power × time")


@pytest.mark.parametrize(
    "trial",
    [
        fake_trial(),
        fake_trial(step_seconds=()),
        watched(fake_reading(energy_joules=None, power_watts=None)),
        watched(fake_reading(energy_joules=None, power_watts=None), fake_reading()),
        watched(TelemetrySummary(seconds=0.0)),
    ],
)
def test_without_readings_there_is_no_energy(trial: Trial) -> None:
    assert energy_of(trial) is joules_per_unit(trial) is None


def test_the_interval_is_student_s() -> None:
    energy = energy_of(counted(256.0, 512.0, 768.0))
    assert energy is not None
    low, high = scipy.stats.t.interval(0.95, 2, loc=2.0, scale=1 / 3**0.5)
    assert (energy.low, energy.high) == (pytest.approx(low, abs=0.03), pytest.approx(high, abs=0.03))


def test_power_is_weighed_by_time() -> None:
    trial = watched(fake_reading(power_watts=100.0, seconds=3.0), fake_reading(power_watts=500.0, seconds=1.0))
    assert power_watts(trial) == 200.0
    assert power_watts(fake_trial()) is None


def epochs(*samples: int, parallelism: str = "none", world_size: int = 1) -> Trial:
    listed = tuple(
        Epoch(
            seconds=10.0,
            data_seconds=0.0,
            num_steps=10,
            num_samples=each,
            counted_seconds=10.0,
            counted_samples=each,
            losses=((9, 1.0),),
            learning_rate=0.1,
        )
        for each in samples
    )
    trial = fake_trial(fake_spec(parallelism=parallelism, world_size=world_size), step_seconds=(), facts=fake_facts())
    return trial.model_copy(update={"ranks": (RankSamples(epochs=listed),)})


def test_an_epoch_that_an_earlier_process_ran_is_left_out() -> None:
    readings = (TelemetrySummary(seconds=0.0), fake_reading(energy_joules=500.0))
    trial = epochs(1000, 1000).model_copy(update={"readings": readings})
    assert joules_per_unit(trial) == 0.5


def test_of_data_parallel_gpus_the_first_has_its_share_of_the_samples() -> None:
    trial = epochs(1000, parallelism="dp", world_size=4)
    assert joules_per_unit(trial.model_copy(update={"readings": (fake_reading(energy_joules=500.0),)})) == 2.0


def test_an_epoch_s_cost_by_energy_and_by_time() -> None:
    # 2560 samples a second, 1 J each.
    cost = cost_of(counted(256.0, 256.0), 3_600_000, Prices(per_kwh=0.3, per_gpu_hour=2.0))
    assert cost is not None
    assert cost.joules == 3.6e6
    assert cost.energy_cost == pytest.approx(0.3)
    assert cost.seconds == pytest.approx(3_600_000 / 2560)
    assert cost.gpu_hour_cost == pytest.approx(2.0 * 1000 / 2560)


def test_of_several_gpus_all_are_paid_for() -> None:
    one = counted(256.0)
    two = watched(fake_reading(energy_joules=256.0, seconds=0.1), world_size=2, parallelism="ddp")
    prices = Prices(per_kwh=0.3, per_gpu_hour=2.0)
    alone, both = cost_of(one, 10_000, prices), cost_of(two, 10_000, prices)
    assert alone is not None
    assert both is not None
    assert both.seconds == alone.seconds / 2
    assert both.joules == alone.joules
    assert both.gpu_hour_cost == pytest.approx(alone.gpu_hour_cost)


def test_what_cannot_be_reckoned_is_none() -> None:
    unwatched = cost_of(fake_trial(), 100, Prices(per_kwh=0.3, per_gpu_hour=2.0))
    assert unwatched is not None
    assert (unwatched.joules, unwatched.energy_cost) == (None, None)
    assert unwatched.gpu_hour_cost is not None
    on_cpu = fake_trial(fake_spec(device="cpu"), environment=fake_environment(None))
    cpu_cost = cost_of(on_cpu, 100, Prices(per_gpu_hour=2.0))
    assert cpu_cost is not None
    assert cpu_cost.gpu_hour_cost is None
    assert cost_of(fake_trial(step_seconds=()), 100, Prices(per_kwh=0.3)) is None


@pytest.mark.parametrize("price", [-1.0, float("nan"), float("inf")])
def test_a_price_that_is_none_is_refused(price: float) -> None:
    with pytest.raises(UsageError, match="per kWh is impossible"):
        Prices(per_kwh=price).check()
    with pytest.raises(UsageError, match="per GPU hour is impossible"):
        Prices(per_gpu_hour=price).check()
    Prices(0.0, 0.0).check()
    assert Prices(per_kwh=0.0)
    assert not Prices()


def test_short_turns_among_others_tell_no_energy() -> None:
    alone = counted(256.0, 512.0)
    assert joules_per_unit(alone.model_copy(update={"session_id": "s"})) is None
    assert power_watts(alone.model_copy(update={"session_id": "s"})) is None
    long = tuple(fake_reading(seconds=2.0, energy_joules=20 * joules) for joules in (256.0, 512.0))
    assert joules_per_unit(alone.model_copy(update={"session_id": "s", "readings": long})) == pytest.approx(1.5)


def test_of_a_block_s_reading_only_the_share_of_its_steps_counts() -> None:
    """The counter ticks ten times a second: a block of 0.1 s has the ticks of the time that it was watched for."""
    energy = energy_of(watched(*[fake_reading(energy_joules=320.0, seconds=0.125)] * 3))
    assert energy is not None
    assert energy.joules_per_unit == pytest.approx(1.0)
    assert energy.power_watts == pytest.approx(2560.0)


def metered(**changes: object) -> Trial:
    fields = {"joules": 500.0, "seconds": 1.0, "num_ticks": 10, "step_seconds": 0.2}
    return counted(256.0, 512.0).model_copy(
        update={"energy_measurement": EnergyMeasurement.model_validate(fields | changes)}
    )


def test_a_stretch_of_steps_tells_more_than_blocks() -> None:
    energy = energy_of(metered())
    assert energy is not None
    assert energy.source == "sustained counter"
    assert energy.power_watts == power_watts(metered()) == 500.0
    assert energy.joules_per_unit == joules_per_unit(metered()) == pytest.approx(500.0 * 0.2 / 256), "of its own steps"
    unknown = metered(step_seconds=0.0)
    assert joules_per_unit(unknown) == pytest.approx(500.0 * 0.1 / 256)
    assert energy.low == pytest.approx(energy.joules_per_unit * (1 - 0.0155))
    assert energy.high == pytest.approx(energy.joules_per_unit * (1 + 0.0155))


def test_a_stretch_without_ticks_tells_nothing() -> None:
    energy = energy_of(metered(joules=0.0, seconds=0.0, missing="the driver's counter ticked 1 times in 0.1 s"))
    assert energy is not None
    assert energy.source == "counter"


def on_four(trial: Trial, parallelism: str = "ddp") -> Trial:
    return trial.model_copy(update={"spec": fake_spec(world_size=4, parallelism=parallelism)})


@pytest.mark.parametrize("parallelism", ["ddp", "dp"])
@pytest.mark.parametrize("source", ["counter", "power × time"])
def test_a_reading_of_all_gpus_is_not_scaled_again(parallelism: str, source: str) -> None:
    """Four GPUs, each as the one: as many joules a unit, and as many watts a GPU."""
    joules = 256.0 if source == "counter" else None
    one = counted(joules, joules, joules)
    old = on_four(one, parallelism)
    new = old.model_copy(update={"readings": tuple(_of_four(each) for each in one.readings)})
    energies = [energy_of(trial) for trial in (one, old, new)]
    for energy in energies:
        assert energy is not None
        assert energy.source == source
        assert energy.joules_per_unit == pytest.approx(1.0 if source == "counter" else 50.0 / 256)
        assert energy.power_watts == pytest.approx(2560.0 if source == "counter" else 500.0)
    assert power_watts(one) == power_watts(old) == power_watts(new) == pytest.approx(500.0)


def _of_four(reading: TelemetrySummary) -> TelemetrySummary:
    joules, watts = reading.energy_joules, reading.power_watts or 0.0
    update = {"num_gpus": 4, "energy_joules": None if joules is None else 4 * joules, "power_watts": 4 * watts}
    return reading.model_copy(update=update)


def test_a_stretch_of_all_gpus_is_not_scaled_again() -> None:
    assert joules_per_unit(on_four(metered())) == joules_per_unit(metered()), "in older records, of the first GPU alone"
    four = on_four(metered(joules=2000.0, num_gpus=4))
    assert joules_per_unit(four) == pytest.approx(joules_per_unit(metered()))
    assert power_watts(four) == 500.0


@pytest.mark.parametrize("parallelism", ["ddp", "dp"])
def test_epochs_of_all_gpus_have_the_samples_of_all(parallelism: str) -> None:
    # A rank trains on a quarter; DataParallel's one process on all.
    trial = epochs(1000 if parallelism == "ddp" else 4000, parallelism=parallelism, world_size=4)
    reading = fake_reading(energy_joules=6000.0, num_gpus=4)
    assert joules_per_unit(trial.model_copy(update={"readings": (reading,)})) == pytest.approx(1.5)


def test_of_how_many_gpus_energy_was_read() -> None:
    two = {"world_size": 2, "parallelism": "ddp"}
    assert gpus_read(watched(fake_reading(), fake_reading(), **two)) == 1
    assert gpus_read(watched(fake_reading(num_gpus=2), fake_reading(num_gpus=2), **two)) == 2
    sustained = EnergyMeasurement(joules=100.0, seconds=1.0, late_seconds=0.005, num_gpus=2)
    metered = watched(fake_reading(), **two).model_copy(update={"energy_measurement": sustained})
    assert gpus_read(metered) == 2, "the stretch is what energy comes from"
    assert gpus_read(fake_trial()) is None
