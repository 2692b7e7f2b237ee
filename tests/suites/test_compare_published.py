"""Published figures compared with measured ones: which run is paired with which."""

from typing import Any

import pytest
from fake_engine import fake_epoch, fake_run, fake_training, fake_trial

from castwise.analysis import training_metrics
from castwise.records.schema import Trial
from castwise.registry.suites import Published, Suite, SuiteFilter, find_suite, parse_suite, specs_of
from castwise.show.fields import FlatRow
from castwise.suites.compare_published import compare_with_published, published_pairs

MINE = """\
name = "mine"
title = "t"
source = "s"
machine = "m"
[recipes.short]
epochs = 2
validate_each_epoch = true
[[cells]]
workloads = ["mnist-cnn"]
recipe = "short"
precisions = ["fp32", "fp16-mixed"]
batch_sizes = [8, 16]
"""


def ran(suite: Suite, **choice: Any) -> list[Trial]:
    """Return made-up trials of all the suite's cells."""
    return [fake_run(spec) for spec in specs_of(suite, device="cuda:0", choice=SuiteFilter(**choice))]


def find(rows: list[FlatRow], precision: str, batch: int, scale: str | None = None, gpu: str | None = None) -> FlatRow:
    (row,) = [
        row
        for row in rows
        if (row["precision"], row["batch_size"]) == (precision, batch)
        and scale in (None, row["loss_scale"])
        and gpu in (None, row["gpu"])
    ]
    return row


def time_of(trials: list[Trial], precision: str, batch: int, workload: str | None = None) -> float:
    (trial,) = [
        trial
        for trial in trials
        if (trial.spec.precision, trial.spec.batch_size) == (precision, batch)
        and workload in (None, trial.spec.workload)
    ]
    split = training_metrics.split(trial)
    assert split is not None
    return split.total


def published(**fields: Any) -> Published:
    return Published(**({"gpu": "g", "workload": "mnist-cnn", "precision": "fp32", "batch_size": 8} | fields))


def suite_with(*figures: Published) -> Suite:
    return parse_suite(MINE, "mine").model_copy(update={"published": figures})


def test_a_larger_batch_is_paired_as_the_source_paired_it() -> None:
    suite = find_suite("tensorcore")
    trials = ran(suite, workloads=("mnist-cnn",))
    rows = compare_with_published(suite, trials)
    row = find(rows, "fp16-mixed", 1024)
    slow, equal, fast = (
        time_of(trials, name, size) for name, size in (("fp32", 512), ("fp32", 1024), ("fp16-mixed", 1024))
    )
    assert row["published_speedup"] == pytest.approx(107.228 / 100.529)
    assert row["speedup"] == pytest.approx(slow / fast)
    assert row["equal_batch_speedup"] == pytest.approx(equal / fast)
    assert row["ratio"] == pytest.approx(slow / fast / (107.228 / 100.529))
    same = [trial.spec.key for trial in trials if trial.spec.precision == "fp16-mixed"]
    pairs = published_pairs(suite, trials)
    assert list(pairs) == [same[1]], "of equal batches it is the ordinary speed-up"
    assert pairs[same[1]] == pytest.approx(slow / fast)


def test_the_baseline_is_the_largest_float32_batch_that_fitted() -> None:
    suite = find_suite("dpn-cifar10")
    trials = ran(suite)
    row = find(compare_with_published(suite, trials), "fp16-master", 512, "128")
    times = {(spec.precision, spec.batch_size, spec.loss_scale): t for t in trials for spec in (t.spec,)}
    fast = times["fp16-master", 512, "128"]
    assert row["published_speedup"] == pytest.approx(204 / 140)
    assert row["speedup"] == training_metrics.speedup(times["fp32", 256, "none"], fast)
    assert row["equal_batch_speedup"] == training_metrics.speedup(times["fp32", 512, "none"], fast)
    pairs = published_pairs(suite, trials)
    assert pairs[fast.spec.key] == row["speedup"]
    assert fast.spec.key in pairs
    assert times["fp16-master", 256, "128"].spec.key not in pairs


