"""Every warning fires on the record it is for, and on no other."""

from typing import get_args

import pytest
from fake_engine import fake_facts, fake_trial
from fake_gpu import fake_gpu_facts, fake_reading

from castwise.analysis.result_table import compare
from castwise.analysis.warnings import TrialWarning, WarningName, warnings_of
from castwise.records.schema import EnergyMeasurement, TelemetrySummary, Trial
from castwise.render.notes import remarks

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

FIRES: list[tuple[str, Trial, str]] = [
    ("throttled", trial_with(fake_reading(throttle_reasons=("sw_power_cap",))), "sw_power_cap in 8 of 8 blocks"),
    (
        "throttled",
        trial_with(*all_but_last(fake_reading(), fake_reading(throttle_reasons=("gpu_idle", "hw_thermal_slowdown")))),
        "hw_thermal_slowdown in 1 of 8 blocks",
    ),
    ("clock-below-boost", trial_with(fake_reading(sm_clock_hertz=1.4e9)), "1400 MHz of at most 1980 MHz"),
    (
        "foreign-process",
        trial_with(*all_but_last(fake_reading(), fake_reading(foreign_processes=2))),
        "up to 2 other processes on the GPU in 1 of 8 blocks",
    ),
    ("noisy", trial_with(fake_reading(), seconds=(0.1, 0.12) * 4), "blocks spread by"),
    ("first-block-slow", trial_with(fake_reading(), seconds=(0.12, *STEADY[1:])), "took 20 % longer a step"),
    ("persistence-off", trial_with(fake_reading(), persistence_mode=False), "persistence mode is off"),
    ("ecc-errors", trial_with(fake_reading(ecc_errors=2), ecc_errors=1), "2 uncorrected memory errors"),
    ("too-few-blocks", trial_with(fake_reading(), seconds=(0.1,) * 5), "5 timed blocks"),
    ("cpu-starved", trial_with(fake_reading(cpu_pressure=0.5)), "waited for a CPU 50 % of the time"),
    ("cpu-starved", trial_with(fake_reading(cpu_steal=0.1)), "hypervisor kept 10 %"),
    ("cpu-starved", trial_with(fake_reading(cpu_pressure=None, cpu_load=3.0)), "3.0 runnable tasks a CPU"),
    ("thermal-drift", trial_with(*all_but_last(COLD, WARM), seconds=(*STEADY[1:], 0.103)), "from 50 to 56 °C"),
    (
        "thermal-drift",
        trial_with(*all_but_last(COLD, WARM.model_copy(update={"sm_clock_hertz": 1.92e9}))),
        "clock -3.0 %, step time +0.0 %",
    ),
]

SILENT: list[Trial] = [
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
]


