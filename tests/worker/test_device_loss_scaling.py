"""Loss scaling on the device: step for step what torch's GradScaler does, overflow, growth and bound included."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adadelta, Adam, AdamW, Optimizer

from castwise.spec.loss_scale import DYNAMIC_SCALES, DynamicScale
from castwise.worker.loss_scaling import DeviceScaling, DynamicScaling

CPU = torch.device("cpu")
INF, NAN = float("inf"), float("nan")
QUICK = DynamicScale("quick", init=4.0, factor=2.0, window=2, maximum=None)
BOUNDED = DynamicScale("bounded", init=4.0, factor=2.0, window=1, maximum=16.0)
# Overflow at the very first step, in the middle, twice in a row, and long enough without for the scale to grow.
GRADIENTS = (INF, 0.25, 0.5, -0.125, NAN, 0.5, -INF, INF, 0.25, 0.25, 0.125, 0.5, 0.25)

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (SGD, {"lr": 0.5}),
    "momentum": (SGD, {"lr": 0.5, "momentum": 0.5, "weight_decay": 0.25}),
    "nesterov": (SGD, {"lr": 0.5, "momentum": 0.5, "nesterov": True}),
    "adam": (Adam, {"lr": 0.5, "weight_decay": 0.25}),
    "adamw": (AdamW, {"lr": 0.5}),
    "adadelta": (Adadelta, {"lr": 0.5}),
}


def make_weights(dtype: torch.dtype) -> list[Tensor]:
    return [torch.tensor([1.0, 0.5], dtype=dtype, requires_grad=True), torch.ones(3, dtype=dtype, requires_grad=True)]


def train(scaling: Any, optimizer: Optimizer, weights: list[Tensor], gradient: float, clip: float | None) -> None:
    """Take one step whose unscaled gradient is `gradient` in the first weight's first element."""
    for weight in weights:
        weight.grad = None
    factors = torch.tensor([gradient, 0.25])
    scaling.backward((weights[0].float() * factors).sum() + 0.5 * weights[1].float().sum())
    scaling.step(optimizer, clip)


@pytest.mark.parametrize("row", [QUICK, BOUNDED, *DYNAMIC_SCALES], ids=lambda row: row.name)
@pytest.mark.parametrize("clip", [None, 0.25])
@pytest.mark.parametrize(
    ("name", "fused"),
    [pair for pair in itertools.product(OPTIMIZERS, (False, True)) if pair != ("adadelta", True)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_it_does_what_torch_s_scaler_does(
    name: str, fused: bool, clip: float | None, row: DynamicScale, dtype: torch.dtype
) -> None:
    kind, arguments = OPTIMIZERS[name]
    theirs, own = make_weights(dtype), make_weights(dtype)
    reference = kind(theirs, **arguments)
    optimizer = kind(own, **arguments, **({"fused": True} if fused else {}))
    torch_s, scaling = DynamicScaling(row, "cpu", reference), DeviceScaling(row, CPU, optimizer)
    for gradient in GRADIENTS:
        train(torch_s, reference, theirs, gradient, clip)
        train(scaling, optimizer, own, gradient, clip)
        assert scaling.read_scale() == torch_s.read_scale()
        assert scaling.skipped_steps == torch_s.skipped_steps
        for weight, expected in zip(own, theirs, strict=True):
            tolerance = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(weight, expected, rtol=tolerance, atol=tolerance)
            assert weight.isfinite().all()
    assert scaling.skipped_steps == 4


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_touches_neither_weights_nor_optimizer_state(name: str) -> None:
    kind, arguments = OPTIMIZERS[name]
    weights = make_weights(torch.float32)
    optimizer = kind(weights, **arguments)
    scaling = DeviceScaling(QUICK, CPU, optimizer)

    def everything() -> list[list[float]]:
        states = [value for weight in weights for value in optimizer.state[weight].values()]
        return [part.flatten().tolist() for part in (*weights, *states) if part is not None]

    train(scaling, optimizer, weights, INF, None)
    train(scaling, optimizer, weights, 0.25, None)
    before = everything()
    for gradient in (INF, NAN, -INF):
        train(scaling, optimizer, weights, gradient, 1.0)
        assert everything() == before
    train(scaling, optimizer, weights, 0.25, None)
    assert everything() != before


def test_a_weight_without_a_gradient_is_left_alone() -> None:
    used, unused = (torch.ones(2, requires_grad=True) for _ in range(2))
    optimizer = SGD([used, unused], lr=0.5, momentum=0.5, weight_decay=0.5)
    scaling = DeviceScaling(QUICK, CPU, optimizer)
    scaling.backward(used.sum())
    scaling.step(optimizer, 10.0)
    assert unused.tolist() == [1.0, 1.0]
    assert used.tolist() == [0.25, 0.25]


def test_it_goes_on_from_its_state_in_the_same_tensors() -> None:
    weights = make_weights(torch.float32)
    optimizer = SGD(weights, lr=0.5)
    scaling, later = DeviceScaling(QUICK, CPU, optimizer), DeviceScaling(QUICK, CPU, SGD(weights, lr=0.5))
    for gradient in (INF, 0.25):
        train(scaling, optimizer, weights, gradient, None)
    scale = later._scale
    later.load_state_dict(scaling.state_dict())
    assert later._scale is scale
    assert (later.read_scale(), later.skipped_steps) == (2.0, 1)
    train(later, SGD(weights, lr=0.5), weights, 0.25, None)
    assert later.read_scale() == 4.0  # the second good step in a row
