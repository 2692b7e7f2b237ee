"""Linear layers in FP8 by torchao, on a CPU: which are converted, what they compute, and what is known of them."""

import copy
import math
from functools import partial

import pytest
import torch
from small_step import PLAIN_SGD, make_step, make_task
from torch import Tensor, nn

from castwise.apply.float8 import compare_with_bfloat16, convert_to_float8, keep_decoder, keep_small_layers
from castwise.apply.pytree import Batch
from castwise.apply.techniques.padding import pad_decoder
from castwise.errors import TechniqueError
from castwise.records.schema import Float8Facts
from castwise.registry.precisions import NARROW_PRECISIONS, Precision, find_precision
from castwise.registry.techniques import step_config_of
from castwise.trial.build import describe
from castwise.trial.flops import ProductCounter

pytest.importorskip("torchao", reason="pip install 'castwise[fp8]'")

TENSORWISE, MXFP8 = find_precision("fp8-tensorwise"), find_precision("mxfp8")
# A CPU's autocast does not reach torchao's layer, so that the third recipe mixes dtypes there.
every_row = pytest.mark.parametrize(
    "row",
    [row for row in NARROW_PRECISIONS if row.float8_recipe in ("tensorwise", "rowwise")],
    ids=lambda row: row.name,
)


class Words(nn.Module):
    """A language model with a tied head, and a layer of every kind that stays as it is."""

    def __init__(self, num_words: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(num_words, 32)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)
        self.odd = nn.Linear(32, 24)
        self.back = nn.Linear(24, 32)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(32, num_words, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("calls", torch.zeros(()))
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        x = self.words(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.second(nn.functional.gelu(self.first(x)))
        x = x + self.back(self.odd(x))
        return self.head(self.drop(x))  # type: ignore[no-any-return]


def words_loss(model: nn.Module, batch: Batch) -> Tensor:
    tokens, targets = batch
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def make_words(num_words: int = 64) -> Words:
    torch.manual_seed(0)
    return Words(num_words)


def words_batch(batch: int = 4, length: int = 8) -> Batch:
    tokens = torch.randint(64, (2, batch, length), generator=torch.Generator().manual_seed(1))
    return tokens[0], tokens[1]


@every_row
def test_plain_linear_layers_of_fitting_dimensions_are_converted(row: Precision) -> None:
    model = make_words()
    names, weights = list(model.state_dict()), {id(each) for each in model.parameters()}
    facts = convert_to_float8(model, row)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    assert {name for name, kind in kinds.items() if kind == "Float8Linear"} == {"first", "second", "head"}
    assert (facts.recipe, facts.num_converted) == (row.float8_recipe, 3)
    assert facts.left == {
        "with a dimension that is no multiple of 16": 2,
        "no nn.Linear but MultiheadAttention": 1,
        "no plain nn.Linear but NonDynamicallyQuantizableLinear": 1,
    }
    assert model.head.weight is model.words.weight, "tied weights stay tied"
    assert list(model.state_dict()) == names
    assert {id(each) for each in model.parameters()} == weights, "an optimizer of them goes on"


def test_techniques_choose_the_layers() -> None:
    model = Words()
    keep_decoder(model)
    facts = convert_to_float8(model, TENSORWISE)
    assert (type(model.head) is nn.Linear, type(model.first) is nn.Linear) == (True, False)
    assert facts.left["left out by a technique"] == 1
    wide = nn.Sequential(nn.Linear(64, 2048), nn.Linear(2048, 64))
    keep_small_layers(wide)
    assert convert_to_float8(wide, TENSORWISE).num_converted == 1
    assert type(wide[1]) is nn.Linear, "the second one is small by torchao's table"
    with pytest.raises(TechniqueError, match="no linear layer is too small"):
        keep_small_layers(nn.Sequential(nn.Linear(64, 2048)))
    with pytest.raises(TechniqueError, match="finds no linear layer with an output for each word"):
        keep_decoder(nn.Sequential(nn.Linear(64, 64)))


@every_row
def test_a_padded_decoder_runs_in_fp8_and_returns_the_words_that_there_are(row: Precision) -> None:
    batch = words_batch()
    losses = []
    for change in (lambda _: None, lambda model: pad_decoder(model, 48)):
        change(model := make_words())
        facts = convert_to_float8(model, row)
        assert facts.num_converted == 3
        assert model.head.weight is model.words.weight
        compared = compare_with_bfloat16(model, facts, partial(run_words, model, batch))
        assert compared.min_sqnr_db is not None
        assert compared.min_sqnr_db > 23
        losses.append(words_loss(model.eval(), batch).item())
        assert model(batch[0]).shape[-1] == 64
    assert model.head.out_features == 96
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@every_row
def test_a_step_trains_like_bf16_mixed_and_its_products_run_in_fp8(row: Precision) -> None:
    batch = words_batch()
    losses = {}
    for each in (find_precision("bf16-mixed"), row):
        task = make_task(make_words(), words_loss)
        step = make_step(each, task, loop=step_config_of(()))
        torch.manual_seed(2)
        losses[each.name] = [step(batch).item() for _ in range(3)]
    assert losses[row.name] == pytest.approx(losses["bf16-mixed"], rel=0.02)
    assert losses[row.name][2] < losses[row.name][0]
    facts = describe(step, task, PLAIN_SGD).float8
    assert facts is not None
    assert facts.num_converted == 3
    with ProductCounter(torch.device("cpu")) as counter:
        step.run_backward(batch)
    tokens, multiply_adds = batch[0].numel(), 2 * 32 * 64 + 32 * 64
    assert counter.products["linear"]["fp8"] == 3 * 2 * tokens * multiply_adds


def run_words(model: Words, batch: Batch) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = words_loss(model, batch)
    loss.backward()


@every_row
def test_products_are_compared_and_nothing_else_changes(row: Precision) -> None:
    model = make_words()
    facts = convert_to_float8(model, row)
    torch.manual_seed(3)
    expected, before = torch.rand(1), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(3)
    compared = compare_with_bfloat16(model, facts, partial(run_words, model, words_batch()))
    assert torch.equal(torch.rand(1), expected), "dropout draws as it would have"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    assert compared.missing == ""
    assert compared.min_sqnr_db is not None
    # e5m2 rounds gradients to 2 bits, e4m3 to 3: about 6 dB apart. Both are far above a wrong product's 0 dB.
    assert (23 if row is TENSORWISE else 27) < compared.min_sqnr_db < 32
    assert compared.max_underflow_share is not None
    assert compared.max_underflow_share < 0.05


def one_layer(row: Precision) -> tuple[nn.Sequential, Float8Facts]:
    torch.manual_seed(0)
    return (model := nn.Sequential(nn.Linear(64, 64, bias=False))), convert_to_float8(model, row)


def test_the_lowest_sqnr_is_that_of_rounding_by_hand() -> None:
    model, facts = one_layer(TENSORWISE)
    data = torch.randn(32, 64).bfloat16().float()
    # Gradients of 1 are exact in FP8, so that the output alone has two rounded factors.
    found = compare_with_bfloat16(model, facts, lambda: model(data).sum().backward())
    weight = model[0].weight.detach()
    rounded = [(x / (scale := x.abs().max() / 448)).to(torch.float8_e4m3fn).float() * scale for x in (data, weight)]
    exact, inexact = data @ weight.t(), rounded[0] @ rounded[1].t()
    by_hand = 20 * math.log10(exact.norm() / (exact - inexact).norm())
    assert found.min_sqnr_product == "0, output"
    assert found.min_sqnr_db == pytest.approx(by_hand, abs=0.3)


def test_values_that_the_cast_makes_0_are_counted() -> None:
    data = torch.randn(32, 64)
    data[0, 0] = 1e7  # with one scale for all, next to nothing is left of the other values
    for name, share in (("fp8-tensorwise", 1 - 1 / data.numel()), ("fp8-rowwise", 63 / data.numel())):
        model, facts = one_layer(find_precision(name))
        found = compare_with_bfloat16(model, facts, lambda each=model: each(data).sum().backward())
        assert found.max_underflow_factor == "0, input"
        assert found.max_underflow_share == pytest.approx(share, abs=0.01)


def test_a_model_without_a_layer_for_fp8_is_refused() -> None:
    with pytest.raises(TechniqueError, match=r"no layer that can run in FP8. Left: 1 no nn.Linear but Conv2d; 1 with"):
        convert_to_float8(nn.Sequential(nn.Conv2d(3, 16, 3), nn.Linear(16, 10)), TENSORWISE)


def test_a_number_of_tokens_that_fp8_does_not_take_is_refused() -> None:
    model = make_words()
    facts = convert_to_float8(model, TENSORWISE)
    with pytest.raises(TechniqueError, match=r"a multiple of 16 tokens; 'first' gets 15. Take another batch size"):
        compare_with_bfloat16(model, facts, partial(run_words, model, words_batch(3, 5)))


class Bypassing(nn.Module):
    """A module that reads its layers' weights and calls none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.layer.weight


def test_layers_that_are_not_called_do_not_count() -> None:
    facts = convert_to_float8(model := Bypassing(), TENSORWISE)
    with pytest.raises(TechniqueError, match="calls none of them"):
        compare_with_bfloat16(model, facts, lambda: model(torch.ones(16, 16)).sum().backward())
    facts = convert_to_float8(both := nn.Sequential(nn.Linear(16, 16), Bypassing()), TENSORWISE)
    found = compare_with_bfloat16(both, facts, lambda: both(torch.ones(16, 16)).sum().backward())
    assert (found.num_converted, found.left) == (1, {"that are not called as layers": 1})


def test_mxfp8_computes_what_torchao_s_own_layer_does() -> None:
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization import quantize_
    from torchao.quantization.quantize_.common import KernelPreference

    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32, bias=False)).bfloat16().float()
    theirs = copy.deepcopy(ours).bfloat16()
    for index in (0, 2):
        theirs[index].__class__ = MXFP8Linear
        theirs[index].kernel_preference = KernelPreference.EMULATED
        theirs[index].scale_calculation_mode, theirs[index].wgrad_with_hp = ScaleCalculationMode.RCEIL, False
    facts = convert_to_float8(ours, MXFP8)
    data = torch.randn(64, 64).bfloat16()
    for model in (ours, theirs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(data.to(next(model.parameters()).dtype))
        output.float().square().sum().backward()
    assert facts.num_converted == 2
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.grad.bfloat16(), other.grad), "each gradient, to the last bit"
    # torchao's recipe for a model has no bias in its products.
    recipe = nn.Sequential(copy.deepcopy(theirs[2]))
    recipe[0].__class__ = nn.Linear
    quantize_(recipe, MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL))
    hidden = torch.randn(32, 128).bfloat16()
    assert torch.equal(recipe(hidden), ours[2](hidden))


def test_mxfp8_takes_layers_of_multiples_of_32_and_keeps_weights_ties_and_padding() -> None:
    model = make_words()
    pad_decoder(model, 48)
    weights = {id(each) for each in model.parameters()}
    facts = convert_to_float8(model, MXFP8)
    assert (facts.recipe, facts.num_converted) == ("mxfp8", 3)
    assert facts.left["with a dimension that is no multiple of 32"] == 2
    assert {id(each) for each in model.parameters()} == weights, "an optimizer of them goes on"
    assert model.head.weight is model.words.weight
    compared = compare_with_bfloat16(model, facts, partial(run_words, model, words_batch()))
    assert compared.min_sqnr_db is not None
    assert 27 < compared.min_sqnr_db < 36, "e4m3 everywhere, as with a scale a row"
    assert compared.max_underflow_share is not None
    assert compared.max_underflow_share < 0.05
    assert model(words_batch()[0]).shape[-1] == 64
    with pytest.raises(TechniqueError, match="a multiple of 32 tokens; 'first' gets 16"):
        compare_with_bfloat16(model, facts, partial(run_words, model, words_batch(2, 8)))


def test_mxfp8_trains_like_bf16_mixed() -> None:
    batch, losses = words_batch(), {}
    for row in (find_precision("bf16-mixed"), MXFP8):
        step = make_step(row, make_task(make_words(), words_loss), loop=step_config_of(()))
        torch.manual_seed(2)
        losses[row.name] = [step(batch).item() for _ in range(3)]
    assert losses["mxfp8"] == pytest.approx(losses["bf16-mixed"], rel=0.02)
    assert losses["mxfp8"][2] < losses["mxfp8"][0]


def test_torchao_has_no_emulation_of_nvfp4_which_is_why_castwise_does_not_train_in_it() -> None:
    from torchao.prototype.moe_training.nvfp4_training.nvfp4_training import NVFP4TrainingConfig
    from torchao.quantization import quantize_

    model = nn.Sequential(nn.Linear(128, 128)).bfloat16()
    quantize_(model, NVFP4TrainingConfig())
    with pytest.raises(NotImplementedError, match=r"triton|SM100"):
        model(torch.randn(128, 128).bfloat16())
    assert not find_precision("nvfp4").is_trained
