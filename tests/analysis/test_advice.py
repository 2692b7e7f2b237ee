import ast

import pytest
from fake_engine import fake_spec, fake_trial

from castwise.analysis.advice import Advice, recommend
from castwise.analysis.result_table import compare
from castwise.records.schema import Status, Trial
from castwise.registry.precisions import PRECISIONS, Precision, find_precision

each_precision = pytest.mark.parametrize("row", PRECISIONS, ids=lambda row: row.name)


def advise(*trials: Trial) -> Advice:
    (advice,) = recommend(compare(trials))
    return advice


def at(precision: str, speed: float, status: Status = "ok", **changes: object) -> Trial:
    """Return a trial that is `speed` times as fast as one of 0.1 s a step."""
    return fake_trial(fake_spec(precision, **changes), status=status, step_seconds=(0.1 / speed,))


def test_the_fastest_with_float32_weights_is_taken() -> None:
    advice = advise(at("fp32", 1), at("tf32", 1.5), at("bf16-mixed", 3.25), at("fp16-mixed", 3.0))
    assert advice.workload == "resnet50"
    assert advice.precision == "bf16-mixed"
    assert advice.sentence == (
        "resnet50, batch 256: take bf16-mixed. It trains 3.25 times as fast as fp32 "
        "(2.17 times tf32, which PyTorch uses in convolutions and RNNs unasked) in the same memory."
    )
    assert "dtype=torch.bfloat16" in advice.code


def in_rounds(*speeds: float) -> list[Trial]:
    """Return a round for each speed-up of bf16-mixed."""
    pairs = [(at("fp32", 1, repeat=n), at("bf16-mixed", speed, repeat=n)) for n, speed in enumerate(speeds)]
    return [trial.model_copy(update={"session_id": f"s{n}"}) for n, pair in enumerate(pairs) for trial in pair]


def test_a_gain_whose_interval_holds_one_is_none() -> None:
    advice = advise(*in_rounds(1.1, 1.5))
    assert advice.precision == "fp32"
    assert advice.code == ""
    assert "bf16-mixed was 1.28 times as fast, but the 95 % interval reaches from " in advice.sentence
    assert advice.sentence.endswith(": more rounds tell more.")


def test_a_gain_whose_interval_lies_above_one_is_taken() -> None:
    assert advise(*in_rounds(1.30, 1.31, 1.30)).precision == "bf16-mixed"


@pytest.mark.parametrize(("speed", "precision"), [(0.5, "fp32"), (1.0, "fp32"), (1.029, "fp32"), (1.031, "bf16-mixed")])
def test_a_gain_under_three_per_cent_is_not_worth_a_change(speed: float, precision: str) -> None:
    advice = advise(at("fp32", 1), at("bf16-mixed", speed))
    assert advice.precision == precision
    assert bool(advice.code) == (precision != "fp32")


def test_staying_says_what_came_closest_or_that_nothing_did() -> None:
    slower = advise(at("fp32", 1), at("bf16-mixed", 0.8), at("tf32", 0.7))
    assert slower.sentence == (
        "resnet50, batch 256: stay with fp32. No other precision that keeps float32 weights was faster."
    )
    nearly = advise(at("fp32", 1), at("bf16-mixed", 1.02), at("tf32", 0.7))
    assert nearly.sentence == (
        "resnet50, batch 256: stay with fp32. bf16-mixed comes closest, at 1.02 times its speed: "
        "not worth a change of numerics."
    )


def test_simplicity_never_hides_a_worthwhile_gain() -> None:
    # tf32 is nearly as fast as bf16-mixed, but only bf16-mixed gains enough over fp32.
    assert advise(at("fp32", 1), at("tf32", 1.02), at("bf16-mixed", 1.04)).precision == "bf16-mixed"


@pytest.mark.parametrize("order", [1, -1])
def test_of_nearly_equals_the_one_that_changes_the_loop_least_is_taken(order: int) -> None:
    trials = [at("fp32", 1), at("tf32", 1.96), at("bf16-mixed", 1.97), at("fp16-mixed", 2.0), at("fp16-master", 2.01)]
    assert advise(*trials[::order]).precision == "tf32"


def test_simplicity_gives_way_to_a_worthwhile_gain() -> None:
    assert advise(at("fp32", 1), at("tf32", 1.9), at("bf16-mixed", 2.0)).precision == "bf16-mixed"


def test_faster_precisions_without_float32_weights_are_named_as_a_caution() -> None:
    advice = advise(at("fp32", 1), at("bf16-mixed", 2), at("bf16-true", 2.2), at("fp16-true", 3))
    assert advice.precision == "bf16-mixed"
    assert advice.sentence.endswith(
        " bf16-true (1.10×), fp16-true (1.50×) were faster still but keep no float32 weights: "
        "check the accuracy before you take it."
    )
    one = advise(at("fp32", 1), at("bf16-mixed", 2), at("bf16-true", 2.2))
    assert "bf16-true (1.10×) was faster still but keeps no float32 weights" in one.sentence


def test_no_caution_for_what_is_hardly_faster_or_did_not_end_well() -> None:
    advice = advise(at("fp32", 1), at("bf16-mixed", 2), at("bf16-true", 2.04), at("fp16-true", 3, status="diverged"))
    assert "accuracy" not in advice.sentence


def test_staying_with_fp32_cautions_too() -> None:
    advice = advise(at("fp32", 1), at("bf16-true", 2))
    assert advice.precision == "fp32"
    assert "bf16-true (2.00×) was faster but keeps no float32 weights" in advice.sentence


