"""Records put in order: what counts, what goes into one chart, and what cells are called there."""

import math

import pytest
from fake_engine import fake_environment, fake_run, fake_spec, fake_training, fake_trial
from fake_records import every_kind, steady

from castwise.analysis.statistics import Estimate, has_interval
from castwise.records.schema import Trial
from castwise.registry.suites import LIMIT_STEPS
from castwise.report.collection import ComparisonGroup, collect, is_search, throughput_of


def only_topic(*trials: Trial) -> ComparisonGroup:
    (topic,) = collect(trials).groups
    return topic


def test_a_copy_counts_once_and_says_so() -> None:
    trial = fake_trial()
    collection = collect([trial, trial.model_copy()])
    assert collection.trials == (trial,)
    assert collection.notes == ("1 record is a copy of another, and counted once",)


def test_of_a_question_asked_again_the_newest_answer_counts() -> None:
    old = fake_trial(step_seconds=(0.2,))
    new = fake_trial(step_seconds=(0.1,)).model_copy(update={"started_at": "2001-01-01T00:00:00.000+00:00"})
    for order in ([old, new], [new, old]):
        collection = collect(order)
        assert collection.trials == (new,)
        assert collection.notes == ("1 record was measured again later: the newest counts",)


def test_the_same_question_on_another_machine_is_another_topic() -> None:
    topics = collect([fake_trial(), fake_trial(environment=fake_environment(gpu="Slow GPU"))]).groups
    assert [topic.title for topic in topics] == ["resnet50 (Fake GPU)", "resnet50 (Slow GPU)"]


@pytest.mark.parametrize(
    ("other", "apart"),
    [
        ({"driver": "1.2"}, ("driver 580.0", "driver 1.2")),
        ({"torch": "2.99", "driver": "1.2"}, ("torch 2.11.0", "torch 2.99")),
        ({"num_threads": 3}, ("machine ", "machine ")),
    ],
)
def test_machines_with_the_same_device_are_told_apart_by_what_differs(
    other: dict[str, object], apart: tuple[str, str]
) -> None:
    here = fake_environment(torch="2.11.0", driver="580.0")
    there = here.model_copy(update=other)
    only_here = fake_trial(fake_spec("fp32", workload="dpn92"), environment=here)
    topics = collect([fake_trial(environment=here), fake_trial(environment=there), only_here]).groups
    titles = [topic.title for topic in topics]
    assert titles[2] == "dpn92", "there is nothing to tell it from"
    for title, words in zip(titles, apart, strict=False):
        assert title.startswith(f"resnet50, {words}")
    assert len(set(titles)) == 3


def test_batches_gpus_and_techniques_are_one_topic_and_in_order() -> None:
    topic = only_topic(
        steady("bf16-mixed", batch_size=64),
        steady("fp32", batch_size=64),
        steady("fp32", batch_size=32),
        steady("fp32", batch_size=32, techniques=("fused",)),
        steady("fp32", batch_size=32, world_size=2, parallelism="ddp"),
    )
    assert [topic.label(cell) for cell in topic.configurations] == [
        "fp32, batch 32, 1 GPU",
        "fp32, batch 32, 1 GPU, fused",
        "fp32, batch 32, 2 GPUs, ddp",
        "fp32, batch 64, 1 GPU",
        "bf16-mixed, batch 64, 1 GPU",
    ]
    assert topic.label(topic.configurations[0], "batch_size", "world_size") == "fp32"


def test_what_all_cells_have_is_left_out_of_their_names() -> None:
    topic = only_topic(steady("bf16-mixed"), steady("fp32"))
    assert [topic.label(cell) for cell in topic.configurations] == ["fp32", "bf16-mixed"]
    assert topic.settings == [""]


def test_a_loss_scale_is_named_where_a_precision_has_several() -> None:
    alone = only_topic(steady("fp32"), steady("fp16-master", loss_scale="128.0"))
    assert [alone.label(cell) for cell in alone.configurations] == ["fp32", "fp16-master"]
    several = only_topic(steady("fp16-master"), steady("fp16-master", loss_scale="128.0"))
    assert {several.label(cell) for cell in several.configurations} == {"fp16-master", "fp16-master, loss scale 128.0"}


def test_no_two_topics_have_one_title() -> None:
    topics = collect([steady(), fake_trial()]).groups  # they differ in their protocols
    assert [topic.title for topic in topics] == ["resnet50", "resnet50 #2"]


def test_training_runs_are_topics_of_their_own_and_say_how_long_they_are() -> None:
    whole, cut = fake_training(workload="wrn-28-10"), fake_training(recipe={"max_steps": 25})
    search = fake_run(fake_training(recipe={"max_steps": LIMIT_STEPS}))
    topics = collect([fake_run(whole), fake_run(cut), search, fake_trial()]).groups
    assert [topic.title for topic in topics] == [
        "resnet50",
        "wrn-28-10: training",
        "resnet50: training, 25 steps an epoch",
        "resnet50: search for the largest batch",
    ]
    assert [topic.is_training for topic in topics] == [False, True, True, True]
    assert is_search(search)
    assert not is_search(fake_run(cut))


def test_cells_of_rounds_have_intervals_and_single_ones_none() -> None:
    rounds = only_topic(*(steady(precision, repeat) for repeat in range(3) for precision in ("fp32", "tf32")))
    assert [len(cell.trials) for cell in rounds.configurations] == [3, 3]
    assert has_interval(rounds.configurations[1].throughput)
    assert not has_interval(only_topic(steady()).configurations[0].throughput)


@pytest.mark.parametrize(
    "found", [None, Estimate(1.0, math.nan, math.nan, 1), Estimate(1.0, 1.0, 1.0, 3), Estimate(1.0, 0.5, math.inf, 3)]
)
def test_what_is_no_interval(found: Estimate | None) -> None:
    assert not has_interval(found)


def test_throughput_is_that_of_either_kind() -> None:
    assert throughput_of(fake_trial(step_seconds=(0.5,))) == 512
    run = throughput_of(fake_run(fake_training()))
    assert run is not None
    assert run > 0
    assert throughput_of(fake_trial(step_seconds=())) is None


def test_nothing_is_lost_on_the_way() -> None:
    trials = every_kind()
    collection = collect(trials)
    kept = [trial for cell in collection.configurations for trial in cell.trials]
    assert sorted(trial.spec.key for trial in kept) == sorted(trial.spec.key for trial in trials)


def test_an_unknown_precision_comes_last() -> None:
    strange = fake_trial().model_copy(update={"spec": fake_spec().model_copy(update={"precision": "int4-mixed"})})
    assert only_topic(strange, steady_alone()).precisions == ["fp32", "int4-mixed"]


def steady_alone() -> Trial:
    return fake_trial()
