"""The user's optimizer and scheduler, over what a precision steps in the place of their weights."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from castwise.errors import UsageError
from castwise.worker.models.task import UserLoop
from castwise.worker.precision import Weights
from castwise.worker.user_model.contract import Contract, is_optimizer

# Of AdamW, for a model without an optimizer.
_LEARNING_RATE = 1e-4


def make_loop(contract: Contract, source: str) -> UserLoop:
    """Return the user's own parts of the training loop.

    Args:
        contract: The user's parts.
        source: The user's function, for messages: "train_me.py:build".
    """
    return UserLoop(
        make_optimizer=lambda weights: _optimizer(contract.optimizer, weights, source),
        make_scheduler=None if contract.scheduler is None else partial(_scheduler, contract.scheduler, source),
        accumulate=contract.accumulate,
        clip_grad_norm=contract.clip_grad_norm,
    )


def _optimizer(given: Any, weights: Weights, source: str) -> Optimizer:
    if given is None:
        return torch.optim.AdamW(weights.stepped, lr=_LEARNING_RATE)
    if is_optimizer(given):
        return adopt(given, weights)
    made = given(weights.stepped)
    if not is_optimizer(made):
        raise UsageError(f"The optimizer function of {source} returned {type(made).__name__}, not an optimizer.")
    return made  # type: ignore[no-any-return]


def adopt(optimizer: Optimizer, weights: Weights) -> Optimizer:
    """Let an optimizer of a model's weights step the precision's masters in their place, its state included.

    Source: NVIDIA/apex apex/amp/_process_optimizer.py at 47e3367f (masters take the weights' places in the groups).
    """
    for group in optimizer.param_groups:
        group["params"] = [weights.stepped_for(parameter) for parameter in group["params"]]
    state, optimizer.state = dict(optimizer.state), type(optimizer.state)(dict)
    for parameter, values in state.items():
        stepped = weights.stepped_for(parameter)
        optimizer.state[stepped] = {
            name: value.to(stepped.device, stepped.dtype if value.shape == stepped.shape else None)
            if isinstance(value, torch.Tensor)
            else value
            for name, value in values.items()
        }
    return optimizer


def _scheduler(given: Any, source: str, optimizer: Optimizer) -> Callable[[], None] | None:
    if isinstance(given, type) or not hasattr(given, "step"):
        given = given(optimizer)
    if not hasattr(given, "step"):
        raise UsageError(f"The scheduler function of {source} returned {type(given).__name__}, not a scheduler.")
    if getattr(given, "optimizer", optimizer) is not optimizer:
        raise UsageError(f"The scheduler of {source} belongs to another optimizer than the one it trains with.")
    return step_of(given)


def step_of(scheduler: Any) -> Callable[[], None] | None:
    """Return a function that steps a scheduler after an optimizer step; None for one that depends on validation.

    Some of torch's schedulers raise after their last step: the rate stays then.
    """
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        return None
    total = getattr(scheduler, "total_steps", None)

    def step() -> None:
        if total is None or scheduler.last_epoch + 1 < total:
            scheduler.step()

    return step


def check_optimizer(optimizer: Any, model: nn.Module, source: str) -> None:
    """Check that an optimizer steps weights of the model.

    Raises:
        UsageError: It steps others, for example those of a copy of the model.
    """
    if not is_optimizer(optimizer):
        return
    own = {id(parameter) for parameter in model.parameters()}
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(id(parameter) in own for parameter in stepped):
        raise UsageError(f"The optimizer of {source} steps no weight of its model. Make it from model.parameters().")