def test_skipped_steps_are_part_of_the_advice() -> None:
    skipping = fake_trial(fake_spec("fp16-mixed"), step_seconds=(0.05,), skipped=3)
    assert "loss scaling skipped 3 steps." in advise(at("fp32", 1), skipping).sentence
    once = fake_trial(fake_spec("fp16-mixed"), step_seconds=(0.05,), skipped=1)
    assert "loss scaling skipped 1 step." in advise(at("fp32", 1), once).sentence


@pytest.mark.parametrize("status", ["oom", "timeout", "crashed", "diverged", "unsupported"])
def test_only_what_ended_well_is_recommended(status: Status) -> None:
    assert advise(at("fp32", 1), at("bf16-mixed", 9, status=status), at("tf32", 2)).precision == "tf32"


def test_without_a_baseline_nothing_is_said_of_a_gain() -> None:
    advice = advise(at("bf16-mixed", 2), at("tf32", 1))
    assert advice.precision == "bf16-mixed"
    assert "without fp32 to compare with" in advice.sentence
    assert "times as fast" not in advice.sentence
    assert advice.code


def test_without_a_baseline_too_float32_weights_are_kept_and_the_rest_is_a_caution() -> None:
    # fp32 does not fit: the case in which the others matter most.
    advice = advise(at("fp32", 1, status="oom"), at("bf16-mixed", 2), at("bf16-true", 2.2))
    assert advice.precision == "bf16-mixed"
    assert "bf16-true (1.10×) was faster still but keeps no float32 weights" in advice.sentence


def test_where_nothing_measured_keeps_float32_weights_the_advice_says_so() -> None:
    advice = advise(at("bf16-true", 2), at("fp16-true", 1))
    assert advice.precision == "bf16-true"
    assert "keeps no float32 weights: check the accuracy" in advice.sentence
    beside = advise(at("fp32", 1, status="oom"), at("fp16-true", 1))
    assert "keeps no float32 weights: check the accuracy" in beside.sentence


def test_fp32_alone_is_no_reason_to_stay_with_it() -> None:
    advice = advise(at("fp32", 1))
    assert advice.precision == "fp32"
    assert "was faster" not in advice.sentence
    assert advice.code == ""


@pytest.mark.parametrize("status", ["oom", "timeout", "crashed", "diverged", "unsupported"])
def test_where_nothing_ended_well_there_is_nothing_to_recommend(status: Status) -> None:
    advice = advise(fake_trial(status=status, step_seconds=()), at("bf16-mixed", 2, status=status))
    assert (advice.precision, advice.code) == (None, "")
    assert advice.sentence == "resnet50, batch 256: nothing to recommend, no trial ended well."


def test_each_workload_and_batch_has_its_own_advice_in_order() -> None:
    rows = compare(
        [
            at("fp32", 1),
            at("fp32", 1, batch_size=8),
            at("fp32", 1, workload="dpn92"),
            at("tf32", 2, batch_size=8),
        ]
    )
    advice = recommend(rows)
    assert [(item.workload, item.precision) for item in advice] == [
        ("resnet50", "fp32"),
        ("resnet50", "tf32"),
        ("dpn92", "fp32"),
    ]


def test_of_several_loss_scales_the_advice_says_which() -> None:
    advice = advise(at("fp32", 1), at("fp16-master", 2), at("fp16-master", 3, loss_scale="128"))
    assert advice.precision == "fp16-master"
    assert "take fp16-master with loss scale 128" in advice.sentence


def test_nothing_comes_to_nothing() -> None:
    assert recommend([]) == []


@each_precision
def test_every_precisions_code_can_be_pasted(row: Precision) -> None:
    for device in ("cuda:0", "cpu"):
        trials = [at("fp32", 1, status="oom", device=device), at(row.name, 2, device=device)]
        code = advise(*trials).code or find_precision(row.name).code
        ast.parse(code)
        if row.name != "fp32":
            assert "{" not in code
            assert "device" not in code or f'"{device.partition(":")[0]}"' in code


def test_a_gain_within_the_noise_is_none() -> None:
    noisy = (0.08, 0.09, 0.1, 0.11, 0.12)
    rows = compare(
        [
            fake_trial(fake_spec("fp32"), step_seconds=tuple(1.1 * seconds for seconds in noisy)),
            fake_trial(fake_spec("tf32"), step_seconds=noisy),
        ]
    )
    (advice,) = recommend(rows)
    assert advice.precision == "fp32"
    assert "the blocks spread by as much: measure it again" in advice.sentence


@pytest.mark.parametrize(("status", "words"), [("oom", "does not fit into memory"), ("crashed", "fp32 crashed")])
def test_a_baseline_that_failed_is_named(status: Status, words: str) -> None:
    rows = compare([fake_trial(fake_spec("fp32"), status=status, step_seconds=()), fake_trial(fake_spec("bf16-mixed"))])
    (advice,) = recommend(rows)
    assert words in advice.sentence


def test_each_number_of_gpus_has_its_own_advice() -> None:
    two = {"world_size": 2, "parallelism": "ddp"}
    alone, spread = recommend(
        compare([at("fp32", 1), at("fp32", 0.9, **two), at("bf16-mixed", 1), at("bf16-mixed", 3, **two)])
    )
    assert (alone.precision, spread.precision) == ("fp32", "bf16-mixed")
    assert alone.sentence.startswith("resnet50, batch 256: stay with fp32")
    assert spread.sentence.startswith("resnet50, batch 256 on 2 GPUs (ddp): take bf16-mixed. It trains 3.33 times")
