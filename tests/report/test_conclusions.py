"""What records say in the end: which precision to take, and the sentence for all."""

from typing import Any

import pytest
from fake_engine import fake_epoch, fake_run, fake_spec, fake_training, fake_trial
from fake_records import steady

from castwise.records.schema import Trial
from castwise.registry.suites import LIMIT_STEPS
from castwise.report.collection import collect
from castwise.report.conclusions import Answer, answer_table, answers_of, headline


def answers(*trials: Trial) -> list[Answer]:
    return answers_of(collect(trials))


def sentence(*trials: Trial) -> str:
    return headline(collect(trials), answers(*trials))


def rounds(precision: str, **changes: Any) -> list[Trial]:
    return [steady(precision, repeat, **changes) for repeat in range(3)]


def run(
    precision: str,
    seconds: float,
    accuracy: float | None = None,
    epochs: int = 2,
    score: float | None = None,
    **changes: object,
) -> Trial:
    spec = fake_training(precision, **changes)
    update = {"seconds": seconds, "counted_seconds": seconds, "accuracy": accuracy, "score": score}
    return fake_run(spec, *(fake_epoch(spec, number).model_copy(update=update) for number in range(epochs)))


def test_a_speedup_over_the_same_loop_says_so() -> None:
    trials = [steady(name, repeat, techniques=("compile",)) for repeat in range(3) for name in ("fp32", "bf16-mixed")]
    collection = collect(trials)
    (answer,) = answers_of(collection)
    assert headline(collection, [answer]).endswith("bf16-mixed with compile, 2.50× as fast as fp32 in the same loop")
    assert "as fast as fp32 in the same loop" in answer.advice.sentence


def test_answer_has_precision_speedup_memory_and_code() -> None:
    trials = [*rounds("fp32"), *rounds("bf16-mixed")]
    (answer,) = answers(*trials)
    assert (answer.advice.decision, answer.advice.precision) == ("take", "bf16-mixed")
    assert answer.advice.speedup == pytest.approx(2.5, rel=0.03)
    assert answer.advice.memory_ratio == pytest.approx(0.7)
    assert 'castwise.apply(model, optimizer, precision="bf16-mixed")' in answer.advice.code
    assert sentence(*trials) == "resnet50 on Fake GPU: take bf16-mixed, 2.50× as fast as fp32"


def test_speedup_is_over_pytorchs_default_if_that_was_measured() -> None:
    names = ("resnet50", "dpn92")
    trials = [each for name in names for p in ("default", "fp32", "bf16-mixed") for each in rounds(p, workload=name)]
    answer, _ = answers(*trials)
    assert answer.advice.speedup == pytest.approx(0.7 / 0.4, rel=0.03)
    assert answer.advice.over_fp32 is not None
    assert answer.advice.over_fp32.value == pytest.approx(2.5, rel=0.03)
    assert sentence(*trials) == "2 models on Fake GPU: 2 train faster than PyTorch's default, 1.75×"


def test_a_script_s_speedup_is_over_the_script_as_written() -> None:
    trials = [
        each
        for p, factor in (("as-written", 2.0), ("fp32", 1.0), ("bf16-mixed", 1.0))
        for each in rounds(p, factor=factor)
    ]
    (answer,) = answers(*trials)
    assert answer.advice.over_written is not None
    assert answer.advice.speedup == answer.advice.over_written.value
    assert f"{answer.advice.speedup:.2f}× as fast as your script as written" in sentence(*trials)
    assert f"{answer.advice.speedup:.2f}× as fast as your script as written" in answer.advice.sentence


def test_the_title_counts_answers_and_the_table_has_the_largest_gain_first() -> None:
    factors = {"resnet50": 1.0, "dpn92": 0.5, "lstm-lm": 3.0}
    trials = [t for name, factor in factors.items() for t in rounds("bf16-mixed", workload=name, factor=factor)]
    trials += [trial for name in factors for trial in rounds("fp32", workload=name)]
    once = [steady(precision, workload=name) for precision in ("fp32", "tf32") for name in ("resnet18", "resnet101")]
    said = sentence(*trials, *once)
    assert said == "5 models on Fake GPU: 2 train faster than fp32, 2.50× to 5.00×; 1 stay as is; 2 undecided"
    table = answer_table(answers(*trials, *once))
    take = [(row["workload"], row["take"]) for row in table.rows]
    assert take[:3] == [("dpn92", "bf16-mixed"), ("resnet50", "bf16-mixed"), ("lstm-lm", "fp32")]
    assert [name for _, name in take[3:]] == ["undecided", "undecided"]
    texts = {column.title: column.text(table.rows[0]) for column in table.columns}
    assert texts["× fp32"].startswith("5.00× [")
    assert (texts["memory"], texts["how sure"]) == ("0.70×", "3 runs each")


def test_one_process_of_each_leaves_it_undecided() -> None:
    small, large = answers(*(steady(name, batch_size=size) for size in (32, 64) for name in ("default", "bf16-mixed")))
    assert (small.advice.decision, small.advice.precision, small.advice.speedup) == ("undecided", None, None)
    assert (small.advice.batch_size, large.advice.batch_size) == (32, 64)


