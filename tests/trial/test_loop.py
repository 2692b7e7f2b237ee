"""Every technique computes what the plain loop does: 20 losses compared, within the precision's rounding."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import ADADELTA, IMAGES, WORDS, losses_of, setup_of, spec_of
from torch import Tensor, nn

from castwise.apply.loss_scaling import DeviceScaling, DynamicScaling
from castwise.apply.techniques.first_conv import MatmulConv, use_matmul_stem, use_space_to_depth
from castwise.apply.techniques.padding import pad_decoder, pad_first_conv, pad_hidden
from castwise.errors import UsageError
from castwise.registry.technique_fit import why_unsupported
from castwise.registry.techniques import PLAIN, TECHNIQUES, captures_graph, compiles, join, step_config_of
from castwise.spec.recipe import Loader, Recipe
from castwise.trial.models.rnn_lm import LanguageModel

# The relative difference allowed after 20 steps, in roundings of the format: a loss is a mean of many numbers, and
# float32 training amplifies the difference of a sum in another order. The losses fall by 3 to 16 % in these steps.
BOUNDS = {"fp32": 500 * torch.finfo(torch.float32).eps, "bf16-mixed": 0.5 * torch.finfo(torch.bfloat16).eps}


@functools.cache
def plain_losses(workload: str, precision: str, loss_scale: str) -> Tensor:
    return losses_of(spec_of(workload, precision, loss_scale=loss_scale))


def cases() -> list[tuple[str, str, tuple[str, ...]]]:
    """Return every technique with every workload that it applies to on a CPU, and some together, in 16 bits too."""
    # Compiling takes long: test_compiled.py and test_update.py do it for the smallest models.
    alone = [(row.name,) for row in TECHNIQUES if not row.compile_cost]
    together = [
        ("channels-last", "fused-optimizer", "no-step-sync", "matmul-stem"),
        ("fused-optimizer", "pad-vocabulary", "chunked-loss"),
    ]
    # What changes the optimizer or a layout is the same in 16 bits, and a CPU may take seconds for them.
    return [
        (workload, precision, names)
        for workload in (IMAGES, WORDS, ADADELTA)
        for precision, tried in zip(BOUNDS, (alone + together, together), strict=True)
        for names in tried
        if why_unsupported(spec_of(workload, precision, *names, loss_scale="dynamic")) is None
    ]


@pytest.mark.parametrize(
    ("workload", "precision", "names"), cases(), ids=lambda value: value if isinstance(value, str) else join(value)
)
def test_losses_of_20_steps_equal_the_plain_loop(workload: str, precision: str, names: tuple[str, ...]) -> None:
    loss_scale = "dynamic" if "no-step-sync" in names else "none"
    found = losses_of(spec_of(workload, precision, *names, loss_scale=loss_scale))
    expected = plain_losses(workload, precision, loss_scale)
    assert ((found - expected) / expected).abs().max() < BOUNDS[precision]
    assert expected[0] - expected[-1] > 4 * BOUNDS[precision] * expected[0] or workload == ADADELTA


def test_compiles_and_captures_graph_by_name() -> None:
    loops = {row.name: step_config_of((row.name,)) for row in TECHNIQUES}
    compiling = [name for name, loop in loops.items() if loop.compile_mode is not None or loop.compiled_update]
    assert compiling == [name for name in loops if compiles([name])]
    assert [name for name, loop in loops.items() if loop.cuda_graph] == [
        name for name in loops if captures_graph([name])
    ]


# What a technique changes


def test_channels_last_of_weights_and_batches() -> None:
    with setup_of(spec_of(IMAGES, "fp32", "channels-last")) as (setup, batches):
        convolutions = [m for m in setup.step.model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size != (1, 1)]
        assert convolutions
        assert all(m.weight.is_contiguous(memory_format=torch.channels_last) for m in convolutions)
        assert all(batch[0].is_contiguous(memory_format=torch.channels_last) for batch in batches)
        assert not batches[0][0].is_contiguous()


@pytest.mark.parametrize(("name", "argument"), [("fused-optimizer", "fused"), ("foreach-optimizer", "foreach")])
def test_optimizer_argument_is_set_and_recorded(name: str, argument: str) -> None:
    with setup_of(spec_of(IMAGES, "fp32", name)) as (setup, _):
        assert setup.step.optimizer.defaults[argument] is True
        assert f"{argument}=True" in setup.facts.optimizer


def test_class_of_dynamic_scaling() -> None:
    with setup_of(spec_of(IMAGES, "fp32", loss_scale="dynamic")) as (setup, _):
        assert type(setup.step.scaling) is DynamicScaling
    for name in ("no-step-sync", "fused-optimizer"):
        with setup_of(spec_of(IMAGES, "fp32", name, loss_scale="dynamic")) as (setup, _):
            assert type(setup.step.scaling) is DeviceScaling


@pytest.mark.parametrize("num_channels", [4, 8])
def test_padded_channels_stay_0(num_channels: int) -> None:
    with setup_of(spec_of(IMAGES, "fp32", f"pad-channels-{num_channels}")) as (setup, batches):
        for batch in batches:
            assert batch[0].shape[1] == num_channels
            assert not batch[0][:, 3:].any()
            setup.step(batch)
        first = next(m for m in setup.step.model.modules() if isinstance(m, nn.Conv2d))
        assert first.weight.shape[1] == first.in_channels == num_channels
        assert first.weight[:, :3].abs().min() > 0
        assert not first.weight[:, 3:].any()


def test_padded_words_are_never_trained() -> None:
    with setup_of(spec_of(WORDS, "fp32", "pad-vocabulary")) as (setup, batches):
        for batch in batches:
            setup.step(batch)
        decoder = setup.step.model.decoder
        assert isinstance(decoder, nn.Linear)
        assert decoder.weight.shape[0] == decoder.out_features == 33_280
        assert not decoder.weight[33_278:].any()
        assert not decoder.bias[33_278:].any()
        assert setup.facts.num_parameters == sum(p.numel() for p in setup.step.model.parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_a_padded_vocabulary_changes_no_logits(tied: bool) -> None:
    model = nn.Sequential(nn.Embedding(70, 8), nn.Linear(8, 8), nn.Linear(8, 70, bias=not tied))
    if tied:
        model[2].weight = model[0].weight
    tokens = torch.arange(70)
    before = model(tokens)
    pad_decoder(model, 64)
    assert model[2].weight.shape == (128, 8)
    assert (model[0].weight is model[2].weight) is tied
    assert torch.equal(model(tokens), before)
    nn.functional.cross_entropy(model(tokens), tokens).backward()
    assert not model[2].weight.grad[70:].any()
    assert copy.deepcopy(model)(tokens).shape == (70, 70)


def test_techniques_change_the_recipe() -> None:
    recipe = Recipe(epochs=1, read_loss_every_step=True, loader=Loader(num_workers=1))
    assert PLAIN.recipe(recipe) == recipe
    assert step_config_of(("no-step-sync",)).recipe(recipe).read_loss_every_step is False
    pinned = step_config_of(("pinned-transfer",)).recipe(recipe).loader
    assert (pinned.pin_memory, pinned.non_blocking, pinned.num_workers) == (True, True, 1)
    many = step_config_of(("loader-workers",)).recipe(recipe).loader
    assert many.num_workers >= 1
    assert (many.persistent, many.prefetch_batches) == (True, 4)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN_TANH"])
def test_padded_units_stay_0(kind: str) -> None:
    torch.manual_seed(0)
    narrow = LanguageModel(kind, width=12, dropout=0.0)
    wide = copy.deepcopy(narrow)
    pad_hidden(wide, 64)
    assert (wide.rnn.hidden_size, wide.encoder.embedding_dim, wide.decoder.in_features) == (64, 64, 64)
    tokens = torch.randint(100, (5, 3))
    for _ in range(3):
        found: list[float] = []
        for model in (narrow, wide):
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            loss = nn.functional.cross_entropy(model(tokens, None)[0].flatten(0, 1), tokens.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        assert found[1] == pytest.approx(found[0], rel=1e-5)
    hidden = wide(tokens, None)[1]
    state = hidden if isinstance(hidden, Tensor) else torch.stack(hidden)
    assert state[..., :12].abs().min() > 0
    assert not state[..., 12:].any()
    assert not wide.encoder.weight[:, 12:].any()
    assert not wide.decoder.weight[:, 12:].any()
    for name, weight in wide.rnn.named_parameters():
        own = weight.unflatten(0, (-1, 64))
        assert not own[:, 12:].any(), name
        expected = dict(narrow.rnn.named_parameters())[name]
        part = own[:, :12] if weight.dim() == 1 else own[:, :12, :12]
        assert torch.allclose(part.flatten(0, 1), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("kernel", "padding", "height", "width"),
    [(7, 3, 224, 224), (3, 0, 299, 299), (3, 1, 33, 35), (4, 1, 32, 30), (5, 2, 31, 31), (2, 0, 9, 8), (6, 5, 12, 13)],
)
def test_space_to_depth_equals_the_convolution(kernel: int, padding: int, height: int, width: int) -> None:
    conv = nn.Conv2d(3, 8, kernel, stride=2, padding=padding).double()
    model = nn.Sequential(nn.Sequential(nn.Identity(), conv))
    images = torch.randn(2, 3, height, width, dtype=torch.double)
    expected = model(images)
    expected.square().sum().backward()
    gradients = [conv.weight.grad, conv.bias.grad]
    keys = list(model.state_dict())
    use_space_to_depth(model)
    assert list(model.state_dict()) == keys
    for layout in (torch.contiguous_format, torch.channels_last):
        conv.weight.grad = conv.bias.grad = None
        found = model(images.contiguous(memory_format=layout))
        assert torch.allclose(found, expected)
        found.square().sum().backward()
        assert all(torch.allclose(p.grad, g) for p, g in zip((conv.weight, conv.bias), gradients, strict=True))


@pytest.mark.parametrize(
    ("channels", "kernel", "padding", "stride"),
    [(1, 3, 0, 1), (3, 3, 1, 1), (1, 5, 2, 1), (4, (3, 1), (1, 0), 1), (3, 4, 0, 4), (3, (5, 3), 0, (5, 3))],
)
def test_matmul_stem_equals_the_convolution(channels: int, kernel: Any, padding: Any, stride: Any) -> None:
    conv = nn.Conv2d(channels, 8, kernel, stride, padding, bias=channels != 3).double()
    model = nn.Sequential(conv)
    images = torch.randn(2, channels, 10, 12, dtype=torch.double)
    expected = model(images)
    expected.square().sum().backward()
    wanted, conv.weight.grad = conv.weight.grad, None
    use_matmul_stem(model)
    assert type(model[0]) is MatmulConv
    found = model(images)
    assert torch.allclose(found, expected)
    assert found.is_contiguous(memory_format=torch.channels_last)
    found.square().sum().backward()
    assert torch.allclose(conv.weight.grad, wanted)


EVEN = nn.ModuleDict({"encoder": nn.Embedding(5, 64), "rnn": nn.LSTM(64, 64), "decoder": nn.Linear(64, 128)})
WORDS_128 = nn.Sequential(nn.Embedding(128, 8), nn.Linear(8, 128))


@pytest.mark.parametrize(
    ("change", "model", "reason"),
    [
        (functools.partial(pad_first_conv, num_channels=8), nn.Conv2d(8, 8, 3), "images of 8 channels already"),
        (functools.partial(pad_first_conv, num_channels=8), nn.Conv2d(4, 4, 3, groups=4), "no ordinary convolution"),
        (functools.partial(pad_decoder, multiple=64), nn.Conv2d(8, 8, 3), "no linear decoder"),
        (functools.partial(pad_decoder, multiple=64), EVEN, "no linear decoder"),
        (functools.partial(pad_decoder, multiple=64), WORDS_128, "128 words, a multiple of 64"),
        (functools.partial(pad_hidden, multiple=64), EVEN, "width of 64, a multiple of 8"),
        (use_matmul_stem, nn.Conv2d(3, 4, 3, stride=2), "convolution of stride 1"),
        (use_matmul_stem, nn.Conv2d(8, 4, 3), "convolution of stride 1"),
        (use_matmul_stem, nn.Conv2d(1, 4, 3, padding="same"), "convolution of stride 1"),
        (use_space_to_depth, nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3, stride=2)), "of stride 2"),
        (use_space_to_depth, nn.Conv2d(8, 4, 3, stride=2), "convolution of stride 2"),
        (use_space_to_depth, nn.Conv2d(3, 3, 3, stride=2, groups=3), "convolution of stride 2"),
        (use_space_to_depth, nn.Linear(3, 3), "convolution of stride 2"),
    ],
)
def test_unfit_model_is_refused(change: Callable[[nn.Module], None], model: nn.Module, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        change(model)
