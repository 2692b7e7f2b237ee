"""What a loop's own trials show of its bounds, and nothing else."""

import pytest
from fake_engine import fake_spec, fake_trial

from castwise.analysis.step_evidence import power_limit_of
from castwise.records.schema import EnergyMeasurement, GpuFacts, StepProfile, TelemetrySummary, Trial
from castwise.tune.measurements import Measurements

LOOP = fake_spec()


def bounds(*trials: Trial) -> str:
    return Measurements().plus(trials).what_bounds(trials[0].spec)


def test_without_a_profile_nothing_is_said() -> None:
    assert bounds(fake_trial(LOOP, step_seconds=(1.0,) * 3)) == ""


def test_a_profile_shows_how_long_the_gpu_is_idle() -> None:
    shares = {"elementwise": 0.75}
    profile = StepProfile(
        device_type="cuda", num_steps=3, num_kernels=9, seconds=1.0, busy_seconds=0.75, class_seconds=shares
    )
    loop = LOOP.model_copy(update={"device": "cuda:0"})
    trial = fake_trial(loop, step_seconds=(1.0,) * 3).model_copy(update={"profile": profile})
    said = bounds(trial)
    assert "75 % of the step is work that is bound by memory" in said
    assert "the GPU is idle 25 % of the step" in said


def trial_with(*samples: tuple[float, float, tuple[str, ...]]) -> Trial:
    readings = tuple(
        TelemetrySummary(seconds=0.1, sm_clock_hertz=clock, power_watts=watts, throttle_reasons=reasons)
        for clock, watts, reasons in samples
    )
    return fake_trial(step_seconds=(0.1,), readings=readings, gpu_facts=GpuFacts(max_sm_clock_hertz=1980e6))


CAPPED = ((1860e6, 690.0, ("sw_power_cap",)), (1900e6, 680.0, ("sw_power_cap",)))


def test_the_slowdown_of_sustained_training_is_named() -> None:
    sustained = [EnergyMeasurement(step_seconds=seconds) for seconds in (0.1, 0.1023, 0.1011)]
    trials = [trial_with(*CAPPED).model_copy(update={"energy_measurement": each}) for each in sustained]
    power = power_limit_of(trials)
    assert power is not None
    assert power.slowdown == pytest.approx(0.023)
    assert "at 1,880 of 1,980 MHz (685 W)" in bounds(*trials)
    assert "up to 2.3 % longer" in bounds(*trials)


@pytest.mark.parametrize(
    "samples",
    [
        [(1980e6, 500.0, ()), (1980e6, 690.0, ("sw_power_cap",)), (1800e6, 500.0, ())],  # not in most blocks
        [(1500e6, 300.0, ("gpu_idle",))],
    ],
)
def test_other_clocks_are_not_blamed_on_the_power_limit(samples: list[tuple[float, float, tuple[str, ...]]]) -> None:
    assert power_limit_of([trial_with(*samples)]) is None


def test_without_the_highest_clock_no_power_limit_is_known() -> None:
    assert power_limit_of([trial_with(*CAPPED).model_copy(update={"gpu_facts": GpuFacts()})]) is None
