"""Model FLOP/s and MFU against figures by hand."""

from pathlib import Path

import pytest
from fake_engine import fake_environment, fake_spec, fake_trial
from fake_gpu import fake_reading

from castwise.analysis import steady_metrics
from castwise.analysis.model_flops import model_flops_per_second, model_flops_utilization, share_of_peak
from castwise.analysis.result_table import rows_of_steps
from castwise.analysis.warnings import warnings_of
from castwise.records.schema import StepFlops, Trial
from castwise.show.run_report import data_table, flat_row

H200 = "NVIDIA H200"


def trial(
    by_format: dict[str, int] | None = None, *, gpu: str = H200, clock: float | None = 1.83e9, **changes: object
) -> Trial:
    """Return a trial whose steps take 0.1 s."""
    readings = (fake_reading(sm_clock_hertz=clock),)
    made = fake_trial(fake_spec("bf16-mixed", **changes), environment=fake_environment(gpu=gpu), readings=readings)
    flops = None if by_format is None else StepFlops(products={"linear": by_format})
    return made.model_copy(update={"ranks": (made.ranks[0].model_copy(update={"flops": flops}),)})


def mfu(*trials: Trial) -> float | None:
    return model_flops_utilization(trials, 0.1)


def test_mfu_is_over_the_nominal_peak_of_the_format_whatever_the_clock() -> None:
    flops = 49_475_000_000_000  # half of 0.1 s at 989.5 TFLOP/s
    assert model_flops_per_second([trial({"bf16": flops})], 0.1) == pytest.approx(494.75e12)
    assert mfu(trial({"bf16": flops})) == pytest.approx(0.5)
    assert mfu(trial({"bf16": flops}, clock=1.83e9 / 2)) == pytest.approx(0.5)
    assert mfu(trial({"tf32": flops // 2})) == pytest.approx(494.75 / 494.5 / 2)


@pytest.mark.parametrize(("flops", "share"), [(20_949_000_000_000, 1.0), (23_800_000_000_000, None)])
def test_a_gpu_above_its_peak_has_a_warning_in_place_of_an_mfu(flops: int, share: float | None) -> None:
    fast = trial({"bf16": flops}, gpu="NVIDIA GeForce RTX 5090")  # whose peak is 209.5 TFLOP/s
    assert mfu(fast) == (None if share is None else pytest.approx(share, rel=0.001))
    assert [warning.name for warning in warnings_of(fast) if warning.name == "above-peak"] == (
        ["above-peak"] if share is None else []
    )


def test_no_record_exceeds_its_peak() -> None:
    for path in (Path(__file__).parents[2] / "benchmarks" / "records" / "trials").rglob("*.json"):
        recorded = Trial.model_validate_json(path.read_text())
        assert (share_of_peak([recorded], steady_metrics.step_seconds(recorded)) or 0) <= 1, path.name


def test_gpus_of_one_step_share_its_work() -> None:
    flops = 49_475_000_000_000
    ddp = trial({"bf16": flops}, world_size=2, parallelism="ddp")
    assert model_flops_per_second([ddp], 0.1) == pytest.approx(2 * 494.75e12), "each process computes its own"
    assert mfu(ddp) == pytest.approx(0.5)
    replicas = trial({"bf16": 2 * flops}, world_size=2, parallelism="dp")
    assert model_flops_per_second([replicas], 0.1) == pytest.approx(2 * 494.75e12)
    assert mfu(replicas) == pytest.approx(0.5)


def test_there_is_no_mfu_without_a_peak_or_with_several_formats() -> None:
    assert mfu(trial({"bf16": 98, "fp32": 2})) is None
    assert mfu(trial({"bf16": 999, "fp32": 1})) is not None, "a thousandth is no second format"
    assert mfu(trial({"bf16": 100}, gpu="NVIDIA H2000")) is None
    assert model_flops_per_second([trial({"bf16": 100}, gpu="NVIDIA H2000")], 0.1) == 1000.0
    assert mfu(trial()) is None
    assert model_flops_per_second([trial()], 0.1) is None
    assert model_flops_per_second([trial({"bf16": 1})], None) is None
    assert mfu(trial({"fp64": 100})) is None
    assert mfu(trial({"fp16": 100}, techniques=("fp16-accumulation",))) is None, "the peak has sums in float32"


def test_the_first_trial_counts_for_all_of_its_configuration() -> None:
    rounds = [trial({"bf16": 49_475_000_000_000}), trial(repeat=1)]
    (row,) = rows_of_steps(rounds)
    values = flat_row(row)
    assert values["model_flops_utilization"] == pytest.approx(0.5)
    texts = {field.title: field.text(values) for field in data_table([row]).columns}
    assert texts["model TFLOP/s"] == "494.7"
    assert texts["MFU"] == "50.0 %"
    assert "MFU" not in {field.title for field in data_table(rows_of_steps([trial()])).columns}