@pytest.mark.parametrize(("name", "trial", "seen"), FIRES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_warning_fires_alone(name: str, trial: Trial, seen: str) -> None:
    (warning,) = warnings_of(trial)
    assert warning.name == name
    assert seen in warning.seen
    assert warning.cause
    assert warning.advice


@pytest.mark.parametrize("trial", SILENT)
def test_what_is_no_cause_for_a_warning(trial: Trial) -> None:
    assert warnings_of(trial) == []


def test_every_name_of_the_list_is_tried() -> None:
    assert {name for name, _, _ in FIRES} == set(get_args(WarningName))


@pytest.mark.parametrize(
    "field", [name for name in TelemetrySummary.model_fields if name not in ("seconds", "missing")]
)
def test_what_is_missing_gives_no_warning(field: str) -> None:
    empty = (
        None if TelemetrySummary.model_fields[field].default is None else TelemetrySummary.model_fields[field].default
    )
    assert warnings_of(trial_with(fake_reading(**{field: empty}))) == []


def test_a_record_without_telemetry_has_the_warnings_of_its_blocks_alone() -> None:
    assert warnings_of(fake_trial(step_seconds=STEADY)) == []
    assert [each.name for each in warnings_of(fake_trial(step_seconds=(0.12, *STEADY)))] == ["first-block-slow"]
    assert warnings_of(fake_trial(step_seconds=())) == []
    bare = trial_with(TelemetrySummary(seconds=1.0)).model_copy(update={"gpu_facts": None})
    assert warnings_of(bare) == []


def only(trial: Trial) -> TrialWarning:
    (warning,) = warnings_of(trial)
    return warning


def test_a_power_cap_is_told_as_normal_and_with_its_limit() -> None:
    warning = only(trial_with(fake_reading(throttle_reasons=("sw_power_cap",), power_watts=690.0)))
    assert "at 690 of 700 W" in warning.seen
    assert "normal for a big GPU under full load" in warning.cause


@pytest.mark.parametrize(("seconds", "said"), [(0.0, ""), (0.0995, ""), (0.1004, ""), (0.1016, "1.6 % longer")])
def test_steps_that_a_limit_slows_down_as_they_go_on_are_told(seconds: float, said: str) -> None:
    trial = fake_trial(step_seconds=(0.1,) * 8)
    reading = fake_reading(throttle_reasons=("sw_power_cap",), power_watts=690.0)
    warning = only(
        trial.model_copy(
            update={"readings": (reading,) * 8, "energy_measurement": EnergyMeasurement(step_seconds=seconds)}
        )
    )
    assert ("sustained steps" in warning.seen) is bool(said)
    assert said in warning.seen


def test_a_stretch_within_what_blocks_spread_by_is_not_laid_to_the_limit() -> None:
    trial = fake_trial(step_seconds=(0.1, 0.102, 0.104, 0.106) * 2)
    reading = fake_reading(throttle_reasons=("sw_power_cap",), power_watts=690.0)
    warning = only(
        trial.model_copy(
            update={"readings": (reading,) * 8, "energy_measurement": EnergyMeasurement(step_seconds=0.105)}
        )
    )
    assert "sustained steps" not in warning.seen


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("sw_thermal_slowdown", "too hot"),
        ("hw_power_brake_slowdown", "power supply"),
        ("hw_slowdown", "halved its clock"),
    ],
)
def test_other_reasons_have_other_causes(reason: str, cause: str) -> None:
    assert cause in only(trial_with(fake_reading(throttle_reasons=(reason,)))).cause


@pytest.mark.parametrize(
    ("reasons", "cause"),
    [
        (("applications_clocks_setting",), "set by hand"),
        (("gpu_idle",), "waits for the host"),
        ((), "no reason"),
        (None, "no reason"),
    ],
)
def test_why_a_clock_is_below_its_boost(reasons: tuple[str, ...] | None, cause: str) -> None:
    assert cause in only(trial_with(fake_reading(sm_clock_hertz=1e9, throttle_reasons=reasons))).cause


def test_a_throttled_clock_has_both_warnings() -> None:
    found = warnings_of(trial_with(fake_reading(sm_clock_hertz=1e9, throttle_reasons=("sw_power_cap",))))
    assert [(each.name, each.cause[:8]) for each in found] == [
        ("throttled", "the powe"),
        ("clock-below-boost", "the thro"),
    ]


def test_noise_says_whether_warm_up_had_settled() -> None:
    seconds = (0.1, 0.12) * 4
    assert "never settled" in only(trial_with(fake_reading(), seconds=seconds, settled=False)).seen
    assert "settled" not in only(trial_with(fake_reading(), seconds=seconds)).seen


def test_errors_during_the_trial_are_told_apart() -> None:
    assert "1 of them in this trial" in only(trial_with(fake_reading(ecc_errors=2), ecc_errors=1)).seen
    assert "in this trial" not in only(trial_with(fake_reading(ecc_errors=2), ecc_errors=2)).seen


