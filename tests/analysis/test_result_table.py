import math

import pytest
from fake_engine import OTHER_VALUES, fake_spec, fake_trial

from castwise.analysis.result_table import rows_of_steps
from castwise.records.schema import Trial
from castwise.show import run_report

# Fields whose difference does not keep two trials from being set side by side.
COMPARED = {"precision", "loss_scale", "repeat"}


def trial(precision: str, seconds: float, peak: int | None = 2**30, **changes: object) -> Trial:
    return fake_trial(fake_spec(precision, **changes), step_seconds=(seconds,), peak_bytes=peak)


def test_a_speedup_is_baseline_time_over_candidate_time() -> None:
    trials = [trial("bf16-mixed", 0.1, peak=150), trial("fp32", 0.3, peak=300), trial("tf32", 0.2, peak=None)]
    rows = rows_of_steps(trials)
    assert [row.trial for row in rows] == trials, "wherever the baseline stands"
    assert [row.speedup for row in rows] == [pytest.approx(3), pytest.approx(1), pytest.approx(1.5)]
    assert [row.memory_ratio for row in rows] == [pytest.approx(0.5), pytest.approx(1), None]
    assert rows_of_steps([]) == []


@pytest.mark.parametrize("name", list(OTHER_VALUES))
def test_only_like_is_compared_with_like(name: str) -> None:
    baseline = trial("fp32", 0.3)
    names = ("kind", "recipe") if name in ("kind", "recipe") else (name,)  # neither goes without the other
    spec = fake_spec("bf16-mixed").model_copy(update={each: OTHER_VALUES[each] for each in names})
    row = rows_of_steps([baseline, fake_trial(spec)])[1]
    assert (row.speedup is not None) == (name in COMPARED)
    assert (row.memory_ratio is not None) == (name in COMPARED)


@pytest.mark.parametrize("status", ["oom", "diverged"])
def test_a_baseline_that_did_not_end_well_gives_no_ratios(status: str) -> None:
    baseline = trial("fp32", 0.3).model_copy(update={"status": status})
    row = rows_of_steps([baseline, trial("bf16-mixed", 0.1)])[1]
    assert row.speedup is None
    assert row.memory_ratio is None
    assert row.throughput == pytest.approx(2560)


def test_a_trial_without_samples_has_no_figures_and_no_ratios() -> None:
    row = rows_of_steps([trial("fp32", 0.3), fake_trial(fake_spec("bf16-mixed"), status="oom", step_seconds=())])[1]
    assert (row.throughput, row.spread, row.step_seconds, row.speedup, row.memory_ratio) == (None,) * 5
    assert (row.final_loss, row.final_step, row.skipped_steps) == (None, None, 0)


def test_a_diverged_trial_keeps_its_loss() -> None:
    diverged = fake_trial(fake_spec("fp16-true"), status="diverged", losses=(math.nan,))
    row = rows_of_steps([trial("fp32", 0.3), diverged])[1]
    assert row.final_loss is not None
    assert math.isnan(row.final_loss)
    assert row.speedup == pytest.approx(3)


def test_the_first_of_several_baselines_counts() -> None:
    # `--precision fp32 --loss-scale none,128`: fp32 as it is, and fp32 with a scaled loss.
    rows = rows_of_steps([trial("fp32", 0.3), trial("fp32", 0.6, loss_scale="128"), trial("tf32", 0.1)])
    assert [row.speedup for row in rows] == [pytest.approx(1), pytest.approx(0.5), pytest.approx(3)]


def test_scaling_efficiency() -> None:
    two = {"world_size": 2, "parallelism": "ddp"}
    rows = rows_of_steps(
        [
            trial("bf16-mixed", 0.125, **two),
            trial("bf16-mixed", 0.1),
            trial("bf16-mixed", 0.2, world_size=4, parallelism="dp"),
            trial("fp32", 0.3, **two),
        ]
    )
    assert [row.scaling_efficiency for row in rows] == [pytest.approx(0.8), None, pytest.approx(0.5), None]
    assert rows[0].throughput == pytest.approx(2 * 256 / 0.125)
    assert rows[0].speedup == pytest.approx(0.3 / 0.125), "speed-ups stay within one number of GPUs"
    assert rows[1].speedup is None


def test_scaling_efficiency_has_an_interval_from_three_processes_on() -> None:
    two: dict[str, object] = {"world_size": 2, "parallelism": "ddp"}
    noisy = [(0, 0.1, 0.124), (1, 0.101, 0.125), (2, 0.1, 0.126)]
    trials = [trial("fp32", alone, repeat=n) for n, alone, _ in noisy]
    trials += [trial("fp32", spread, repeat=n, **two) for n, _, spread in noisy]
    found = rows_of_steps(trials)[1]
    assert found.scaling_estimate is not None
    assert found.scaling_estimate.value == found.scaling_efficiency
    assert found.scaling_estimate.low < 0.8 < found.scaling_estimate.high < 0.85
    text = run_report.present([found], []).text("csv").splitlines()
    shown = dict(zip(text[0].split(","), text[1].split(","), strict=True))
    assert float(shown["scaling_efficiency_low"]) == pytest.approx(found.scaling_estimate.low)
    assert " ± " in run_report.present(rows_of_steps(trials), []).text("markdown")
    once = rows_of_steps([trial("fp32", 0.1), trial("fp32", 0.125, **two)])
    assert "80.0 %" in run_report.present(once, []).text("markdown")
    assert " ± " not in run_report.present(once, []).text("markdown")


