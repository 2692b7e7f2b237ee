"""None, static and dynamic loss scaling: the gradients they step with, and the steps they skip."""

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adadelta, Adam, AdamW, Optimizer

from castwise.apply import loss_scaling
from castwise.apply.loss_scaling import DeviceScaling, DynamicScaling, NoScaling, make_loss_scaling
from castwise.errors import UsageError
from castwise.spec.loss_scale import DYNAMIC_SCALES, DynamicScale, parse_loss_scale

CPU = torch.device("cpu")
DYNAMIC, APEX = DYNAMIC_SCALES
QUICK = DynamicScale("quick", init=4.0, factor=2.0, window=2, maximum=None)
BOUNDED = DynamicScale("bounded", init=4.0, factor=2.0, window=1, maximum=16.0)
INF, NAN = float("inf"), float("nan")

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (SGD, {"lr": 0.5}),
    "momentum": (SGD, {"lr": 0.5, "momentum": 0.5, "weight_decay": 0.25}),
    "nesterov": (SGD, {"lr": 0.5, "momentum": 0.5, "nesterov": True}),
    "adam": (Adam, {"lr": 0.5, "weight_decay": 0.25}),
    "adamw": (AdamW, {"lr": 0.5}),
    "adadelta": (Adadelta, {"lr": 0.5}),
}

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
every_scale = pytest.mark.parametrize(
    ("name", "on_device"),
    [("none", False), ("128", False), *itertools.product(("dynamic", "dynamic-apex"), (False, True))],
)


def make_weight(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(2, dtype=dtype, requires_grad=True)


def momentum_sgd(*weights: Tensor) -> SGD:
    return SGD(weights, lr=0.5, momentum=0.5)


def train(
    scaling: NoScaling,
    optimizer: Optimizer,
    weight: Tensor,
    gradient: tuple[float, float] = (0.25, 0.5),
    clip_grad_norm: float | None = None,
) -> None:
    """Take one step on a loss whose unscaled gradient is `gradient`."""
    weight.grad = None
    scaling.backward((weight.float() * torch.tensor(gradient)).sum())
    scaling.step(optimizer, clip_grad_norm)


# Names


@pytest.mark.parametrize(
    ("text", "canonical"),
    [(" None ", "none"), ("DYNAMIC", "dynamic"), ("dynamic-apex", "dynamic-apex"), ("1.28e2", "128"), ("0.5", "0.5")],
)
def test_loss_scales_have_one_spelling(text: str, canonical: str) -> None:
    assert parse_loss_scale(text) == canonical
    assert parse_loss_scale(canonical) == canonical


@pytest.mark.parametrize("text", ["abc", "", "128x", "0", "-1", "inf", "nan", "1e400"])
def test_refuses_bad_loss_scale(text: str) -> None:
    with pytest.raises(UsageError, match=f"'{text}'"):
        parse_loss_scale(text)


# Whatever the scaling


@every_scale
@every_dtype
def test_steps_use_unscaled_gradients(name: str, on_device: bool, dtype: torch.dtype) -> None:
    """Momentum too is of the unscaled ones: 0.25 · (1, 1.5) times the learning rate of 0.5."""
    weight = make_weight(dtype)
    optimizer = momentum_sgd(weight)
    scaling = make_loss_scaling(name, CPU, optimizer, decides_on_device=on_device)
    for _ in range(2):
        train(scaling, optimizer, weight)
    assert weight.tolist() == [1 - 0.5 * 0.25 * 2.5, 1 - 0.5 * 0.5 * 2.5]
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.25, 0.5]
    assert scaling.skipped_steps == 0


@every_scale
@every_dtype
def test_clipping_is_of_the_unscaled_gradients(name: str, on_device: bool, dtype: torch.dtype) -> None:
    weight = make_weight(dtype)
    optimizer = SGD([weight], lr=1.0)
    scaling = make_loss_scaling(name, CPU, optimizer, decides_on_device=on_device)
    train(scaling, optimizer, weight, (0.375, 0.5), clip_grad_norm=0.0625)  # the norm is 0.625
    assert weight.grad is not None
    assert weight.grad.float().tolist() == pytest.approx([0.0375, 0.05], rel=torch.finfo(dtype).eps + 1e-4)
    train(scaling, optimizer, weight, (0.375, 0.5), clip_grad_norm=1.0)
    assert weight.grad.tolist() == [0.375, 0.5]


