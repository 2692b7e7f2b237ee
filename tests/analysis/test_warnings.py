"""Every warning fires on the record it is for, and on no other."""

import pytest
from fake_engine import fake_environment, fake_facts, fake_spec, fake_trial
from fake_gpu import fake_gpu_facts, fake_reading
from syrupy.assertion import SnapshotAssertion

from castwise.analysis.result_table import rows_of_steps
from castwise.analysis.warnings import WARNING_NAMES, warnings_of, warnings_of_all
from castwise.records.schema import EnergyMeasurement, StepFlops, TelemetrySummary, Trial, WorkBetweenSteps
from castwise.show.notes import remarks

NUM_BLOCKS = 8
STEADY = (0.1,) * NUM_BLOCKS


def trial_with(
    *readings: TelemetrySummary, seconds: tuple[float, ...] = STEADY, settled: bool = True, **facts: object
) -> Trial:
    """Return a healthy trial but for what is said; one reading stands for all blocks."""
    listed = readings if len(readings) != 1 else readings * len(seconds)
    return fake_trial(
        step_seconds=seconds,
        facts=fake_facts(settled=settled),
        readings=listed,
        gpu_facts=fake_gpu_facts(**facts),
    )


def all_but_last(first: TelemetrySummary, last: TelemetrySummary) -> tuple[TelemetrySummary, ...]:
    return (*(first,) * (NUM_BLOCKS - 1), last)


COLD, WARM = fake_reading(max_temperature_celsius=50.0), fake_reading(max_temperature_celsius=56.0)


def sustained(step_seconds: float, blocks: tuple[float, ...] = (0.1,) * 8) -> Trial:
    """Return a trial under a power cap with sustained steps of this length."""
    readings = (fake_reading(throttle_reasons=("sw_power_cap",), power_watts=690.0),) * 8
    measured = EnergyMeasurement(step_seconds=step_seconds)
    return fake_trial(step_seconds=blocks).model_copy(update={"readings": readings, "energy_measurement": measured})


def fp8_trial(share: float) -> Trial:
    """Return a trial with this share of its FLOPs in FP8."""
    left = {"with a dimension that is no multiple of 16": 1}
    facts = fake_facts(float8={"recipe": "tensorwise", "num_converted": 8, "left": left})
    trial = fake_trial(fake_spec("fp8-tensorwise"), step_seconds=STEADY, facts=facts)
    fp8 = round(100 * share)
    flops = StepFlops(products={"linear": {"fp8": fp8, "bf16": 95 - fp8}, "attention": {"bf16": 5}})
    return trial.model_copy(update={"ranks": (trial.ranks[0].model_copy(update={"flops": flops}),)})


def rtx5090_trial(teraflops: float) -> Trial:
    """Return a trial on a GPU whose bfloat16 has a peak of 209.5 TFLOP/s."""
    trial = fake_trial(step_seconds=STEADY, environment=fake_environment(gpu="NVIDIA GeForce RTX 5090"))
    flops = StepFlops(products={"linear": {"bf16": round(teraflops * 1e11)}})  # in 0.1 s
    return trial.model_copy(update={"ranks": (trial.ranks[0].model_copy(update={"flops": flops}),)})


FOUR: dict[str, object] = {"num_gpus": 4, "power_watts": 2400.0}
HELD = fake_reading(**FOUR, throttle_reasons=("hw_slowdown",), affected_gpus={"hw_slowdown": ("cuda:3",)})
SHARED = [
    fake_reading(**FOUR, foreign_processes=1, affected_gpus={"foreign_processes": (gpu,)})
    for gpu in ("cuda:2", "cuda:1")
]


def between_steps(**changes: float) -> Trial:
    """Return a trial of a script whose work between steps was not timed whole."""
    work = {"period_steps": 320, "times_seen": 2, "seconds": 0.4, "share": 0.12, "timed_share": 0.0} | changes
    trial = fake_trial(step_seconds=STEADY)
    samples = trial.ranks[0].model_copy(update={"between_steps": WorkBetweenSteps(**work)})
    return trial.model_copy(update={"ranks": (samples,)})