def test_scaling_efficiency_ignores_techniques_for_several_gpus() -> None:
    loop, two = ("compile", "cuda-graph"), {"world_size": 2, "parallelism": "ddp"}
    rows = rows_of_steps(
        [
            trial("fp32", 0.1, techniques=loop),
            trial("fp32", 0.125, techniques=("compile", "coalesced-reduce", "cuda-graph"), **two),
            trial("fp32", 0.125, techniques=("coalesced-reduce",), **two),
        ]
    )
    assert [row.scaling_efficiency for row in rows] == [None, pytest.approx(0.8), None]


@pytest.mark.parametrize("change", [{"batch_size": 8}, {"precision": "fp32"}, {"seed": 1}, {"loss_scale": "128"}])
def test_scaling_efficiency_needs_the_same_configuration_on_one_gpu(change: dict[str, object]) -> None:
    alone = fake_trial(fake_spec("bf16-mixed").model_copy(update=change))
    spread = fake_trial(fake_spec("bf16-mixed", world_size=2, parallelism="ddp"))
    assert rows_of_steps([alone, spread])[1].scaling_efficiency is None


def test_loop_speedup() -> None:
    graph = {"techniques": ("cuda-graph",)}
    rows = rows_of_steps(
        [
            trial("bf16-mixed", 0.2),
            trial("bf16-mixed", 0.1, **graph),
            trial("fp32", 0.6),
            trial("fp32", 0.4, **graph),
            trial("tf32", 0.3, **graph),
        ]
    )
    assert [row.loop_speedup for row in rows] == [None, pytest.approx(2), None, pytest.approx(1.5), None]
    assert [row.speedup for row in rows] == [pytest.approx(ratio) for ratio in (3, 4, 1, 1, 4 / 3)]


def test_verdicts_are_over_pytorch_s_default_if_it_was_measured() -> None:
    times = {"fp32": 0.3, "default": 0.2, "tf32": 0.2, "bf16-mixed": 0.25}
    trials = [trial(name, seconds, repeat=repeat) for repeat in (0, 1) for name, seconds in times.items()]
    rows = rows_of_steps(trials)
    assert [row.speedup for row in rows] == [pytest.approx(ratio) for ratio in (1, 1.5, 1.5, 1.2)]
    assert [row.default_speedup for row in rows] == [pytest.approx(ratio) for ratio in (2 / 3, 1, 1, 0.8)]
    assert [row.verdict and row.verdict.kind for row in rows] == ["slower", None, "same", "slower"]
    over_fp32 = rows_of_steps([each for each in trials if each.spec.precision != "default"])
    assert [row.default_speedup for row in over_fp32] == [None] * 3
    assert [row.verdict and row.verdict.kind for row in over_fp32] == [None, "faster", "faster"]


def test_a_script_is_compared_with_itself_as_written() -> None:
    times = {"as-written": 0.1, "default": 0.2, "bf16-mixed": 0.05}
    rows = rows_of_steps([trial(name, seconds, repeat=repeat) for repeat in (0, 1) for name, seconds in times.items()])
    assert [row.written_speedup for row in rows] == [1.0, pytest.approx(0.5), pytest.approx(2.0)]
    assert [row.default_speedup for row in rows] == [pytest.approx(2.0), 1.0, pytest.approx(4.0)]
    assert [row.verdict and row.verdict.kind for row in rows] == [None, "slower", "faster"]


@pytest.mark.parametrize("status", ["oom", "crashed"])
def test_without_a_default_that_ended_well_verdicts_are_over_fp32(status: str) -> None:
    failed = fake_trial(fake_spec("default"), step_seconds=()).model_copy(update={"status": status})
    rows = rows_of_steps([failed, *(trial(name, 0.2, repeat=repeat) for repeat in (0, 1) for name in ("fp32", "tf32"))])
    assert [row.default_speedup for row in rows] == [None] * 3
    assert [row.verdict and row.verdict.kind for row in rows] == [None, None, "same"]


def test_fp8_is_compared_with_bf16_mixed_in_the_same_loop() -> None:
    trials = [trial("bf16-mixed", 0.2, repeat=repeat) for repeat in (0, 1)]
    trials += [trial("fp8-tensorwise", 0.1, repeat=repeat) for repeat in (0, 1)]
    rival, fp8, alone = rows_of_steps([*trials, trial("fp8-rowwise", 0.1, techniques=("compile",))])
    assert (rival.bf16_speedup, fp8.bf16_speedup, alone.bf16_speedup) == (1.0, pytest.approx(2.0), None)
    assert getattr(fp8.verdict, "kind", None) == "faster", "nothing else was measured that it could be over"
    assert rows_of_steps(trials[:2])[0].bf16_speedup is None
    over_default = rows_of_steps([*trials, trial("default", 0.1)])[1]
    assert getattr(over_default.verdict, "kind", None) == "inconclusive"
