"""Batch norm kernels compared with torch in Triton's interpreter, and models that use them compared with themselves."""

import copy
import io
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fake_norm import KernelCall, let_torch_compute
from interpreted import interpreted, run_interpreted
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from castwise.errors import UsageError
from castwise.registry.workloads import find_workload
from castwise.trial.kernels.batch_norm.fusion import use_batch_norm_kernel
from castwise.trial.kernels.batch_norm.module import fits_kernels, update_running_statistics
from castwise.trial.kernels.batch_norm.types import HARDSWISH, NO_ACTIVATION, RELU, SILU
from castwise.trial.models import build_task

Forward = Callable[..., Any]

# The expected values are float64's.
COMPARED_WITH_TORCH = """
    import itertools
    import torch
    from torch.nn import functional as F
    from castwise.trial.kernels.batch_norm import ops

    torch.manual_seed(0)
    ops._REDUCTION_ELEMENTS, ops._REDUCTION_PROGRAMS = 512, 6  # so that a program sums several blocks
    leaf = lambda each: None if each is None else each.detach().double().requires_grad_()
    # A number whose value rounds to the other side of the activation's kink has another gradient.
    near = lambda found, wanted: ((found.double() - wanted).abs() < 1e-4 * wanted.abs().max()).double().mean() > 0.999
    for index, shape in enumerate(((2, 5, 8, 8), (2, 64, 7, 5), (2, 72, 3, 3), (1, 304, 2, 3))):
        cases = itertools.product(range(4), ("", "add", "drop"), *[(False, True)] * 4)
        for case in list(cases)[index :: (9, 25, 21, 23)[index]]:  # each value together with each other
            activation, before, has_residual, has_carried, reads_total, has_conv_bias = case
            channels, found = shape[1], (shape, case)
            if has_residual and activation > 1 or reads_total and not before or before == "drop" and channels % 8:
                continue
            make = lambda: torch.randn(shape).contiguous(memory_format=torch.channels_last)
            inputs = [
                3 * make() + 50, torch.randn(channels) if has_conv_bias else None, make() if before == "add" else None,
                make() if has_residual else None, *torch.randn(2, channels),
            ]
            exact = [leaf(each) for each in inputs]
            inputs = [None if each is None else each.requires_grad_() for each in inputs]
            images, conv_bias, addend, residual, weight, bias = inputs
            seed = torch.tensor([1234567890123]) if before == "drop" else None
            gradients, carried, of_total = make(), make(), make()
            out, carrier, total, mean, variance, _ = ops.batch_norm(
                images, conv_bias, seed, 3, 19661, addend, residual, None, weight, bias, 1e-5, activation, has_carried
            )
            results = [(out, gradients)] + [(carrier, carried)] * has_carried + [(total, of_total)] * reads_total
            torch.autograd.backward(*zip(*results))

            expected_total = exact[0] if conv_bias is None else exact[0] + exact[1][:, None, None]
            if seed is not None:
                kept = total != 0
                assert abs(kept.double().mean() - 0.7) < 4 * (0.21 / kept.numel()) ** 0.5, case
                expected_total = expected_total * kept * (65536 / (65536 - 19661))
            expected_total = expected_total if addend is None else expected_total + exact[2]
            running = torch.zeros(2, channels).double()
            value = F.batch_norm(expected_total, *running, *exact[4:], True, 1.0, 1e-5)
            value = value if residual is None else value + exact[3]
            expected = (lambda value: value, F.relu, F.silu, F.hardswish)[activation](value)
            loss = (expected * (gradients + has_carried * carried).double()).sum()
            (loss + reads_total * (expected_total * of_total.double()).sum()).backward()
            assert near(out, expected), found
            mean = mean if before or conv_bias is None else mean + conv_bias
            assert near(mean, running[0]) and near(variance, running[1]), found
            assert not before or near(total, expected_total), found
            for own, wanted in zip(inputs, exact):
                if own is not None and own is not conv_bias:
                    assert near(own.grad, wanted.grad), found
            if has_conv_bias:
                bound = 1e-3 * images.grad.abs().sum((0, 2, 3)).max()
                assert (conv_bias.grad - exact[1].grad).abs().max() < bound, found

    # What is no number stays none: the loss has to tell of it.
    images, residual, gradients = (torch.randn(2, 8, 3, 3).contiguous(memory_format=torch.channels_last) for _ in "123")
    images[1, 0, 0, 0], residual[0, 1, 0, 0] = torch.inf, torch.nan
    weight, bias = torch.ones(8), torch.zeros(8)
    one, other = residual.clone().requires_grad_(), residual.clone().requires_grad_()
    out, *_, variance, _ = ops.batch_norm(images, None, None, 0, 0, None, one, None, weight, bias, 1e-5, 1, False)
    expected = F.relu(F.batch_norm(images, None, None, weight, bias, True, 0.0, 1e-5) + other)
    assert expected.isnan().sum() == 2 * 9 + 1 and torch.equal(out.isnan(), expected.isnan()) and variance[0].isnan()
    out.backward(gradients), expected.backward(gradients)
    assert torch.equal(one.grad, other.grad)

    # A gradient of a gradient is refused, not wrong.
    images = torch.randn(2, 8, 3, 3).contiguous(memory_format=torch.channels_last).requires_grad_()
    out = ops.batch_norm(images, None, None, 0, 0, None, None, None, weight, bias, 1e-5, 1, False)[0]
    (gradient,) = torch.autograd.grad(out.square().sum(), images, create_graph=True)
    try:
        gradient.sum().backward()
    except RuntimeError as error:
        assert "no autograd formula" in str(error)
        print("same")
"""


