"""`castwise.apply`: a precision and techniques for a loop that the user writes, as trials have them."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from castwise.apply.hardware import read_hardware
from castwise.apply.loss_scaling import make_loss_scaling
from castwise.apply.precision import (
    ShardedWeights,
    Weights,
    autocast_maker,
    convert_weights,
    make_weights,
    rounded_buffers,
    set_switches,
)
from castwise.apply.techniques.batch_layout import prepare_inputs
from castwise.apply.techniques.compile import check_compiler, compile_blocks
from castwise.apply.techniques.optimizer_options import set_as_wanted
from castwise.apply.techniques.optimizer_state import keep_state_in
from castwise.errors import UsageError
from castwise.registry.precisions import Precision, find_precision, why_unsupported
from castwise.registry.technique_fit import why_not_on
from castwise.registry.techniques import NONE, PLAIN, SETS, StepConfig, find_technique, parse_techniques, step_config_of
from castwise.spec.loss_scale import is_dynamic


class Applied:
    """What a loop calls in the place of `torch.autocast`, `loss.backward`, `optimizer.step` and `zero_grad`.

    Attributes:
        model: The model that was given, changed in place.
        optimizer: The optimizer that was given; with masters it steps these.
    """

    def __init__(  # noqa: PLR0913  a setting each, by keyword
        self,
        model: nn.Module,
        precision: Precision,
        make_optimizer: Callable[[Weights], Optimizer],
        *,
        loss_scale: str,
        device: torch.device,
        loop: StepConfig = PLAIN,
        shard: Callable[[nn.Module], None] | None = None,
    ) -> None:
        self.model, self.precision = model, precision
        self.notes = rounded_buffers(model, precision)
        self.float8 = convert_weights(model, precision)
        if loop.channels_last:
            model.to(memory_format=torch.channels_last)
        self._weights = make_weights(model, precision) if shard is None else ShardedWeights(model, shard)
        self.optimizer = make_optimizer(self._weights)
        if loop.optimizer_state:
            keep_state_in(self.optimizer, loop.optimizer_state)
        self.scaling = make_loss_scaling(loss_scale, device, self.optimizer, decides_on_device=loop.scales_on_device)
        # Masters keep their gradients' memory; everything else is as in a loop written by hand.
        self._zero_grad = self._weights.zero_grad if precision.steps_copies else self.optimizer.zero_grad
        self._autocast = autocast_maker(precision, device.type)
        if loop.compile_mode is not None or loop.compiled_update or loop.optimizer_state:
            check_compiler(device)
        if loop.compile_mode is not None and loop.compile_blocks:
            compile_blocks(model, loop.compile_mode)

    @property
    def skipped_steps(self) -> int:
        """Return how many steps loss scaling skipped. It may read from the device."""
        return self.scaling.skipped_steps

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context for forward and loss: autocast, or none if the precision has no autocast."""
        return self._autocast()

    def backward(self, loss: Tensor) -> None:
        """Run backward on the loss, scaled if the precision scales it; before a step as often as you accumulate."""
        self.scaling.backward(loss)

    def step(self, clip_grad_norm: float | None = None) -> None:
        """Unscale the gradients, clip their norm, step unless a gradient overflowed, and drop the gradients."""
        self._step_optimizer(clip_grad_norm)
        self._zero_grad()

    def _step_optimizer(self, clip_grad_norm: float | None) -> None:
        for clip in self._weights.updates(clip_grad_norm):
            self.scaling.step(self.optimizer, clip)

    def __repr__(self) -> str:
        """Return it in a line."""
        return f"Applied({self.precision.name} to {type(self.model).__name__} and {type(self.optimizer).__name__})"

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs: model, masters, optimizer and loss scaling."""
        return {
            "model": self.model.state_dict(),
            "stepped": self._weights.kept,
            "optimizer": self.optimizer.state_dict(),
            "scaling": self.scaling.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint of the same precision."""
        self.model.load_state_dict(state["model"])
        for tensor, saved in zip(self._weights.kept, state["stepped"], strict=True):
            tensor.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaling.load_state_dict(state["scaling"])


