"""How a user's model is called on a batch, and what its loss is."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from castwise.errors import UsageError
from castwise.worker.pytree import tree_tensors
from castwise.worker.user_model.contract import Contract

# Usual names of a parameter that is a model.
_MODEL_NAMES = ("model", "net", "network", "module")

ComputeLoss = Callable[[nn.Module, Any], Tensor]


def make_compute_loss(contract: Contract, source: str) -> ComputeLoss:
    """Return the loss function of a batch that the contract asks for.

    - `training_step`: that, of model and batch.
    - `loss`: of the output and the target. A tuple's last part is the target and the others are the model's arguments;
      of a dict, whose items are the model's arguments by name, the whole is the target; a tensor has none.
    - neither: the whole batch goes into the model, and the loss is `loss_of_output`.

    Args:
        contract: The user's parts.
        source: The user's function, for messages: "train_me.py:build".
    """
    step = contract.training_step
    if step is not None:
        return lambda model, batch: _scalar(step(model, batch), source)
    if contract.loss is None:
        return lambda model, batch: loss_of_output(_call(model, batch), source)
    loss = _LossOnOutputDevice(_explaining(contract.loss, source))
    return lambda model, batch: _loss_on_target(loss, model, batch, source)


def _explaining(loss: Callable[..., Any], source: str) -> Callable[..., Any]:
    """Return the loss; if it takes a model first and fails, the UsageError says what it is called with."""
    try:
        first = next(iter(inspect.signature(loss).parameters), "")
    except (TypeError, ValueError):  # some built-in functions have no signature
        first = ""
    if first not in _MODEL_NAMES:
        return loss

    def called(output: Any, *target: Any) -> Any:
        try:
            return loss(output, *target)
        except (TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"The loss of {source} takes '{first}' first, and is called with the model's output and the target: "
                f"{error}. A function of model and batch is a training_step."
            ) from error

    return called


def loss_of_output(output: Any, source: str) -> Tensor:
    """Return the loss that a model's output has, or else a bounded one: its mean square.

    Args:
        output: A scalar, which is the loss; something with a `loss`, as transformers' models have given labels; or a
            nest of tensors: the mean squares of the floating-point ones are added up.
        source: The user's function, for messages: "train_me.py:build".

    Raises:
        UsageError: The output has no loss and no floating-point tensor.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is not None:
        return _scalar(loss, source)
    if isinstance(output, Tensor) and output.dim() == 0:
        return output
    parts = [part.float().square().mean() for part in tree_tensors(output) if part.is_floating_point()]
    if not parts:
        raise UsageError(
            f"The model of {source} returned {type(output).__name__} without a floating-point tensor, of which there "
            "is no loss. Give a loss, or a training_step."
        )
    return sum(parts[1:], parts[0])


class _LossOnOutputDevice:
    """A loss that moves to the outputs' device at its first call if it is a module: it may hold class weights."""

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


def _loss_on_target(loss: Callable[..., Any], model: nn.Module, batch: Any, source: str) -> Tensor:
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return _scalar(loss(_call(model, batch[:-1]), batch[-1]), source)
    if isinstance(batch, Mapping):
        return _scalar(loss(_call(model, batch), batch), source)
    return _scalar(loss(_call(model, batch)), source)


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def _scalar(loss: Any, source: str) -> Tensor:
    """Return a loss as a float32 scalar, or raise UsageError."""
    if isinstance(loss, Mapping) and "loss" in loss:  # as Lightning's training_step may return it
        loss = loss["loss"]
    if not isinstance(loss, Tensor):
        raise UsageError(f"The loss of {source} is {type(loss).__name__}, not a tensor: it must be a scalar tensor.")
    if loss.numel() != 1:
        raise UsageError(
            f"The loss of {source} has shape {tuple(loss.shape)}: it must be a scalar. Take its mean, for example."
        )
    if not loss.requires_grad:
        raise UsageError(f"The loss of {source} does not depend on the model's weights: nothing can be trained by it.")
    return loss.reshape(()).float()
