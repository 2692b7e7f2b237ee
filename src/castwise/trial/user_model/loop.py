"""The user's own parts of the training loop: the loss of a batch, the optimizer and its scheduler."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from castwise.apply.precision import Weights
from castwise.apply.pytree import tree_tensors
from castwise.errors import UsageError
from castwise.trial.models.task import UserLoop
from castwise.trial.user_model.contract import Contract, check_single_optimizer

# Usual names of a parameter that is a model.
_MODEL_NAMES = ("model", "net", "network", "module")
# The similarity of "label_ids" and "labels". Source: difflib's ratio; the figure is chosen here.
_NEAR_NAME = 0.8
# Of AdamW, for a model without an optimizer.
_LEARNING_RATE = 1e-4

ComputeLoss = Callable[[nn.Module, Any], Tensor]


def make_compute_loss(contract: Contract, source: str) -> ComputeLoss:
    """Return the loss function of a batch that the contract asks for.

    - `training_step`: that, of model and batch.
    - `loss`: of the output and the target. A tuple's last part is the target and the others are the model's arguments;
      of a dict, whose items are the model's arguments by name, the whole is the target; a tensor has none.
    - neither: the whole batch goes into the model, and the loss is `loss_of_output`.
    """
    if contract.training_step is not None:
        return _LossOfStep(contract.training_step, source)
    if contract.loss is None:
        return _LossOfOutput(source)
    return _LossOnTarget(_explaining(contract.loss, source), source)


class _LossOfStep:
    """The user's training step. Its first call is checked: castwise runs forward by the model, and backward itself."""

    def __init__(self, step: Callable[[nn.Module, Any], Any], source: str) -> None:
        self._step, self._source = step, source
        self._is_checked = False
        self._without_call = (
            f"The training_step of {source} does not call model(...): precisions and several GPUs act on that call. "
            "Let the model's forward do what the step calls, and call model(...)."
        )

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        if self._is_checked or torch.compiler.is_compiling():
            return _scalar(self._step(model, batch), self._source)
        self._is_checked = True
        had_gradients = any(parameter.grad is not None for parameter in model.parameters())
        calls: list[None] = []
        handle = model.register_forward_hook(lambda *_: calls.append(None))
        try:
            loss = self._step(model, batch)
        except RuntimeError as error:
            # Source: the wording of torch; the second is older.
            if calls or not any(words in str(error) for words in ("dtype", "expected scalar type")):
                raise
            # A part that was called by itself got its input in float32: the model's call casts it.
            raise UsageError(f"{self._without_call} It ended with: {error}") from error
        finally:
            handle.remove()
        if not calls:
            raise UsageError(self._without_call)
        if not had_gradients and any(parameter.grad is not None for parameter in model.parameters()):
            raise UsageError(
                f"The training_step of {self._source} runs backward itself, and castwise runs it again. Return the "
                "loss without calling backward."
            )
        return _scalar(loss, self._source)


class _LossOfOutput:
    """The loss that a model's output has, or one that castwise chooses; `note` names it then."""

    note = ""  # known after the first batch

    def __init__(self, source: str) -> None:
        self._source = source

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        loss, note = loss_of_output(_call(model, batch), self._source)
        if note != self.note:
            self.note = note
        return loss


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


class _LossOnTarget:
    """The user's loss of the model's output and the batch's target.

    A loss that is a module moves to the output's device at its first call: it may hold class weights.
    """

    def __init__(self, loss: Callable[..., Any], source: str) -> None:
        self._loss, self._source = loss, source
        self._must_move = isinstance(loss, nn.Module)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        if isinstance(batch, tuple | list) and len(batch) > 1:
            inputs, target = batch[:-1], batch[-1:]
        else:
            inputs, target = batch, ([batch] if isinstance(batch, Mapping) else [])
        output = _call(model, inputs)
        if self._must_move and isinstance(self._loss, nn.Module):
            self._must_move = False
            devices = [tensor.device for tensor in tree_tensors(output)]
            if devices:
                self._loss.to(devices[0])
        return _scalar(self._loss(output, *target), self._source)


