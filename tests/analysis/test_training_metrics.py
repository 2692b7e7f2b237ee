"""Figures of training runs, compared with values computed by hand."""

import math
from typing import Any

import pytest
from fake_engine import fake_environment, fake_facts, fake_run, fake_training, fake_trial

from castwise.analysis import training_metrics
from castwise.analysis.result_table import rows_of_runs
from castwise.records.schema import Epoch, RankSamples, Trial


def epoch(seconds: float, **changes: Any) -> Epoch:
    """Return an epoch of 100 samples; all of its time counts unless said otherwise."""
    fields: dict[str, Any] = {
        "seconds": seconds,
        "data_seconds": 0.0,
        "placing_seconds": 0.0,
        "num_steps": 10,
        "num_samples": 100,
        "counted_seconds": seconds,
        "counted_samples": 100,
        "losses": ((9, 1.0),),
        "learning_rate": 0.1,
    }
    return Epoch(**(fields | changes))


def run(precision: str, *epochs: Epoch, recipe: dict[str, Any] | None = None, **changes: Any) -> Trial:
    status = changes.pop("status", "ok")
    return fake_run(fake_training(precision, recipe, **changes), *epochs, status=status)


def judged(*losses_and_accuracies: tuple[float, float]) -> Trial:
    epochs = [epoch(1.0, validation_loss=loss, accuracy=accuracy) for loss, accuracy in losses_and_accuracies]
    return run("fp32", *epochs, recipe={"epochs": len(epochs)})


WHOLE = (
    epoch(11.0, first_step_seconds=2.0, data_seconds=3.0, validation_seconds=4.0),
    epoch(9.0, data_seconds=1.0, validation_seconds=4.0),
)


def test_a_whole_run_by_hand() -> None:
    (figures,) = rows_of_runs([run("fp32", *WHOLE)])
    split = training_metrics.split(figures.trial)
    assert split == training_metrics.Split(start=2.0, data=4.0, train=14.0, validation=8.0)
    assert split.total == 28.0
    assert figures.throughput == pytest.approx(200 / 20)
    assert training_metrics.data_share(figures.trial) == pytest.approx(4 / 18), "the first step is left out"
    assert figures.speedup == 1.0
    words, rank = fake_facts(units_per_sample=35), figures.trial.ranks[0]
    on_two = figures.trial.model_copy(update={"facts": words, "ranks": (rank, rank)})
    assert training_metrics.throughput(on_two) == pytest.approx(2 * 35 * 200 / 20)


def test_the_share_of_the_first_step_by_hand() -> None:
    assert training_metrics.start_share(run("fp32", *WHOLE), of_throughput=False) == pytest.approx(2 / 28)
    assert training_metrics.start_share(run("fp32", *WHOLE), of_throughput=True) == pytest.approx(2 / 20), (
        "without validation"
    )
    left_out = run("fp32", *WHOLE, recipe={"skip_batches": 2})
    assert training_metrics.start_share(left_out, of_throughput=True) == 0.0
    later = run("fp32", *WHOLE, recipe={"skip_epochs": 1})
    assert (
        training_metrics.start_share(later, of_throughput=True)
        == training_metrics.start_share(later, of_throughput=False)
        == 0.0
    )
    failed = fake_trial(fake_training("fp32"), status="crashed", step_seconds=())
    assert training_metrics.start_share(failed, of_throughput=True) == 0.0


@pytest.mark.parametrize(("reads_loss", "share"), [(False, None), (True, 4 / 18)])
def test_data_share_of_older_records(reads_loss: bool, share: float | None) -> None:
    older = [each.model_copy(update={"placing_seconds": None}) for each in WHOLE]
    trial = run("fp32", *older, recipe={"read_loss_every_step": reads_loss})
    assert training_metrics.data_share(trial) == (None if share is None else pytest.approx(share))
    split = training_metrics.split(trial)
    assert split is not None
    assert (split.data, split.train) == ((4.0, 14.0) if reads_loss else (0.0, 18.0))
    assert split.total == 28.0


