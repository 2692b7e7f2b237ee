"""None, static and dynamic loss scaling: the gradients they step with, and the steps they skip."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from castwise.errors import UsageError
from castwise.registry.precisions import PRECISIONS, Precision
from castwise.spec.loss_scale import DYNAMIC_SCALES, DynamicScale, parse_loss_scale
from castwise.worker import loss_scaling
from castwise.worker.loss_scaling import DynamicScaling, NoScaling, StaticScaling, make_loss_scaling

DYNAMIC, APEX = DYNAMIC_SCALES
INF, NAN = float("inf"), float("nan")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

every_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)
every_scale = pytest.mark.parametrize("name", ["none", "128", *(row.name for row in DYNAMIC_SCALES)])


def make_weight(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(2, dtype=dtype, requires_grad=True)


def momentum_sgd(weight: Tensor) -> SGD:
    return SGD([weight], lr=0.5, momentum=0.5)


def train(
    scaling: NoScaling,
    optimizer: Optimizer,
    weight: Tensor,
    *,
    gradient: tuple[float, float] = (0.25, 0.5),
    clip_grad_norm: float | None = None,
) -> None:
    """Take one step on a loss whose unscaled gradient is `gradient`."""
    weight.grad = None
    scaling.backward((weight.float() * torch.tensor(gradient)).sum())
    scaling.step(optimizer, clip_grad_norm)


def dynamic(optimizer: Optimizer, row: DynamicScale = DYNAMIC) -> DynamicScaling:
    return DynamicScaling(row, "cpu", optimizer)


# Names


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("none", "none"),
        (" None ", "none"),
        ("DYNAMIC", "dynamic"),
        ("dynamic-apex", "dynamic-apex"),
        ("128", "128"),
        ("128.0", "128"),
        ("1.28e2", "128"),
        ("0.5", "0.5"),
        ("65536", "65536"),
        ("16777216", "16777216"),
        ("1e7", "10000000"),
    ],
)
def test_loss_scales_have_one_spelling(text: str, canonical: str) -> None:
    assert parse_loss_scale(text) == canonical
    assert parse_loss_scale(canonical) == canonical


@pytest.mark.parametrize("text", ["abc", "", "128x", "dynamic-", "auto"])
def test_what_is_no_loss_scale_is_refused(text: str) -> None:
    with pytest.raises(
        UsageError, match=r"is no loss scale\. Write none, dynamic, dynamic-apex, or a number"
    ) as caught:
        parse_loss_scale(text)
    assert f"'{text}'" in str(caught.value)


@pytest.mark.parametrize("text", ["0", "-0.0", "-1", "inf", "-inf", "nan", "1e400"])
def test_a_static_scale_must_be_positive_and_finite(text: str) -> None:
    with pytest.raises(UsageError, match="must be a positive number") as caught:
        parse_loss_scale(text)
    assert f"'{text}'" in str(caught.value)


def test_names_make_their_scalings() -> None:
    optimizer = momentum_sgd(make_weight())
    assert type(make_loss_scaling("none", torch.device("cpu"), optimizer)) is NoScaling
    static = make_loss_scaling("1024", torch.device("cpu"), optimizer)
    assert type(static) is StaticScaling
    assert static.read_scale() == 1024.0
    for row in DYNAMIC_SCALES:
        scaling = make_loss_scaling(row.name, torch.device("cpu"), optimizer)
        assert type(scaling) is DynamicScaling
        assert scaling.read_scale() == 2.0**16


@pytest.mark.parametrize("row", PRECISIONS, ids=lambda row: row.name)
def test_every_precision_s_own_loss_scale_can_be_made(row: Precision) -> None:
    name = row.loss_scale
    assert parse_loss_scale(name) == name
    make_loss_scaling(name, torch.device("cpu"), momentum_sgd(make_weight()))


# Whatever the scaling


@every_scale
@every_dtype
def test_steps_are_taken_with_the_unscaled_gradients(name: str, dtype: torch.dtype) -> None:
    """Momentum too is of the unscaled ones: 0.25 · (1, 1.5) times the learning rate of 0.5."""
    weight = make_weight(dtype)
    optimizer = momentum_sgd(weight)
    scaling = make_loss_scaling(name, torch.device("cpu"), optimizer)
    for _ in range(2):
        train(scaling, optimizer, weight)
    assert weight.tolist() == [1 - 0.5 * 0.25 * 2.5, 1 - 0.5 * 0.5 * 2.5]
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.25, 0.5]
    assert scaling.skipped_steps == 0


@every_scale
@every_dtype
def test_clipping_is_of_the_unscaled_gradients(name: str, dtype: torch.dtype) -> None:
    weight = make_weight(dtype)
    optimizer = SGD([weight], lr=1.0)
    scaling = make_loss_scaling(name, torch.device("cpu"), optimizer)
    train(scaling, optimizer, weight, gradient=(0.375, 0.5), clip_grad_norm=0.0625)  # the norm is 0.625
    assert weight.grad is not None
    assert weight.grad.float().tolist() == pytest.approx([0.0375, 0.05], rel=torch.finfo(dtype).eps + 1e-4)
    train(scaling, optimizer, weight, gradient=(0.375, 0.5), clip_grad_norm=1.0)
    assert weight.grad.tolist() == [0.375, 0.5]


@every_scale
def test_a_weight_without_a_gradient_is_left_alone(name: str) -> None:
    used, unused = make_weight(), make_weight()
    optimizer = SGD([used, unused], lr=0.5, momentum=0.5, weight_decay=0.5)
    scaling = make_loss_scaling(name, torch.device("cpu"), optimizer)
    train(scaling, optimizer, used, clip_grad_norm=10.0)
    assert unused.tolist() == [1.0, 1.0]
    assert used.tolist() == [1 - 0.5 * 0.75, 1 - 0.5 * 1.0]


@every_scale
def test_every_parameter_group_is_unscaled(name: str) -> None:
    first, second = make_weight(), make_weight()
    optimizer = SGD([{"params": [first], "lr": 1.0}, {"params": [second], "lr": 0.5}])
    scaling = make_loss_scaling(name, torch.device("cpu"), optimizer)
    scaling.backward(((first + second) * 0.25).sum())
    scaling.step(optimizer, None)
    assert first.tolist() == [0.75, 0.75]
    assert second.tolist() == [0.875, 0.875]


# None and static


def test_without_scaling_there_is_no_scale_and_nothing_is_skipped() -> None:
    weight = make_weight()
    scaling = NoScaling()
    train(scaling, momentum_sgd(weight), weight, gradient=(INF, 1.0))
    assert weight.tolist() == [-INF, 0.5]
    assert scaling.read_scale() is None
    assert scaling.skipped_steps == 0


def test_a_static_scale_multiplies_what_backward_sees() -> None:
    weight = make_weight()
    StaticScaling(128.0).backward((weight * 0.5).sum())
    assert weight.grad is not None
    assert weight.grad.tolist() == [64.0, 64.0]


def test_a_static_scale_need_be_no_power_of_two() -> None:
    weight = make_weight()
    optimizer = momentum_sgd(weight)
    train(StaticScaling(1000.0), optimizer, weight)
    assert weight.grad is not None
    assert weight.grad.tolist() == pytest.approx([0.25, 0.5])


@pytest.mark.parametrize("bad", [INF, NAN])
def test_a_static_scale_lets_overflow_through(bad: float) -> None:
    weight = make_weight()
    optimizer = momentum_sgd(weight)
    scaling = StaticScaling(128.0)
    train(scaling, optimizer, weight, gradient=(bad, 0.5))
    assert not weight[0].isfinite()
    assert weight[1] == 0.75
    assert scaling.skipped_steps == 0
    assert scaling.read_scale() == 128.0


def test_a_static_scale_lifts_small_gradients_out_of_underflow() -> None:
    """What loss scaling is for: 2⁻²⁶ is 0 in float16, and 2⁻¹⁹ is not."""
    updates = []
    for scaling in (NoScaling(), StaticScaling(128.0)):
        weight = make_weight(torch.float16)
        scaling.backward((weight.float() * 2.0**-26).sum())
        assert weight.grad is not None
        updates.append(float(weight.grad[0]))
    assert updates == [0.0, 2.0**-19]


# Dynamic


@every_dtype
def test_a_dynamic_scale_halves_until_the_gradients_fit(dtype: torch.dtype) -> None:
    """Steps until then are skipped and counted; the first that is taken is the unscaled gradient's."""
    largest = torch.finfo(dtype).max
    weight = make_weight(dtype)
    optimizer = SGD([weight], lr=2.0 / largest)
    scaling = dynamic(optimizer)
    for skipped in range(1, 6):
        train(scaling, optimizer, weight, gradient=(0.0, largest * 3 * 2.0**-13))
        assert weight.tolist() == [1.0, 1.0]
        assert scaling.skipped_steps == skipped
        assert scaling.read_scale() == 2.0 ** (16 - skipped)
    for _ in range(2):
        train(scaling, optimizer, weight, gradient=(0.0, largest * 3 * 2.0**-13))
    assert scaling.skipped_steps == 5
    assert scaling.read_scale() == 2.0**11
    assert weight.grad is not None
    assert float(weight.grad[1]) == pytest.approx(largest * 3 * 2.0**-13, rel=torch.finfo(dtype).eps)


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("clip_grad_norm", [None, 0.5])
@pytest.mark.parametrize("optimizer_class", [SGD, Adam])
def test_a_skipped_step_touches_neither_weights_nor_optimizer_state(
    bad: float, clip_grad_norm: float | None, optimizer_class: type[Optimizer]
) -> None:
    weight = make_weight()
    arguments: dict[str, Any] = {"lr": 0.5, "momentum": 0.5} if optimizer_class is SGD else {"lr": 0.5}
    optimizer = optimizer_class([weight], **arguments)
    scaling = dynamic(optimizer)
    train(scaling, optimizer, weight, clip_grad_norm=clip_grad_norm)
    before, state = weight.tolist(), copy.deepcopy(optimizer.state_dict()["state"])
    assert before != [1.0, 1.0]
    train(scaling, optimizer, weight, gradient=(0.25, bad), clip_grad_norm=clip_grad_norm)
    assert weight.tolist() == before
    after = optimizer.state_dict()["state"]
    assert after.keys() == state.keys() == {0}
    assert {name: torch.as_tensor(value).tolist() for name, value in after[0].items()} == {
        name: torch.as_tensor(value).tolist() for name, value in state[0].items()
    }
    assert scaling.skipped_steps == 1
    train(scaling, optimizer, weight, clip_grad_norm=clip_grad_norm)
    assert weight.tolist() != before
    assert scaling.skipped_steps == 1


