"""What a user's function returns: a model, a batch, and other parts of the training loop; read and checked."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

from torch import Tensor, nn
from torch.optim import Optimizer

from castwise.errors import UsageError
from castwise.spec.types import Unit

_UNITS: tuple[str, ...] = get_args(Unit)
_FORMS = "a model, (model, batch), (model, batch, loss), or a dict of these and more, as `castwise init FILE` writes it"


@dataclass(frozen=True)
class Contract:
    """What a user's function returns, by the names of the arguments of `castwise.compare`."""

    model: nn.Module  # a LightningModule brings its own loss and optimizer
    # An example batch, or a function that returns a batch of the number of samples that it is given. None uses a
    # LightningModule's own data loader.
    batch: Any = None
    loss: Callable[..., Any] | None = None  # of the output and the target; None uses a loss of the output alone
    training_step: Callable[[nn.Module, Any], Any] | None = None  # returns the loss of model and batch; replaces `loss`
    optimizer: Optimizer | Callable[..., Optimizer] | None = None  # or a function of the parameters that makes one
    scheduler: Any = None  # or a function of the optimizer that makes one
    batch_size: int | None = None  # samples per optimizer step unless `--batch-size` says otherwise
    accumulate: int = 1  # batches whose gradients are added up for one optimizer step
    clip_grad_norm: float | None = None  # the norm that gradients are clipped to
    unit: Unit = "samples"  # what throughput counts
    units_per_sample: int = 1
    # For `castwise accuracy`: the batches of an epoch, and a function of the model that returns its score.
    training_set: Any = None
    validate: Callable[[nn.Module], float] | None = None
    higher_is_better: bool = False  # whether a higher score is better

    @property
    def can_be_judged(self) -> bool:
        """Return whether `castwise accuracy` has what it needs."""
        return self.training_set is not None and self.validate is not None


NAMES = tuple(field.name for field in fields(Contract))


def read_contract(returned: Any, source: str) -> Contract:
    """Return the parts of what a user's function returned; `source` is its name for messages: "train_me.py:build"."""
    if isinstance(returned, nn.Module):
        parts: dict[str, Any] = {"model": returned}
    elif isinstance(returned, Mapping):
        parts = dict(returned)
    elif isinstance(returned, tuple) and 1 <= len(returned) <= 3:
        parts = dict(zip(("model", "batch", "loss"), returned, strict=False))
    else:
        raise UsageError(f"{source} returned {_a(returned)}. It must return {_FORMS}.")
    unknown = [str(name) for name in parts if name not in NAMES]
    if unknown:
        raise UsageError(f"{source} returned a dict with '{unknown[0]}'. Its keys may be: {', '.join(NAMES)}.")
    if "model" not in parts:
        raise UsageError(f"{source} returned a dict without 'model'.")

    model = parts["model"]
    if not isinstance(model, nn.Module) and callable(model):
        model = call_without_arguments(model, f"the model of {source}")
    if not isinstance(model, nn.Module):
        raise UsageError(f"The model of {source} is {_a(model)}, not a torch.nn.Module.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"The model of {source} ({type(model).__name__}) has no parameter that learns.")

    contract = Contract(**{name: value for name, value in parts.items() if value is not None} | {"model": model})
    _check_parts(contract, source)
    return contract


def call_without_arguments(function: Any, source: str) -> Any:
    if not callable(function):
        raise UsageError(f"{source} is no function but {_a(function)}. It must be one without arguments.")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature: try it
        return function()
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each.name for each in parameters if each.default is each.empty and each.kind not in optional]
    if needed:
        raise UsageError(
            f"{source} needs arguments ({', '.join(needed)}), and castwise calls it without. Give them defaults, or "
            "write a function that calls it."
        )
    return function()


