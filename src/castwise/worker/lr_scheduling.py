"""What follows a step of the optimizer: the user's scheduler, which computes on the host."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from castwise.errors import TechniqueError
from castwise.worker.loss_scaling import NoScaling
from castwise.worker.techniques.optimizer_options import keep_rates_on_device


class AfterStep:
    """Steps the user's scheduler after each step that the optimizer took, and not after a skipped one."""

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
        """Bring the rates to the device.

        Args:
            optimizer: The optimizer, whose scheduler is made already.
            device: Where its rates are read.
            step_scheduler: Steps the scheduler.
        """
        self._optimizer, self._step_scheduler = optimizer, step_scheduler
        self._numbers = [float(group["lr"]) for group in optimizer.param_groups]
        keep_rates_on_device(optimizer, device)
        self._fixed = self._settings()

    def __call__(self) -> None:
        """Step the scheduler.

        Raises:
            TechniqueError: It moves more than the rates.
        """
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
        """Return what of the groups has to stay."""
        known = self._optimizer.defaults.keys() - {"lr"}
        return [{name: group[name] for name in known if name in group} for group in self._optimizer.param_groups]
