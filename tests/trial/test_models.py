"""Every row of the workload registry builds what its source describes and takes a training step."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loops import lstm_anywhere
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from castwise.apply.precision import convert_weights
from castwise.apply.pytree import Batch
from castwise.errors import DataError, UsageError
from castwise.registry.precisions import find_precision
from castwise.registry.suites import find_suite
from castwise.registry.workloads import WORKLOADS, Workload, find_workload
from castwise.trial.data import datasets
from castwise.trial.data.wikitext import make_corpus
from castwise.trial.lr_schedules import triangular
from castwise.trial.models import build_task, transformer
from castwise.trial.models.rnn_lm import CarriedLoss, LanguageModel
from castwise.trial.models.task import Task
from castwise.trial.models.wide_resnet import WideResNet

CPU = torch.device("cpu")
META = torch.device("meta")

# What torchvision publishes: weights (Weights.meta["num_params"]), of Inception without its auxiliary classifier, and
# 10⁹ multiply-accumulates (Weights.meta["_ops"]); those of b4 and b7 are for another image size.
PUBLISHED = {
    "resnet18": (11_689_512, 1.814),
    "resnet34": (21_797_672, 3.664),
    "resnet50": (25_557_032, 4.089),
    "resnet101": (44_549_160, 7.801),
    "resnet152": (60_192_808, 11.514),
    "inception_v3": (27_161_264 - 3_326_696, 5.713),
    "efficientnet_b0": (5_288_548, 0.386),
    "efficientnet_b4": (19_341_616, None),
    "efficientnet_b7": (66_347_960, None),
}
# Images of 32² keep a step on a CPU short; Inception's stem takes no less than 75².
SMALL_SIDE = 32
SMALL_INCEPTION_SIDE = 107

every_row = pytest.mark.parametrize("row", WORKLOADS, ids=lambda row: row.name)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator(CPU).manual_seed(seed)


def build_on_meta(row: Workload) -> Task:
    with META:
        return build_task(row)


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def count_macs(task: Task, batch_size: int = 1) -> float:
    """Return multiply-accumulates of one sample's forward pass; the model must be on the meta device."""
    batch = task.make_batches(1, batch_size, CPU, generator())[0]
    with FlopCounterMode(display=False) as counter:
        task.compute_loss(task.model, tuple(part.to(META) for part in batch))
    flops: int = counter.get_total_flops()
    return flops / 2 / batch_size


def small(row: Workload) -> Workload:
    """Return the row with smaller images or a narrower model, where a CPU would take seconds for its own."""
    if row.family in ("torchvision", "fastai_resnet"):
        side = SMALL_INCEPTION_SIDE if row.name == "inception_v3" else SMALL_SIDE
        return replace(row, input_shape=(3, side, side))
    if row.family == "rnn_lm":
        return replace(row, options=(*row.options, ("width", 16)))
    if row.family == "wide_resnet":
        return replace(row, options=(("depth", 10), ("widen", 1), ("dropout", 0.3)))
    if row.family == "transformer":
        sizes = {"width": 16, "depth": 2, "heads": 4, "hidden": 24}
        sizes |= {"key_heads": 2} if row.name == "llama-1b" else {}
        sizes |= {"length": 12, "vocabulary": 40} if row.unit == "tokens" else {}
        return replace(row, options=(*(dict(row.options) | sizes).items(),))
    return row


@pytest.mark.parametrize("row", [row for row in WORKLOADS if row.num_parameters], ids=lambda row: row.name)
def test_model_size_matches_row(row: Workload) -> None:
    task = build_on_meta(row)
    assert count_parameters(task.model) == row.num_parameters
    assert row.macs_per_sample in (None, count_macs(task))


@pytest.mark.parametrize("name", PUBLISHED)
def test_torchvision_model_size_is_the_published_one(name: str) -> None:
    num_parameters, gmacs = PUBLISHED[name]
    task = build_on_meta(find_workload(name))
    assert count_parameters(task.model) == num_parameters
    assert gmacs is None or count_macs(task) / 1e9 == pytest.approx(gmacs, abs=5e-4)


@pytest.mark.parametrize(
    ("name", "gates", "width"),
    [("lstm-lm", 4, 200), ("gru-lm", 3, 200), ("rnn-lm", 1, 200), ("lstm-lm-1500", 4, 1500)],
)
def test_language_model_size_follows_width(name: str, gates: int, width: int) -> None:
    task = build_on_meta(find_workload(name))
    recurrent = 2 * gates * 2 * width * width
    biases = 2 * gates * 2 * width
    assert count_parameters(task.model) == 2 * 33_278 * width + 33_278 + recurrent + biases
    assert count_macs(task, batch_size=3) == 35 * (recurrent + 33_278 * width)