# Each trial has the warning of this name and no other.
FIRES: list[tuple[str, Trial]] = [
    ("throttled", trial_with(fake_reading(throttle_reasons=("sw_power_cap",), power_watts=690.0))),
    ("throttled", trial_with(*all_but_last(fake_reading(), fake_reading(throttle_reasons=("hw_thermal_slowdown",))))),
    ("throttled", trial_with(fake_reading(throttle_reasons=("gpu_idle", "sw_thermal_slowdown")))),
    ("throttled", trial_with(fake_reading(throttle_reasons=("hw_power_brake_slowdown",)))),
    ("throttled", trial_with(fake_reading(throttle_reasons=("hw_slowdown",)))),
    ("throttled", trial_with(HELD)),
    ("throttled", trial_with(*all_but_last(HELD, HELD.model_copy(update={"affected_gpus": {}})))),
    ("throttled", sustained(0.1016)),
    ("clock-below-boost", trial_with(fake_reading(sm_clock_hertz=1.4e9))),
    ("clock-below-boost", trial_with(fake_reading(sm_clock_hertz=1.4e9, num_gpus=2, power_watts=900.0))),
    ("clock-below-boost", trial_with(fake_reading(sm_clock_hertz=1e9, throttle_reasons=("sync_boost",)))),
    ("clock-below-boost", trial_with(fake_reading(sm_clock_hertz=1e9, throttle_reasons=("gpu_idle",)))),
    ("clock-below-boost", trial_with(fake_reading(sm_clock_hertz=1e9, throttle_reasons=None))),
    ("foreign-process", trial_with(*all_but_last(fake_reading(), fake_reading(foreign_processes=2)))),
    ("foreign-process", trial_with(*all_but_last(*SHARED))),
    ("foreign-process", trial_with(fake_reading(**FOUR, foreign_processes=2))),
    ("untimed-work", between_steps()),
    ("untimed-work", between_steps(times_seen=1)),
    ("untimed-work", between_steps(period_steps=0, times_seen=1)),
    ("untimed-work", between_steps(period_steps=0, times_seen=3)),
    ("little-fp8", fp8_trial(0.49)),
    ("above-peak", rtx5090_trial(238)),
    ("noisy", trial_with(fake_reading(), seconds=(0.1, 0.12) * 4)),
    ("noisy", trial_with(fake_reading(), seconds=(0.1, 0.12) * 4, settled=False)),
    ("first-block-slow", trial_with(fake_reading(), seconds=(0.12, *STEADY[1:]))),
    ("first-block-slow", fake_trial(step_seconds=(0.12, *STEADY))),
    ("persistence-off", trial_with(fake_reading(), persistence_mode=False)),
    ("ecc-errors", trial_with(fake_reading(ecc_errors=2), ecc_errors=1)),
    ("ecc-errors", trial_with(fake_reading(ecc_errors=2), ecc_errors=2)),
    ("ecc-errors", trial_with(fake_reading(ecc_errors=2), missing={"ecc_errors": "cuda:1: denied"})),
    ("ecc-errors", trial_with(fake_reading(**FOUR, ecc_errors=2, affected_gpus={"ecc_errors": ("cuda:1",)}))),
    ("too-few-blocks", trial_with(fake_reading(), seconds=(0.1,) * 5)),
    ("cpu-starved", trial_with(fake_reading(cpu_pressure=0.5))),
    ("cpu-starved", trial_with(fake_reading(cpu_steal=0.1))),
    ("cpu-starved", trial_with(fake_reading(cpu_pressure=None, cpu_load=3.0))),
    ("thermal-drift", trial_with(*all_but_last(COLD, WARM), seconds=(*STEADY[1:], 0.103))),
    ("thermal-drift", trial_with(*all_but_last(COLD, WARM.model_copy(update={"sm_clock_hertz": 1.92e9})))),
]

SILENT: list[Trial] = [
    fp8_trial(0.5),
    rtx5090_trial(200),
    trial_with(fake_reading()),
    trial_with(fake_reading(throttle_reasons=("gpu_idle",))),
    trial_with(fake_reading(throttle_reasons=("applications_clocks_setting", "sync_boost"))),
    trial_with(fake_reading(sm_clock_hertz=1.9e9)),
    trial_with(fake_reading(), seconds=(0.1, 0.104) * 4),
    trial_with(fake_reading(), seconds=(0.104, *STEADY[1:])),
    trial_with(fake_reading(), seconds=(0.098, *STEADY[1:])),
    trial_with(fake_reading(), seconds=(0.1,) * 6),
    trial_with(fake_reading(cpu_pressure=0.1, cpu_load=9.0)),
    trial_with(*all_but_last(COLD, WARM)),
    trial_with(*all_but_last(WARM, COLD), seconds=(*STEADY[1:], 0.103)),
    trial_with(fake_reading(), seconds=(*STEADY[1:], 0.103)),
    trial_with(fake_reading(), seconds=(0.1,) * 3).model_copy(update={"status": "crashed"}),
    trial_with(TelemetrySummary(seconds=1.0)).model_copy(update={"gpu_facts": None}),
    fake_trial(step_seconds=STEADY),
    fake_trial(step_seconds=()),
]