def test_a_loss_scale_in_the_published_figure_tells_runs_apart() -> None:
    suite = find_suite("dpn-cifar10")
    rows = compare_with_published(suite, ran(suite))
    for scale in ("64", "128", "256"):
        (trial,) = find(rows, "fp16-master", 512, scale)["trials"]
        assert trial.spec.loss_scale == scale
    suite = find_suite("wrn-cifar10")  # whose figures name none
    (trial,) = find(compare_with_published(suite, ran(suite)), "fp16-mixed", 128, gpu="Tesla T4")["trials"]
    assert trial.spec.loss_scale == "dynamic-apex"


def test_without_published_numbers_the_first_batch_of_float32_is_the_pair() -> None:
    suite = find_suite("amd-nvidia")
    trials = ran(suite, world_sizes=(1,), workloads=("inception_v3",))
    assert compare_with_published(suite, trials) == []
    slow, fast = time_of(trials, "fp32", 64), time_of(trials, "fp16-mixed", 128)
    (key,) = (trial.spec.key for trial in trials if trial.spec.precision == "fp16-mixed")
    assert published_pairs(suite, trials) == {key: pytest.approx(slow / fast)}


def test_pairs_are_of_the_same_gpus() -> None:
    suite = find_suite("amd-nvidia")
    trials = [
        fake_run(spec)
        for spec in specs_of(suite, device="cuda:0", choice=SuiteFilter(world_sizes=(1, 2), workloads=("resnet50",)))
    ]
    pairs = published_pairs(suite, trials)
    mixed = {trial.spec.key: trial for trial in trials if trial.spec.precision == "fp16-mixed"}
    assert set(pairs) == set(mixed)
    assert {trial.spec.world_size for trial in mixed.values()} == {1, 2}
    for key, trial in mixed.items():
        (slow,) = [
            other
            for other in trials
            if (other.spec.precision, other.spec.batch_size) == ("fp32", 96)
            and (other.spec.world_size, other.spec.parallelism) == (trial.spec.world_size, trial.spec.parallelism)
        ]
        assert pairs[key] == training_metrics.speedup(slow, trial)


def test_without_the_published_baseline_there_is_no_published_speed_up() -> None:
    suite = suite_with(published(precision="fp16-mixed", batch_size=16, seconds=3.0))
    trials = ran(suite)
    (row,) = compare_with_published(suite, trials)
    assert (row["published_speedup"], row["ratio"]) == (None, None)
    assert row["speedup"] == row["equal_batch_speedup"]
    assert row["speedup"] == pytest.approx(time_of(trials, "fp32", 16) / time_of(trials, "fp16-mixed", 16))


@pytest.mark.parametrize(
    ("lost", "status", "num_trials"), [("fp32", None, 1), ("fp32", "crashed", 1), ("fp16-mixed", None, 0)]
)
def test_the_ratio_needs_both_sides(lost: str, status: str | None, num_trials: int) -> None:
    suite = suite_with(published(seconds=4.0), published(precision="fp16-mixed", seconds=2.0))
    trials = [trial for trial in ran(suite) if trial.spec.precision != lost]
    if status is not None:
        lost_trials = [trial for trial in ran(suite) if trial.spec.precision == lost]
        trials += [trial.model_copy(update={"status": status}) for trial in lost_trials]
    row = find(compare_with_published(suite, trials), "fp16-mixed", 8)
    assert row["published_speedup"] == 2.0
    assert (row["speedup"], row["ratio"]) == (None, None)
    assert len(row["trials"]) == num_trials


def seeds(suite: Suite, statuses: dict[tuple[str, int], str]) -> list[Trial]:
    """Return three seeds a cell; a seed's float32 run takes as many times as long as the seed's number plus 2."""
    trials = []
    for spec in specs_of(suite, device="cuda:0", choice=SuiteFilter(seeds=3)):
        status = statuses.get((spec.precision, spec.seed), "ok")
        epochs = [fake_epoch(spec, number) for number in range(2)]
        factor = (spec.seed + 2) if spec.precision == "fp32" else 1
        epochs = [
            e.model_copy(update={"seconds": 2.0 * factor, "validation_seconds": 0.0, "data_seconds": 0.1})
            for e in epochs
        ]
        trials.append(fake_run(spec, *epochs, status=status))  # type: ignore[arg-type]
    return trials