@interpreted
def test_kernels_match_torch() -> None:
    out, err = run_interpreted(COMPARED_WITH_TORCH)
    assert out == "same\n", err


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[KernelCall]:
    return let_torch_compute(monkeypatch)


class Cast(nn.Module):
    """Makes bfloat16 of float32, as autocast's convolutions do."""

    def forward(self, images: Tensor) -> Tensor:
        return images.bfloat16()


class Parts(nn.Module):
    """The layers of the models below."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
        self.convolutions = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(3))
        self.relu = nn.ReLU(inplace=True)
        self.relu6 = nn.ReLU6(inplace=True)
        self.dropout = nn.Dropout(0.5)
        self.dropout_in_place = nn.Dropout(0.5, inplace=True)
        self.identity = nn.Identity()
        self.cast = Cast()
        self.scale = nn.Parameter(torch.full((8, 1, 1), 2.0))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("total", torch.ones(4, 8, 5, 5))


def make_model(forward: Forward) -> nn.Module:
    """Return a model with this forward."""
    return type("Made", (Parts,), {"forward": forward})()  # type: ignore[no-any-return]


def take_step(model: nn.Module, *inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a step's result, and by name all gradients and buffers after it."""
    torch.manual_seed(1)
    out = model(*inputs)
    (out.float() * torch.linspace(0, 1, out.numel()).reshape(out.shape)).sum().backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return out, gradients | {name: each.clone() for name, each in model.named_buffers()}


def assert_same(model: nn.Module, *inputs: Any, change: Callable[[Any], object] = lambda _: None) -> nn.Module:
    """Assert that a model and its copy with the kernels compute the same, and return the copy."""
    changed = copy.deepcopy(model)
    use_batch_norm_kernel(changed)
    assert list(changed.state_dict()) == list(model.state_dict())
    for each in (model, changed):
        change(each)
    images = torch.randn(4, 8, 5, 5) + 1
    (expected, wanted), (found, ours) = (take_step(each, *inputs, images) for each in (model, changed))
    assert found.dtype == expected.dtype
    digits = 1e-4 if found.dtype == torch.float32 else 2e-2
    assert torch.allclose(found, expected, rtol=digits, atol=digits)
    assert ours.keys() == wanted.keys()
    for name, each in ours.items():
        bound = 1e-3 + digits * float(wanted[name].abs().max())
        assert (each - wanted[name]).abs().max() <= bound, name
    return changed


# Models that stay the same