def test_a_dynamic_scale_grows_after_a_window_of_good_steps() -> None:
    weight = make_weight()
    optimizer = momentum_sgd(weight)
    scaling = dynamic(optimizer, DynamicScale("test", init=16.0, factor=4.0, window=3, maximum=None))
    scales = []
    for gradient in [0.25] * 4 + [INF] + [0.25] * 6:
        train(scaling, optimizer, weight, gradient=(gradient, 0.25))
        scales.append(scaling.read_scale())
    # Two good steps, the third grows; one more, an overflow, and the window starts anew.
    assert scales == [16, 16, 64, 64, 16, 16, 16, 64, 64, 64, 256]
    assert scaling.skipped_steps == 1


def test_a_loss_that_is_not_a_number_drives_the_scale_down_and_is_counted() -> None:
    weight = make_weight()
    optimizer = momentum_sgd(weight)
    scaling = dynamic(optimizer)
    for _ in range(10):
        weight.grad = None
        scaling.backward(weight.sum() * NAN)
        scaling.step(optimizer, None)
    assert scaling.read_scale() == 2.0**6
    assert scaling.skipped_steps == 10
    assert weight.tolist() == [1.0, 1.0]


def test_torch_s_dynamic_scale_has_no_floor() -> None:
    """As GradScaler has none: a run that is broken ends at a scale of 0, and says so by it."""
    weight = make_weight()
    optimizer = momentum_sgd(weight)
    scaling = dynamic(optimizer, replace(DYNAMIC, init=2.0**-148))
    for _ in range(3):
        train(scaling, optimizer, weight, gradient=(NAN, 1.0))
    assert scaling.read_scale() == 0.0
    assert scaling.skipped_steps == 3


