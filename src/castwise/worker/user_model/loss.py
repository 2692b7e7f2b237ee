"""How a user's model is called on a batch, and what its loss is."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from castwise.errors import UsageError
from castwise.worker.pytree import tree_tensors
from castwise.worker.user_model.contract import Contract

# What people call a model that they hand to a function.
_NAMES_OF_MODELS = ("model", "net", "network", "module")

ComputeLoss = Callable[[nn.Module, Any], Tensor]


def make_compute_loss(contract: Contract, whose: str) -> ComputeLoss:
    """Return the loss of a batch, as the contract has it.

    - `training_step`: that, of model and batch.
    - `loss`: of the output and the target. A tuple's last part is the target and the others are the model's arguments;
      of a dict, whose items are the model's arguments by name, the whole is the target; a tensor has none.
    - neither: the whole batch goes into the model, and the loss is what `loss_of_output` makes of the output.

    Args:
        contract: The user's parts.
        whose: The user's function, for messages.
    """
    step = contract.training_step
    if step is not None:
        return lambda model, batch: _scalar(step(model, batch), whose)
    if contract.loss is None:
        return lambda model, batch: loss_of_output(_call(model, batch), whose)
    loss = _WhereOutputsAre(_told_apart(contract.loss, whose))
    return lambda model, batch: _loss_on_target(loss, model, batch, whose)


def _told_apart(loss: Callable[..., Any], whose: str) -> Callable[..., Any]:
    """Return a loss; of one that takes a model first, say what it is called with when it fails for that.

    Raises:
        UsageError: It failed.
    """
    first = next(iter(_parameters(loss)), "")
    if first not in _NAMES_OF_MODELS:
        return loss

    def called(output: Any, *target: Any) -> Any:
        try:
            return loss(output, *target)
        except (TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"The loss of {whose} takes '{first}' first, and is called with the model's output and the target: "
                f"{error}. A function of model and batch is a training_step."
            ) from error

    return called


def _parameters(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of some built-in functions Python does not know them
        return []


def loss_of_output(output: Any, whose: str) -> Tensor:
    """Return the loss that a model's output has or, where it has none, one that is bounded: its mean square.

    Args:
        output: A scalar, which is the loss; something with a `loss`, as transformers' models have given labels; or a
            nest of tensors, whose floating-point ones' mean squares are added up.
        whose: The user's function, for messages.

    Raises:
        UsageError: There is nothing to take a loss of.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is not None:
        return _scalar(loss, whose)
    if isinstance(output, Tensor) and output.dim() == 0:
        return output
    parts = [part.float().square().mean() for part in tree_tensors(output) if part.is_floating_point()]
    if not parts:
        raise UsageError(
            f"The model of {whose} returned {type(output).__name__} without a floating-point tensor, of which there is "
            "no loss. Give a loss, or a training_step."
        )
    return sum(parts[1:], parts[0])


class _WhereOutputsAre:
    """A loss that is a module moves to the outputs' device with its first: it may hold tensors, as class weights."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        self._loss = loss
        self._is_to_move = isinstance(loss, nn.Module)

    def __call__(self, output: Any, *target: Any) -> Any:
        if self._is_to_move and isinstance(self._loss, nn.Module):
            self._is_to_move = False
            devices = [tensor.device for tensor in tree_tensors(output)]
            if devices:
                self._loss.to(devices[0])
        return self._loss(output, *target)


def _loss_on_target(loss: Callable[..., Any], model: nn.Module, batch: Any, whose: str) -> Tensor:
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return _scalar(loss(_call(model, batch[:-1]), batch[-1]), whose)
    if isinstance(batch, Mapping):
        return _scalar(loss(_call(model, batch), batch), whose)
    return _scalar(loss(_call(model, batch)), whose)


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def _scalar(loss: Any, whose: str) -> Tensor:
    """Return a loss as a float32 scalar.

    Raises:
        UsageError: It is none.
    """
    if isinstance(loss, Mapping) and "loss" in loss:  # as Lightning's training_step may return it
        loss = loss["loss"]
    if not isinstance(loss, Tensor):
        raise UsageError(f"The loss of {whose} is {type(loss).__name__}, not a tensor: it must be a scalar tensor.")
    if loss.numel() != 1:
        raise UsageError(
            f"The loss of {whose} has shape {tuple(loss.shape)}: it must be a scalar. Take its mean, for example."
        )
    if not loss.requires_grad:
        raise UsageError(f"The loss of {whose} does not depend on the model's weights: nothing can be trained by it.")
    return loss.reshape(()).float()