class Same:
    """Forward passes that write in place, read twice, by keyword or no tensor, and sums of two dtypes."""

    def read_by_a_view(self: Any, images: Tensor) -> Tensor:
        total = self.convolutions[0](images)
        view = total[:, :4]
        total += self.convolutions[1](images)
        return self.norms[0](total).sum(1, keepdim=True) * view

    def written_before_the_norm(self: Any, images: Tensor) -> Tensor:
        one, other = self.convolutions[0](images), self.convolutions[1](images)
        total = one + other
        return self.norms[0](total) + self.relu(other).mean()

    def written_past_a_carrier(self: Any, images: Tensor) -> Tensor:
        value = self.norms[0](self.convolutions[0](images))
        activated = self.relu6(value)
        return torch.relu(self.norms[1](self.convolutions[1](activated)) + value)

    def dropped_in_place_and_read(self: Any, images: Tensor) -> Tensor:
        value = self.convolutions[0](images)
        return self.norms[0](self.dropout_in_place(value)) + value

    def counted_in_place(self: Any, images: Tensor) -> Tensor:
        side = images.shape[2]
        more = side
        more += 1
        return self.norms[0](images) * side

    def buffer_written_by_a_chain(self: Any, images: Tensor) -> Tensor:
        total = self.total
        total += self.convolutions[0](images).detach()
        return self.norms[0](total) + self.convolutions[0](images)

    def count_before_it_is_read(self: Any, images: Tensor) -> Tensor:
        value = self.norms[0](images)
        self.count.add_(1)
        return value + self.count

    def read_twice(self: Any, images: Tensor) -> Tensor:
        value = self.convolutions[0](images)
        return self.norms[0](value) + value

    def convolved_by_keyword(self: Any, images: Tensor) -> Tensor:
        return torch.relu(self.norms[0](self.convolutions[0](input=images)))

    def dropped_by_keyword(self: Any, images: Tensor) -> Tensor:
        return self.norms[0](self.dropout(input=images))

    def a_number_added(self: Any, images: Tensor) -> Tensor:
        return torch.relu(self.norms[0](images) + images.size(0))

    def identity_of_a_tuple(self: Any, images: Tensor) -> Tensor:
        both = self.identity((images, images * 2))
        return self.norms[0](both[0]) + both[1]

    def own_weight_and_count(self: Any, images: Tensor) -> Tensor:
        self.count.add_(1)
        return torch.relu(self.norms[0](images * self.scale)) * self.count

    def added_behind_in_place(self: Any, images: Tensor) -> Tensor:
        value = self.norms[0](self.cast(images))
        value += images
        return value

    def added_behind(self: Any, images: Tensor) -> Tensor:
        return self.norms[0](self.cast(images)) + images

    def added_before_in_place(self: Any, images: Tensor) -> Tensor:
        value = self.cast(self.convolutions[0](images))
        value += images
        return self.norms[0](value)

    def hardswish_behind_an_addition(self: Any, images: Tensor) -> Tensor:
        return nn.functional.hardswish(self.norms[0](images) + images)


def dropped(self: Any, images: Tensor) -> Tensor:
    return torch.relu(self.norms[0](self.dropout(self.convolutions[0](images))))


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("forward", [forward for name, forward in vars(Same).items() if name[0] != "_"])
def test_model_computes_the_same(forward: Forward) -> None:
    assert_same(make_model(forward))


@pytest.mark.usefixtures("calls")
def test_counts_go_on_and_tracing_does_not_count() -> None:
    model = make_model(Same.own_weight_and_count)
    use_batch_norm_kernel(traced := copy.deepcopy(model))
    assert traced.count == 0
    changed = assert_same(model)
    changed(torch.randn(4, 8, 5, 5))
    assert changed.count == 2


