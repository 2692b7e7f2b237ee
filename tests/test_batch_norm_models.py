"""Models whose batch norms are told what is beside them compute what they did, or are refused."""

import copy
import io
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fake_norm import Asked, let_torch_compute
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from castwise.errors import UsageError
from castwise.worker.kernels.batch_norm import module
from castwise.worker.kernels.batch_norm.fusion import use_batch_norm_kernel

Forward = Callable[..., Any]


class Cast(nn.Module):
    """Makes bfloat16 of float32, as autocast's convolutions do."""

    def forward(self, images: Tensor) -> Tensor:
        return images.bfloat16()


class Parts(nn.Module):
    """What the models below are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
        self.convolutions = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(3))
        self.relu = nn.ReLU(inplace=True)
        self.relu6 = nn.ReLU6(inplace=True)
        self.dropout = nn.Dropout(0.5)
        self.dropout_in_place = nn.Dropout(0.5, inplace=True)
        self.cast = Cast()


def made(forward: Forward) -> nn.Module:
    """Return a model with this forward."""
    return type("Made", (Parts,), {"forward": forward})()  # type: ignore[no-any-return]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    return let_torch_compute(monkeypatch)


def results(model: nn.Module, *inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a step's result, and by name all gradients and buffers after it."""
    torch.manual_seed(1)
    out = model(*inputs)
    (out.float() * torch.linspace(0, 1, out.numel()).reshape(out.shape)).sum().backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return out, gradients | {name: each.clone() for name, each in model.named_buffers()}


def stays(model: nn.Module, *inputs: Any, change: Callable[[Any], object] = lambda _: None) -> nn.Module:
    """Make sure that a model and its copy with the kernels compute the same, and return the copy."""
    changed = copy.deepcopy(model)
    use_batch_norm_kernel(changed)
    for each in (model, changed):
        change(each)
    images = torch.randn(4, 8, 5, 5) + 1
    (expected, wanted), (found, ours) = (results(each, *inputs, images) for each in (model, changed))
    assert found.dtype == expected.dtype
    digits = 1e-4 if found.dtype == torch.float32 else 2e-2
    assert torch.allclose(found, expected, rtol=digits, atol=digits)
    assert ours.keys() == wanted.keys()
    for name, each in ours.items():
        bound = 1e-3 + digits * float(wanted[name].abs().max())
        assert (each - wanted[name]).abs().max() <= bound, name
    return changed


# What is written in place


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


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(
    "forward",
    [
        read_by_a_view,
        written_before_the_norm,
        written_past_a_carrier,
        dropped_in_place_and_read,
        counted_in_place,
    ],
)
def test_what_is_written_in_place_is_seen_by_others_as_before(forward: Forward) -> None:
    stays(made(forward))


# What is read twice, or by a keyword, or is no tensor


def read_twice(self: Any, images: Tensor) -> Tensor:
    value = self.convolutions[0](images)
    return self.norms[0](value) + value


def convolved_by_keyword(self: Any, images: Tensor) -> Tensor:
    return torch.relu(self.norms[0](self.convolutions[0](input=images)))


def dropped_by_keyword(self: Any, images: Tensor) -> Tensor:
    return self.norms[0](self.dropout(input=images))


def a_number_added(self: Any, images: Tensor) -> Tensor:
    return torch.relu(self.norms[0](images) + images.size(0))


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("forward", [read_twice, convolved_by_keyword, dropped_by_keyword, a_number_added])
def test_what_is_read_otherwise_is_read(forward: Forward) -> None:
    stays(made(forward))


# Dtypes


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


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("forward", [added_behind_in_place, added_behind, added_before_in_place])
def test_a_sum_has_the_dtype_that_it_had(forward: Forward) -> None:
    stays(made(forward))


# timm's norms that activate, too, and what stands in the place of options


def activated(kind: type[nn.Module] | None, **options: Any) -> nn.Module:
    """Return timm's norm, which activates in place if it can."""
    timm = pytest.importorskip("timm.layers")
    norm = timm.BatchNormAct2d(8, apply_act=kind is not None, act_layer=kind or nn.ReLU, **options)
    return nn.Sequential(nn.Conv2d(8, 8, 1), norm, nn.Conv2d(8, 8, 1))


