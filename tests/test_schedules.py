"""Learning rates of the sources, step by step."""

import pytest
import torch

from castwise.measure.schedules import make_scheduler
from castwise.recipe import Schedule


def rates(schedule: Schedule, lr: float, steps: int, total_steps: int) -> list[float]:
    """Return the rate that each of the first steps runs at."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=lr)
    scheduler = make_scheduler(schedule, optimizer, total_steps)
    seen = []
    for _ in range(steps):
        seen.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.after_step()
    return seen


def test_the_triangular_schedule_is_the_sources() -> None:
    schedule = Schedule(kind="triangular", arguments={"max_mul": 1000.0, "ratio": 5.0})
    seen = rates(schedule, 0.1, 3900, 3900)
    # Source: ceshine/apex_pytorch_cifar_experiment, logs of colab_snapshots (after step 130, 650 and 3900).
    assert seen[129] == pytest.approx(1.977e-2, rel=1e-3)
    assert seen[649] == pytest.approx(9.969e-2, rel=1e-3)
    assert seen[3899] == pytest.approx(1.615e-4, rel=1e-3)
    assert max(seen) == pytest.approx(0.1)
    assert seen[0] == pytest.approx(1e-4)


def test_a_constant_schedule_leaves_the_rate_alone() -> None:
    assert set(rates(Schedule(), 0.1, 5, 5)) == {0.1}


def test_the_step_schedule_falls_after_each_epoch() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = make_scheduler(Schedule(kind="step", arguments={"gamma": 0.8}), optimizer, 30)
    optimizer.step()
    scheduler.after_step()
    assert optimizer.param_groups[0]["lr"] == 1.0
    scheduler.after_epoch(None)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.8)


def test_the_plateau_schedule_divides_at_the_first_loss_that_is_no_minimum() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=20.0)
    scheduler = make_scheduler(Schedule(kind="plateau", arguments={"factor": 0.25}), optimizer, 30)
    seen = []
    for loss in (5.0, 4.0, 4.1, 3.9, 3.9, None):
        scheduler.after_epoch(loss)
        seen.append(optimizer.param_groups[0]["lr"])
    assert seen == [20.0, 20.0, 5.0, 5.0, 1.25, 1.25]


def test_one_cycle_goes_up_for_three_tenths_and_down_to_nothing() -> None:
    seen = rates(Schedule(kind="one_cycle", arguments={"pct_start": 0.3}), 3e-3, 100, 100)
    assert seen[0] == pytest.approx(3e-3 / 25)
    assert max(range(100), key=seen.__getitem__) == 29
    assert seen[99] < 1e-7


def test_a_schedule_goes_on_from_its_state() -> None:
    schedule = Schedule(kind="triangular", arguments={"max_mul": 10.0, "ratio": 2.0})
    whole = rates(schedule, 1.0, 12, 12)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    first = make_scheduler(schedule, optimizer, 12)
    for _ in range(5):
        optimizer.step()
        first.after_step()
    state, groups = first.state_dict(), optimizer.state_dict()
    again = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    second = make_scheduler(schedule, again, 12)
    again.load_state_dict(groups)
    second.load_state_dict(state)
    assert again.param_groups[0]["lr"] == pytest.approx(whole[5])