def test_a_trial_that_failed_is_not_told_that_its_blocks_are_few() -> None:
    failed = trial_with(fake_reading(), seconds=(0.1,) * 3).model_copy(update={"status": "crashed"})
    assert warnings_of(failed) == []


def test_a_remark_is_a_line_a_kind() -> None:
    off = trial_with(fake_reading(), persistence_mode=False)
    other = off.model_copy(update={"spec": off.spec.model_copy(update={"seed": 1})})
    lines = [line for line in remarks(compare([off, other])) if line.startswith("persistence-off")]
    assert lines == [
        "persistence-off: all trials (persistence mode is off); likely cause: the driver unloads between processes: "
        "each start takes longer, and clocks start anew; to try: nvidia-smi -pm 1, or nvidia-persistenced"
    ]
    (line,) = [line for line in remarks(compare([off, trial_with(fake_reading())])) if "persistence" in line]
    assert line.startswith("persistence-off: resnet50 fp32 batch 256 (persistence mode is off); likely cause")


def test_of_many_trials_six_are_told_of_in_full_and_all_are_named() -> None:
    off = trial_with(fake_reading(), persistence_mode=False)
    many = [off.model_copy(update={"spec": off.spec.model_copy(update={"batch_size": size})}) for size in range(1, 10)]
    (line,) = [line for line in remarks(compare([*many, trial_with(fake_reading())])) if "persistence" in line]
    assert line.count("persistence mode is off") == 6
    assert "and as well resnet50 fp32 batch 7, resnet50 fp32 batch 8, resnet50 fp32 batch 9; likely" in line


def test_what_is_not_available_is_a_remark_once() -> None:
    note = "not available: gpu (no NVML)"
    trial = trial_with(fake_reading()).model_copy(update={"telemetry_note": note})
    assert remarks(compare([trial, trial])) == [f"telemetry {note}"]


def test_of_several_gpus_the_one_that_is_throttled_is_named() -> None:
    held = fake_reading(
        num_gpus=4, power_watts=2400.0, throttle_reasons=("hw_slowdown",), affected_gpus={"hw_slowdown": ("cuda:3",)}
    )
    assert only(trial_with(held)).seen == "hw_slowdown in 8 of 8 blocks on cuda:3, at 600 of 700 W"
    of_all = held.model_copy(update={"affected_gpus": {}})
    assert only(trial_with(*all_but_last(held, of_all))).seen == "hw_slowdown in 8 of 8 blocks, at 600 of 700 W"


def test_of_several_gpus_those_with_others_processes_or_memory_errors_are_named() -> None:
    two = {"num_gpus": 4, "power_watts": 2400.0}
    shared = [
        fake_reading(**two, foreign_processes=1, affected_gpus={"foreign_processes": (gpu,)})
        for gpu in ("cuda:2", "cuda:1")
    ]
    assert "up to 1 other process on cuda:1, cuda:2 in 8 of 8 blocks" in only(trial_with(*all_but_last(*shared))).seen
    of_all = fake_reading(**two, foreign_processes=2)
    assert "up to 2 other processes on the GPUs in 8 of 8 blocks" in only(trial_with(of_all)).seen
    errors = fake_reading(**two, ecc_errors=2, affected_gpus={"ecc_errors": ("cuda:1",)})
    assert only(trial_with(errors)).seen.endswith("2 of them in this trial on cuda:1")


def test_memory_errors_are_this_trial_s_where_those_before_are_known_of_all_gpus() -> None:
    unknown = trial_with(fake_reading(ecc_errors=2), missing={"ecc_errors": "cuda:1: denied"})
    assert "in this trial" not in only(unknown).seen


def test_the_slowest_gpu_s_clock_is_told_as_such() -> None:
    seen = only(trial_with(fake_reading(num_gpus=2, power_watts=900.0, sm_clock_hertz=1.4e9))).seen
    assert seen == "SM clock 1400 MHz, of the slowest GPU, of at most 1980 MHz"