def test_speedup_of_whole_runs_is_the_ratio_of_wall_times() -> None:
    fast = run("fp16-mixed", epoch(4.0, validation_seconds=4.0), epoch(4.0, validation_seconds=4.0))
    _, figures = rows_of_runs([run("fp32", *WHOLE), fast])
    assert figures.speedup == pytest.approx(28 / 16)
    assert figures.throughput == pytest.approx(200 / 8)


@pytest.mark.parametrize("which", ["both", "baseline", "run"])
def test_speedup_of_a_shortened_run_is_the_ratio_of_throughputs(which: str) -> None:
    slow = (*WHOLE,) if which == "run" else (epoch(30.0, validation_seconds=4.0),)
    fast = (epoch(4.0), epoch(4.0)) if which == "baseline" else (epoch(6.0, shortened=True, num_samples=60),)
    expected = {"both": 30 / 6, "baseline": 30 / 4, "run": 20 / 6 / 2}[which]
    _, figures = rows_of_runs([run("fp32", *slow), run("tf32", *fast)])
    assert figures.speedup == pytest.approx(expected)
    assert [training_metrics.is_whole(run("fp32", *slow)), training_metrics.is_whole(run("tf32", *fast))] == [
        which == "run",
        which == "baseline",
    ]


def test_a_limit_that_cut_nothing_leaves_a_run_whole() -> None:
    assert training_metrics.is_whole(run("fp32", *WHOLE, recipe={"max_steps": 10_000}))
    assert not training_metrics.is_whole(run("fp32", *WHOLE, status="crashed"))
    assert not training_metrics.is_whole(fake_trial())


def test_epochs_and_batches_that_the_recipe_skips_do_not_count() -> None:
    epochs = (
        epoch(100.0, first_step_seconds=50.0, data_seconds=40.0),
        epoch(20.0, counted_seconds=15.0, counted_samples=80, data_seconds=5.0),
    )
    skipping = run("fp32", *epochs, recipe={"skip_epochs": 1, "skip_batches": 2})
    assert training_metrics.throughput(skipping) == pytest.approx(80 / 15)
    assert training_metrics.split(skipping) == training_metrics.Split(start=0.0, data=5.0, train=15.0, validation=0.0)
    assert training_metrics.data_share(skipping) == pytest.approx(5 / 20)


def test_a_run_that_ended_before_anything_counted_counts_all() -> None:
    in_first_epoch = run("fp32", epoch(10.0, shortened=True), recipe={"epochs": 3, "skip_epochs": 1})
    assert training_metrics.throughput(in_first_epoch) == pytest.approx(10.0)
    in_first_batches = run("fp32", epoch(10.0, counted_samples=0, shortened=True), recipe={"skip_batches": 99})
    assert training_metrics.throughput(in_first_batches) == pytest.approx(10.0)


def test_without_epochs_nothing_is_known() -> None:
    failed = fake_trial(fake_training(), status="oom", step_seconds=())
    (figures,) = rows_of_runs([failed])
    assert (training_metrics.split(figures.trial), figures.throughput, figures.speedup) == (None, None, None)
    assert (training_metrics.best_accuracy(figures.trial), figures.peak_allocated_bytes) == (None, None)
    assert training_metrics.data_share(failed) is None
    assert training_metrics.data_share(run("fp32", epoch(1.0, first_step_seconds=1.0))) is None, (
        "nothing but a first step"
    )


def test_baselines_of_runs_may_have_other_learning_rates() -> None:
    def speedup(baseline: dict[str, Any], own: dict[str, Any]) -> float | None:
        figures = rows_of_runs(
            [run("fp32", epoch(4.0), epoch(4.0), **baseline), run("tf32", epoch(2.0), epoch(2.0), **own)]
        )
        return figures[1].speedup

    assert speedup({}, {}) == 2.0
    assert speedup({"recipe": {"group_rates": (0.1,)}}, {"recipe": {"group_rates": (0.2,)}}) == 2.0
    adam = {"name": "Adam", "arguments": {"lr": 0.1}}
    assert speedup({"recipe": {"optimizer": adam}}, {"recipe": {"optimizer": adam | {"arguments": {"lr": 0.3}}}}) == 2.0
    assert speedup({"recipe": {"optimizer": adam}}, {"recipe": {"optimizer": adam | {"name": "SGD"}}}) is None
    for other in ({"batch_size": 8}, {"seed": 1}, {"data_set": "synthetic:x"}, {"recipe": {"epochs": 3}}):
        assert speedup(other, {}) is None
    assert speedup({"status": "diverged"}, {}) is None, "a baseline has to end well"
    assert speedup({}, {"status": "diverged"}) == 2.0
    there = run("fp32", *WHOLE).model_copy(update={"environment": fake_environment(host="elsewhere")})
    assert rows_of_runs([there, run("tf32", *WHOLE)])[1].speedup is None