def test_a_shorter_sequence_leaves_a_model_its_positions() -> None:
    task = build_on_meta(find_workload("gpt2@64"))
    assert count_parameters(task.model) == find_workload("gpt2").num_parameters
    assert task.make_batches(1, 2, CPU, generator())[0][0].shape == (2, 64)


@every_row
def test_takes_a_training_step(row: Workload) -> None:
    row = small(row)
    torch.manual_seed(0)
    task = build_task(row)
    batches = task.make_batches(2, 2, CPU, generator())
    assert len(batches) == 2
    loss = task.compute_loss(task.model, batches[0])
    torch.autograd.backward(loss)
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    for name, parameter in task.model.named_parameters():
        assert parameter.dtype == torch.float32
        assert (parameter.grad is not None) == parameter.requires_grad, name
        assert parameter.grad is None or parameter.grad.isfinite().all(), name
    frozen = [name for name, parameter in task.model.named_parameters() if not parameter.requires_grad]
    assert bool(frozen) == (row.family == "fastai_resnet")
    with lstm_anywhere(row.name), torch.autocast("cpu", dtype=torch.bfloat16):
        loss = task.compute_loss(task.model, batches[1])
    assert loss.dtype == torch.float32
    assert loss.isfinite()


@every_row
def test_batch_shapes_and_seeds(row: Workload) -> None:
    task = build_on_meta(row)
    length = dict(row.options).get("length", 35)
    assert task.units_per_sample == (length if row.unit == "tokens" else 1)
    torch.manual_seed(1)
    (inputs, targets), second = task.make_batches(2, 3, CPU, generator())
    torch.manual_seed(2)
    again, _ = task.make_batches(2, 3, CPU, generator())
    other, _ = task.make_batches(2, 3, CPU, generator(seed=1))
    assert torch.equal(inputs, again[0])
    assert torch.equal(targets, again[1])
    assert not torch.equal(inputs, other[0])
    assert not torch.equal(inputs, second[0])
    if row.family == "rnn_lm":
        assert (inputs.shape, targets.shape) == ((35, 3), (105,))
    elif row.unit == "tokens":
        assert inputs.shape == targets.shape == (3, length)
    else:
        assert (inputs.shape, inputs.dtype) == ((3, *row.input_shape), torch.float32)
    assert targets.dtype == (torch.float32 if row.family == "mlp" else torch.int64)


# The sources' oddities


def test_mnist_cnn_returns_log_probabilities() -> None:
    task = build_task(find_workload("mnist-cnn"))
    images, _ = task.make_batches(1, 4, CPU, generator())[0]
    output = task.model(images)
    torch.testing.assert_close(output.exp().sum(dim=1), torch.ones(4))
    torch.testing.assert_close(output.log_softmax(dim=1), output)


def test_wide_resnet_biases_and_batch_norm_momentum() -> None:
    model = build_on_meta(find_workload("wrn-28-10")).model
    assert all(m.bias is not None for m in model.modules() if isinstance(m, nn.Conv2d))
    fast = [name for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d) and m.momentum == 0.9]
    assert fast == ["bn1"]


def test_wide_resnet_refuses_depth() -> None:
    with pytest.raises(ValueError, match=r"6n \+ 4, not 27"):
        WideResNet(27, 10, 0.3)


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        ("efficientnet_b0", (1e-3, 0.01)),
        ("efficientnet_b4", (1e-3, 0.01)),
        ("efficientnet_b7", (1e-3, 0.01)),
        ("torchvision:efficientnet_b0", (1e-5, 0.1)),
    ],
)
def test_efficientnet_batch_norm(name: str, norm: tuple[float, float]) -> None:
    model = build_on_meta(find_workload(name)).model
    assert {(m.eps, m.momentum) for m in model.modules() if isinstance(m, nn.BatchNorm2d)} == {norm}


# The language models' state


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN_TANH"])
def test_state_is_carried_and_detached(kind: str) -> None:
    torch.manual_seed(0)
    model, carried = LanguageModel(kind, width=8, dropout=0.0), CarriedLoss()
    batch = language_batch(batch_size=3)
    first = carried.compute_loss(model, batch)
    state = carried.hidden
    for part in state if isinstance(state, tuple) else (state,):
        assert part is not None
        assert part.shape == (2, 3, 8)
        assert not part.requires_grad
    second = carried.compute_loss(model, batch)
    assert not torch.equal(first, second)
    expected, _ = model(batch[0], state)
    torch.testing.assert_close(second, nn.functional.cross_entropy(expected.flatten(0, 1), batch[1]))
    torch.autograd.backward(first)
    torch.autograd.backward(second)  # would fail if it reached into the first batch's freed graph


