"""A training step in every row of the precision registry: dtypes, the update itself, and what it leaves alone."""

import copy
from dataclasses import replace

import pytest
import torch
from small_step import (
    MOMENTUM_SGD,
    PLAIN_SGD,
    compute_dtype,
    every_row,
    make_batch,
    make_net,
    make_step,
    make_task,
    stepped_tensors,
)
from torch import Tensor, nn

from castwise.apply.pytree import Batch
from castwise.errors import UsageError
from castwise.registry.precisions import PRECISIONS, Precision, find_precision
from castwise.registry.workloads import OptimizerSpec
from castwise.spec.loss_scale import DYNAMIC_SCALES
from castwise.trial.step import TrainingStep, describe_optimizer, make_optimizer

# Adam's own epsilon is 0 in float16, and a gradient of 0 then makes a weight not-a-number.
ADAM = OptimizerSpec("Adam", (("lr", 0.125), ("betas", (0.9, 0.999)), ("eps", 1e-3), ("weight_decay", 0.25)))
# How many roundings' worth of error a gradient of the small network may have, in its own norm.
ROUNDINGS = 5


def settle(step: TrainingStep, batch: Batch) -> None:
    """Run steps until one is taken: a dynamic scale may have to come down first."""
    for _ in range(20):
        skipped = step.scaling.skipped_steps
        step(batch)
        if step.scaling.skipped_steps == skipped:
            return
    raise AssertionError("every step was skipped")


# Dtypes


@every_row
def test_dtypes_of_gradients_and_optimizer_state(row: Precision) -> None:
    net = make_net()
    step = make_step(row, make_task(net), MOMENTUM_SGD, loss_scale=row.loss_scale)
    settle(step, make_batch())
    for tensor, weight in zip(stepped_tensors(step), net.parameters(), strict=True):
        stepped_dtype = torch.float32 if row.master_weights else weight.dtype
        assert tensor.dtype == stepped_dtype
        assert tensor.grad is not None
        assert tensor.grad.dtype == stepped_dtype
        assert step.optimizer.state[tensor]["momentum_buffer"].dtype == stepped_dtype
        assert weight.grad is not None
        assert weight.grad.dtype == weight.dtype


@every_row
def test_only_forward_runs_under_autocast(row: Precision) -> None:
    """Backward and the optimizer do not: torch says so, and casts there would not be the recipe's."""
    during: list[bool] = []
    step = make_step(row, make_task(make_net()))
    step.model.register_forward_hook(lambda *_: during.append(torch.is_autocast_enabled("cpu")))
    step.optimizer.register_step_pre_hook(lambda *_: during.append(torch.is_autocast_enabled("cpu")))
    step(make_batch())
    assert during == [row.autocast_dtype is not None, False]


# The update


@every_row
def test_step_equals_float64_within_rounding(row: Precision) -> None:
    """Loss, gradients and running statistics, from the weights that the row starts from."""
    net, (images, labels) = make_net(), make_batch()
    twin = copy.deepcopy(net)
    for weight in twin.parameters():
        weight.data = weight.data.to(getattr(torch, row.param_dtype))
    expected = nn.functional.cross_entropy(twin.double()(images.double()), labels)
    torch.autograd.backward(expected)
    step = make_step(row, make_task(net))
    loss = step(make_batch())
    bound = ROUNDINGS * torch.finfo(compute_dtype(row)).eps
    assert (loss.dtype, loss.shape) == (torch.float32, ())
    assert abs(loss.item() / expected.item() - 1) < bound
    for (name, weight), tensor in zip(twin.named_parameters(), stepped_tensors(step), strict=True):
        assert tensor.grad is not None
        assert weight.grad is not None
        assert (tensor.grad.double() - weight.grad).norm() / weight.grad.norm() < bound, name
    for name in ("running_mean", "running_var"):
        got, wanted = net.norm.get_buffer(name).double(), twin.norm.get_buffer(name)
        assert (got - wanted).norm() / wanted.norm() < bound
        assert not torch.equal(got, make_net().norm.get_buffer(name).double())


@every_row
def test_sgd_update(row: Precision) -> None:
    net = make_net()
    step = make_step(row, make_task(net))
    before = [tensor.detach().double() for tensor in stepped_tensors(step)]
    step(make_batch())
    for old, tensor, weight in zip(before, stepped_tensors(step), net.parameters(), strict=True):
        assert tensor.grad is not None
        torch.testing.assert_close(
            tensor.double(), old - 0.125 * tensor.grad.double(), rtol=torch.finfo(tensor.dtype).eps, atol=1e-7
        )
        assert not torch.equal(tensor.double(), old)
        assert torch.equal(weight, tensor.to(weight.dtype))


@every_row
@pytest.mark.parametrize("loss_scale", ["128", *(scale.name for scale in DYNAMIC_SCALES)])
def test_loss_scale_changes_only_rounding(row: Precision, loss_scale: str) -> None:
    """Also where the gradients are float16 themselves, which torch's GradScaler refuses."""
    nets = make_net(), make_net()
    plain, scaled = make_step(row, make_task(nets[0])), make_step(row, make_task(nets[1]), loss_scale=loss_scale)
    plain(make_batch())
    settle(scaled, make_batch())
    bound = ROUNDINGS * torch.finfo(compute_dtype(row)).eps
    for tensor, expected in zip(stepped_tensors(scaled), stepped_tensors(plain), strict=True):
        assert tensor.grad is not None
        assert expected.grad is not None
        assert (tensor.grad - expected.grad).norm() < bound * expected.grad.norm()


def sum_of_outputs(model: nn.Module, batch: Batch) -> Tensor:
    return model(*batch).float().sum()  # type: ignore[no-any-return]


