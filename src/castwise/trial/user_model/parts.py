"""What a script that calls a user's function has to know of what it returns."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from castwise.apply.precision import Weights
from castwise.spec.user_model import LightningParts, UserParts
from castwise.trial.user_model.batches import BatchMaker, common_first_size
from castwise.trial.user_model.contract import Contract
from castwise.trial.user_model.loop import make_optimizer, make_scheduler


def describe_parts(
    returned: Any,
    contract: Contract,
    batches: BatchMaker,
    lightning: LightningParts | None,
    *,
    is_function: bool,
    is_float32: bool,
) -> UserParts:
    """Return how a user's function gives its parts.

    Args:
        returned: What it returned.
        contract: The parts of that, with a LightningModule's own.
        batches: Made from its batch.
        lightning: Where a LightningModule has its own parts.
        is_function: Whether it is a function, and not an object.
        is_float32: Whether the model came in float32.
    """
    form: Literal["model", "tuple", "dict"] = "tuple"
    names: tuple[str, ...] = ("model", "batch", "loss")
    model = returned
    if isinstance(returned, nn.Module):
        form, names = "model", ("model",)
    elif isinstance(returned, Mapping):
        form, names, model = "dict", tuple(returned), returned["model"]
    else:
        names, model = names[: len(returned)], returned[0]
    optimizer, scheduler = _made(contract)
    batch = batches.example
    if batches.kind == "function":
        with suppress(Exception):  # the trial says why it cannot be had
            batch = contract.batch((contract.batch_size or contract.accumulate) // contract.accumulate)
    return UserParts(
        form=form,
        names=names,
        is_function=is_function,
        makes_model=not isinstance(model, nn.Module),
        is_float32=is_float32,
        is_of_transformers=any(each.__module__.startswith("transformers.") for each in type(contract.model).__mro__),
        lightning=lightning,
        batch=batches.kind,
        batch_form=_form_of(batch),
        example_size=None if batches.kind == "function" else common_first_size(batch),
        optimizer=_given_as(contract.optimizer, isinstance(contract.optimizer, Optimizer)),
        optimizer_name="" if optimizer is None else type(optimizer).__name__,
        scheduler=_given_as(scheduler, hasattr(contract.scheduler, "step")),
        has_total_steps=getattr(scheduler, "total_steps", None) is not None,
        has_loss_module=isinstance(contract.loss, nn.Module),
        clip_grad_norm=contract.clip_grad_norm,
        accumulate=contract.accumulate,
        unit=contract.unit,
        units_per_sample=contract.units_per_sample,
    )


def _given_as(part: Any, is_instance: bool) -> Literal["none", "instance", "function"]:
    return "none" if part is None else "instance" if is_instance else "function"


def _form_of(batch: Any) -> Literal["tensor", "tuple", "dict", "mapping", "other"]:
    if isinstance(batch, Tensor):
        return "tensor"
    if isinstance(batch, Mapping):
        return "dict" if isinstance(batch, dict) else "mapping"
    return "tuple" if isinstance(batch, tuple | list) else "other"


def _made(contract: Contract) -> tuple[Optimizer | None, Any]:
    """Return the optimizer and the scheduler that is stepped each step, as far as they can be made without a trial."""
    optimizer, scheduler = None, contract.scheduler
    with suppress(Exception):
        optimizer = make_optimizer(contract.optimizer, Weights(contract.model), "")
        scheduler = scheduler and make_scheduler(scheduler, optimizer, "")
    return optimizer, None if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else scheduler