def test_state_restarts_when_the_batch_size_changes() -> None:
    torch.manual_seed(0)
    model, carried = LanguageModel("LSTM", width=8, dropout=0.0), CarriedLoss()
    batch = language_batch(batch_size=3)
    fresh = carried.compute_loss(model, batch)
    carried.compute_loss(model, language_batch(batch_size=2))
    torch.testing.assert_close(carried.compute_loss(model, batch), fresh)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN_TANH"])
def test_state_is_carried_through_casts(kind: str) -> None:
    model, carried = LanguageModel(kind, width=8, dropout=0.0), CarriedLoss()
    convert_weights(model, find_precision("bf16-true"))
    for _ in range(2):
        loss = carried.compute_loss(model, language_batch(batch_size=3))
        torch.autograd.backward(loss)
        assert loss.dtype == torch.float32
    state = carried.hidden
    assert (state[0] if isinstance(state, tuple) else state).dtype == torch.float32  # type: ignore[union-attr]


def language_batch(batch_size: int) -> Batch:
    return build_on_meta(find_workload("lstm-lm")).make_batches(1, batch_size, CPU, generator())[0]


def test_targets_are_the_next_tokens() -> None:
    first, second = build_on_meta(find_workload("lstm-lm")).make_batches(2, 3, CPU, generator())
    tokens = torch.cat([first[0], second[0]])
    assert torch.equal(first[1].view(35, 3), tokens[1:36])


@pytest.mark.parametrize("name", ["lstm-lm", "gru-lm", "rnn-lm"])
def test_language_model_initialisation(name: str) -> None:
    model = build_task(small(find_workload(name))).model
    for module in ("encoder", "decoder"):
        weight = model.get_submodule(module).get_parameter("weight")
        assert 0.0999 < weight.abs().max() <= 0.1
    assert not model.get_parameter("decoder.bias").any()


# The zoos


@pytest.mark.parametrize(("name", "side"), [("resnext50_32x4d", 224), ("inception_v3", 299), ("googlenet", 224)])
def test_torchvision_models_have_one_output(name: str, side: int) -> None:
    task = build_on_meta(find_workload(f"torchvision:{name}"))
    images, _ = task.make_batches(1, 2, CPU, generator())[0]
    assert images.shape == (2, 3, side, side)
    assert -1 <= images.min() < -0.99
    assert 0.99 < images.max() <= 1
    assert task.model(images.to(META)).shape == (2, 1000)


@pytest.mark.parametrize(
    ("name", "shape", "num_classes"),
    [
        ("test_resnet", (3, 160, 160), 1000),
        ("vit_tiny_patch16_224.augreg_in21k", (3, 224, 224), 21_843),
        ("vit_small_patch14_dinov2", (3, 518, 518), 1000),  # published without a classifier
    ],
)
def test_timm_models_keep_their_size_and_classes(name: str, shape: tuple[int, ...], num_classes: int) -> None:
    pytest.importorskip("timm", minversion="1.0.22")  # older ones cannot build every model on the device "meta"
    task = build_on_meta(find_workload(f"timm:{name}"))
    images, _ = task.make_batches(1, 2, CPU, generator())[0]
    assert images.shape == (2, *shape)
    assert task.model(images.to(META)).shape == (2, num_classes)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("torchvision:resnet51", "No torchvision model named 'resnet51'. Did you mean .*resnet50"),
        ("torchvision:qqqq", "No torchvision model named 'qqqq'. `python -c .*` lists them"),
        *(
            (f"torchvision:{name}", f"'{name}' is not a float image classifier")
            for name in ("fcn_resnet50", "fasterrcnn_resnet50_fpn", "r3d_18", "quantized_resnet18")
        ),
        ("timm:resnet51", "No timm model named 'resnet51'.*resnet50"),
        ("timm:resnet18.a1_in2k", "No timm model named 'resnet18.a1_in2k'.*resnet18.a1_in1k"),
        ("timm:hf-hub:timm/resnet18", "No timm model named"),  # timm would look for it on the network
    ],
)
def test_what_no_zoo_has_is_refused(name: str, words: str) -> None:
    if name.startswith("timm"):
        pytest.importorskip("timm")
    with pytest.raises(UsageError, match=words):
        build_task(find_workload(name))


def test_missing_timm_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UsageError, match=r"pip install 'castwise\[timm\]'"):
        build_task(find_workload("timm:resnet18"))