def check_single_optimizer(optimizer: Any, source: str) -> None:
    if isinstance(optimizer, list | tuple) and all(isinstance(each, Optimizer) for each in optimizer):
        raise UsageError(
            f"{source} has {len(optimizer)} optimizers, and castwise steps one. Put the parameters into groups of one "
            "optimizer, or measure the parts one by one."
        )


def _check_parts(contract: Contract, source: str) -> None:
    for name in ("loss", "training_step", "validate"):
        value = getattr(contract, name)
        if value is not None and not callable(value):
            raise UsageError(f"The {name} of {source} is {_a(value)}, not a function.")
    if contract.loss is not None and contract.training_step is not None:
        raise UsageError(f"{source} has both a loss and a training_step, which returns the loss. Leave one out.")
    _check_arguments(contract, source)
    optimizer = contract.optimizer
    check_single_optimizer(optimizer, source)
    if optimizer is not None and not callable(optimizer) and not isinstance(optimizer, Optimizer):
        raise UsageError(f"The optimizer of {source} is {_a(optimizer)}: neither an optimizer nor a function.")
    for name in ("batch_size", "accumulate", "units_per_sample"):
        value = getattr(contract, name)
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise UsageError(f"The {name} of {source} is {value!r}, not a whole number from 1.")
    norm = contract.clip_grad_norm
    if norm is not None and not (isinstance(norm, int | float) and norm > 0):
        raise UsageError(f"The clip_grad_norm of {source} is {norm!r}, not a number above 0.")
    _check_training_set(contract.training_set, source)
    if not isinstance(contract.higher_is_better, bool):
        raise UsageError(f"The higher_is_better of {source} is {contract.higher_is_better!r}, not True or False.")
    if contract.unit not in _UNITS:
        raise UsageError(f"The unit of {source} is {contract.unit!r}. It may be: {', '.join(_UNITS)}.")


def _check_training_set(training_set: Any, source: str) -> None:
    if training_set is None:
        return
    is_iterable = hasattr(training_set, "__iter__")
    try:
        num_batches = len(training_set) if is_iterable else None
    except TypeError:  # a DataLoader of an IterableDataset has the method, and no length
        num_batches = None
    if num_batches is None:
        raise UsageError(
            f"The training_set of {source} is {_a(training_set)}{' without a length' if is_iterable else ''}. "
            "It must be batches with a length, such as a DataLoader of a data set that has __len__."
        )
    if not num_batches:
        raise UsageError(f"The training_set of {source} has no batches.")


def _check_arguments(contract: Contract, source: str) -> None:
    """Raise UsageError if the loss or the training step cannot be called with what castwise gives it."""
    name, function = ("training_step", contract.training_step) if contract.training_step else ("loss", contract.loss)
    if function is None or isinstance(function, type):
        return
    batch, calls = contract.batch, list[tuple[str, ...]]()
    if name == "training_step":
        calls = [("model", "batch")]
    elif isinstance(batch, Mapping):
        calls = [("output", "batch")]
    elif isinstance(batch, tuple | list):
        calls = [("output", "target")] if len(batch) > 1 else [("output",)]
    elif isinstance(batch, Tensor):
        calls = [("output",)]
    else:  # a function of the batch size or a data loader: nothing is known of its batches yet
        calls = [("output", "target"), ("output",)]
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return
    for call in calls:
        try:
            signature.bind(*call)
        except TypeError:
            continue
        return
    arguments = ", ".join(map(str, signature.parameters))
    own = getattr(function, "__name__", type(function).__name__)
    hint = (
        " For a step of your own return {'model': ..., 'batch': ..., 'training_step': f}, with f(model, batch) "
        "returning the loss."
    )
    raise UsageError(
        f"The {name} of {source} is called as {name}({', '.join(calls[0])}), but {own} takes ({arguments})."
        + (hint if name == "loss" else "")
    )


def _a(value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, tuple | list):
        return f"a {kind} of {len(value)} ({', '.join(type(part).__name__ for part in value[:4])})"
    return "None" if value is None else f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"
