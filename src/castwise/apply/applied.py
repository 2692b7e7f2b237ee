"""`castwise.apply`: a precision and techniques for a loop that the user writes, as trials have them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from castwise.apply.hardware import read_hardware
from castwise.apply.loss_scaling import NoScaling, make_loss_scaling
from castwise.apply.precision import (
    Weights,
    autocast_maker,
    convert_weights,
    make_weights,
    set_attention,
    set_fp32_precision,
)
from castwise.apply.techniques.batch_layout import preparation
from castwise.apply.techniques.compile import check_compiler, compile_blocks
from castwise.apply.techniques.optimizer_options import set_as_wanted
from castwise.errors import UsageError
from castwise.registry.precisions import find_precision, why_unsupported
from castwise.registry.techniques import NONE, SETS, find_technique, parse_techniques, step_config_of
from castwise.spec.loss_scale import is_dynamic


class Applied:
    """What a loop calls in the place of `torch.autocast`, `loss.backward`, `optimizer.step` and `zero_grad`.

    Attributes:
        model: The model that was given, changed in place.
        optimizer: The optimizer that was given; with masters it steps these.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, precision: str, names: Sequence[str]) -> None:
        row, loop = find_precision(precision), step_config_of(names)
        device = next(model.parameters()).device
        self.model, self.optimizer = model, optimizer
        self._name = " with ".join(filter(None, [precision, "+".join(names)]))
        if row.float32_matmul is not None:
            set_fp32_precision(row.float32_matmul)
        if loop.cudnn_search:
            torch.backends.cudnn.benchmark = True
        if loop.attention:
            set_attention([loop.attention])
        convert_weights(model, row)
        if loop.channels_last:
            model.to(memory_format=torch.channels_last)
        prepare = preparation(loop)
        if prepare is not None:
            convert: Callable[[Any], Any] = prepare
            model.register_forward_pre_hook(lambda _, args, named: (convert(args), convert(named)), with_kwargs=True)
        self._weights = make_weights(model, row)
        self._weights.adopt(optimizer)
        set_as_wanted(optimizer, loop, device, may_skip=is_dynamic(row.loss_scale))
        self._scaling = make_loss_scaling(row.loss_scale, device, optimizer, decides_on_device=loop.scales_on_device)
        self._zero_grad = self._weights.zero_grad if row.master_weights else optimizer.zero_grad
        self._autocast = autocast_maker(row, device.type)
        if loop.compile_mode is not None:
            check_compiler(device)
            if loop.compile_blocks:
                compile_blocks(model, loop.compile_mode)
            else:
                model.compile(mode=loop.compile_mode, dynamic=False)

    @property
    def skipped_steps(self) -> int:
        """Return how many steps loss scaling skipped. It may read from the device."""
        return self._scaling.skipped_steps

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context for forward and loss: autocast, or none if the precision has no autocast."""
        return self._autocast()

    def backward(self, loss: Tensor) -> None:
        """Run backward on the loss, scaled if the precision scales it; before a step as often as you accumulate."""
        self._scaling.backward(loss)

    def step(self, clip_grad_norm: float | None = None) -> None:
        """Unscale the gradients, clip their norm, step unless a gradient overflowed, and drop the gradients."""
        self._weights.collect_gradients()
        self._scaling.step(self.optimizer, clip_grad_norm)
        self._weights.publish()
        self._zero_grad()

    def __repr__(self) -> str:
        """Return it in a line."""
        return f"Applied({self._name} to {type(self.model).__name__} and {type(self.optimizer).__name__})"

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs: model, masters, optimizer and loss scaling."""
        return state_of_loop(self.model, self._weights, self.optimizer, self._scaling)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint of the same precision."""
        load_state_of_loop(state, self.model, self._weights, self.optimizer, self._scaling)


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
    device = next(model.parameters()).device
    if (impossible := why_unsupported(find_precision(precision), read_hardware(device))) is not None:
        raise UsageError(f"{impossible}. `castwise doctor` shows the precisions of this machine.")
    names = parse_techniques(techniques if isinstance(techniques, str) else "+".join(techniques) or NONE)
    for name in names:
        if name in SETS:
            raise UsageError(f"{name} is short for {', '.join(SETS[name])}. Name those that your loop is to have.")
        row = find_technique(name)
        if row.unfit_settings("apply"):
            raise UsageError(
                f"{name} needs a loop of its own, which castwise.apply cannot make. If a function in a file builds the "
                "model, `castwise tune FILE.py:FUNCTION --emit train.py` writes the loop."
            )
        if device.type not in row.devices:
            raise UsageError(f"{name} is for {' and '.join(row.devices)}; the model is on {device.type}.")
    if find_precision(precision).float8_recipe and step_config_of(names).compile_mode is None:
        raise UsageError(f"{precision} needs compile, without which FP8 is several times slower.")
    check_optimizer(optimizer, model, "castwise.apply")
    if optimizer.state:
        raise UsageError(
            "The optimizer has stepped already. Call castwise.apply before its first step; a checkpoint goes into "
            "load_state_dict of what castwise.apply returns."
        )
    return Applied(model, optimizer, precision, names)


def check_optimizer(optimizer: Any, model: nn.Module, source: str) -> None:
    """Check that an optimizer, unless it is a function that makes one, steps weights of the model.

    Raises:
        UsageError: It steps others, for example those of a copy of the model.
    """
    if not isinstance(optimizer, Optimizer):
        return
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise UsageError(f"The optimizer of {source} steps no weight of its model. Make it from model.parameters().")


def state_of_loop(model: nn.Module, weights: Weights, optimizer: Optimizer, scaling: NoScaling) -> dict[str, Any]:
    """Return what `load_state_of_loop` needs to go on: model, masters, optimizer, loss scaling."""
    return {
        "model": model.state_dict(),
        "stepped": weights.stepped,
        "optimizer": optimizer.state_dict(),
        "scaling": scaling.state_dict(),
    }


@torch.no_grad()
def load_state_of_loop(
    state: dict[str, Any], model: nn.Module, weights: Weights, optimizer: Optimizer, scaling: NoScaling
) -> None:
    """Go on from a state of a loop with the same precision."""
    model.load_state_dict(state["model"])
    for tensor, saved in zip(weights.stepped, state["stepped"], strict=True):
        tensor.copy_(saved)
    optimizer.load_state_dict(state["optimizer"])
    scaling.load_state_dict(state["scaling"])