# Data sets


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dpn92", r"dpn92 does not take the data set 'mnist'. It takes: synthetic."),
        ("mnist-cnn", "'mnist' is read from a folder"),
    ],
)
def test_a_data_set_that_cannot_be_read_is_refused(name: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build_task(find_workload(name), data_set="mnist")


WITH_DATA = [row for row in WORKLOADS if row.data_sets and row.family != "transformer"]


@pytest.mark.parametrize("row", WITH_DATA, ids=lambda row: row.name)
def test_real_data_replaces_synthetic(row: Workload, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    images = torch.randint(256, (9, *row.input_shape), dtype=torch.uint8)
    labels = torch.arange(9) % 10
    for name in datasets.IMAGE_SETS:
        monkeypatch.setitem(datasets.IMAGE_SETS, name, lambda *_: (images, labels))
    corpus = make_corpus(" ".join(str(n % 7) for n in range(300)), "0", "0")
    monkeypatch.setattr(datasets, "load_wikitext2", lambda _: corpus)
    for data_set in row.data_sets:
        task = build_task(row, data_set=data_set, data_dir=tmp_path)
        batches = task.make_batches(1, 2, CPU, torch.Generator().manual_seed(0))
        assert len(batches) == 4
        if row.family == "rnn_lm":
            assert {tuple(tokens.shape) for tokens, _ in batches} == {(35, 2)}
            continue
        assert {tuple(part[0].shape) for part in batches} == {(2, *row.input_shape)}
        seen = torch.cat([part for _, part in batches])
        assert len(seen) == 8
        assert not torch.equal(seen, labels[:8]), "not shuffled"


@pytest.mark.parametrize("name", ["gpt2", "bert-base"])
def test_a_transformer_reads_all_of_a_text(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny = {"width": 16, "depth": 1, "heads": 2, "length": 8, "vocabulary": 300}
    row = find_workload(name)
    row = replace(row, options=(*(dict(row.options) | tiny).items(),))
    text = torch.arange(1, 52)  # six sequences of 8 tokens, and a rest
    monkeypatch.setattr(transformer, "load_tokens", lambda *_: (text, "a note"))
    task = build_task(row, data_set="wikitext-2", data_dir=tmp_path)
    assert task.notes == ("a note",)
    batches = task.make_batches(1, 2, CPU, generator())
    assert len(batches) == 3
    tokens, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert tokens.shape == targets.shape == (6, 8)
    is_hidden = tokens == 0
    if name == "gpt2":
        assert targets.equal(tokens + 1), "the next ones"
    else:
        assert targets[~is_hidden].eq(-100).all()
        assert 0 < is_hidden.sum() < 20
    read = torch.where(is_hidden, targets, tokens)
    assert read.flatten().sort()[0].equal(text[:48])
    assert not read.flatten().equal(text[:48]), "shuffled"
    assert task.compute_loss(task.model, batches[0]).isfinite()
    with pytest.raises(DataError, match="has 6 sequences of 8 tokens, and a batch 7"):
        task.make_batches(1, 7, CPU, generator())


def test_real_images_are_enlarged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    images, labels = torch.randint(256, (9, 3, 32, 32), dtype=torch.uint8), torch.arange(9)
    monkeypatch.setitem(datasets.IMAGE_SETS, "cifar100", lambda *_: (images, labels))
    make = datasets.resident_batches("cifar100", tmp_path, 64)
    batches = make(3, 2, CPU, generator())
    assert {tuple(part[0].shape) for part in batches} == {(2, 3, 64, 64)}
    assert len(batches) == 3, "a device could not hold all of them"
    plain = datasets.resident_batches("cifar100", tmp_path, 32)(3, 2, CPU, generator())
    assert len(plain) == 4
    for (large, same), (small_, wanted) in zip(batches, plain, strict=False):
        assert torch.equal(same, wanted)
        torch.testing.assert_close(nn.functional.avg_pool2d(large, 2).mean(), small_.mean(), atol=2e-2, rtol=0)


def test_resnet9_is_its_sources() -> None:
    model = build_on_meta(find_workload("resnet9")).model
    assert sum(weight.numel() for weight in model.parameters()) == 6_573_120
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert [m.out_channels for m in convolutions] == [64, 128, 128, 128, 256, 512, 512, 512]
    assert all(m.bias is None for m in convolutions)


def test_the_rate_of_the_fast_recipe_peaks_after_five_epochs() -> None:
    arguments = find_suite("fast-cifar10").recipes["short-epochs"].schedule.arguments
    steps = 50_000 // 512
    rate = triangular(24 * steps, **arguments)  # type: ignore[arg-type]
    rates = [rate(step) for step in range(24 * steps)]
    assert rates.index(max(rates)) == 5 * steps + 1  # the first step is taken at the first rate twice
    assert max(rates) == pytest.approx(1.0)
    assert rates[0] == pytest.approx(0.001)
    assert rates[-1] < 0.005
