"""What records say in the end: which precision to take, and the sentence for all."""

import re
from typing import Any

import pytest
from fake_engine import fake_epoch, fake_run, fake_spec, fake_training, fake_trial
from fake_records import steady

from castwise.records.schema import Trial
from castwise.registry.suites import LIMIT_STEPS
from castwise.report.collection import collect
from castwise.report.conclusions import Answer, answers_of, in_one_sentence


def answers(*trials: Trial) -> list[Answer]:
    return answers_of(collect(trials))


def sentence(*trials: Trial) -> str:
    return in_one_sentence(collect(trials), answers(*trials))


def rounds(precision: str, **changes: Any) -> list[Trial]:
    return [steady(precision, repeat, **changes) for repeat in range(3)]


def run(precision: str, seconds: float, accuracy: float | None = None, epochs: int = 2, **changes: object) -> Trial:
    spec = fake_training(precision, **changes)
    update = {"seconds": seconds, "counted_seconds": seconds, "accuracy": accuracy}
    return fake_run(spec, *(fake_epoch(spec, number).model_copy(update=update) for number in range(epochs)))


def test_answer_has_precision_speedup_memory_and_code() -> None:
    trials = [*rounds("fp32"), *rounds("bf16-mixed")]
    (answer,) = answers(*trials)
    assert (answer.advice.decision, answer.advice.precision) == ("take", "bf16-mixed")
    assert answer.speedup == pytest.approx(2.5, rel=0.03)
    assert answer.advice.memory_ratio == pytest.approx(0.7)
    assert answer.advice.code.startswith("with torch.autocast")
    assert sentence(*trials) == answer.advice.sentence


def test_speedup_is_over_pytorchs_default_if_that_was_measured() -> None:
    names = ("resnet50", "dpn92")
    trials = [each for name in names for p in ("default", "fp32", "bf16-mixed") for each in rounds(p, workload=name)]
    answer, _ = answers(*trials)
    assert answer.speedup == pytest.approx(0.7 / 0.4, rel=0.03)
    assert answer.advice.over_fp32 is not None
    assert answer.advice.over_fp32.value == pytest.approx(2.5, rel=0.03)
    assert "times as fast as PyTorch's default)" in sentence(*trials)


def test_answers_are_put_together_by_precision() -> None:
    factors = {"resnet50": 1.0, "dpn92": 0.5, "lstm-lm": 3.0}
    trials = [t for name, factor in factors.items() for t in rounds("bf16-mixed", workload=name, factor=factor)]
    trials += [trial for name in factors for trial in rounds("fp32", workload=name)]
    once = [steady(precision, workload=name) for precision in ("fp32", "tf32") for name in ("resnet18", "resnet101")]
    said = sentence(*trials, *once)
    assert re.search(r"take bf16-mixed for resnet50, dpn92 \(2\.\d\d to [45]\.\d\d times as fast as fp32\)", said)
    assert "stay with fp32 for lstm-lm; undecided for resnet18, resnet101." in said


def test_one_process_of_each_leaves_it_undecided() -> None:
    small, large = answers(*(steady(name, batch_size=size) for size in (32, 64) for name in ("default", "bf16-mixed")))
    assert (small.advice.decision, small.advice.precision, small.speedup) == ("undecided", None, None)
    assert (small.spec.batch_size, large.spec.batch_size) == (32, 64)


def test_nothing_is_recommended_if_nothing_ended_well() -> None:
    assert sentence() == "No trial was measured."
    failed = [fake_trial(fake_spec(workload=name), status="oom", step_seconds=()) for name in ("resnet50", "dpn92")]
    assert "nothing can be recommended" in sentence(*failed)


def test_whole_runs_are_recommended_with_their_accuracy() -> None:
    (answer,) = answers(run("fp32", 10.0, 0.8), run("fp16-mixed", 5.0, 0.79))
    assert (answer.advice.precision, answer.cut, answer.speedup) == ("fp16-mixed", "", pytest.approx(2.0))
    assert "79.0 % accuracy" in answer.advice.sentence
    assert "after 2 epochs" in answer.advice.sentence
    imitated = {"data_set": "synthetic:cifar10", "workload": "wrn-28-10"}
    random = sentence(run("fp32", 10.0, 0.1, **imitated), run("fp16-mixed", 5.0, 0.1, **imitated))
    assert "accuracy" not in random, "random data has none"


def test_cut_runs_say_so_and_recommend_nothing() -> None:
    (answer,) = answers(run("fp32", 10.0, 0.8, epochs=1), run("fp16-mixed", 5.0, 0.79, epochs=1))
    assert answer.cut == "1 of 2 epochs"
    assert "cut short (1 of 2 epochs)" in answer.advice.sentence
    assert "after 1 epoch" in answer.advice.sentence
    assert "take" not in answer.advice.sentence
    names = ("dpn92", "wrn-28-10")
    slow = [run(precision, 10.0, epochs=1, workload=name) for precision in ("fp32", "tf32") for name in names]
    assert "no precision was worth leaving fp32, in dpn92, wrn-28-10" in sentence(*slow)
    fast = [run("fp16-mixed", 5.0, epochs=1, workload=name) for name in names]
    assert "fp16-mixed was the fastest for dpn92, wrn-28-10 (2.00" in sentence(*slow, *fast)


def test_slower_or_unsafe_precisions_are_not_taken() -> None:
    (answer,) = answers(run("fp32", 5.0), run("fp16-mixed", 10.0))
    assert answer.advice.precision == "fp32"
    assert "fp16-mixed comes closest, at 0.50" in answer.advice.sentence
    assert answers(run("fp32", 5.0), run("fp16-true", 1.0)) == [], "float16 weights are not recommended"


def test_searches_for_the_largest_batch_recommend_nothing() -> None:
    recipe = {"recipe": {"max_steps": LIMIT_STEPS}}
    assert answers(run("fp32", 5.0, **recipe), run("fp16-mixed", 1.0, **recipe)) == []


def test_answers_with_a_reference_go_first() -> None:
    without = [trial for name in ("bf16-mixed", "fp16-master") for trial in rounds(name, workload="dpn92")]
    assert "take tf32 for resnet50 (" in (said := sentence(*rounds("fp32"), *rounds("tf32"), *without))
    assert "bf16-mixed" not in said
    assert "take bf16-mixed, the fastest" in sentence(*without)


def test_the_answer_is_one_for_all_loops() -> None:
    loops = ((), ("channels-last",), ("channels-last", "compile"))
    trials = [trial for loop in loops for trial in rounds("bf16-mixed", techniques=loop, factor=0.5 ** len(loop))]
    trials += [*rounds("fp32"), *rounds("fp32", workload="dpn92"), *rounds("tf32", workload="dpn92")]
    said = sentence(*trials)
    assert re.search(r"take bf16-mixed with 2 techniques for resnet50 \(\d+\.\d\d times as fast as fp32\)", said)
    assert said.index("bf16-mixed") < said.index("tf32"), "the largest gain first"
