"""What measurements prove of a loop's bounds, and nothing else."""

from collections.abc import Mapping

import pytest
from fake_engine import fake_epoch, fake_run, fake_spec, fake_training, fake_trial

from castwise.analysis.causes import power_limit_of
from castwise.analysis.training_metrics import data_share
from castwise.records.schema import EnergyMeasurement, GpuFacts, StepProfile, TelemetrySummary, Trial
from castwise.spec.quantities import format_share
from castwise.spec.trial import TrialSpec
from castwise.tune.bottleneck import what_bounds
from castwise.tune.candidates import Change
from castwise.tune.measurements import Measurements

LOOP = fake_spec()
HALF, TF32, MIXED = Change(batch_size=128), Change(precision="tf32"), Change(precision="bf16-mixed")
GRAPH, RESIDENT = Change(techniques=("cuda-graph",)), Change(techniques=("resident-data",))


def words(seconds: Mapping[Change, float], loop: TrialSpec = LOOP) -> str:
    """Return what bounds a loop whose step takes a second, and as many seconds with each of these changes."""
    trials = [fake_trial(change.on(loop), step_seconds=(time,) * 3) for change, time in seconds.items()]
    return what_bounds(Measurements().plus([fake_trial(loop, step_seconds=(1.0,) * 3), *trials]), loop)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ({}, "what bounds it is not known: no measurement shows it."),
        ({RESIDENT: 0.25}, "bound by input for at least 75 % of the step"),
        ({RESIDENT: 1 / 1.02}, "not bound by input"),
        ({GRAPH: 1 / 1.05}, "bound by launches for at least 4.8 % of the step"),
        ({GRAPH: 1 / 1.04}, "not bound by launches"),
        ({HALF: 0.5}, "its time is proportional to the batch (half the batch takes 50 % of the time)"),
        ({HALF: 0.42}, "its time is proportional to the batch (half the batch takes 42 % of the time)"),
        ({HALF: 0.33}, "is not known: too noisy (half the batch takes 33 % of the time)"),
        ({HALF: 0.61}, "22 % of the step does not depend on the batch"),
        ({HALF: 0.67}, "34 % of the step does not depend on the batch"),
        ({HALF: 1.0}, "most of the step does not depend on the batch"),
        ({TF32: 0.5}, "bound by arithmetic for at least 50 % of the step"),
        ({TF32: 0.5, MIXED: 1 / 3}, "16 bits are 1.50 times as fast as TF32"),
    ],
)
def test_what_bounds_a_loop_is_known_from_neighbouring_loops(seconds: Mapping[Change, float], said: str) -> None:
    assert said in words(seconds)


def test_launches_do_not_bound_a_graph() -> None:
    assert words({}, GRAPH.on(LOOP)) == "launches do not bound it: the step is a CUDA graph."


def test_a_profile_shows_how_long_the_gpu_is_idle() -> None:
    shares = {"elementwise": 0.75}
    profile = StepProfile(device_type="cuda", num_steps=3, seconds=1.0, busy_seconds=0.75, class_seconds=shares)
    loop = LOOP.model_copy(update={"device": "cuda:0"})
    trial = fake_trial(loop, step_seconds=(1.0,) * 3).model_copy(update={"profile": profile})
    assert "the GPU is idle 25 % of the step" in what_bounds(Measurements().plus([trial]), loop)


def test_waiting_for_batches_is_said_of_epochs() -> None:
    loop = fake_training()
    epochs = [fake_epoch(loop, number).model_copy(update={"seconds": 2.0, "data_seconds": 0.5}) for number in (1, 2)]
    waiting, resident = fake_run(loop, *epochs), fake_run(RESIDENT.on(loop))
    share = data_share(waiting)
    assert share is not None
    said = what_bounds(Measurements().plus([waiting, resident]), loop)
    assert f"the host waits for batches {format_share(share)} of the time" in said


def readings(*samples: tuple[float, float, tuple[str, ...]]) -> tuple[TelemetrySummary, ...]:
    return tuple(
        TelemetrySummary(seconds=0.1, num_samples=3, sm_clock_hertz=clock, power_watts=watts, throttle_reasons=reasons)
        for clock, watts, reasons in samples
    )


def trial_with(*samples: tuple[float, float, tuple[str, ...]], max_clock: float | None = 1980e6) -> Trial:
    facts = GpuFacts(max_sm_clock_hertz=max_clock)
    return fake_trial(step_seconds=(0.1,)).model_copy(update={"readings": readings(*samples), "gpu_facts": facts})


CAPPED = ((1860e6, 690.0, ("sw_power_cap",)), (1900e6, 680.0, ("sw_power_cap",)))


def test_a_power_limit_that_holds_the_clock_down_is_named() -> None:
    power = power_limit_of([trial_with(*CAPPED)])
    assert power is not None
    assert power.slowdown is None
    assert "(685 W, 1,880 of 1,980 MHz)" in what_bounds(Measurements().plus([trial_with(*CAPPED)]), LOOP)


def test_the_slowdown_of_sustained_training_is_named() -> None:
    sustained = [EnergyMeasurement(step_seconds=seconds) for seconds in (0.1, 0.1023, 0.1011)]
    trials = [trial_with(*CAPPED).model_copy(update={"energy_measurement": each}) for each in sustained]
    power = power_limit_of(trials)
    assert power is not None
    assert power.slowdown == pytest.approx(0.023)
    assert "up to 2.3 % longer" in what_bounds(Measurements().plus(trials), LOOP)


@pytest.mark.parametrize(
    "samples",
    [
        [(1980e6, 500.0, ()), (1980e6, 690.0, ("sw_power_cap",)), (1800e6, 500.0, ())],  # not in most blocks
        [(1970e6, 690.0, ("sw_power_cap",))],  # hardly below its highest clock
        [(1500e6, 300.0, ("gpu_idle",))],
        [],  # nothing was read
    ],
)
def test_other_clocks_are_not_blamed_on_the_power_limit(samples: list[tuple[float, float, tuple[str, ...]]]) -> None:
    assert power_limit_of([trial_with(*samples)]) is None


def test_without_the_highest_clock_no_power_limit_is_known() -> None:
    assert power_limit_of([trial_with(*CAPPED, max_clock=None)]) is None


@pytest.mark.parametrize(("seconds", "is_proven"), [((0.5, 1.5), False), ((0.5, 0.501), True)])
def test_a_ratio_that_may_be_a_gain_or_none_proves_nothing(seconds: tuple[float, ...], is_proven: bool) -> None:
    trials = []
    for repeat, time in enumerate(seconds):
        for spec, step in ((LOOP, 1.0), (TF32.on(LOOP), time)):
            trial = fake_trial(spec.model_copy(update={"repeat": repeat}), step_seconds=(step,) * 3)
            trials.append(trial.model_copy(update={"session_id": str(repeat)}))
    assert ("arithmetic" in what_bounds(Measurements().plus(trials), LOOP)) is is_proven
