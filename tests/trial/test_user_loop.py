"""The user's optimizer, scheduler, accumulation and clipping, in every precision's own step."""

from typing import Any

import pytest
import torch
from small_step import CPU, every_row, make_batch, make_net, make_task, stepped_tensors
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler

from castwise.apply.applied import check_optimizer
from castwise.apply.precision import numeric_state
from castwise.errors import UsageError
from castwise.registry.precisions import find_precision
from castwise.registry.workloads import OptimizerSpec
from castwise.trial.step import TrainingStep
from castwise.trial.user_model.contract import Contract
from castwise.trial.user_model.loop import make_loop

UNUSED = OptimizerSpec("SGD", (("lr", 1e9),))


def make_step(precision: str, net: nn.Module, *, loss_scale: str | None = None, **parts: Any) -> TrainingStep:
    row = find_precision(precision)
    task = make_task(net)
    task.user_loop = make_loop(Contract(model=net, **parts), "x.py:build")
    return TrainingStep(
        task,
        row,
        UNUSED,
        loss_scale=row.loss_scale if loss_scale is None else loss_scale,
        clip_grad_norm=task.user_loop.clip_grad_norm,
        device=CPU,
    )


def weights(step: TrainingStep) -> list[Tensor]:
    return [tensor.detach().float().clone() for tensor in stepped_tensors(step)]


def halves() -> tuple[Any, Any]:
    images, labels = make_batch()
    return (images[:8], labels[:8]), (images[8:], labels[8:])


@every_row
def test_optimizer_of_the_weights_steps_the_masters(row: Any) -> None:
    net = make_net()
    given = SGD([{"params": net.conv.parameters()}, {"params": net.linear.parameters(), "lr": 0.25}], lr=0.125)
    step = make_step(row.name, net, optimizer=given, loss_scale="none")
    assert step.optimizer is given
    dtypes = {tensor.dtype for tensor in stepped_tensors(step)}
    assert dtypes == {torch.float32 if row.master_weights else getattr(torch, row.param_dtype)}
    before = weights(step)
    step(make_batch())
    assert all(not torch.equal(old, new) for old, new in zip(before, weights(step), strict=True))
    model = [p.float() for p in (*net.conv.parameters(), *net.linear.parameters())]
    rounded = [tensor.to(getattr(torch, row.param_dtype)).float() for tensor in weights(step)]
    assert all(torch.equal(own, stepped) for own, stepped in zip(model, rounded, strict=True))


def test_optimizer_function_gets_the_masters() -> None:
    step = make_step("fp16-master", make_net(), optimizer=lambda tensors: SGD(tensors, lr=0.5, momentum=0.9))
    assert {tensor.dtype for tensor in stepped_tensors(step)} == {torch.float32}
    assert (step.optimizer.defaults["lr"], step.optimizer.defaults["momentum"]) == (0.5, 0.9)


def test_default_optimizer_is_adamw() -> None:
    step = make_step("fp32", make_net())
    assert isinstance(step.optimizer, AdamW)
    assert step.optimizer.defaults["lr"] == 1e-4


def test_optimizer_state_moves_to_the_masters() -> None:
    net = make_net()
    step = make_step("bf16-true", net, optimizer=torch.optim.Adagrad(net.parameters()))  # has state before any step
    sums = [values["sum"].dtype for values in step.optimizer.state.values()]
    assert sums
    assert set(sums) == {torch.bfloat16}
    step(make_batch())


def test_bad_optimizer_and_scheduler_are_refused() -> None:
    with pytest.raises(UsageError, match=r"optimizer function of x\.py:build returned NoneType"):
        make_step("fp32", make_net(), optimizer=lambda tensors: None)
    with pytest.raises(UsageError, match=r"scheduler function of x\.py:build returned NoneType"):
        make_step("fp32", make_net(), scheduler=lambda optimizer: None)
    other = SGD(make_net().parameters(), lr=1)
    with pytest.raises(UsageError, match="steps no weight of its model"):
        check_optimizer(other, make_net(), "x.py:build")
    net = make_net()
    with pytest.raises(UsageError, match="belongs to another optimizer"):
        make_step("fp32", net, scheduler=lr_scheduler.ConstantLR(other), optimizer=SGD(net.parameters(), lr=1))