def test_nothing_is_recommended_if_nothing_ended_well() -> None:
    assert sentence() == "No trial was measured"
    failed = [fake_trial(fake_spec(workload=name), status="oom", step_seconds=()) for name in ("resnet50", "dpn92")]
    assert sentence(*failed) == "2 models on Fake GPU: 2 not compared"
    assert sentence(*failed[:1]) == "resnet50 on Fake GPU: nothing to compare"


def test_whole_runs_are_recommended_with_their_accuracy() -> None:
    (answer,) = answers(run("fp32", 10.0, 0.8), run("fp16-mixed", 5.0, 0.79))
    assert (answer.advice.precision, answer.advice.cut, answer.advice.speedup) == ("fp16-mixed", "", pytest.approx(2.0))
    assert "79.0 % accuracy" in answer.advice.sentence
    assert "after 2 epochs" in answer.advice.sentence
    (own,) = answers(run("fp32", 10.0, score=3.5), run("fp16-mixed", 5.0, score=3.25))
    assert "at a score of 3.25 compared with 3.5 after 2 epochs" in own.advice.sentence
    imitated = {"data_set": "synthetic:cifar10", "workload": "wrn-28-10"}
    (random,) = answers(run("fp32", 10.0, 0.1, **imitated), run("fp16-mixed", 5.0, 0.1, **imitated))
    assert "accuracy" not in random.advice.sentence, "random data has none"


def test_cut_runs_say_so_and_recommend_nothing() -> None:
    (answer,) = answers(run("fp32", 10.0, 0.8, epochs=1), run("fp16-mixed", 5.0, 0.79, epochs=1))
    assert answer.advice.cut == "1 of 2 epochs"
    assert "cut short (1 of 2 epochs)" in answer.advice.sentence
    assert "after 1 epoch" in answer.advice.sentence
    assert "take" not in answer.advice.sentence
    assert "fp16-mixed was the fastest in runs cut short, 2.00×" in headline(collect(()), [answer])
    (row,) = answer_table([answer]).rows
    assert (row["take"], row["how_sure"]) == ("(fp16-mixed)", "cut short: 1 of 2 epochs")


def test_slower_or_unsafe_precisions_are_not_taken() -> None:
    (answer,) = answers(run("fp32", 5.0), run("fp16-mixed", 10.0))
    assert answer.advice.precision == "fp32"
    assert "fp16-mixed comes closest, at 0.50" in answer.advice.sentence
    assert answers(run("fp32", 5.0), run("fp16-true", 1.0)) == [], "float16 weights are not recommended"


def test_what_may_be_chance_is_not_taken() -> None:
    seconds = {("fp32", 0): 10.0, ("fp16-mixed", 0): 4.0, ("fp32", 1): 5.0, ("fp16-mixed", 1): 8.0}
    (answer,) = answers(*(run(precision, each, seed=seed) for (precision, seed), each in seconds.items()))
    assert (answer.advice.decision, answer.advice.precision) == ("stay", "fp32")
    assert "fp16-mixed trains 1.25× (too noisy" in answer.advice.sentence
    assert "which may be chance" in answer.advice.sentence


def test_searches_for_the_largest_batch_recommend_nothing() -> None:
    recipe = {"recipe": {"max_steps": LIMIT_STEPS, "stop_after": 1}}
    assert answers(run("fp32", 5.0, **recipe), run("fp16-mixed", 1.0, **recipe)) == []


def test_the_answer_is_one_for_all_loops() -> None:
    loops = ((), ("channels-last",), ("channels-last", "compile"))
    trials = [trial for loop in loops for trial in rounds("bf16-mixed", techniques=loop, factor=0.5 ** len(loop))]
    trials += rounds("fp32")
    assert sentence(*trials).startswith("resnet50 on Fake GPU: take bf16-mixed with 2 techniques, 10.")
    assert len(answer_table(answers(*trials)).rows) == 1


def test_of_equal_loops_the_one_measured_most_is_taken() -> None:
    often = [steady("bf16-mixed", repeat, techniques=("channels-last",)) for repeat in range(4)]
    lucky = [steady("bf16-mixed", repeat, 0.995, techniques=("compile",)) for repeat in range(2)]
    (answer,) = answers(*(steady("fp32", repeat) for repeat in range(4)), *often, *lucky)
    assert answer.advice.techniques == ("channels-last",)


def test_the_half_batch_that_a_search_measures_once_has_no_answer() -> None:
    loop = {"techniques": ("channels-last",), "batch_size": 256}
    taken = [*rounds("fp32", batch_size=256), *rounds("bf16-mixed", **loop)]
    probes = [steady("fp32", batch_size=128), steady("bf16-mixed", **{**loop, "batch_size": 128})]
    assert [each.advice.batch_size for each in answers(*taken, *probes)] == [256]
    assert len(answers(*taken, *probes, steady("tf32", batch_size=128))) == 2, "the batch was asked for"
