"""What neighbouring loops prove of a loop's bounds, and that nothing else is said."""

import math

import pytest
from fake_engine import fake_spec, fake_trial

from castwise.analysis.statistics import Estimate
from castwise.records.schema import EnergyMeasurement, GpuFacts, TelemetrySummary
from castwise.tune.bottleneck import Evidence, Power, _is_in_doubt, power_of, words_of


def of(value: float | None) -> Estimate | None:
    return None if value is None else Estimate(value, value, value, 2)


def words(
    graph: float | None = None,
    half: float | None = None,
    tf32: float | None = None,
    sixteen: float | None = None,
    techniques: tuple[str, ...] = (),
    resident: float | None = None,
) -> str:
    loop = fake_spec(techniques=techniques)
    return words_of(Evidence(loop, of(graph), of(half), of(tf32), of(sixteen), of(resident), waiting=0.25))


@pytest.mark.parametrize(
    ("resident", "said"),
    [
        (4.0, "bound by its input for 75 % of the step at the least: with its data on the device it is 4.00 times"),
        (1.02, "not bound by its input: with its data on the device it is 1.02 times as fast"),
    ],
)
def test_resident_data_tells_of_input(resident: float, said: str) -> None:
    assert words(resident=resident).startswith(said)
    assert "the host waits for batches 25 % of the time" in words(resident=resident)


def test_without_evidence_nothing_is_known() -> None:
    assert words() == "what bounds it is not known: nothing that would tell was measured beside it."


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        (2.0, "bound by launches for 50 % of the step at the least"),
        (1.05, "bound by launches for 4.8 % of the step"),
        (1.04, "not bound by launches"),
        (0.9, "not bound by launches"),
    ],
)
def test_a_graph_tells_of_launches(graph: float, said: str) -> None:
    assert words(graph=graph).startswith(said)


def test_a_loop_that_is_a_graph_has_one_launch() -> None:
    assert words(techniques=("cuda-graph",)) == "its launches are one already."


@pytest.mark.parametrize(
    ("half", "said"),
    [
        (2.0, "its time goes with the work (half the batch takes 50 % of the time)"),
        (1.5, "33 % of the step is there whatever the batch"),
        (1.0, "most of the step is there whatever the batch"),
    ],
)
def test_half_the_batch_tells_what_does_not_depend_on_it(half: float, said: str) -> None:
    assert said in words(half=half)


def test_tf32_tells_of_arithmetic_and_16_bits_do_not_tell_which() -> None:
    assert "bound by arithmetic for 50 % of the step at the least" in words(tf32=2.0)
    assert "not bound by the arithmetic of products" in words(tf32=1.01)
    assert "which of the two, these measurements do not tell" in words(tf32=2.0, sixteen=1.5)
    assert "16 bits" not in words(tf32=2.0, sixteen=1.0)


def readings(*samples: tuple[float, float, tuple[str, ...]]) -> list[TelemetrySummary]:
    return [
        TelemetrySummary(seconds=0.1, num_samples=3, sm_clock_hertz=clock, power_watts=watts, throttle_reasons=reasons)
        for clock, watts, reasons in samples
    ]


def held(*samples: tuple[float, float, tuple[str, ...]], most: float | None = 1980e6) -> Power | None:
    trial = fake_trial(fake_spec()).model_copy(update={"readings": tuple(readings(*samples))})
    return power_of([trial.model_copy(update={"gpu_facts": GpuFacts(max_sm_clock_hertz=most)})])


def test_a_power_limit_that_holds_the_clock_down_is_named() -> None:
    capped = held((1860e6, 690.0, ("sw_power_cap",)), (1900e6, 680.0, ("sw_power_cap",)))
    said = words_of(Evidence(fake_spec(), None, of(1.9), None, None, power=capped))
    assert said.endswith(
        "held by the board's power limit in 100 % of its blocks (685 W, 1,880 of 1,980 MHz): what takes fewer "
        "joules is faster."
    )


def test_what_the_limit_takes_from_a_training_that_lasts_is_said() -> None:
    reading = readings((1860e6, 690.0, ("sw_power_cap",)))
    update = {"readings": tuple(reading), "gpu_facts": GpuFacts(max_sm_clock_hertz=1980e6)}
    stretches = [EnergyMeasurement(step_seconds=seconds) for seconds in (0.1, 0.1023, 0.1011)]
    trials = [
        fake_trial(step_seconds=(0.1,)).model_copy(update={**update, "energy_measurement": each}) for each in stretches
    ]
    said = words_of(Evidence(fake_spec(), None, of(1.9), None, None, power=power_of(trials)))
    assert said.endswith("is faster; steps that run on and on take up to 2.3 % longer than the timed blocks.")


@pytest.mark.parametrize(
    "samples",
    [
        [(1980e6, 500.0, ()), (1980e6, 690.0, ("sw_power_cap",)), (1800e6, 500.0, ())],  # not in most blocks
        [(1970e6, 690.0, ("sw_power_cap",))],  # hardly below its highest clock
        [(1500e6, 300.0, ("gpu_idle",))],
    ],
)
def test_a_clock_that_a_power_limit_does_not_hold_is_not_laid_to_it(
    samples: list[tuple[float, float, tuple[str, ...]]],
) -> None:
    power = held(*samples)
    assert power is not None
    assert "power" not in words_of(Evidence(fake_spec(), None, of(1.9), None, None, power=power))


def test_without_clocks_or_reasons_nothing_is_known_of_power() -> None:
    assert held((1980e6, 690.0, ()), most=None) is None
    assert held() is None


@pytest.mark.parametrize(
    ("low", "high", "in_doubt"),
    [(0.46, 3.06, True), (0.99, 1.01, False), (1.1, 1.3, False), (0.8, 0.9, False), (math.nan, math.nan, False)],
)
def test_a_ratio_that_may_be_a_gain_or_none_tells_nothing(low: float, high: float, in_doubt: bool) -> None:
    """MNIST on an H200: TF32 was 1.19 times as fast in two sittings, with an interval from 0.46 to 3.06."""
    assert _is_in_doubt(Estimate(1.19, low, high, 2)) is in_doubt