class Block(nn.Module):
    """A norm of each kind: before an activation, an addition, both, none; after a convolution, an addition of two."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(8, momentum=0.1 if index else 0.9) for index in range(6))
        self.relu = nn.ReLU(inplace=True)
        self.convolution = nn.Conv2d(8, 8, 1)
        self.others = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(3))

    def forward(self, images: Tensor) -> Tensor:
        first = self.relu(self.norms[0](images))
        second = self.norms[1](self.convolution(first))
        second += first
        second = torch.relu(second)
        third = self.norms[2](self.convolution(second)) + second
        fourth = nn.functional.silu(self.norms[3](third))
        fifth = self.norms[4](self.others[0](fourth))
        sum_before = self.others[1](fifth)
        sum_before += self.others[2](fourth)
        return self.norms[5](sum_before) * sum_before + fifth


def test_neighbours_are_fused_in_training_only(calls: list[KernelCall]) -> None:
    changed = assert_same(Block())
    assert calls == [
        KernelCall(activation=RELU, makes_carrier=True),  # read by a convolution, and added after the next norm
        KernelCall(adds=True, carries=True, activation=RELU, makes_carrier=True),
        KernelCall(adds=True, carries=True),
        KernelCall(activation=SILU),  # read by two convolutions
        KernelCall(conv_bias=True),
        KernelCall(conv_bias=True, adds_before=True),
    ]
    images = torch.randn(4, 8, 5, 5)
    assert torch.equal(changed.eval()(images), copy.deepcopy(changed)(images))
    assert len(calls) == 6, "validation is the model's own forward"


def test_model_in_double(calls: list[KernelCall]) -> None:
    model = Block()
    use_batch_norm_kernel(model)
    model.double()
    assert model(torch.randn(2, 8, 3, 3).double()).dtype == torch.float64
    assert calls
    assert model.norms[1].running_mean.dtype == torch.float64  # type: ignore[union-attr]
    assert model.norms[1].running_mean.abs().sum() > 0  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("change", [lambda _: None, lambda model: model.norms[0].eval()], ids=["cpu", "frozen"])
def test_without_fitting_kernels_torch_computes(change: Callable[[Any], object]) -> None:
    assert_same(Block(), change=change)


ADDED = KernelCall(adds=True, activation=RELU, makes_carrier=True)
ADDED_AND_CARRIED = KernelCall(adds=True, carries=True, activation=RELU)
DROPPED = KernelCall(conv_bias=True, drops=True, activation=RELU)
ADDED_BEFORE = KernelCall(conv_bias=True, adds_before=True, activation=RELU)


@pytest.mark.parametrize(
    ("name", "count", "wanted"),
    [
        ("resnet18", 20, {ADDED, ADDED_AND_CARRIED}),
        ("efficientnet_b0", 49, {KernelCall(activation=SILU), KernelCall()}),
        ("wrn-28-10", 25, {DROPPED, ADDED_BEFORE}),
    ],
)
def test_all_norms_of_a_workload_use_the_kernels(
    name: str, count: int, wanted: set[KernelCall], calls: list[KernelCall]
) -> None:
    task = build_task(find_workload(name))
    use_batch_norm_kernel(task.model)
    (batch,) = task.make_batches(1, 2, torch.device("cpu"), torch.Generator())
    task.compute_loss(task.model.train(), batch).backward()
    assert len(calls) == count
    assert wanted <= set(calls)


# timm's norms with an activation, and identities


def timm_model(kind: type[nn.Module] | None, **options: Any) -> nn.Module:
    """Return timm's norm between two convolutions; it activates in place if it can."""
    timm = pytest.importorskip("timm.layers")
    norm = timm.BatchNormAct2d(8, apply_act=kind is not None, act_layer=kind or nn.ReLU, **options)
    return nn.Sequential(nn.Conv2d(8, 8, 1), norm, nn.Conv2d(8, 8, 1))


@pytest.mark.parametrize(
    ("kind", "options", "activation"),
    [
        (nn.ReLU, {}, RELU),
        (nn.SiLU, {"inplace": False}, SILU),
        (nn.Hardswish, {}, HARDSWISH),
        (nn.LeakyReLU, {}, NO_ACTIVATION),
        (None, {}, NO_ACTIVATION),
        (nn.SiLU, {"drop_layer": nn.Dropout}, NO_ACTIVATION),
    ],
)
def test_timm_norm_is_split(
    kind: type[nn.Module] | None, options: dict[str, Any], activation: int, calls: list[KernelCall]
) -> None:
    changed = assert_same(timm_model(kind, **options))
    assert calls == [KernelCall(conv_bias=True, activation=activation)]
    images = torch.randn(2, 8, 3, 3)
    plain = timm_model(kind, **options)
    plain.load_state_dict(changed.state_dict())
    assert torch.equal(changed.eval()(images), plain.eval()(images))