@every_scale
def test_weights_without_a_gradient_and_other_groups(name: str, on_device: bool) -> None:
    used, unused, other = make_weight(), make_weight(), make_weight()
    groups = [{"params": [used, unused]}, {"params": [other], "lr": 1.0}]
    optimizer = SGD(groups, lr=0.5, momentum=0.5, weight_decay=0.5)
    scaling = make_loss_scaling(name, CPU, optimizer, decides_on_device=on_device)
    scaling.backward(((used + other) * 0.25).sum())
    scaling.step(optimizer, 10.0)
    assert unused.tolist() == [1.0, 1.0]
    assert used.tolist() == [1 - 0.5 * 0.75] * 2
    assert other.tolist() == [1 - 1.0 * 0.75] * 2


# None and static


@pytest.mark.parametrize(("name", "scale"), [("none", None), ("1000", 1000.0)])
@pytest.mark.parametrize("bad", [INF, NAN])
def test_no_and_static_scaling_let_overflow_through(bad: float, name: str, scale: float | None) -> None:
    weight = make_weight()
    optimizer = momentum_sgd(weight)
    scaling = make_loss_scaling(name, CPU, optimizer)
    train(scaling, optimizer, weight, (bad, 0.5))
    assert not weight[0].isfinite()
    assert weight[1].item() == pytest.approx(0.75)
    assert (scaling.read_scale(), scaling.skipped_steps) == (scale, 0)


# Dynamic


@every_dtype
def test_dynamic_scale_halves_until_gradients_fit(dtype: torch.dtype) -> None:
    """Steps until then are skipped and counted; the first that is taken is the unscaled gradient's."""
    largest = torch.finfo(dtype).max
    weight = make_weight(dtype)
    optimizer = SGD([weight], lr=2.0 / largest)
    scaling = DynamicScaling(DYNAMIC, "cpu", optimizer)
    for skipped in range(1, 6):
        train(scaling, optimizer, weight, (0.0, largest * 3 * 2.0**-13))
        assert weight.tolist() == [1.0, 1.0]
        assert scaling.skipped_steps == skipped
        assert scaling.read_scale() == 2.0 ** (16 - skipped)
    for _ in range(2):
        train(scaling, optimizer, weight, (0.0, largest * 3 * 2.0**-13))
    assert scaling.skipped_steps == 5
    assert scaling.read_scale() == 2.0**11
    assert weight.grad is not None
    assert float(weight.grad[1]) == pytest.approx(largest * 3 * 2.0**-13, rel=torch.finfo(dtype).eps)


@pytest.mark.parametrize("clip_grad_norm", [None, 0.5])
@pytest.mark.parametrize("kind", [DynamicScaling, DeviceScaling])
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_skipped_step_changes_nothing(optimizer_name: str, kind: type, clip_grad_norm: float | None) -> None:
    weight = make_weight()
    optimizer_class, arguments = OPTIMIZERS[optimizer_name]
    optimizer = optimizer_class([weight], **arguments)
    scaling = kind(QUICK, "cpu" if kind is DynamicScaling else CPU, optimizer)
    train(scaling, optimizer, weight, (0.25, INF))
    assert weight.tolist() == [1.0, 1.0]
    train(scaling, optimizer, weight, clip_grad_norm=clip_grad_norm)

    def everything() -> list[list[float]]:
        state = optimizer.state[weight].values()
        return [torch.as_tensor(part).tolist() for part in (weight, *state) if part is not None]

    before = copy.deepcopy(everything())
    assert weight.tolist() != [1.0, 1.0]
    for bad in (INF, -INF, NAN):
        train(scaling, optimizer, weight, (0.25, bad), clip_grad_norm)
        assert everything() == before
    assert scaling.skipped_steps == 4
    train(scaling, optimizer, weight, clip_grad_norm=clip_grad_norm)
    assert everything() != before
    assert scaling.skipped_steps == 4


