"""Learning rates of the sources, step by step."""

from typing import Any

import pytest
import torch
from torch.optim import AdamW

from castwise.spec.recipe import Recipe, Schedule
from castwise.trial.lr_schedules import Scheduler, make_run_scheduler


def rates(schedule: Schedule, lr: float, steps: int, total_steps: int) -> list[float]:
    """Return the rate that each of the first steps runs at."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=lr)
    scheduler = Scheduler(schedule, optimizer, total_steps)
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


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule(kind="step", arguments={"gamma": 0.5}), [10.0, 5.0, 2.5, 1.25, 0.625, 0.3125]),
        # divided at each loss that is not a new minimum
        (Schedule(kind="plateau", arguments={"factor": 0.25}), [20.0, 20.0, 5.0, 5.0, 1.25, 1.25]),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_schedules_by_epoch(schedule: Schedule, expected: list[float]) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=20.0)
    scheduler = Scheduler(schedule, optimizer, 30)
    seen = []
    for loss in (5.0, 4.0, 4.1, 3.9, 3.9, None):
        optimizer.step()
        scheduler.after_step()
        scheduler.after_epoch(loss)
        seen.append(optimizer.param_groups[0]["lr"])
    assert seen == expected


# fastai's one cycle, group by group, and a first one before it

ONE_CYCLE = Schedule(kind="one_cycle")
FIRST_RATES, RATES = (3e-4, 3e-4, 3e-3), (1e-2, 2e-2, 4e-2)
STEPS = 10  # of an epoch


def make_adamw(rates: tuple[float, ...] = RATES) -> AdamW:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates]
    return AdamW(groups, betas=(0.9, 0.99), weight_decay=1e-2)


def take_step(optimizer: AdamW) -> tuple[Any, ...]:
    """Take a step down a slope that the weights decide; return what it ran with, and the weights behind it."""
    ran_with = tuple((group["lr"], *group["betas"]) for group in optimizer.param_groups)
    parameters = [group["params"][0] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = parameter.detach().sin()
    optimizer.step()
    return *ran_with, *(parameter.item() for parameter in parameters)


def take_steps(optimizer: AdamW, scheduler: Scheduler, count: int, done: int = 0) -> list[tuple[Any, ...]]:
    """Take steps behind those done already, telling the scheduler of each and of every epoch's end."""
    taken = []
    for number in range(done + 1, done + count + 1):
        taken.append(take_step(optimizer))
        scheduler.after_step()
        if number % STEPS == 0:
            scheduler.after_epoch(None)
    return taken


def plain_loop(rates: tuple[float, ...], weights: tuple[float, ...], count: int) -> list[tuple[Any, ...]]:
    """Train as one `fit_one_cycle` does: with an optimizer of its own."""
    optimizer = make_adamw(rates)
    for group, weight in zip(optimizer.param_groups, weights, strict=True):
        group["params"][0].data.fill_(weight)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=list(rates), total_steps=count)
    taken = []
    for _ in range(count):
        taken.append(take_step(optimizer))
        scheduler.step()
    return taken


def test_one_cycle_is_fastai_s() -> None:
    taken = plain_loop(RATES, (1.0, 1.0, 1.0), 1000)
    # Source: fastai/fastai fastai/callbacks/one_cycle.py at 0d37271f: from lr / 25 to lr over three tenths, then to
    # lr / 25 / 10⁴, by cosines; the momentum from 0.95 to 0.85 and back. Its steps lie within one of torch's.
    for index, rate in enumerate(RATES):
        rates, momenta = ([step[index][part] for step in taken] for part in (0, 1))
        assert rates[0] == pytest.approx(rate / 25)
        assert rates[150] == pytest.approx((rate / 25 + rate) / 2, rel=0.01)
        assert max(rates) == rates[299] == pytest.approx(rate)
        assert rates[650] == pytest.approx(rate / 2, rel=0.01)
        assert rates[999] == pytest.approx(rate / 25 / 1e4)
        assert (momenta[0], momenta[299], momenta[999]) == pytest.approx((0.95, 0.85, 0.95))
    assert {step[0][2] for step in taken} == {0.99}
    own = make_adamw()
    assert taken == take_steps(own, make_run_scheduler(Recipe(epochs=100, schedule=ONE_CYCLE), own, STEPS), 1000)


def test_one_cycle_stays_where_it_ends() -> None:
    seen = rates(ONE_CYCLE, 1.0, 12, 10)
    assert seen[9:] == pytest.approx([1 / 25 / 1e4] * 3)


def recipe(epochs: int = 4) -> Recipe:
    return Recipe(
        epochs=epochs,
        schedule=ONE_CYCLE,
        group_rates=RATES,
        first_cycle_epochs=1,
        first_cycle_rates=FIRST_RATES,
    )


def two_loops() -> list[tuple[Any, ...]]:
    first = plain_loop(FIRST_RATES, (1.0, 1.0, 1.0), STEPS)
    return first + plain_loop(RATES, first[-1][3:], 3 * STEPS)


@pytest.mark.parametrize("done", [0, 1, 4, STEPS - 1, STEPS, STEPS + 1, 25, 4 * STEPS - 1])
def test_two_cycles_resume(done: int) -> None:
    optimizer = make_adamw()
    scheduler = make_run_scheduler(recipe(), optimizer, STEPS)
    before = take_steps(optimizer, scheduler, done)
    again = make_adamw()
    resumed = make_run_scheduler(recipe(), again, STEPS)
    for new, old in zip(again.param_groups, optimizer.param_groups, strict=True):
        new["params"][0].data.copy_(old["params"][0].data)
    again.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    assert before + take_steps(again, resumed, 4 * STEPS - done, done) == two_loops()


def test_run_without_second_cycle() -> None:
    optimizer = make_adamw()
    scheduler = make_run_scheduler(recipe(epochs=1), optimizer, STEPS)
    assert take_steps(optimizer, scheduler, STEPS) == two_loops()[:STEPS]
    assert optimizer.state, "nothing is forgotten"


def test_first_cycle_of_a_shortened_epoch() -> None:
    optimizer = make_adamw()
    scheduler = make_run_scheduler(recipe(), optimizer, STEPS)
    first = take_steps(optimizer, scheduler, 3)
    scheduler.after_epoch(None)
    weights = first[-1][3:]
    assert first == plain_loop(FIRST_RATES, (1.0, 1.0, 1.0), STEPS)[:3]
    assert take_steps(optimizer, scheduler, 3) == plain_loop(RATES, weights, 3 * STEPS)[:3]