def test_norms_applied_twice_stay_plain(calls: list[KernelCall]) -> None:
    norm = timm_model(nn.SiLU)[1]  # type: ignore[index]
    assert_same(nn.Sequential(norm, norm, nn.BatchNorm2d(8)))
    assert calls == [KernelCall()]


def test_identities_do_not_separate_norm_and_activation(calls: list[KernelCall]) -> None:
    assert_same(nn.Sequential(nn.BatchNorm2d(8), nn.Identity(), nn.ReLU(), nn.Identity()))
    assert calls == [KernelCall(activation=RELU)]


# Models that cannot be traced as a whole


class Segmenter(nn.Module):
    """Branches on what it computes; its parts do not."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.heads = nn.ModuleList(nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()) for _ in range(2))
        self.norm = nn.BatchNorm2d(8)

    def forward(self, images: Tensor, scale: float = 2.0) -> Tensor:
        features = self.norm(self.backbone(images) * scale)
        return sum((head(features) for head in self.heads if features.mean() > -1e9), features)


def test_traceable_parts_use_the_kernels(calls: list[KernelCall]) -> None:
    changed = assert_same(Segmenter())
    alone = KernelCall(activation=RELU)
    assert calls == [KernelCall(conv_bias=True, activation=RELU), alone, alone]
    assert type(changed.norm) is nn.BatchNorm2d, "it has no neighbours that were traced"


@pytest.mark.usefixtures("calls")
def test_part_called_without_a_tensor_runs_plain() -> None:
    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(8)

        def forward(self, images: Tensor, skip: Tensor | None) -> Tensor:
            value = self.norm(images)
            return value if skip is None else value + skip * 2

    class Unet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.other = Up(), Up()

        def forward(self, images: Tensor, scale: float = 1.0) -> Tensor:
            return self.up(images, None) * scale + self.other(images, images)  # type: ignore[no-any-return]

    assert_same(Unet())


# Modes and settings that change after the model was rewritten


def in_evaluation(*names: str) -> Callable[[Any], object]:
    return lambda model: [model.get_submodule(name).eval() for name in names]


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize(
    ("forward", "change"),
    [
        (dropped, in_evaluation("dropout")),
        (dropped, in_evaluation("dropout", "norms.0")),
        (dropped, lambda model: setattr(model.dropout, "p", 0.0)),
        (Same.read_twice, lambda model: [setattr(norm, "momentum", None) for norm in model.norms]),  # as update_bn does
        (Same.read_twice, lambda model: [setattr(norm, "track_running_stats", False) for norm in model.norms]),
    ],
)
def test_layers_follow_their_present_settings(forward: Forward, change: Callable[[Any], object]) -> None:
    assert_same(make_model(forward), change=change)


@pytest.mark.parametrize(("probability", "drops"), [(0.3, [True]), (1e-6, [False]), (1.0, [])])
def test_kernels_drop_with_16_bit_probabilities(probability: float, drops: list[bool], calls: list[KernelCall]) -> None:
    model = make_model(dropped)
    use_batch_norm_kernel(model)
    model.dropout.p = probability  # type: ignore[union-attr]
    model(torch.randn(2, 8, 3, 3))
    assert [each.drops for each in calls] == drops


@pytest.mark.usefixtures("calls")
def test_numbers_may_be_inputs() -> None:
    def scaled(self: Any, scale: float, images: Tensor) -> Tensor:
        return dropped(self, images) * scale

    assert_same(make_model(scaled), 2.0, change=in_evaluation("dropout"))


@pytest.mark.usefixtures("calls")
def test_model_in_evaluation_is_traced_in_training() -> None:
    def choosing(self: Any, images: Tensor) -> Tensor:
        value = self.norms[0](images)
        return value * 2 if self.training else value

    model = make_model(choosing)
    model.norms[1].eval()  # type: ignore[index, union-attr]
    changed = assert_same(model.eval(), change=lambda each: setattr(each, "training", True))
    assert [part.training for part in changed.modules()] == [part.training for part in model.modules()]


# Copies, pickles, torch.compile


def test_copy_trains_its_own_weights(calls: list[KernelCall]) -> None:
    model = make_model(dropped)
    use_batch_norm_kernel(model)
    copied = copy.deepcopy(model)
    images = torch.randn(2, 8, 3, 3)
    copied(images).sum().backward()
    assert len(calls) == 1
    assert all(each.grad is None for each in model.parameters())
    assert copied.norms[0].weight.grad is not None  # type: ignore[index, union-attr]
    assert [int(each.norms[0].num_batches_tracked) for each in (model, copied)] == [0, 1]  # type: ignore[index, union-attr, arg-type]
    copied.eval()(images)
    assert len(calls) == 1, "a weight average's validation runs the plain forward, though the model is in training"


@pytest.mark.parametrize("is_timm", [False, True])
def test_pickled_model_computes_as_its_class_does(is_timm: bool, calls: list[KernelCall]) -> None:
    model = timm_model(nn.ReLU) if is_timm else nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU())
    use_batch_norm_kernel(model)
    images = torch.randn(2, 8, 3, 3)
    model(images)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded[1]) is type(model[1])  # type: ignore[index]
    assert torch.equal(loaded.eval()(images), model.eval()(images))
    assert len(calls) == 1
    assert torch.allclose(loaded.train()(images), model.train()(images), atol=1e-6)
    assert int(loaded[1].num_batches_tracked) == len(calls) == 2


def test_replaced_layer_is_trained() -> None:
    model = nn.Sequential(nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 3))
    use_batch_norm_kernel(model)
    model[2] = nn.Linear(8, 5)
    assert model(torch.randn(2, 8, 1, 1)).shape == (2, 5)


def test_compiles_as_one_graph() -> None:
    model = make_model(dropped)
    use_batch_norm_kernel(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    images = torch.randn(2, 8, 3, 3)
    compiled(images).sum().backward()
    assert int(model.norms[0].num_batches_tracked) == 1  # type: ignore[index, union-attr, arg-type]
    model.eval()
    assert torch.equal(compiled(images), model(images))


def test_running_statistics_keep_their_dtype() -> None:
    norm = nn.BatchNorm2d(2, momentum=0.5).half()
    update_running_statistics([norm], [torch.tensor([2.0, 4.0])], [torch.tensor([3.0, 5.0])])
    assert norm.running_mean is not None
    assert norm.running_mean.tolist() == [1.0, 2.0]
    assert norm.running_var is not None
    assert norm.running_var.tolist() == [2.0, 3.0]


# What is refused


class Doubled(torch.autograd.Function):
    """Has a gradient of its own making."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # type: ignore[override]
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 3


