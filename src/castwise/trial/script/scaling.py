"""The loss scale of a script: that of its own GradScaler, or castwise's if it has none in use."""

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import LBFGS, Optimizer
from torch.overrides import get_default_nowrap_functions

from castwise.errors import TechniqueError
from castwise.registry.precisions import AS_WRITTEN, Precision
from castwise.trial.script.autocast import ScriptAutocast
from castwise.trial.script.replacing import on_import, replaces
from castwise.trial.user_model.source import calling_line, is_own


class ReadGradients:
    """Calls `is_read` when a script reads the `grad` of a tensor, and `is_given` after it has put one there.

    That is while it is on; off it costs next to nothing.
    """

    def __init__(self, is_read: Callable[[Tensor], None], is_given: Callable[[Tensor], None]) -> None:
        get_default_nowrap_functions()  # torch keeps in it the property as it is
        own: Any = torch.Tensor.grad
        get = own.__get__

        def read(tensor: Tensor) -> Tensor | None:
            if self._is_on and get(tensor) is not None:
                with self.off():
                    is_read(tensor)
            gradient: Tensor | None = get(tensor)
            return gradient

        def give(tensor: Tensor, gradient: Tensor | None) -> None:
            own.__set__(tensor, gradient)
            if self._is_on and gradient is not None:
                is_given(tensor)

        self._is_on = False
        self._fields = {False: (get, own.__set__, own.__delete__), True: (read, give, own.__delete__)}
        self._property: Any = property(*self._fields[False])
        torch.Tensor.grad = self._property  # type: ignore[assignment]

    def switch(self, *, is_on: bool) -> None:
        if is_on is not self._is_on:
            self._is_on = is_on
            self._property.__init__(*self._fields[is_on])  # another one would void what Python keeps of the class

    @contextmanager
    def off(self) -> Iterator[None]:
        was_on = self._is_on
        self.switch(is_on=False)
        try:
            yield
        finally:
            self.switch(is_on=was_on)