def loss_of_output(output: Any, source: str) -> tuple[Tensor, str]:
    """Return the loss that a model's output has, and a sentence on it if castwise chose it; empty if it is the user's.

    Args:
        output: A scalar, which is the loss; something with a `loss`, as transformers' models have given labels; a nest
            of tensors with one scalar, which castwise takes; or one tensor, of which it takes the mean square.
        source: The user's function, for messages: "train_me.py:build".
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is not None:
        return _scalar(loss, source), ""
    if isinstance(output, Tensor) and output.dim() == 0:
        return output, ""
    parts = [part for part in tree_tensors(output) if part.is_floating_point()]
    scalars = [part for part in parts if part.numel() == 1 and part.requires_grad]
    if len(scalars) == 1:
        return _scalar(scalars[0], source), "the loss is the one number in the model's output: no loss was given"
    if len(parts) == 1:
        note = "the loss is the mean square of the model's output: no loss was given"
        return _scalar(parts[0].float().square().mean(), source), note
    found = f"{len(parts)} floating-point tensors and no loss" if parts else "no floating-point tensor"
    raise UsageError(
        f"The model of {source} returned {found}: which loss is meant? Return (model, batch, loss), or a training_step."
    )


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
        raise UsageError(
            f"The loss of {source} does not depend on the model's weights. "
            "Return it attached to its graph, and leave backward and the optimizer's step to castwise."
        )
    return loss.reshape(()).float()


def make_loop(contract: Contract, source: str) -> UserLoop:
    """Return the user's optimizer, scheduler, accumulation and clipping; `source` is for messages."""

    def make_step(optimizer: Optimizer) -> Callable[[], None] | None:
        return step_of(make_scheduler(contract.scheduler, optimizer, source))

    return UserLoop(
        make_optimizer=lambda weights: make_optimizer(contract.optimizer, weights, source),
        make_scheduler=None if contract.scheduler is None else make_step,
        accumulate=contract.accumulate,
        clip_grad_norm=contract.clip_grad_norm,
    )


def check_batch(contract: Contract, source: str, batch: Any) -> None:
    """Check that the model takes a batch without a loss, and a dict's keys, which it may take in silence, unread."""
    if contract.training_step is not None or (contract.loss is not None and not isinstance(batch, Mapping)):
        return
    signature, name = inspect.signature(contract.model.forward), type(contract.model).__name__
    if isinstance(batch, tuple | list) and not contract.model._forward_pre_hooks:
        try:
            signature.bind(*batch)
        except TypeError as error:
            raise UsageError(
                f"{source} gives no loss, so its whole batch goes into {name}, whose output is the loss: {error}. "
                "Return (model, batch, loss)."
            ) from None
    if not isinstance(batch, Mapping):
        return
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = signature.parameters.values()
    missing = [each.name for each in parameters if each.kind in named and each.name not in batch]
    taken = {each.name for each in parameters}
    # A hook of theirs may take keys out.
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    takes_any |= bool(contract.model._forward_pre_hooks)
    for key in batch:
        if key not in taken and (near := difflib.get_close_matches(str(key), missing, n=1, cutoff=_NEAR_NAME)):
            raise UsageError(f"The batch of {source} has '{key}', which {name} does not take: it takes '{near[0]}'.")
        if key not in taken and not takes_any:
            raise UsageError(
                f"The batch of {source} has '{key}', which {name} does not take: a dict's items are the model's "
                "arguments. Return a training_step(model, batch), which gives the model its arguments, and returns the "
                "loss."
            )


def make_optimizer(given: Any, weights: Weights, source: str) -> Optimizer:
    """Return the user's optimizer, or what their function makes; AdamW if they give none."""
    if given is None:
        return torch.optim.AdamW(weights.stepped, lr=_LEARNING_RATE)
    if isinstance(given, Optimizer):
        weights.adopt(given)
        return given
    made = given(weights.stepped)
    check_single_optimizer(made, source)
    if not isinstance(made, Optimizer):
        raise UsageError(f"The optimizer function of {source} returned {type(made).__name__}, not an optimizer.")
    return made


def make_scheduler(given: Any, optimizer: Optimizer, source: str) -> Any:
    """Return the user's scheduler, or what their function makes."""
    if isinstance(given, type) or not hasattr(given, "step"):
        given = given(optimizer)
    if not hasattr(given, "step"):
        raise UsageError(f"The scheduler function of {source} returned {type(given).__name__}, not a scheduler.")
    if getattr(given, "optimizer", optimizer) is not optimizer:
        raise UsageError(f"The scheduler of {source} belongs to another optimizer than the one it trains with.")
    return given


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