def with_an_option(self: Any, images: Tensor, scale: Tensor | None = None) -> Tensor:
    value = self.norms[0](images)
    return value if scale is None else value * 2


def without_gradients(self: Any, images: Tensor) -> Tensor:
    with torch.no_grad():
        value = self.norms[0](images)
    return self.norms[1](value)


def with_its_own_gradient(self: Any, images: Tensor) -> Tensor:
    return Doubled.apply(self.norms[0](images))  # type: ignore[no-untyped-call, no-any-return]


def with_its_own_draws(self: Any, images: Tensor) -> Tensor:
    return self.norms[0](images) if torch.rand(1) < 0.5 else self.norms[1](images)


def without_autocast_anywhere(self: Any, images: Tensor) -> Tensor:
    with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
        return self.norms[0](self.convolutions[0](images))


def with_a_checkpoint(self: Any, images: Tensor) -> Tensor:
    return checkpoint(self.norms[0], images, use_reentrant=False)  # type: ignore[no-any-return]


def with_numpy_s_draws(self: Any, images: Tensor) -> Tensor:
    return self.norms[0](images) if np.random.rand() < 0.5 else self.norms[1](images)


def with_weights_set(self: Any, images: Tensor) -> Tensor:
    self.norms[0].weight.data = self.norms[0].weight / 2
    return self.norms[0](images)


def with_another_operator_in_place(self: Any, images: Tensor) -> Tensor:
    value = self.norms[0](images)
    value **= 2
    return value


def with_a_list_that_it_keeps(self: Any, images: Tensor) -> Tensor:
    value = self.norms[0](images)
    self.kept.append(value.mean())
    return value