def apply(model: nn.Module, optimizer: Optimizer, *, precision: str, techniques: str | Sequence[str] = ()) -> Applied:
    """Apply a precision and techniques to a model and its optimizer, in place, for a loop of your own.

    The switches for float32 products, cuDNN's search and the tag of what torch.compile caches are global, and stay
    set. The loop is the one that `castwise.compare` and `castwise.run` measure, but for one thing: `compile` compiles
    the model without the loss.

    Args:
        model: The model, in float32 and on its device.
        optimizer: An optimizer of torch, of the model's parameters, before its first step.
        precision: Its name, such as "bf16-mixed" (`castwise list precisions`).
        techniques: Changes to the loop: "channels-last+compile" or a sequence (`castwise list techniques`).

    Returns:
        An object with `autocast()`, `backward(loss)` and `step()`.

    Raises:
        UsageError: There is no such precision or technique, the device does not have it, a technique needs a loop of
            its own, or the optimizer has stepped already.
    """
    row, device = find_precision(precision), next(model.parameters()).device
    if (impossible := why_unsupported(row, read_hardware(device))) is not None:
        raise UsageError(f"{impossible}. `castwise doctor` shows the precisions of this machine.")
    names = parse_techniques(techniques if isinstance(techniques, str) else "+".join(techniques) or NONE)
    for name in names:
        if name in SETS:
            raise UsageError(f"{name} is short for {', '.join(SETS[name])}. Name those that your loop is to have.")
        technique = find_technique(name)
        if technique.unfit_settings("apply"):
            raise UsageError(
                f"{name} needs a loop of its own, which castwise.apply cannot make. If a function in a file builds the "
                "model, `castwise tune FILE.py:FUNCTION --emit train.py` writes the loop."
            )
        if (reason := why_not_on(technique, device.type)) is not None:
            raise UsageError(f"{name} {reason}; the model is on {device.type}.")
    loop = step_config_of(names)
    if row.float8_recipe and loop.compile_mode is None:
        raise UsageError(f"{precision} needs compile, without which FP8 is several times slower.")
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            "castwise.apply takes one optimizer of torch. Of several, call it for each, with what that trains."
        )
    check_optimizer(optimizer, model, "castwise.apply")
    # Adagrad has its state from the start.
    if any(values.get("step", 1) for values in optimizer.state.values()):
        raise UsageError(
            "The optimizer has stepped already. Call castwise.apply before its first step; a checkpoint goes into "
            "load_state_dict of what castwise.apply returns."
        )

    def adopt(weights: Weights) -> Optimizer:
        weights.adopt(optimizer)
        set_as_wanted(optimizer, loop, device, may_skip=is_dynamic(row.loss_scale))
        return optimizer

    def refuse(_: Any) -> None:
        raise UsageError(f"Weights that come after castwise.apply have no float32 copies, which {row.name} steps.")

    if row.steps_copies:
        optimizer.add_param_group = refuse  # type: ignore[assignment, method-assign]
    set_switches(row, loop)
    applied = Applied(model, row, adopt, loss_scale=row.loss_scale, device=device, loop=loop)
    prepare_inputs(model, loop)
    if loop.compile_mode is not None and not loop.compile_blocks:
        model.compile(mode=loop.compile_mode, dynamic=False)
    return applied


def check_optimizer(optimizer: Any, model: nn.Module, source: str) -> None:
    """Raise UsageError if an optimizer steps no weight of the model, or needs a closure, as LBFGS does."""
    if not isinstance(optimizer, Optimizer):
        return
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise UsageError(f"The optimizer of {source} steps no weight of its model. Make it from model.parameters().")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"{type(optimizer).__name__}, the optimizer of {source}, computes the loss in its step, by a closure. "
            "castwise measures that in a script alone: castwise run -- python train.py"
        )