@pytest.mark.parametrize(("name", "largest"), [("dynamic-apex", 2.0**24), ("dynamic", 2.0**27)])
def test_apex_s_dynamic_scale_is_bounded_and_torch_s_is_not(
    name: str, largest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = tuple(replace(row, init=2.0**23, window=1) for row in DYNAMIC_SCALES)
    monkeypatch.setattr(loss_scaling, "DYNAMIC_SCALES", quick)
    weight = make_weight()
    optimizer = momentum_sgd(weight)
    scaling = make_loss_scaling(name, torch.device("cpu"), optimizer)
    for _ in range(4):
        train(scaling, optimizer, weight)
    assert scaling.read_scale() == largest
    train(scaling, optimizer, weight, gradient=(INF, 1.0))
    assert scaling.read_scale() == largest / 2


def test_the_registry_s_dynamic_scales_are_their_sources() -> None:
    torch_s = torch.amp.GradScaler("cpu")
    assert torch_s.get_scale() == DYNAMIC.init
    assert torch_s.get_growth_factor() == DYNAMIC.factor
    assert torch_s.get_backoff_factor() == 1 / DYNAMIC.factor
    assert torch_s.get_growth_interval() == DYNAMIC.window
    assert replace(DYNAMIC, name="dynamic-apex", maximum=2.0**24) == APEX


def test_two_scalings_count_their_own_steps() -> None:
    weight, other = make_weight(), make_weight()
    optimizers = momentum_sgd(weight), momentum_sgd(other)
    scalings = dynamic(optimizers[0]), dynamic(optimizers[1])
    train(scalings[0], optimizers[0], weight, gradient=(INF, 1.0))
    train(scalings[1], optimizers[1], other)
    assert [scaling.skipped_steps for scaling in scalings] == [1, 0]
