"""What rounding does, in sentences: shares and loss scales from planted exponents."""

import pytest

from castwise.analysis.numerics import findings_of, first_loss, lost_share, static_scales, underflow_share, worst_first
from castwise.records.schema import GradientHistogram, ModuleNumerics, PrecisionFall, StepNumerics, StepProfile
from castwise.registry.precisions import find_precision


def histogram(counts: dict[int, int], largest: float = 0.0) -> GradientHistogram:
    places = range(min(counts), max(counts) + 1)
    text = " ".join(str(counts.get(place, 0)) for place in places)
    return GradientHistogram(first_exponent=places.start, counts=text, largest=largest or 2.0 ** max(counts))


def module(name: str, counts: dict[int, int], **more: object) -> ModuleNumerics:
    return ModuleNumerics.model_validate({"name": name, "num_weights": 100, "weights": histogram(counts)} | more)


def test_the_share_that_underflows_is_what_is_below_half_of_the_smallest_number() -> None:
    gradients = histogram({-40: 10, -26: 15, -25: 5, -10: 70})
    assert underflow_share(gradients, "float16") == pytest.approx(0.25), "2^-25 is rounded to 2^-24 or kept"
    assert underflow_share(gradients, "float16", 2.0) == pytest.approx(0.10)
    assert underflow_share(gradients, "float16", 65_536.0) == 0.0
    assert underflow_share(gradients, "bfloat16") == 0.0
    assert underflow_share(GradientHistogram(), "float16") == 0.0


def test_scales_fit_from_the_smallest_that_loses_little_to_the_largest_that_overflows_nowhere() -> None:
    fits = StepNumerics(modules=(module("a", {-30: 500, 0: 500}), module("b", {-28: 1, -5: 9999})))
    assert static_scales(fits) == (5, 15), "2^5 lifts 2^-30 to 2^-25; 1 times 2^16 is infinite in float16"
    assert static_scales(StepNumerics(modules=(module("a", {-60: 500, 10: 500}),))) is None
    rare = StepNumerics(modules=(module("a", {-60: 1, 0: 9999}),))
    assert static_scales(rare) == (0, 15), "0.01 % may be lost"


@pytest.mark.parametrize(("loss_scale", "scale", "kind"), [("dynamic", 65_536.0, "dynamic"), ("128", 128.0, "static")])
def test_the_layer_that_loses_most_is_named(loss_scale: str, scale: float, kind: str) -> None:
    modules = (module("stem", {-8: 100}), module("layer3", {-30: 31, -8: 69}))
    found = findings_of(StepNumerics(modules=modules, loss_scale=scale), find_precision("fp16-mixed"), loss_scale)
    by_name = {each.name: each for each in found}
    assert by_name["underflow"].module == "layer3"
    assert by_name["underflow"].sentence == (
        f"float16 without scaling loses 31 % of the gradients of layer3's weights; the {kind} scale of {scale:,.6g} "
        "keeps 100.0 %."
    )
    assert by_name["static-scale"].sentence == f"static loss scales that fit: 32 to {2**23:,}."


def test_overflow_rounding_and_lost_updates_have_a_sentence_each() -> None:
    modules = (
        module("stem", {-8: 100}, overflow_share=0.5, output_sqnr_db=60.0, gradient_sqnr_db=None),
        module("head", {-8: 100}, output_sqnr_db=20.0, gradient_sqnr_db=40.0, lost_update_share=0.12),
    )
    numerics = StepNumerics(modules=modules, loss_scale=65_536.0, note="a note")
    found = {each.name: each for each in findings_of(numerics, find_precision("fp16-true"), "dynamic")}
    assert found["overflow"].sentence == (
        "50 % of the gradients of stem overflow with a loss scale of 65,536; such a step is skipped."
    )
    assert found["rounding"].sentence.startswith("furthest from float32 are the outputs of head: 20 dB, an error of 10")
    assert found["lost-updates"].sentence == "12 % of the weight updates round to nothing, in head 12 %."
    kept = numerics.model_copy(update={"kept_update_share": 0.98})
    sentences = [each.sentence for each in findings_of(kept, find_precision("bf16-sr"), "none")]
    assert (
        "12 % of the weight updates round to nothing, in head 12 %; in the mean 98 % of an update is kept." in sentences
    )
    assert found["limit"].sentence == "a note."
    assert [each.name for each in worst_first(numerics, find_precision("fp16-true"))] == ["stem", "head"]


def test_without_float16_nothing_is_said_of_scales_and_without_modules_why_there_are_none() -> None:
    fine = StepNumerics(modules=(module("a", {-30: 50, 0: 50}, output_sqnr_db=200.0, gradient_sqnr_db=200.0),))
    assert findings_of(fine, find_precision("fp32"), "none") == []
    assert lost_share(fine.modules[0], "float16") == 0.5
    (only,) = findings_of(StepNumerics(missing="on one GPU only"), find_precision("fp16-mixed"), "dynamic")
    assert (only.name, only.sentence) == ("limit", "on one GPU only.")


def test_older_records_have_no_numerics() -> None:
    assert StepProfile(device_type="cpu").numerics is None


def fall(module: str, before_db: float, after_db: float, before: str = "") -> PrecisionFall:
    return PrecisionFall(module=module, before=before, before_db=before_db, after_db=after_db, dtype="bfloat16")


def test_the_first_sharp_fall_that_leaves_little_is_named_instead_of_the_lowest_ratio() -> None:
    falls = (fall("patch", 200.0, 52.0), fall("norm", 49.0, 33.0), fall("a", 52.0, 3.0), fall("b", 40.0, 0.0))
    head = module("head", {-8: 100}, output_sqnr_db=1.0)
    (found,) = findings_of(StepNumerics(modules=(head,), falls=falls), find_precision("bf16-mixed"), "none")
    assert (found.name, found.module) == ("first-loss", "a")
    assert found.sentence == "precision is lost first in `a`: 52 dB before it, 3 dB after it; it computes in bfloat16."
    between = (fall("", 200.0, 5.0, before="mix"),)
    (found,) = findings_of(StepNumerics(modules=(head,), falls=between), find_precision("bf16-mixed"), "none")
    assert "in the model's own code, before it calls `mix`: exact before it, 5 dB after it" in found.sentence


def test_a_slow_decay_names_no_place() -> None:
    falls = tuple(fall(f"layer{depth}", 54.0 - 4 * depth, 50.0 - 4 * depth) for depth in range(12))
    assert first_loss(StepNumerics(falls=falls)) is None


def test_of_a_script_nothing_is_said_of_gradients() -> None:
    only = ModuleNumerics(name="head", num_weights=8, output_sqnr_db=60.0)
    (found,) = findings_of(StepNumerics(modules=(only,)), find_precision("fp16-mixed"), "dynamic")
    assert (found.name, found.sentence[:35]) == ("rounding", "furthest from float32 are the outpu")