@pytest.mark.parametrize(("name", "largest"), [("dynamic-apex", 2.0**24), ("dynamic", 2.0**27)])
def test_apex_dynamic_scale_is_bounded(name: str, largest: float, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = tuple(replace(row, init=2.0**23, window=1) for row in DYNAMIC_SCALES)
    monkeypatch.setattr(loss_scaling, "DYNAMIC_SCALES", quick)
    weight = make_weight()
    optimizer = momentum_sgd(weight)
    scaling = make_loss_scaling(name, CPU, optimizer)
    for _ in range(4):
        train(scaling, optimizer, weight)
    assert scaling.read_scale() == largest
    train(scaling, optimizer, weight, (INF, 1.0))
    assert scaling.read_scale() == largest / 2


def test_dynamic_scale_rows_equal_their_sources() -> None:
    torch_s = torch.amp.GradScaler("cpu")
    assert torch_s.get_scale() == DYNAMIC.init
    assert torch_s.get_growth_factor() == DYNAMIC.factor
    assert torch_s.get_backoff_factor() == 1 / DYNAMIC.factor
    assert torch_s.get_growth_interval() == DYNAMIC.window
    assert replace(DYNAMIC, name="dynamic-apex", maximum=2.0**24) == APEX


# Dynamic, decided on the device

# Overflow at the very first step, in the middle, twice in a row, and long enough without for the scale to grow.
GRADIENTS = (INF, 0.25, 0.5, -0.125, NAN, 0.5, -INF, INF, 0.25, 0.25, 0.125, 0.5, 0.25)


@pytest.mark.parametrize("row", [QUICK, BOUNDED, *DYNAMIC_SCALES], ids=lambda row: row.name)
@pytest.mark.parametrize("clip", [None, 0.25])
@pytest.mark.parametrize(
    ("name", "fused"),
    [pair for pair in itertools.product(OPTIMIZERS, (False, True)) if pair != ("adadelta", True)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_device_scaling_equals_grad_scaler(
    name: str, fused: bool, clip: float | None, row: DynamicScale, dtype: torch.dtype
) -> None:
    kind, arguments = OPTIMIZERS[name]
    theirs, own = make_weight(dtype), make_weight(dtype)
    reference = kind([theirs], **arguments)
    optimizer = kind([own], **arguments, **({"fused": True} if fused else {}))
    torch_s, scaling = DynamicScaling(row, "cpu", reference), DeviceScaling(row, CPU, optimizer)
    tolerance = 4 * torch.finfo(dtype).eps
    for gradient in GRADIENTS:
        train(torch_s, reference, theirs, (gradient, 0.25), clip)
        train(scaling, optimizer, own, (gradient, 0.25), clip)
        assert scaling.read_scale() == torch_s.read_scale()
        assert scaling.skipped_steps == torch_s.skipped_steps
        torch.testing.assert_close(own, theirs, rtol=tolerance, atol=tolerance)
        assert own.isfinite().all()
    assert scaling.skipped_steps == 4


def test_device_scaling_restores_state() -> None:
    weight = make_weight()
    optimizer = SGD([weight], lr=0.5)
    scaling, later = DeviceScaling(QUICK, CPU, optimizer), DeviceScaling(QUICK, CPU, optimizer)
    tensors = later.state_dict()
    for gradient in (INF, 0.25):
        train(scaling, optimizer, weight, (gradient, 0.25))
    later.load_state_dict(scaling.state_dict())
    assert all(later.state_dict()[name] is tensor for name, tensor in tensors.items()), "kernels may hold on to them"
    assert (later.read_scale(), later.skipped_steps) == (2.0, 1)
    train(later, optimizer, weight)
    assert later.read_scale() == 4.0  # the second good step in a row
