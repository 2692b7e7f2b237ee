"""What came of a suite, and the lines a reader of it must know."""

from dataclasses import replace
from typing import Any

import pytest
from fake_engine import fake_environment, fake_facts, fake_run, fake_training, fake_trial

from castwise.records.schema import GpuCounters, Status, Trial
from castwise.registry.suites import Published, Suite, SuiteFilter, find_suite, specs_of
from castwise.suites.result import SuiteResult, lacks_gpus, notes


def result(name: str, *, searches: tuple[tuple[Trial, ...], ...] = (), **choice: Any) -> SuiteResult:
    suite = find_suite(name)
    specs = specs_of(suite, device="cuda:0", choice=SuiteFilter(**choice))
    return SuiteResult(suite, tuple(fake_run(spec) for spec in specs), searches)


def with_trial(made: SuiteResult, index: int, **changes: Any) -> SuiteResult:
    trials = list(made.trials)
    trials[index] = trials[index].model_copy(update=changes)
    return replace(made, trials=tuple(trials))


def validated(trial: Trial, seconds: float) -> Trial:
    rank = trial.ranks[0]
    epochs = tuple(epoch.model_copy(update={"validation_seconds": seconds}) for epoch in rank.epochs)
    return trial.model_copy(update={"ranks": (rank.model_copy(update={"epochs": epochs}),)})


def test_a_speed_up_below_its_ratio_of_throughputs_is_noted() -> None:
    made = result("wrn-cifar10", precisions=("fp32", "fp16-mixed"))
    assert list(notes(made)) == []
    longer = replace(made, trials=tuple(validated(trial, 1000.0) for trial in made.trials))
    _, mixed = longer.runs
    assert mixed.unpaired_speedup is not None
    assert mixed.unpaired_speedup > 1.1
    assert mixed.speedup == pytest.approx(1.0, abs=0.05)
    (note,) = notes(longer)
    assert f"{mixed.unpaired_speedup:.2f}× for {mixed.trial.spec.label} (speed-up {mixed.speedup:.2f}×)" in note


def test_a_note_counts_the_runs_cut_short_among_those_that_succeeded() -> None:
    made = result("wrn-cifar10")
    rank = made.trials[0].ranks[0]
    made = with_trial(made, 0, ranks=(rank.model_copy(update={"epochs": rank.epochs[:2]}),))
    made = with_trial(made, 3, status="diverged", message="m")
    assert next(notes(made)).startswith("cut short (column length): 1 of 3 successful runs")


def test_batches_that_the_loader_made_beforehand_are_noted() -> None:
    made = with_trial(result("wrn-cifar10", max_steps=2), 3, status="crashed", message="m", ranks=())
    assert any(line.startswith("in 3 of 3 runs, throughput counts batches") for line in notes(made))
    quick = result("wrn-cifar10", quick=True)  # 10 batches are left out, and 2 workers make 4 beforehand
    assert not any("throughput counts batches" in line for line in notes(quick))


@pytest.mark.parametrize(("with_weights", "expected"), [(0, "3 of 3 runs"), (2, "1 of 3 runs"), (3, None)])
def test_runs_from_random_weights_are_counted_and_searches_are_not(with_weights: int, expected: str | None) -> None:
    made = result("fastai-cifar100", workloads=("fastai-resnet34",))
    for index in range(with_weights):
        made = with_trial(made, index, spec=made.trials[index].spec.model_copy(update={"weights": "/w.pth"}))
    lines = list(notes(replace(made, searches=(made.trials[1:],))))
    assert len(lines) == (expected is not None)
    assert all(line.startswith("random weights") and f"in {expected}" in line for line in lines)


def lacking(spec_changes: dict[str, Any], num_gpus: int = 1) -> Trial:
    spec = fake_training(**spec_changes)
    environment = fake_environment(num_gpus=num_gpus)
    return fake_trial(spec, status="unsupported", message="too few", environment=environment, step_seconds=())