def mean_of_outputs(model: nn.Module, batch: Batch) -> Tensor:
    return model(*batch).float().mean()  # type: ignore[no-any-return]


@every_row
def test_small_updates_add_up_only_in_float32(row: Precision) -> None:
    """64 updates of 2⁻¹⁴, each a quarter of float16's half step below 1 and less of bfloat16's."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.ones_(net.weight)
    step = make_step(row, make_task(net, sum_of_outputs), OptimizerSpec("SGD", (("lr", 2.0**-14),)))
    for _ in range(64):
        step((torch.ones(1, 1),))
    adds_up = row.master_weights or row.param_dtype == "float32"
    assert stepped_tensors(step)[0].item() == (1 - 2.0**-8 if adds_up else 1.0)
    assert net.weight.item() == (1 - 2.0**-8 if adds_up else 1.0)


# Weights that take no part


class Branches(nn.Module):
    """Two linear layers of which a step uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, take_left: Tensor) -> Tensor:
        return self.left(x) if take_left else self.right(x)  # type: ignore[no-any-return]


def make_branches() -> Branches:
    torch.manual_seed(0)
    return Branches()


@every_row
@pytest.mark.parametrize("optimizer", [MOMENTUM_SGD, ADAM], ids=lambda spec: spec.name)
@pytest.mark.parametrize("loss_scale", ["none", "128", "dynamic"])
def test_unused_weights_are_not_stepped(row: Precision, optimizer: OptimizerSpec, loss_scale: str) -> None:
    """Neither momentum, nor weight decay, nor an old gradient moves it; the next time it goes on where it was."""
    net = make_branches()
    step = make_step(row, make_task(net, mean_of_outputs), optimizer, loss_scale=loss_scale)
    twins = [tensor.detach().clone().requires_grad_() for tensor in stepped_tensors(step)]
    twin_optimizer = make_optimizer(optimizer, twins)
    for take_left in (True, False, True, True, False):
        before = [tensor.detach().clone() for tensor in stepped_tensors(step)]
        step((torch.full((2, 4), 0.25), torch.tensor(take_left)))
        for index, (tensor, twin) in enumerate(zip(stepped_tensors(step), twins, strict=True)):
            is_used = take_left == (index < 2)
            assert torch.equal(tensor, before[index]) != is_used
            # The gradients are powers of two: exact in every format, scaled or not.
            twin.grad = torch.full_like(twin, 0.25 if tensor.dim() == 1 else 0.0625) if is_used else None
        twin_optimizer.step()
    assert step.scaling.skipped_steps == 0
    for tensor, twin in zip(stepped_tensors(step), twins, strict=True):
        assert torch.equal(tensor, twin)


@every_row
def test_frozen_weights_are_not_stepped(row: Precision) -> None:
    net = make_net()
    net.conv.requires_grad_(False)
    expected = net.conv.weight.to(getattr(torch, row.param_dtype)).clone()
    step = make_step(row, make_task(net), MOMENTUM_SGD, loss_scale=row.loss_scale)
    for _ in range(3):
        settle(step, make_batch())
    assert torch.equal(net.conv.weight, expected)
    assert net.conv.weight.dtype == expected.dtype
    assert net.conv.weight.grad is None
    assert len(stepped_tensors(step)) == 4


class Tied(nn.Module):
    """One weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.second.weight = self.first.weight
        nn.init.constant_(self.first.weight, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


@every_row
def test_tied_weights_are_stepped_once(row: Precision) -> None:
    net = Tied()
    step = make_step(row, make_task(net, sum_of_outputs))
    step((torch.ones(1, 1),))
    assert net.first.weight is net.second.weight
    assert net.first.weight.item() == 0.5 - 0.125 * (2 * 0.5)


# The optimizer


def test_describe_optimizer() -> None:
    assert describe_optimizer(ADAM) == "Adam(lr=0.125, betas=(0.9, 0.999), eps=0.001, weight_decay=0.25)"
    assert describe_optimizer(PLAIN_SGD) == "SGD(lr=0.125)"
    grouped = replace(PLAIN_SGD, group_rates=(3e-4, 3e-3))
    assert describe_optimizer(grouped) == "SGD(lr=0.125), layer groups at lr 0.0003, 0.003"


# Layer groups


RATES = (0.0625, 0.125, 0.25)


def group_of(name: str) -> int:
    return {"conv": 0, "norm": 1, "linear": 2}[name.partition(".")[0]]


@pytest.mark.parametrize("precision", ["fp32", "fp16-master"])
@pytest.mark.parametrize("has_frozen_norm", [False, True])
def test_layer_groups_have_their_rates(precision: str, has_frozen_norm: bool) -> None:
    """A group with nothing to step is left out."""
    net = make_net()
    net.norm.requires_grad_(not has_frozen_norm)
    task = replace(make_task(net), group_of=group_of)
    step = make_step(find_precision(precision), task, replace(PLAIN_SGD, group_rates=RATES))
    found = {
        group["layer_group"]: (group["lr"], [tuple(tensor.shape) for tensor in group["params"]])
        for group in step.optimizer.param_groups
    }
    expected = {0: (RATES[0], [(8, 3, 3, 3)]), 1: (RATES[1], [(8,), (8,)]), 2: (RATES[2], [(10, 288), (10,)])}
    if has_frozen_norm:
        del expected[1]
    assert found == expected


def test_refuses_wrong_group_rates() -> None:
    optimizer = replace(PLAIN_SGD, group_rates=(0.1, 0.2))
    with pytest.raises(UsageError, match="the workload has no layer groups"):
        make_step(PRECISIONS[0], make_task(make_net()), optimizer)
    with pytest.raises(UsageError, match="group_rates are 2, and the workload has 3 layer groups"):
        make_step(PRECISIONS[0], replace(make_task(make_net()), group_of=group_of), optimizer)