@pytest.mark.parametrize(("name", "trial"), FIRES, ids=[name for name, _ in FIRES])
def test_a_warning_fires_alone(name: str, trial: Trial) -> None:
    assert [warning.name for warning in warnings_of(trial)] == [name]


def test_the_words_of_the_warnings(snapshot: SnapshotAssertion) -> None:
    assert {name for name, _ in FIRES} == set(WARNING_NAMES)
    words = [(each.name, each.seen, each.cause, each.advice) for _, trial in FIRES for each in warnings_of(trial)]
    assert "\n".join(" | ".join(each) for each in words) == snapshot


@pytest.mark.parametrize("trial", SILENT)
def test_no_warning(trial: Trial) -> None:
    assert warnings_of(trial) == []


@pytest.mark.parametrize(
    "field", [name for name in TelemetrySummary.model_fields if name not in ("seconds", "missing")]
)
def test_missing_fields_give_no_warning(field: str) -> None:
    assert warnings_of(trial_with(fake_reading(**{field: TelemetrySummary.model_fields[field].default}))) == []


@pytest.mark.parametrize(
    "trial", [sustained(0.0), sustained(0.0995), sustained(0.1004), sustained(0.105, (0.1, 0.102, 0.104, 0.106) * 2)]
)
def test_sustained_slowdown_within_the_noise_is_not_reported(trial: Trial) -> None:
    (warning,) = warnings_of(trial)
    assert "sustained" not in warning.seen


def test_the_most_serious_warning_is_first() -> None:
    reading = fake_reading(sm_clock_hertz=1e9, throttle_reasons=("sw_power_cap",))
    assert [each.name for each in warnings_of(trial_with(reading))] == ["throttled", "clock-below-boost"]
    broken = trial_with(reading.model_copy(update={"ecc_errors": 2, "foreign_processes": 1}), ecc_errors=2)
    expected = ["ecc-errors", "foreign-process", "throttled", "clock-below-boost"]
    assert [each.name for each in warnings_of(broken)] == expected
    noisiest = trial_with(reading, seconds=(0.1, 0.12) * 4)
    assert [each.name for each in warnings_of_all([noisiest, broken])] == [*expected[:2], "noisy", *expected[2:]]


def test_each_kind_of_warning_is_one_remark() -> None:
    off = trial_with(fake_reading(), persistence_mode=False)
    other = off.model_copy(update={"spec": off.spec.model_copy(update={"seed": 1})})
    (line,) = [line for line in remarks(rows_of_steps([off, other])) if "persistence" in line]
    assert line.startswith("persistence-off: all trials")
    (line,) = [line for line in remarks(rows_of_steps([off, trial_with(fake_reading())])) if "persistence" in line]
    assert line.startswith("persistence-off: resnet50 fp32 batch 256")


def test_a_remark_has_details_of_six_trials_and_counts_the_others() -> None:
    off = trial_with(fake_reading(), persistence_mode=False)
    many = [off.model_copy(update={"spec": off.spec.model_copy(update={"batch_size": size})}) for size in range(1, 10)]
    (line,) = [line for line in remarks(rows_of_steps([*many, trial_with(fake_reading())])) if "persistence" in line]
    assert line.count("persistence mode is off") == 6
    assert "and 3 more; likely" in line


def test_missing_telemetry_is_one_remark() -> None:
    note = "not available: gpu (no NVML)"
    trial = trial_with(fake_reading()).model_copy(update={"telemetry_note": note})
    assert remarks(rows_of_steps([trial, trial])) == [f"telemetry {note}"]


def test_a_spread_of_thousands_of_per_cent_keeps_its_unit() -> None:
    noisy = next(each for each in warnings_of(fake_trial(step_seconds=(0.1,) * 4 + (9.0,) * 3)) if each.name == "noisy")
    assert noisy.brief == "blocks spread by 8,900 %"