@every_row
def test_accumulation(row: Any) -> None:
    """The reference accumulates by hand: with batch norm the statistics of halves differ from the whole batch's."""
    net, reference = make_net(), make_net()
    step = make_step(row.name, net, accumulate=2, optimizer=lambda tensors: SGD(tensors, lr=0.125), loss_scale="none")
    by_hand = make_step(row.name, reference, optimizer=lambda tensors: SGD(tensors, lr=0.125), loss_scale="none")
    with numeric_state(row):
        loss = step(halves())  # type: ignore[arg-type]
        by_hand._zero_grad()
        losses = [by_hand._backward(half) / 1 for half in halves()]
    with torch.no_grad():
        for parameter in reference.parameters():
            assert parameter.grad is not None
            parameter.grad /= 2
    by_hand._weights.collect_gradients()
    by_hand.optimizer.step()
    assert loss.item() == pytest.approx(sum(each.item() for each in losses) / 2, rel=1e-3)
    # Halving is exact but for float16's smallest numbers.
    for own, other in zip(weights(step), weights(by_hand), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("loss_scale", ["1024", "dynamic"])
@pytest.mark.parametrize("precision", ["fp16-mixed", "fp16-master"])
def test_clipping_after_accumulation_and_unscaling(precision: str, loss_scale: str) -> None:
    """Clipping scaled gradients would make the step some thousand times too small or depend on the scale."""
    norm = 0.0625
    steps = []
    for scale in ("none", loss_scale):
        net = make_net()
        net.train()
        step = make_step(
            precision,
            net,
            accumulate=2,
            clip_grad_norm=norm,
            optimizer=lambda tensors: SGD(tensors, lr=1.0),
            loss_scale=scale,
        )
        before = weights(step)
        for _ in range(12 if scale == "dynamic" else 1):  # until the scale has come down to where nothing overflows
            skipped = step.scaling.skipped_steps
            step(halves())  # type: ignore[arg-type]
            if step.scaling.skipped_steps == skipped:
                break
        moved = [new - old for old, new in zip(before, weights(step), strict=True)]
        steps.append(torch.cat([each.flatten() for each in moved]))
    assert steps[0].norm().item() == pytest.approx(norm, rel=1e-2)
    assert steps[1].norm().item() == pytest.approx(norm, rel=1e-2)
    torch.testing.assert_close(steps[1], steps[0], rtol=0.05, atol=1e-3)


def test_scheduler_skips_skipped_steps() -> None:
    rates: list[float] = []

    def schedule(optimizer: Optimizer) -> Any:
        return lr_scheduler.LambdaLR(optimizer, lambda step: rates.append(step) or 0.5**step)

    step = make_step("fp16-master", make_net(), optimizer=lambda tensors: SGD(tensors, lr=1e-3), scheduler=schedule)
    batch = make_batch()
    step((batch[0] * float("inf"), batch[1]))
    assert (step.scaling.skipped_steps, rates) == (1, [0])
    for _ in range(20):
        step(batch)
    assert rates == list(range(22 - step.scaling.skipped_steps))


def test_scheduler_with_an_end() -> None:
    net = make_net()
    optimizer = SGD(net.parameters(), lr=0.1)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3)
    step = make_step("fp32", net, optimizer=optimizer, scheduler=scheduler)
    for _ in range(5):
        step(make_batch())
    assert scheduler.last_epoch == 2


def test_reduce_lr_on_plateau_is_not_stepped() -> None:
    step = make_step("fp32", make_net(), scheduler=lr_scheduler.ReduceLROnPlateau)
    step(make_batch())  # torch's would ask for a metric
