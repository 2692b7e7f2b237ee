"""What a script that calls a user's function has to know of what it returns."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer, lr_scheduler

from castwise.spec.user_model import LightningParts, UserParts
from castwise.trial.user_model.batches import common_first_size
from castwise.trial.user_model.contract import Contract
from castwise.trial.user_model.loop import LEARNING_RATE

_LIGHTNING_HOOKS = ("setup", "configure_model")


def describe_parts(
    returned: Any, given: Contract, contract: Contract, *, is_function: bool, is_float32: bool
) -> UserParts:
    """Return how a user's function gives its parts.

    Args:
        returned: What it returned.
        given: The parts of that.
        contract: The same with a LightningModule's own parts.
        is_function: Whether it is a function, and not an object.
        is_float32: Whether the model came in float32.
    """
    form: Literal["model", "tuple", "dict"] = "tuple"
    names: tuple[str, ...] = ("model", "batch", "loss")
    if isinstance(returned, nn.Module):
        form, names = "model", ("model",)
    elif isinstance(returned, Mapping):
        form, names = "dict", tuple(returned)
    else:
        names = names[: len(returned)]
    lightning = _lightning_parts(given) if contract.training_step is not given.training_step else None
    optimizer, scheduler = _made(contract)
    batch = _batch(contract)
    return UserParts(
        form=form,
        names=names,
        is_function=is_function,
        makes_model=form != "model" and not isinstance(_model_part(returned), nn.Module),
        is_float32=is_float32,
        is_of_transformers=any(each.__module__.startswith("transformers.") for each in type(given.model).__mro__),
        lightning=lightning,
        batch=_batch_kind(contract.batch),
        batch_form=_form_of(batch),
        example_size=None if _batch_kind(contract.batch) == "function" else common_first_size(batch),
        optimizer=_given_as(contract.optimizer, Optimizer),
        optimizer_name="" if optimizer is None else type(optimizer).__name__,
        scheduler="none" if scheduler is None else "instance" if hasattr(given.scheduler, "step") else "function",
        has_total_steps=getattr(scheduler, "total_steps", None) is not None,
        has_loss_module=isinstance(contract.loss, nn.Module),
        clip_grad_norm=contract.clip_grad_norm,
        accumulate=contract.accumulate,
        unit=contract.unit,
        units_per_sample=contract.units_per_sample,
    )


def _model_part(returned: Any) -> Any:
    return returned["model"] if isinstance(returned, Mapping) else returned[0]


def _given_as(part: Any, kind: type) -> Any:
    return "none" if part is None else "instance" if isinstance(part, kind) else "function"


def _batch_kind(batch: Any) -> Any:
    if _is_loader(batch):
        return "loader"
    return "function" if callable(batch) and _form_of(batch) == "other" else "example"


def _is_loader(batch: Any) -> bool:
    return isinstance(batch, Iterable) and hasattr(batch, "dataset")


def _batch(contract: Contract) -> Any:
    """Return one of the user's batches, None if it cannot be had: the trial says why."""
    batch = contract.batch
    with suppress(Exception):
        if _is_loader(batch):
            return next(iter(batch))
        if _batch_kind(batch) == "function":
            return batch((contract.batch_size or contract.accumulate) // contract.accumulate)
    return batch


def _form_of(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return "tensor"
    if isinstance(batch, Mapping):
        return "dict" if isinstance(batch, dict) else "mapping"
    return "tuple" if isinstance(batch, tuple | list) else "other"


def _made(contract: Contract) -> tuple[Optimizer | None, Any]:
    """Return the optimizer and the scheduler that is stepped each step, as far as they can be made without a trial."""
    optimizer, scheduler = contract.optimizer, contract.scheduler
    weights = [parameter for parameter in contract.model.parameters() if parameter.requires_grad]
    with suppress(Exception):
        if optimizer is None:
            optimizer = AdamW(weights, lr=LEARNING_RATE)
        if not isinstance(optimizer, Optimizer):
            optimizer = optimizer(weights)
        if scheduler is not None and (isinstance(scheduler, type) or not hasattr(scheduler, "step")):
            scheduler = scheduler(optimizer)
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler = None
    return optimizer if isinstance(optimizer, Optimizer) else None, scheduler


def _lightning_parts(given: Contract) -> LightningParts:
    """Return where a LightningModule has what the contract took from it."""
    kind = type(given.model)
    hooks = [
        name for name in _LIGHTNING_HOOKS if not _owner(kind, name).startswith(("lightning.", "pytorch_lightning"))
    ]
    configured = given.model.configure_optimizers() if given.optimizer is None else None  # type: ignore[operator]
    optimizer_at, schedulers_at = _places(configured) if configured is not None else ("", ())
    return LightningParts(
        hooks=tuple(hooks), has_loader=given.batch is None, optimizer_at=optimizer_at, schedulers_at=schedulers_at
    )


def _owner(kind: type, name: str) -> str:
    return next((each.__module__ for each in kind.__mro__ if name in vars(each)), "lightning.")


def _places(configured: Any) -> tuple[str, tuple[str, ...]]:
    """Return where, in what configure_optimizers returned, the optimizer and the schedulers of steps are."""
    at, schedulers, schedulers_at = "", None, ""
    if isinstance(configured, tuple | list) and len(configured) == 2 and isinstance(configured[0], list | tuple):
        schedulers, schedulers_at = configured[1], "[1]"
        configured, at = configured[0], "[0]"
    if isinstance(configured, Sequence):
        configured, at = configured[0], f"{at}[0]"
    if isinstance(configured, Mapping):
        if "lr_scheduler" in configured:
            schedulers, schedulers_at = configured["lr_scheduler"], f'{at}["lr_scheduler"]'
        at = f'{at}["optimizer"]'
    pairs = [(schedulers, schedulers_at)]
    if isinstance(schedulers, list | tuple):
        pairs = [(each, f"{schedulers_at}[{index}]") for index, each in enumerate(schedulers)]
    return at, tuple(
        f'{where}["scheduler"]' for each, where in pairs if isinstance(each, Mapping) and each.get("interval") == "step"
    )