def test_scaling_efficiency_is_over_as_many_single_gpus() -> None:
    alone = run("fp32", epoch(10.0), epoch(10.0))
    spec = fake_training("fp32", world_size=2, parallelism="ddp")
    rank = RankSamples(epochs=(epoch(12.5), epoch(12.5)))
    together = fake_run(spec, *rank.epochs).model_copy(update={"ranks": (rank, rank)})
    single, double = rows_of_runs([alone, together])
    assert single.scaling_efficiency is None
    assert double.scaling_efficiency == pytest.approx(0.8)
    assert double.speedup == 1.0, "its own world's float32 run is itself"
    assert rows_of_runs([together])[0].scaling_efficiency is None
    reduced = together.model_copy(update={"spec": spec.model_copy(update={"techniques": ("coalesced-reduce",)})})
    assert rows_of_runs([alone, reduced])[1].scaling_efficiency == pytest.approx(0.8)


def test_best_accuracy_has_the_lowest_validation_loss() -> None:
    assert training_metrics.best_accuracy(judged((2.0, 0.5), (1.0, 0.6), (1.5, 0.7))) == 0.6
    assert training_metrics.best_accuracy(judged((math.nan, 0.9), (3.0, 0.2), (math.inf, 0.8))) == 0.2
    assert training_metrics.best_accuracy(judged((math.nan, 0.9))) is None
    assert training_metrics.best_accuracy(judged((0.0, 0.4), (1.0, 0.5))) == 0.4
    assert training_metrics.best_accuracy(run("fp32", *WHOLE)) is None


@pytest.mark.parametrize(
    ("loss", "accuracy", "expected"),
    [(math.log(120.0), None, 120.0), (1e4, None, math.inf), (None, None, None), (1.0, 0.5, None), (0.0, None, 1.0)],
)
def test_perplexity(loss: float | None, accuracy: float | None, expected: float | None) -> None:
    found = training_metrics.perplexity(epoch(1.0, validation_loss=loss, accuracy=accuracy))
    assert found == (expected if expected is None else pytest.approx(expected))


def test_several_seeds_give_the_median_speedup() -> None:
    def pair(slow: float, fast: float) -> tuple[Trial, Trial]:
        return run("fp32", epoch(slow), epoch(slow)), run("tf32", epoch(fast), epoch(fast))

    assert training_metrics.median_speedup([pair(8, 1), pair(8, 2), pair(8, 4)]) == 4.0
    assert training_metrics.median_speedup([pair(8, 1), (fake_trial(), fake_trial()), pair(8, 2)]) == 6.0
    assert training_metrics.median_speedup([]) is None
    assert training_metrics.median([]) is None


def test_peaks_and_skipped_steps_over_all_ranks() -> None:
    skipping = (epoch(1.0, skipped_steps=2), epoch(1.0, skipped_steps=3))
    trial = run("fp16-mixed", *skipping)
    ranks = tuple(
        RankSamples(epochs=skipping, peak_allocated_bytes=size, driver_used_bytes=2 * size, peak_reserved_bytes=None)
        for size in (1, 3, 2)
    )
    (figures,) = rows_of_runs([trial.model_copy(update={"ranks": ranks})])
    assert figures.skipped_steps == 5
    assert (figures.peak_allocated_bytes, figures.driver_used_bytes, figures.peak_reserved_bytes) == (3, 6, None)