@pytest.mark.parametrize(
    ("kind", "options", "asked"),
    [
        (nn.ReLU, {}, module.RELU),
        (nn.SiLU, {"inplace": False}, module.SILU),
        (nn.Hardswish, {}, module.HARDSWISH),
        (nn.LeakyReLU, {}, module.NO_ACTIVATION),
        (None, {}, module.NO_ACTIVATION),
        (nn.SiLU, {"drop_layer": nn.Dropout}, module.NO_ACTIVATION),
    ],
)
def test_a_norm_of_timm_s_is_a_norm_and_its_activation(
    kind: type[nn.Module] | None, options: dict[str, Any], asked: int, told: list[Asked]
) -> None:
    changed = stays(activated(kind, **options))
    assert told == [Asked(shifts=True, activation=asked)]
    images = torch.randn(2, 8, 3, 3)
    plain = activated(kind, **options)
    plain.load_state_dict(changed.state_dict())
    assert torch.equal(changed.eval()(images), plain.eval()(images))
    assert len(told) == 1


def test_a_norm_of_timm_s_that_is_applied_twice_stays_timm_s(told: list[Asked]) -> None:
    model = activated(nn.SiLU)
    stays(nn.Sequential(model[1], model[1], nn.BatchNorm2d(8)))  # type: ignore[index]
    assert told == [Asked()]


def test_a_norm_of_timm_s_that_was_pickled_computes_as_its_class_does(told: list[Asked]) -> None:
    model = activated(nn.ReLU)
    use_batch_norm_kernel(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded, images = torch.load(file, weights_only=False), torch.randn(2, 8, 3, 3)
    assert type(loaded[1]) is type(model[1])  # type: ignore[index]
    assert torch.equal(loaded.eval()(images), model.eval()(images))
    assert torch.allclose(loaded.train()(images), model.train()(images), atol=1e-6)
    assert int(loaded[1].num_batches_tracked) == len(told) == 1


def test_what_hands_on_what_it_gets_parts_no_norm_from_its_activation(told: list[Asked]) -> None:
    stays(nn.Sequential(nn.BatchNorm2d(8), nn.Identity(), nn.ReLU(), nn.Identity()))
    assert told == [Asked(activation=module.RELU)]


# Models that cannot be traced whole


class Segmenter(nn.Module):
    """Chooses by what it computes; what it is made of does not."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.heads = nn.ModuleList(nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()) for _ in range(2))
        self.norm = nn.BatchNorm2d(8)

    def forward(self, images: Tensor, scale: float = 2.0) -> Tensor:
        features = self.norm(self.backbone(images) * scale)
        return sum((head(features) for head in self.heads if features.mean() > -1e9), features)


def test_the_parts_that_can_be_traced_use_the_kernels(told: list[Asked]) -> None:
    changed = stays(Segmenter())
    behind_a_convolution, alone = Asked(shifts=True, activation=module.RELU), Asked(activation=module.RELU)
    assert told == [behind_a_convolution, alone, alone]
    assert type(changed.norm) is nn.BatchNorm2d, "nothing is beside it that the trace saw"


# Weights and counts that are a model's own


class Scaled(nn.Module):
    """Has a weight and a count that are in none of its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(8)
        self.scale = nn.Parameter(torch.full((8, 1, 1), 2.0))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        self.count.add_(1)
        return torch.relu(self.norm(images * self.scale)) * self.count


@pytest.mark.usefixtures("told")
def test_a_model_s_own_weights_are_trained_and_its_counts_are_kept() -> None:
    model = Scaled()
    traced = copy.deepcopy(model)
    use_batch_norm_kernel(traced)
    assert traced.count == 0
    changed = stays(model)
    changed(torch.randn(4, 8, 5, 5))
    assert changed.count == 2


@pytest.mark.usefixtures("told")
def test_a_weight_that_is_written_into_is_written_before_it_is_read() -> None:
    class Writing(Scaled):
        def forward(self, images: Tensor) -> Tensor:
            value = self.norm(images)
            self.count.add_(1)
            return value + self.count

    stays(Writing())


@pytest.mark.usefixtures("told")
def test_an_identity_hands_on_a_tuple_too() -> None:
    def paired(self: Any, images: Tensor) -> Tensor:
        both = self.identity((images, images * 2))
        return self.norms[0](both[0]) + both[1]

    model = made(paired)
    model.identity = nn.Identity()
    stays(model)


@pytest.mark.usefixtures("told")
def test_what_is_called_without_a_tensor_runs_as_it_is() -> None:
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

    stays(Unet())


def test_hardswish_behind_an_addition_stays_behind_it(told: list[Asked]) -> None:
    def added(self: Any, images: Tensor) -> Tensor:
        return nn.functional.hardswish(self.norms[0](images) + images)

    stays(made(added))
    assert told == [Asked()]


@pytest.mark.usefixtures("told")
def test_a_buffer_that_a_chain_writes_into_is_written() -> None:
    class Accumulating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.convolution = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)
            self.register_buffer("total", torch.ones(4, 8, 5, 5))

        def forward(self, images: Tensor) -> Tensor:
            total = self.total
            total += self.convolution(images).detach()  # type: ignore[operator]
            return self.norm(total) + self.convolution(images)

    stays(Accumulating())


