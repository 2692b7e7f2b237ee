"""Energy and cost, on made-up readings."""

import pytest
from fake_engine import fake_environment, fake_facts, fake_spec, fake_trial
from fake_gpu import fake_reading

from castwise.analysis.energy import Prices, cost_of, energy_of, gpus_read, joules_per_unit, power_watts
from castwise.analysis.statistics import estimate, has_interval
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


@pytest.mark.parametrize(
    ("trial", "joules", "source"),
    [
        (counted(256.0, 512.0), 1.5, "counter"),
        # A counter that stood still in one block: power is taken for all.
        (counted(256.0, None, 512.0), 50.0 / 256, "power × time"),
        (watched(fake_reading(energy_joules=256.0, seconds=0.1), units_per_sample=35), 1 / 35, "counter"),
        # A reading that lasts longer than the steps in it: their share counts.
        (watched(*[fake_reading(energy_joules=320.0, seconds=0.125)] * 3), 1.0, "counter"),
    ],
)
def test_energy_of_blocks(trial: Trial, joules: float, source: str) -> None:
    assert joules_per_unit(trial) == pytest.approx(joules)
    assert source_of(trial) == source


def source_of(*trials: Trial) -> str | None:
    energy = energy_of(trials)
    return energy and energy[1]


def test_the_interval_is_that_between_processes() -> None:
    processes = [counted(256.0), counted(384.0), counted(512.0)]
    energy = energy_of(processes)
    assert energy is not None
    assert energy[0] == estimate([1.0, 1.5, 2.0])
    one = energy_of([counted(256.0, 512.0, 768.0)])
    assert one is not None
    assert not has_interval(one[0]), "blocks of one process do not say how others differ"
    mixed = energy_of([metered(), metered(joules=600.0), *processes])
    assert mixed is not None
    assert (mixed[0].n, mixed[1]) == (2, "sustained counter"), "of the best source alone"


def test_power_of_interleaved_short_blocks_is_unknown() -> None:
    alone = counted(256.0, 512.0)
    interleaved = alone.model_copy(update={"session_id": "s"})
    assert joules_per_unit(interleaved) is power_watts(interleaved) is None
    long = tuple(fake_reading(seconds=2.0, energy_joules=20 * joules) for joules in (256.0, 512.0))
    assert joules_per_unit(interleaved.model_copy(update={"readings": long})) == pytest.approx(1.5)


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
def test_no_energy_without_readings(trial: Trial) -> None:
    assert energy_of([trial]) is joules_per_unit(trial) is None


def test_power_is_weighted_by_time() -> None:
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


@pytest.mark.parametrize(
    ("samples", "parallelism", "num_gpus", "joules", "expected"),
    [
        (1000, "dp", 1, 500.0, 2.0),  # read of the first GPU alone: a quarter of the samples
        (4000, "dp", 4, 6000.0, 1.5),
        (1000, "ddp", 4, 6000.0, 1.5),  # a rank has a quarter of the samples
    ],
)
def test_energy_of_epochs_on_four_gpus(
    samples: int, parallelism: str, num_gpus: int, joules: float, expected: float
) -> None:
    readings = (fake_reading(energy_joules=joules, num_gpus=num_gpus),)
    trial = epochs(samples, parallelism=parallelism, world_size=4).model_copy(update={"readings": readings})
    assert joules_per_unit(trial) == pytest.approx(expected)
    assert gpus_read(trial) == num_gpus


def test_cost_of_an_epoch() -> None:
    # 2560 samples a second, 1 J each.
    processes = [counted(128.0, 128.0), counted(512.0, 512.0)]  # their geometric mean
    cost = cost_of(processes, 2560.0, 3_600_000, Prices(per_kwh=0.3, per_gpu_hour=2.0))
    assert cost is not None
    assert cost.joules == pytest.approx(3.6e6)
    assert cost.energy_cost == pytest.approx(0.3)
    assert cost.seconds == pytest.approx(3_600_000 / 2560)
    assert cost.gpu_hour_cost == pytest.approx(2.0 * 1000 / 2560)
    two = watched(fake_reading(energy_joules=256.0, seconds=0.1), world_size=2, parallelism="ddp")
    both = cost_of([two], 5120.0, 3_600_000, Prices(per_kwh=0.3, per_gpu_hour=2.0))
    assert both is not None
    assert (both.seconds, both.joules) == (cost.seconds / 2, pytest.approx(cost.joules))
    assert both.gpu_hour_cost == pytest.approx(cost.gpu_hour_cost), "all GPUs are paid for"


def test_unknown_costs_are_none() -> None:
    unwatched = cost_of([fake_trial()], 10.0, 100, Prices(per_kwh=0.3, per_gpu_hour=2.0))
    assert unwatched is not None
    assert (unwatched.joules, unwatched.energy_cost) == (None, None)
    on_cpu = fake_trial(fake_spec(device="cpu"), environment=fake_environment(None))
    cpu_cost = cost_of([on_cpu], 10.0, 100, Prices(per_gpu_hour=2.0))
    assert cpu_cost is not None
    assert cpu_cost.gpu_hour_cost is None
    assert cost_of([fake_trial()], None, 100, Prices(per_kwh=0.3)) is None


@pytest.mark.parametrize("price", [-1.0, float("nan"), float("inf")])
def test_impossible_prices_are_refused(price: float) -> None:
    with pytest.raises(UsageError, match="per kWh is impossible"):
        Prices(per_kwh=price).check()
    Prices(0.0, 0.0).check()
    assert Prices(per_kwh=0.0)
    assert not Prices()


def metered(**changes: object) -> Trial:
    fields = {"joules": 500.0, "seconds": 1.0, "num_ticks": 10, "step_seconds": 0.2}
    return counted(256.0, 512.0).model_copy(
        update={"energy_measurement": EnergyMeasurement.model_validate(fields | changes)}
    )


def test_energy_of_sustained_steps_goes_before_that_of_blocks() -> None:
    assert source_of(metered()) == "sustained counter"
    assert power_watts(metered()) == 500.0
    assert joules_per_unit(metered()) == pytest.approx(500.0 * 0.2 / 256), "of its own steps"
    assert joules_per_unit(metered(step_seconds=0.0)) == pytest.approx(500.0 * 0.1 / 256)
    assert joules_per_unit(on_four(metered())) == joules_per_unit(metered()), "in older records, of the first GPU alone"
    four = on_four(metered(joules=2000.0, num_gpus=4))
    assert joules_per_unit(four) == pytest.approx(joules_per_unit(metered()))
    assert (power_watts(four), gpus_read(four)) == (500.0, 4)
    assert source_of(metered(joules=0.0, seconds=0.0, missing="the counter ticked once in 0.1 s")) == "counter"
    assert gpus_read(fake_trial()) is None


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
    for trial in (one, old, new):
        assert source_of(trial) == source
        assert joules_per_unit(trial) == pytest.approx(1.0 if source == "counter" else 50.0 / 256)
    assert power_watts(one) == power_watts(old) == power_watts(new) == pytest.approx(500.0)


def _of_four(reading: TelemetrySummary) -> TelemetrySummary:
    joules, watts = reading.energy_joules, reading.power_watts or 0.0
    update = {"num_gpus": 4, "energy_joules": None if joules is None else 4 * joules, "power_watts": 4 * watts}
    return reading.model_copy(update=update)
