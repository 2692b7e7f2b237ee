"""What measurements prove of a loop's bounds, and nothing else."""

import pytest
from fake_engine import fake_spec, fake_trial

from castwise.analysis.causes import power_limit_of
from castwise.records.schema import EnergyMeasurement, GpuFacts, TelemetrySummary, Trial
from castwise.tune.bottleneck import Evidence, evidence_of, explain
from castwise.tune.candidates import Change
from castwise.tune.measurements import Measurements


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        (Evidence(), "what bounds it is not known"),
        (Evidence(resident=4.0, waiting=0.25), "bound by input for at least 75 % of the step"),
        (Evidence(resident=1.02), "not bound by input"),
        (Evidence(graph=1.05), "bound by launches for at least 4.8 % of the step"),
        (Evidence(graph=1.04), "not bound by launches"),
        (Evidence(is_graph=True), "the step is a CUDA graph"),
        (Evidence(half=2.0), "its time is proportional to the batch (half the batch takes 50 % of the time)"),
        (Evidence(half=2.4), "its time is proportional to the batch (half the batch takes 42 % of the time)"),
        (Evidence(half=3.0), "is not known: too noisy (half the batch takes 33 % of the time)"),
        (Evidence(half=1.64), "22 % of the step does not depend on the batch"),
        (Evidence(half=1.5), "33 % of the step does not depend on the batch"),
        (Evidence(half=1.0), "most of the step does not depend on the batch"),
        (Evidence(tf32=2.0), "bound by arithmetic for at least 50 % of the step"),
        (Evidence(tf32=2.0, sixteen=1.5), "16 bits are 1.50 times as fast as TF32"),
    ],
)
def test_evidence_in_words(evidence: Evidence, words: str) -> None:
    assert words in explain(evidence)


def test_evidence_comes_from_neighbouring_configurations() -> None:
    loop = fake_spec()
    seconds = {
        loop: 1.0,
        loop.model_copy(update={"batch_size": 128}): 0.8,
        Change(techniques=("cuda-graph",)).on(loop): 0.5,
        Change(precision="tf32").on(loop): 0.4,
        Change(precision="bf16-mixed").on(loop): 0.2,
    }
    trials = [fake_trial(spec, step_seconds=(time,) * 3) for spec, time in seconds.items()]
    found = evidence_of(Measurements().plus(trials), loop)
    assert (found.graph, found.half, found.tf32, found.sixteen) == pytest.approx((2.0, 1.25, 2.5, 2.0))
    assert (found.resident, found.waiting, found.power, found.is_graph) == (None, None, None, False)


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
    assert "(685 W, 1,880 of 1,980 MHz)" in explain(Evidence(power=power))


def test_the_slowdown_of_sustained_training_is_named() -> None:
    sustained = [EnergyMeasurement(step_seconds=seconds) for seconds in (0.1, 0.1023, 0.1011)]
    power = power_limit_of([trial_with(*CAPPED).model_copy(update={"energy_measurement": each}) for each in sustained])
    assert power is not None
    assert power.slowdown == pytest.approx(0.023)
    assert "up to 2.3 % longer" in explain(Evidence(power=power))


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
    loop = fake_spec()
    trials = []
    for repeat, time in enumerate(seconds):
        for spec, step in ((loop, 1.0), (Change(precision="tf32").on(loop), time)):
            trial = fake_trial(spec.model_copy(update={"repeat": repeat}), step_seconds=(step,) * 3)
            trials.append(trial.model_copy(update={"session_id": str(repeat)}))
    assert (evidence_of(Measurements().plus(trials), loop).tf32 is not None) is is_proven
