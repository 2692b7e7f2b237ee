"""A precision applied to a script from outside: around its forward, its backward and its optimizers' steps."""

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from castwise.errors import TechniqueError
from castwise.registry.precisions import AS_WRITTEN, Precision
from castwise.worker.precision import (
    autocast_maker,
    read_fp32_precision,
    restore_fp32_precision,
    set_fp32_precision,
)

# Modules that hand a script's arguments on to `torch.autocast`: who called them decides.
_OF_AUTOCAST = ("torch.amp.", "torch.cuda.amp.", "torch.cpu.amp.")


class OutsidePrecision:
    """What stands around a script's own calls, so that it trains in a precision; `as-written` changes nothing.

    The script's own autocast and loss scaling are switched off and replaced.
    """

    def __init__(self, row: Precision, device_type: str) -> None:
        self.row = row
        self.skipped_steps = 0  # of the first optimizer
        self._make_autocast = autocast_maker(row, device_type)
        self._autocast: Any = None  # while it is on
        self._scaler = torch.amp.GradScaler(device_type) if row.loss_scale != "none" else None
        self._unscaled: set[int] = set()  # optimizers whose gradients are without the scale, until their step
        self._has_stepped = False  # since the last backward
        self._withheld: list[tuple[Tensor, Tensor]] = []  # gradients of a step that is skipped
        self._fp32_precision = read_fp32_precision()  # PyTorch's defaults
        if row.name != AS_WRITTEN:
            _switch_off_scripts_own()

    @property
    def scale(self) -> float | None:
        """Return the loss scale."""
        return None if self._scaler is None else self._scaler.get_scale()

    def check_model(self, model: nn.Module) -> None:
        """Set the switches for float32 products, which the script may have set, too; refuse a model in 16 bits.

        Raises:
            TechniqueError: The script's own weights are in 16 bits.
        """
        if self.row.name == AS_WRITTEN:
            return
        low = {p.dtype for p in model.parameters() if p.is_floating_point()} & {torch.float16, torch.bfloat16}
        if low:
            name = str(low.pop()).removeprefix("torch.")
            raise TechniqueError(f"the script converts its model to {name}, which castwise cannot take back")
        if self.row.float32_matmul is None:
            restore_fp32_precision(self._fp32_precision)
        else:
            set_fp32_precision(self.row.float32_matmul)

    def enter(self) -> None:
        """Switch autocast on, at the beginning of a forward pass, unless it is on already."""
        if self._autocast is None and self.row.autocast_dtype is not None:
            self._autocast = self._make_autocast()
            self._autocast.__enter__()

    def leave(self) -> None:
        """Switch autocast off, at the end of a forward pass."""
        if self._autocast is not None:
            self._autocast.__exit__(None, None, None)
            self._autocast = None

    def before_backward(self, loss: Tensor) -> Tensor:
        """Return what backward begins with: the loss, times its scale."""
        self.leave()
        if self._scaler is None:
            return loss
        if self._has_stepped:  # not after each optimizer's step: others may hold gradients with the old scale
            self._scaler.update()
            self._has_stepped = False
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def before_clipping(self, parameters: Iterable[Tensor], optimizers: Iterable[Optimizer]) -> None:
        """Take the loss scale out of the gradients of these parameters."""
        if self._scaler is None:
            return
        wanted = {id(parameter) for parameter in parameters}
        for optimizer in optimizers:
            if any(id(each) in wanted for group in optimizer.param_groups for each in group["params"]):
                self._unscale(optimizer)

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Take the loss scale out of an optimizer's gradients; withhold them if one overflowed, so that none steps."""
        self.leave()
        if self._scaler is None:
            return
        if has_closure:
            raise TechniqueError("the optimizer's step computes the loss itself, which no loss scaling goes with")
        self._unscale(optimizer)
        found = self._scaler._found_inf_per_device(optimizer)
        if sum(each.item() for each in found.values()):
            held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self._withheld = [(parameter, parameter.grad) for parameter in held]
            for parameter in held:
                parameter.grad = None
        self._has_stepped |= bool(found)

    def after_step(self, optimizer: Optimizer, is_first: bool) -> None:
        """Count a step that was skipped, and give its gradients back."""
        self._unscaled.discard(id(optimizer))
        if self._withheld:
            self.skipped_steps += is_first
            for parameter, gradient in self._withheld:
                parameter.grad = gradient
            self._withheld = []

    def _unscale(self, optimizer: Optimizer) -> None:
        assert self._scaler is not None, "it is asked for with a scale"
        if id(optimizer) not in self._unscaled:
            if self._has_stepped:  # a second step without a backward between them
                self._scaler.update()
                self._has_stepped = False
            self._scaler.unscale_(optimizer)
            self._unscaled.add(id(optimizer))


def _switch_off_scripts_own() -> None:
    """Make the script's own autocast do nothing, and its GradScaler scale nothing.

    An autocast that the script makes with `enabled=False` keeps its effect, and so does one of PyTorch's own, as in
    recomputing checkpoints.
    """
    make_scaler: Any = torch.amp.GradScaler.__init__
    make_autocast: Any = torch.autocast.__init__
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__

    @functools.wraps(make_scaler)
    def make_disabled(self: Any, *args: Any, **kwargs: Any) -> None:
        make_scaler(self, *args[:5], **{**kwargs, "enabled": False})

    @functools.wraps(make_autocast)
    def make_marked(self: Any, *args: Any, **kwargs: Any) -> None:
        make_autocast(self, *args, **kwargs)
        frame = sys._getframe(1)
        while frame.f_back is not None and _module_of(frame).startswith(_OF_AUTOCAST):
            frame = frame.f_back
        self.is_scripts_own = self._enabled and not _module_of(frame).startswith(("torch.", "castwise."))

    def unless_scripts_own(method: Callable[..., Any], answer: Callable[[Any], Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any) -> Any:
            return answer(self) if getattr(self, "is_scripts_own", False) else method(self, *args)

        return call

    replacements: list[tuple[Any, str, Any]] = [
        (torch.amp.GradScaler, "__init__", make_disabled),
        (torch.autocast, "__init__", make_marked),
        (torch.autocast, "__enter__", unless_scripts_own(enter, lambda self: self)),
        (torch.autocast, "__exit__", unless_scripts_own(leave, lambda _: False)),
    ]
    for owner, name, replacement in replacements:
        setattr(owner, name, replacement)


def _module_of(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", ""))