# Modes and settings


def dropped(self: Any, images: Tensor) -> Tensor:
    return torch.relu(self.norms[0](self.dropout(self.convolutions[0](images))))


def in_evaluation(*names: str) -> Callable[[Any], object]:
    return lambda model: [model.get_submodule(name).eval() for name in names]


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(
    "change",
    [
        in_evaluation("dropout"),
        in_evaluation("dropout", "norms.0"),
        lambda model: setattr(model.dropout, "p", 0.0),
    ],
)
def test_dropout_is_what_its_module_says_now(change: Callable[[Any], object]) -> None:
    stays(made(dropped), change=change)


@pytest.mark.parametrize(("probability", "asked"), [(0.3, [True]), (1e-6, [False]), (1.0, [])])
def test_kernels_drop_what_16_bits_can_say(probability: float, asked: list[bool], told: list[Asked]) -> None:
    model = made(dropped)
    use_batch_norm_kernel(model)
    model.dropout.p = probability  # type: ignore[union-attr]
    model(torch.randn(2, 8, 3, 3))
    assert [each.drops for each in told] == asked


@pytest.mark.usefixtures("told")
def test_dropout_draws_where_its_images_are() -> None:
    def scaled(self: Any, scale: float, images: Tensor) -> Tensor:
        return dropped(self, images) * scale

    stays(made(scaled), 2.0, change=in_evaluation("dropout"))


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(
    "change",
    [
        lambda model: [setattr(norm, "momentum", None) for norm in model.norms],  # as swa_utils.update_bn does
        lambda model: [setattr(norm, "track_running_stats", False) for norm in model.norms],
    ],
)
def test_statistics_that_move_otherwise_are_torch_s(change: Callable[[Any], object]) -> None:
    stays(made(read_twice), change=change)


@pytest.mark.usefixtures("told")
def test_a_model_that_comes_in_evaluation_is_traced_in_training() -> None:
    def choosing(self: Any, images: Tensor) -> Tensor:
        value = self.norms[0](images)
        return value * 2 if self.training else value

    model = made(choosing)
    model.norms[1].eval()  # type: ignore[index, union-attr]
    changed = stays(model.eval(), change=lambda each: setattr(each, "training", True))
    assert [part.training for part in changed.modules()] == [part.training for part in model.modules()]


# Copies


def test_a_copy_trains_and_validates_its_own_weights(told: list[Asked]) -> None:
    model = made(dropped)
    use_batch_norm_kernel(model)
    copied = copy.deepcopy(model)
    images = torch.randn(2, 8, 3, 3)
    copied(images).sum().backward()
    assert len(told) == 1
    assert all(each.grad is None for each in model.parameters())
    assert copied.norms[0].weight.grad is not None  # type: ignore[index, union-attr]
    assert [int(each.norms[0].num_batches_tracked) for each in (model, copied)] == [0, 1]  # type: ignore[index, union-attr, arg-type]
    copied.eval()(images)
    assert len(told) == 1, "an average's validation is no step, though the model is in training"


