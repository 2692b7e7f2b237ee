"""Learning rates: the schedules of recipes, and the user's own scheduler, which is stepped after each step taken."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler

from castwise.apply.loss_scaling import NoScaling
from castwise.apply.techniques.optimizer_options import keep_rates_on_device
from castwise.errors import TechniqueError
from castwise.spec.recipe import Recipe, Schedule


class Scheduler:
    """A schedule of `total_steps`, relative to the rates of an optimizer's groups."""

    def __init__(self, schedule: Schedule, optimizer: Optimizer, total_steps: int) -> None:
        arguments: dict[str, Any] = dict(schedule.arguments)
        self._kind = schedule.kind
        self._scheduler: Any = None
        match schedule.kind:
            case "step":
                self._scheduler = lr_scheduler.StepLR(optimizer, step_size=1, **arguments)
            case "plateau":
                # Source: pytorch/examples word_language_model main.py: the rate is divided at the first epoch whose
                # validation loss is not a new minimum.
                self._scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.0, **arguments)
            case "triangular":
                self._scheduler = lr_scheduler.LambdaLR(optimizer, triangular(total_steps, **arguments))
            case "one_cycle":
                rates = [group["lr"] for group in optimizer.param_groups]
                self._scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=rates, total_steps=total_steps, **arguments)

    def after_step(self) -> None:
        """Adapt the rates after a step that was taken or skipped."""
        if self._kind == "triangular" or (
            # After its last step, torch's one cycle goes up again, and then raises.
            self._kind == "one_cycle" and self._scheduler.last_epoch + 1 < self._scheduler.total_steps
        ):
            self._scheduler.step()

    def after_epoch(self, validation_loss: float | None) -> None:
        """Adapt the rates after an epoch, by its mean validation loss if there is one."""
        if self._kind == "step":
            self._scheduler.step()
        elif self._kind == "plateau" and validation_loss is not None:
            self._scheduler.step(validation_loss)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._scheduler is None else dict(self._scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state)


class _TwoCycles:
    """One schedule over the first epochs, even if those are cut short; then a fresh optimizer and a second schedule.

    Source: init27/RTX-2080Ti-Vs-GTX-1080Ti-CIFAR-100-Benchmarks, 2080Ti.ipynb (ResNet-18: `fit_one_cycle(1)`, then
    `fit_one_cycle(30)`; each call of fastai's `fit` makes an optimizer).
    """

    def __init__(self, recipe: Recipe, optimizer: Optimizer, steps_per_epoch: int) -> None:
        self._recipe, self._optimizer, self._steps_per_epoch = recipe, optimizer, steps_per_epoch
        self._rates = [group["lr"] for group in optimizer.param_groups]
        self._num_epochs = 0
        first_rates = recipe.first_cycle_rates
        for index, group in enumerate(optimizer.param_groups):
            group["lr"] = first_rates[group.get("layer_group", index)] if first_rates else group["lr"]
        self._cycle = Scheduler(recipe.schedule, optimizer, recipe.first_cycle_epochs * steps_per_epoch)

    def after_step(self) -> None:
        self._cycle.after_step()

    def after_epoch(self, validation_loss: float | None) -> None:
        del validation_loss
        self._num_epochs += 1
        if self._num_epochs == self._recipe.first_cycle_epochs < self._recipe.epochs:
            self._optimizer.state.clear()
            self._begin_second()

    def _begin_second(self) -> None:
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        num_epochs = self._recipe.epochs - self._recipe.first_cycle_epochs
        self._cycle = Scheduler(self._recipe.schedule, self._optimizer, num_epochs * self._steps_per_epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"num_epochs": self._num_epochs, "cycle": self._cycle.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_epochs = state["num_epochs"]
        # A new schedule sets the optimizer's rates to its first ones, but the optimizer has been loaded already.
        loaded = [dict(group) for group in self._optimizer.param_groups]
        if self._recipe.first_cycle_epochs <= min(self._num_epochs, self._recipe.epochs - 1):
            self._begin_second()
        self._cycle.load_state_dict(state["cycle"])
        for group, values in zip(self._optimizer.param_groups, loaded, strict=True):
            group.update(values)


def make_run_scheduler(recipe: Recipe, optimizer: Optimizer, steps_per_epoch: int) -> Scheduler | _TwoCycles:
    """Return the schedule of a whole training run, relative to the rates of the optimizer's groups."""
    if recipe.first_cycle_epochs:
        return _TwoCycles(recipe, optimizer, steps_per_epoch)
    return Scheduler(recipe.schedule, optimizer, recipe.epochs * steps_per_epoch)


def triangular(total_steps: int, *, max_mul: float, ratio: float) -> Callable[[int], float]:
    """Return the multiplier of the rate at each step: up over a `ratio + 1`th of the run, down over the rest.

    The rate grows by the factor `max_mul`. Step k runs at the multiplier of max(k - 1, 0), as in the source, whose
    scheduler is called once before the first step without effect.
    Source: ceshine/pytorch_helper_bot 0.1.3, lr_scheduler.py (TriangularLR).
    """
    turn = max(1, int(total_steps // (ratio + 1)))

    def multiplier(step: int) -> float:
        t = max(step - 1, 0)
        share = t / turn if t <= turn else (total_steps - t) / max(1, total_steps - turn)
        return (1 + (max_mul - 1) * share) / max_mul

    return multiplier


class AfterStep:
    """Steps the user's scheduler after each step that the optimizer took, but not after a skipped one."""

    def __init__(self, scaling: NoScaling, step_scheduler: Callable[[], None]) -> None:
        self._scaling, self._step_scheduler = scaling, step_scheduler
        self._skipped = 0

    def __call__(self) -> None:
        """Step the scheduler unless the step was skipped; under dynamic scaling on the device this waits for it."""
        skipped = self._scaling.skipped_steps
        if skipped == self._skipped:
            self._step_scheduler()
        self._skipped = skipped


class DeviceLearningRates:
    """Learning rates that a scheduler moves as numbers, and that a graph or a compiled update reads on the device.

    A scheduler over rates that are tensors would compute them on the device, in a few launches a step; and not every
    scheduler can. It sees numbers, and what it made of them is written where the device reads.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device, step_scheduler: Callable[[], None]) -> None:
        self._optimizer, self._step_scheduler = optimizer, step_scheduler
        self._numbers = [float(group["lr"]) for group in optimizer.param_groups]
        keep_rates_on_device(optimizer, device)
        self._fixed = self._settings()

    def __call__(self) -> None:
        """Step the scheduler; raise TechniqueError if it moves more than the rates."""
        groups = self._optimizer.param_groups
        places = [group["lr"] for group in groups]
        for group, number in zip(groups, self._numbers, strict=True):
            group["lr"] = number
        self._step_scheduler()
        if len(groups) > len(places):
            raise TechniqueError(
                "Your scheduler gives the optimizer more weights, which a graph and a compiled update leave out."
            )
        moved = [float(group["lr"]) for group in groups]
        for group, place, old, new in zip(groups, places, self._numbers, moved, strict=True):
            group["lr"] = place
            if new != old:
                place.fill_(new)
        self._numbers = moved
        if self._settings() != self._fixed:
            raise TechniqueError(
                "Your scheduler moves more than the learning rate, such as momentum, which a graph and a compiled "
                "update hold fixed."
            )

    def _settings(self) -> list[dict[str, Any]]:
        known = self._optimizer.defaults.keys() - {"lr"}
        return [{name: group[name] for name in known if name in group} for group in self._optimizer.param_groups]