def test_seeds_are_paired_with_their_own_baseline_and_the_median_is_taken() -> None:
    suite = suite_with(published(seconds=4.0), published(precision="fp16-mixed", seconds=2.0))
    assert find(compare_with_published(suite, seeds(suite, {})), "fp16-mixed", 8)["speedup"] == pytest.approx(3.0)
    without_first = seeds(suite, {("fp32", 0): "crashed"})
    row = find(compare_with_published(suite, without_first), "fp16-mixed", 8)
    assert row["speedup"] == pytest.approx(3.5), "the second and third seeds' own, 3 and 4"
    assert len(row["trials"]) == 3


def test_runs_of_another_length_are_no_pair() -> None:
    text = MINE + MINE[MINE.index("[[cells]]") :].replace('"short"', '"long"') + "[recipes.long]\nepochs = 5\n"
    suite = parse_suite(text, "mine").model_copy(
        update={"published": (published(seconds=4.0), published(precision="fp16-mixed", seconds=2.0))}
    )
    trials = [
        trial
        for trial in ran(suite)
        if (trial.spec.precision == "fp32") == (trial.spec.recipe is not None and trial.spec.recipe.epochs == 5)
    ]
    assert find(compare_with_published(suite, trials), "fp16-mixed", 8)["speedup"] is None


def judged(accuracies: tuple[float, ...], *, epochs: int = 2, shortened: bool = False, **changes: Any) -> Trial:
    spec = fake_training("fp32", {"epochs": epochs, "validate_each_epoch": True}, workload="mnist-cnn", batch_size=8)
    spec = spec.model_copy(update=changes)
    done = [
        fake_epoch(spec, number).model_copy(
            update={"accuracy": value, "validation_loss": 1 - value, "shortened": shortened}
        )
        for number, value in enumerate(accuracies)
    ]
    return fake_run(spec, *done)


def test_accuracies_are_after_as_many_epochs() -> None:
    figure = published(accuracy=0.9, epoch_accuracy=(0.3, 0.5, 0.9), seconds=1.0)
    suite = suite_with(figure)

    def accuracies(*trials: Trial) -> tuple[float, float] | None:
        (row,) = compare_with_published(suite, trials)
        return None if row["accuracy"] is None else (row["published_accuracy"], row["accuracy"])

    assert accuracies(judged((0.2, 0.8, 0.7), epochs=3)) == (0.9, 0.8), "the best, as the source selects it"
    assert accuracies(judged((0.2, 0.4), epochs=3)) == (0.5, 0.4), "of a run cut short the last"
    assert accuracies(judged((0.2,), epochs=3, shortened=True)) is None, "not of an epoch cut short"
    assert accuracies(judged((0.2, 0.4), epochs=3, data_set="synthetic:mnist")) is None, "not of random samples"
    assert accuracies(judged((0.1, 0.2, 0.3, 0.4), epochs=9)) is None, "the source had no fourth epoch"
    both = [judged((0.2, value), epochs=3, seed=seed) for seed, value in enumerate((0.4, 0.6))]
    assert accuracies(*both) == (0.5, 0.5)
    assert accuracies(judged((0.2,), epochs=3, seed=2), *both) == (0.5, 0.5), "seeds that got further count"
    failed = fake_trial(fake_training(workload="mnist-cnn", batch_size=8), status="oom", step_seconds=())
    assert accuracies(failed) is None


def test_accuracy_from_random_weights_is_not_compared_with_pretrained_ones() -> None:
    suite = find_suite("fastai-cifar100")
    (spec, *_) = specs_of(suite, device="cuda:0", choice=SuiteFilter(workloads=("fastai-resnet34",)))
    for weights in (None, "/w/resnet34.pth"):
        rows = compare_with_published(suite, [fake_run(spec.model_copy(update={"weights": weights}))])
        accuracy = next(row["accuracy"] for row in rows if row["trials"])
        assert (accuracy is None) == (weights is None)