def test_a_pickled_model_computes_as_its_class_does(told: list[Asked]) -> None:
    norm = nn.BatchNorm2d(8)
    model = nn.Sequential(nn.Conv2d(8, 8, 1), norm, nn.ReLU())
    use_batch_norm_kernel(model)
    images = torch.randn(2, 8, 3, 3)
    model(images)
    assert len(told) == 1
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded.eval()(images), model.eval()(images))
    assert torch.allclose(loaded.train()(images), model.train()(images), atol=1e-6)
    assert len(told) == 2
    assert int(loaded[1].num_batches_tracked) == 2


def test_a_layer_that_takes_another_s_place_is_trained() -> None:
    model = nn.Sequential(nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 3))
    use_batch_norm_kernel(model)
    model[2] = nn.Linear(8, 5)
    assert model(torch.randn(2, 8, 1, 1)).shape == (2, 5)


def test_it_compiles_whole_for_training_and_for_evaluation() -> None:
    model = made(dropped)
    use_batch_norm_kernel(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    images = torch.randn(2, 8, 3, 3)
    compiled(images).sum().backward()
    assert int(model.norms[0].num_batches_tracked) == 1  # type: ignore[index, union-attr, arg-type]
    model.eval()
    assert torch.equal(compiled(images), model(images))


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


def without_autocast(self: Any, images: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.norms[0](self.convolutions[0](images))


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


def with_what_it_keeps(self: Any, images: Tensor) -> Tensor:
    self.features = self.norms[0](images)
    return self.features * 2


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
        (asking_for_its_kind, "asks what kind its inputs are"),
        (without_autocast_anywhere, "turns gradients, autocast or checkpoints on or off"),
        (with_a_checkpoint, "turns gradients, autocast or checkpoints on or off"),
        (with_numpy_s_draws, "layers alone draw random numbers"),
        (with_weights_set, "it sets 'data' of what it computes"),
        (with_another_operator_in_place, "writes in place by another operator"),
        (with_what_it_keeps, "keeps nothing in the model"),
        (with_a_list_that_it_keeps, "keeps nothing in the model"),
        (with_an_option, "inputs are all given"),
        (without_gradients, "turns gradients, autocast or checkpoints on or off"),
        (without_autocast, "turns gradients, autocast or checkpoints on or off"),
        (with_its_own_gradient, "has a gradient of its own"),
        (with_its_own_draws, "layers alone draw random numbers"),
    ],
)
def test_what_tracing_would_lose_is_refused(forward: Forward, reason: str) -> None:
    model = made(forward)
    model.kept = []  # type: ignore[assignment]
    before = dict(vars(model))
    with pytest.raises(UsageError, match=reason):
        use_batch_norm_kernel(model)
    assert vars(model) == before
    assert model.kept == []
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16


def test_hooks_and_a_forward_of_one_s_own_are_refused() -> None:
    hooked, bound = made(read_twice), made(read_twice)
    hooked.norms[0].register_forward_hook(lambda _, __, out: 2 * out)  # type: ignore[index, union-attr]
    with pytest.raises(UsageError, match="without hooks on its parts"):
        use_batch_norm_kernel(hooked)
    bound.forward = lambda images: images
    with pytest.raises(UsageError, match="whose forward is its class's"):
        use_batch_norm_kernel(bound)
    patched = nn.Sequential(nn.BatchNorm2d(8), nn.Identity(), nn.ReLU())
    patched[1].forward = lambda images: images * 2  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="whose forward is its class's"):
        use_batch_norm_kernel(patched)


# What is left to torch


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
def test_kernels_are_for_images_that_they_can_count(
    shape: tuple[int, ...], changes: dict[str, Any], fits: bool
) -> None:
    with FakeTensorMode():
        weight, images = torch.empty(8, device="cuda"), on_gpu(*shape, **changes)
        assert module._is_for_kernels(weight, images, None) is fits
        assert not module._is_for_kernels(weight, images, 5)  # type: ignore[arg-type]
        assert not module._is_for_kernels(weight, images, images.half())
        assert not module._is_for_kernels(torch.empty(8), images)