class ScriptScaling:
    """Scales a script's losses, if the row wants that, and takes the scale out of each gradient once.

    A GradScaler of the script's does what the script calls; it is off in rows without a loss scale, and on in rows with
    one. Without one in use, losses are scaled when backward begins. The scale is gone when the script reads a
    gradient, or its optimizer steps; a gradient that several optimizers hold loses it once.
    """

    def __init__(
        self, row: Precision, device_type: str, autocast: ScriptAutocast, optimizers: Collection[Optimizer]
    ) -> None:
        self._autocast, self._optimizers = autocast, optimizers
        # The one that was used last, None if the row has no loss scale.
        self.scaler = GradScaler(device_type) if row.loss_scale != "none" else None
        self._is_scripts = False  # whether the script scales its losses
        self._is_left_alone = False  # whether it has switched its GradScaler on itself
        self._inf_checks: dict[int, dict[torch.device, Tensor]] = {}  # of gradients without the scale, by weight
        self._checked: dict[int, Tensor | None] = {}  # those gradients: the script may put others in their places
        self._read: dict[int, Any] = {}  # optimizers whose gradients the script has read since, before their step
        self._stepped: set[int] = set()  # the optimizers that have, since the last backward
        self._has_stepped = False
        self._withheld: list[tuple[Tensor, Tensor]] = []  # gradients of a step that is skipped
        self._is_in_backward = False
        if row.name != AS_WRITTEN:
            self._follow_scalers()
            self._follow_hooks()

    @property
    def is_scaling(self) -> bool:
        """Return whether gradients have a scale that the script may not know of."""
        is_left_alone = self._is_left_alone if self._is_scripts else self._autocast.is_own_float16
        return self.scaler is not None and not is_left_alone

    @property
    def is_castwises(self) -> bool:
        """Return whether castwise scales the losses itself."""
        return self.is_scaling and not self._is_scripts

    @property
    def is_withholding(self) -> bool:
        """Return whether the step under way is skipped."""
        return bool(self._withheld)

    def share(self) -> None:
        """Let ranks that hold shards of gradients skip steps together; FSDP2's gradients do by themselves."""
        if self.is_castwises and type(self.scaler) is GradScaler:
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

            self.scaler = ShardedGradScaler(self.scaler._device)

    def before_backward(self, loss: Tensor) -> Tensor:
        if not self.is_scaling:
            return loss
        assert self.scaler is not None, "it is scaling"
        self.scale_again()
        if self._stepped:  # not after each optimizer's step: others may hold gradients with the old scale
            self.scaler.update()
            self._stepped.clear()
        self._inf_checks.clear()
        self._checked.clear()
        self._is_in_backward = True
        return loss if self._is_scripts else self.scaler.scale(loss)

    def after_backward(self) -> None:
        self._is_in_backward = False

    def scale_again(self) -> None:
        """Give gradients the scale again that were read, if no step came; a lower one if they overflowed."""
        for key, optimizer in self._read.items():
            assert self.scaler is not None, "they had it"
            states, weights = self.scaler._per_optimizer_states, list(weights_of(optimizer))
            if self.is_castwises and any(found.item() for found in states[key]["found_inf_per_device"].values()):
                self.scaler.update()
                self._stepped.clear()  # their checks are in this update, too
            states.pop(key, None)
            for weight in weights:
                self._inf_checks.pop(id(weight), None)
                if weight.grad is not None:
                    weight.grad.mul_(self.scaler.get_scale())
        self._read.clear()

    def read(self, tensor: Tensor) -> None:
        """Take the scale out of a gradient, and of those that are stepped with it."""
        if not self.is_scaling or id(tensor) in self._inf_checks:
            return
        holders = [
            optimizer for optimizer in self._optimizers if any(weight is tensor for weight in weights_of(optimizer))
        ]
        alone: Any = SimpleNamespace(param_groups=[{"params": [tensor]}])
        for optimizer in holders or [alone]:
            if self._unscale(optimizer):
                self._read[id(optimizer)] = optimizer

    def give(self, tensor: Tensor) -> None:
        """Take a gradient that the script has made, of those that it has read, as one without the scale."""
        if self.is_scaling and self._inf_checks:
            self._inf_checks.setdefault(id(tensor), {})

    def _unscale(self, optimizer: Any) -> bool:
        assert self.scaler is not None, "it is scaling"
        is_ready: bool = self.scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
        if is_ready:
            self.scaler.unscale_(optimizer)
        return is_ready

    def check_gradients(self) -> None:
        """Refuse gradients of the weights that no backward computes, if castwise scales the losses."""
        if self.is_castwises:
            raise TechniqueError(
                f"{calling_line() or 'the script'} trains by gradients that it takes without `backward`, which loss "
                "scaling does not reach: scale their loss by hand"
            )

    def before_step(self, optimizer: Optimizer) -> None:
        """Take the scale out of an optimizer's gradients; withhold them if one overflowed, so that none steps."""
        self._read.pop(id(optimizer), None)
        if not self.is_castwises:
            return
        assert self.scaler is not None, "it is scaling"
        if self.scaler._scale is None:
            self.check_gradients()
        self._unscale(optimizer)
        self._has_stepped = True
        found: dict[Any, Any] = self.scaler._found_inf_per_device(optimizer)
        for weight in weights_of(optimizer):
            if (gradient := weight.grad) is not None and self._checked.get(id(weight)) is not gradient:
                has_inf = gradient.isfinite().logical_not().any().float()
                found[gradient.device] = found[gradient.device] + has_inf if gradient.device in found else has_inf
        if getattr(optimizer, "_step_supports_amp_scaling", False) and found:
            optimizer.found_inf = sum(found.values())  # type: ignore[attr-defined]  # skips the step on the device
        elif sum(check.item() for check in found.values()):
            self._withheld = [(weight, weight.grad) for weight in weights_of(optimizer) if weight.grad is not None]
            for parameter, _ in self._withheld:
                parameter.grad = None
        if found:
            self._stepped.add(id(optimizer))

    def after_step(self, optimizer: Optimizer) -> bool:
        """Give back the gradients of a step that was skipped; return whether it was."""
        if self.is_castwises and hasattr(optimizer, "found_inf"):
            del optimizer.found_inf
        withheld, self._withheld = self._withheld, []
        for parameter, gradient in withheld:
            parameter.grad = gradient
        return bool(withheld)

    def wait_for_others(self) -> bool:
        """Return whether an optimizer may have gradients with the scale."""
        if not self.is_scaling:
            return False
        firsts = (next(weights_of(optimizer), None) for optimizer in self._optimizers)
        return any(id(weight) not in self._inf_checks for weight in firsts if weight is not None)

    def _follow_scalers(self) -> None:
        @replaces(GradScaler, "__init__")
        def make(make_as_written: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
            if not type(scaler).__module__.startswith("torch."):
                raise TechniqueError(
                    f"{calling_line()} makes a GradScaler of its own kind, {type(scaler).__name__}, which castwise "
                    "cannot switch on or off. Let it be torch's"
                )
            is_on = kwargs.pop("enabled", args[5] if len(args) > 5 else True)
            scaler.process_group = None  # ShardedGradScaler has one only if it is on at once
            make_as_written(scaler, *args[:5], **kwargs, enabled=self.scaler is not None)
            scaler.waits = scaler._enabled and not is_on  # until it scales a loss
            scaler._enabled &= bool(is_on)

        self._follow_scalers_of(GradScaler)
        on_import(
            "torch.distributed.fsdp.sharded_grad_scaler",
            lambda module: self._follow_scalers_of(module.ShardedGradScaler),
        )

    def _follow_scalers_of(self, kind: type[GradScaler]) -> None:
        @replaces(kind, "scale")
        def scale(scale_as_written: Any, scaler: Any, outputs: Any) -> Any:
            if scaler is not self.scaler and (scaler._enabled or scaler.waits):
                self._use(scaler)
            return scale_as_written(scaler, outputs)

        @replaces(kind, "unscale_")
        def unscale(unscale_as_written: Any, scaler: Any, optimizer: Any) -> None:
            if scaler is not self.scaler or id(optimizer) not in self._read:  # else it has no scale any more
                unscale_as_written(scaler, optimizer)

        @replaces(kind, "_unscale_grads_")
        def unscale_once(unscale_all: Any, scaler: Any, optimizer: Any, *args: Any) -> dict[torch.device, Tensor]:
            if scaler is not self.scaler or self._is_left_alone:
                all_found: dict[torch.device, Tensor] = unscale_all(scaler, optimizer, *args)
                return all_found
            weights = [weight for weight in weights_of(optimizer) if weight.grad is not None]
            scaled = [weight for weight in weights if id(weight) not in self._inf_checks]
            found = unscale_all(scaler, SimpleNamespace(param_groups=[{"params": scaled}]), *args)
            earlier = {id(checks): checks for weight in weights if (checks := self._inf_checks.get(id(weight)))}
            self._inf_checks.update(dict.fromkeys(map(id, scaled), found))
            self._checked.update((id(weight), weight.grad) for weight in scaled)
            for checks in earlier.values():
                found = found | {device: check + found.get(device, 0) for device, check in checks.items()}
            return dict(found)

    def _follow_hooks(self) -> None:
        """Let the script's hooks on tensors have gradients without the scale."""

        @replaces(Tensor, "register_hook")
        def register_unscaled(register: Any, tensor: Tensor, hook: Any) -> Any:
            def call(gradient: Tensor) -> Tensor | None:
                scale = self.scaler._scale if self.scaler is not None and self._is_in_backward else None
                if scale is None:
                    unchanged: Tensor | None = hook(gradient)
                    return unchanged
                changed = hook(gradient.float() / scale)
                return None if changed is None else (changed * scale).to(gradient.dtype)

            return register(tensor, call if is_own(sys._getframe(2).f_code.co_filename) else hook)

    def _use(self, scaler: Any) -> None:
        """Let the script scale its losses by this GradScaler of its own."""
        if scaler.waits and (self._has_stepped or self._autocast.is_own_float16):
            return
        if self._has_stepped and not self._is_scripts:
            raise TechniqueError(f"{calling_line()} scales a loss, which it did not do before its first step")
        scaler._enabled = True
        self.scaler, self._is_scripts, self._is_left_alone = scaler, True, not scaler.waits


def with_loss(optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    """Return a closure in the place of one that is called now, and computes the loss of a step."""
    if not takes_one_loss(optimizer):
        raise TechniqueError(
            f"loss scaling does not work with {type(optimizer).__name__}, which may compute the loss more than once"
        )
    with torch.enable_grad():
        loss = closure()
    return lambda: loss


def takes_one_loss(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known to compute the loss once in a step."""
    return type(optimizer).__module__.startswith("torch.optim") and not isinstance(optimizer, LBFGS)


def weights_of(*optimizers: Any) -> Iterator[Tensor]:
    groups = (group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ()))
    return (weight for group in groups for weight in group["params"])