def with_a_dict_of_its_own(self: Any, images: Tensor) -> Any:
    return OrderedDict(out=self.norms[0](images))


def asking_for_its_kind(self: Any, images: Tensor) -> Tensor:
    return self.norms[0](images) if isinstance(images, Tensor) else self.norms[1](images)


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (with_a_dict_of_its_own, "its OrderedDict would become a dict"),
        (asking_for_its_kind, "asks for the type of a tensor"),
        (without_autocast_anywhere, "turns gradients, autocast or checkpoints on or off"),
        (with_a_checkpoint, "asks for the type of a tensor"),
        (with_numpy_s_draws, "layers alone draw random numbers"),
        (with_weights_set, "it sets 'data' of what it computes"),
        (with_another_operator_in_place, "writes in place by another operator"),
        (with_a_list_that_it_keeps, "keeps nothing in the model"),
        (with_an_option, "inputs are all required"),
        (without_gradients, "turns gradients, autocast or checkpoints on or off"),
        (with_its_own_gradient, "turns gradients, autocast or checkpoints on or off|asks for the type"),
        (with_its_own_draws, "layers alone draw random numbers"),
    ],
)
def test_model_that_tracing_would_change_is_refused(forward: Forward, reason: str) -> None:
    model = make_model(forward)
    model.kept = []  # type: ignore[assignment]
    before = dict(vars(model))
    with pytest.raises(UsageError, match=reason):
        use_batch_norm_kernel(model)
    assert vars(model) == before
    assert model.kept == []
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: model[0].register_forward_hook(lambda _, __, out: 2 * out), "without hooks on its parts"),
        (lambda model: setattr(model, "forward", torch.relu), "whose forward is its class's"),
        (lambda model: setattr(model[1], "forward", torch.relu), "whose forward is its class's"),
    ],
)
def test_hooks_and_replaced_forwards_are_refused(change: Callable[[Any], object], reason: str) -> None:
    model = nn.Sequential(nn.BatchNorm2d(8), nn.Identity(), nn.ReLU())
    change(model)
    with pytest.raises(UsageError, match=reason):
        use_batch_norm_kernel(model)


def test_models_the_technique_cannot_help_are_refused() -> None:
    class Choosing(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images if images.sum() > 0 else -images

    class Holding(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.ones(1)  # neither moves with the model nor is saved with it

        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images) * self.scale

    with pytest.raises(UsageError, match=r"torch\.fx can trace: symbolically traced variables"):
        use_batch_norm_kernel(Choosing())
    with pytest.raises(UsageError, match="tensors are parameters or buffers"):
        use_batch_norm_kernel(Holding())
    with pytest.raises(UsageError, match="finds no batch norm"):
        use_batch_norm_kernel(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, affine=False)))


def on_gpu(
    *shape: int, dtype: torch.dtype = torch.float32, layout: torch.memory_format = torch.channels_last
) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=dtype).contiguous(memory_format=layout)


@pytest.mark.parametrize(
    ("shape", "changes", "fits"),
    [
        ((2, 8, 3, 3), {}, True),
        ((2, 8, 3, 3), {"dtype": torch.bfloat16}, True),
        ((2, 8, 3, 3), {"dtype": torch.float64}, False),  # whose digits float32 has not
        ((2, 8, 3, 3), {"layout": torch.contiguous_format}, False),
        ((2, 9, 3, 3), {}, False),  # another norm's
        ((1, 8, 1, 1), {}, False),  # has no variance
        ((0, 8, 3, 3), {}, False),
        ((2**14, 8, 2**8, 2**8), {}, False),  # more rows than 32 bits count
    ],
)
def test_fits_kernels(shape: tuple[int, ...], changes: dict[str, Any], fits: bool) -> None:
    with FakeTensorMode():
        weight, images = torch.empty(8, device="cuda"), on_gpu(*shape, **changes)
        assert fits_kernels(weight, images, None) is fits
        assert not fits_kernels(weight, images, 5)  # type: ignore[arg-type]
        assert not fits_kernels(weight, images, images.half())
        assert not fits_kernels(torch.empty(8), images)
