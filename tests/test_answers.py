"""What records say in the end, in words."""

import pytest
from fake_engine import fake_epoch, fake_run, fake_spec, fake_training, fake_trial
from fake_records import steady

from castwise.records.schema import Epoch, Trial
from castwise.registry.suites import LIMIT_STEPS
from castwise.report.collection import collect
from castwise.report.conclusions import answers_of, in_one_sentence


def sentence(*trials: Trial) -> str:
    collection = collect(trials)
    return in_one_sentence(collection, answers_of(collection))


def run(precision: str, seconds: float, accuracy: float | None = None, epochs: int = 2, **changes: object) -> Trial:
    spec = fake_training(precision, **changes)
    made = (fake_epoch(spec, number) for number in range(epochs))
    return fake_run(spec, *(_with(epoch, seconds, accuracy) for epoch in made))


def _with(epoch: Epoch, seconds: float, accuracy: float | None) -> Epoch:
    return epoch.model_copy(update={"seconds": seconds, "counted_seconds": seconds, "accuracy": accuracy})


def test_one_comparison_has_its_own_sentence() -> None:
    assert sentence(steady("fp32"), steady("bf16-mixed")).startswith("resnet50, batch 256: take bf16-mixed.")


def test_several_are_put_together_by_what_to_take() -> None:
    said = sentence(
        steady("fp32"),
        steady("bf16-mixed"),
        steady("fp32", workload="dpn92"),
        steady("bf16-mixed", workload="dpn92", factor=0.5),
        steady("fp32", workload="lstm-lm"),
        steady("bf16-mixed", workload="lstm-lm", factor=3.0),
    )
    assert said == (
        "On Fake GPU: take bf16-mixed for resnet50, dpn92 (2.50 to 5.00 times as fast as fp32); "
        "stay with fp32 for lstm-lm."
    )


def test_of_many_workloads_a_few_are_named() -> None:
    names = [f"model-{number}" for number in range(7)]
    said = sentence(*(steady(precision, workload=name) for name in names for precision in ("fp32", "tf32")))
    assert "take tf32 for model-0, model-1, model-2 and 4 more (" in said


def test_nothing_measured_is_said() -> None:
    assert sentence() == "No trial was measured."
    failed = [fake_trial(fake_spec(workload=name), status="oom", step_seconds=()) for name in ("resnet50", "dpn92")]
    assert sentence(*failed) == "On Fake GPU nothing can be recommended: no trial ended well."


def test_runs_are_answered_for_with_what_they_learned() -> None:
    said = sentence(run("fp32", 10.0, 0.8), run("fp16-mixed", 5.0, 0.79))
    assert said == (
        "resnet50: training, batch 256: take fp16-mixed. It trains 2.00 times as fast as fp32, at 79.0 % accuracy "
        "beside 80.0 % after 2 epochs."
    )


def test_runs_that_were_cut_short_say_so_and_nothing_is_taken_for_them() -> None:
    said = sentence(run("fp32", 10.0, epochs=1), run("fp16-mixed", 5.0, epochs=1))
    assert said == (
        "resnet50: training, batch 256: fp16-mixed trains 2.00 times as fast as fp32 in runs that were cut short "
        "(1 of 2 epochs), whose end nobody has seen."
    )
    several = [run(name, 10.0, epochs=1, workload=word) for name in ("fp32", "tf32") for word in ("dpn92", "wrn-28-10")]
    assert "in runs cut short no precision was worth leaving fp32, in dpn92, wrn-28-10" in sentence(*several)
    several += [run("fp16-mixed", 5.0, epochs=1, workload=word) for word in ("dpn92", "wrn-28-10")]
    assert "in runs cut short fp16-mixed was the fastest for dpn92, wrn-28-10 (2.00" in sentence(*several)


def test_accuracies_are_those_after_as_many_epochs() -> None:
    assert "after 1 epoch in runs" in sentence(run("fp32", 10.0, 0.8, epochs=1), run("fp16-mixed", 5.0, 0.79))


def test_random_data_has_no_accuracy() -> None:
    synthetic_like = {"data_set": "synthetic:cifar10", "workload": "wrn-28-10"}
    assert "accuracy" not in sentence(
        run("fp32", 10.0, 0.1, **synthetic_like), run("fp16-mixed", 5.0, 0.1, **synthetic_like)
    )


def test_a_slower_precision_is_not_taken_and_weights_matter() -> None:
    assert "stay with fp32. fp16-mixed comes closest, at 0.50" in sentence(run("fp32", 5.0), run("fp16-mixed", 10.0))
    collection = collect([run("fp32", 5.0), run("fp16-true", 1.0)])
    assert answers_of(collection) == [], "runs without float32 weights alone say nothing to take"


def test_searches_for_the_largest_batch_say_nothing_of_precision() -> None:
    recipe = {"recipe": {"max_steps": LIMIT_STEPS}}
    assert answers_of(collect([run("fp32", 5.0, **recipe), run("fp16-mixed", 1.0, **recipe)])) == []


def test_an_answer_knows_its_gain_and_its_memory() -> None:
    (answer,) = answers_of(collect([steady("fp32"), steady("bf16-mixed")]))
    assert round(answer.gain or 0, 2) == 2.5
    assert answer.memory_ratio == pytest.approx(0.7)
    assert answer.code.startswith("with torch.autocast")


def test_what_has_no_float32_beside_it_is_not_named_where_others_have() -> None:
    loops = [steady("bf16-mixed", techniques=("compile",)), steady("bf16-mixed", techniques=("cuda-graph",))]
    said = sentence(steady("fp32"), steady("tf32"), *loops)
    assert said.startswith("On Fake GPU: take tf32 for resnet50 (")
    assert "bf16-mixed" in sentence(*loops)