def test_cells_for_more_gpus_than_there_are_are_one_line_and_no_row() -> None:
    two, four = ({"world_size": n, "parallelism": "ddp"} for n in (2, 4))
    made = result("wrn-cifar10")
    trials = (*made.trials, lacking(two), lacking(four), lacking(four | {"seed": 1}))
    more = replace(made, trials=trials)
    assert list(notes(more)) == ["3 runs need 2 or 4 GPUs, and this machine has 1: not run"]
    assert len(more.runs) == len(made.runs) == 4
    assert next(notes(replace(made, trials=(*made.trials, lacking(two))))).startswith("1 run needs 2 GPUs")
    assert not lacks_gpus(lacking(two, num_gpus=2)), "unsupported for another reason"
    assert not lacks_gpus(fake_trial(fake_training(), status="unsupported", step_seconds=()))


def search(*ends: tuple[int, Status], precision: str = "fp32", scale: str = "none") -> tuple[Trial, ...]:
    trials = []
    for batch, status in ends:
        spec = fake_training(precision, {"epochs": 1}, workload="dpn92", batch_size=batch, loss_scale=scale)
        failed = fake_trial(spec, status=status, message="why", step_seconds=())
        trials.append(fake_run(spec, peak_reserved_bytes=batch * 2**20) if status == "ok" else failed)
    return tuple(trials)


@pytest.mark.parametrize(
    ("name", "choice", "expected"),
    [
        ("wrn-cifar10", {}, []),
        ("wrn-cifar10", {"max_steps": 10_000}, []),  # a limit that cuts nothing
        ("tensorcore", {"synthetic": True}, ["random samples in place of mnist's"]),
        ("rnn-lm", {}, ["the source gives no figures"]),
    ],
)
def test_each_note_comes_once_and_only_if_there_is_a_reason(
    name: str, choice: dict[str, Any], expected: list[str]
) -> None:
    found = list(notes(result(name, **choice)))
    assert len(found) == len(expected)
    assert all(map(str.startswith, found, expected))


def test_failures_and_notes_on_data_come_once() -> None:
    made = with_trial(result("wrn-cifar10"), 0, status="crashed", message="m")
    for index in range(1, 4):
        made = with_trial(made, index, facts=fake_facts(data_note="odd data"))
    assert set(notes(made)) == {"odd data", f"{made.trials[0].spec.label}: crashed: m"}


def test_the_largest_batch_that_trained_and_the_smallest_that_did_not() -> None:
    found = search((128, "ok"), (256, "ok"), (640, "oom"), (512, "ok"), (576, "oom"))
    (limit,) = result("dpn-cifar10", searches=(found, ())).limits
    assert (limit["workload"], limit["precision"], limit["loss_scale"]) == ("dpn92", "fp32", "none")
    assert (limit["gpu"], limit["published"], limit["measured"]) == ("Titan RTX", (256, 512), (512, 576))
    assert limit["reserved_bytes"] == 512 * 2**20
    (nothing,) = result("dpn-cifar10", searches=(search((8, "oom"), precision="tf32"),)).limits
    assert (nothing["gpu"], nothing["published"]) == (None, (None, None)), "no source has TF32"
    assert (nothing["measured"], nothing["reserved_bytes"]) == ((None, 8), None)


def test_a_search_that_ended_early_is_noted() -> None:
    made = result("dpn-cifar10", searches=(search((128, "ok"), (256, "crashed")),))
    assert made.limits[0]["measured"] == (128, None)
    assert ["ended early" in line for line in notes(made)] == [True]


def test_the_published_limit_is_one_gpu_s() -> None:
    suite: Suite = find_suite("dpn-cifar10")
    other = Published(gpu="Other", workload="dpn92", precision="fp32", batch_size=8192, seconds=1.0)
    more = suite.model_copy(update={"published": (*suite.published, other)})
    (limit,) = SuiteResult(more, (), (search((128, "oom")),)).limits
    assert (limit["gpu"], limit["published"]) == ("Titan RTX", (256, 512))


def test_the_cause_stands_beside_a_measured_and_a_published_speed_up() -> None:
    made = result("wrn-cifar10", precisions=("fp32", "fp16-mixed"))
    starved = GpuCounters(num_blocks=3, sm_share=0.3)
    slow = replace(made, trials=tuple(trial.model_copy(update={"counters": starved}) for trial in made.trials))
    lines = [line for line in notes(slow) if "multiprocessors are busy 30 % of the time" in line]
    assert lines
    assert all(
        line.startswith("wrn-28-10 fp16-mixed batch 128: ") and "× here, 1.83× on Tesla T4" in line
        for line in lines[:1]
    )
