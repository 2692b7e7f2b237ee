"""A precision applied to a script from outside: around its forward, its backward and its optimizers' steps."""

import copy
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from castwise.apply.precision import (
    cast_floating,
    convert_weights,
    read_fp32_precision,
    read_products,
    restore_fp32_precision,
    rounded_buffers,
    set_fp32_precision,
)
from castwise.errors import TechniqueError
from castwise.registry.precisions import AS_WRITTEN, OF_SCRIPTS, TRUE_PRECISIONS, Precision, find_precision
from castwise.trial.script.autocast import HALVES, ScriptAutocast
from castwise.trial.script.policies import follow_policies
from castwise.trial.script.replacing import replaces
from castwise.trial.script.scaling import ReadGradients, ScriptScaling, takes_one_loss, with_loss
from castwise.trial.script.weights import ScriptWeights
from castwise.trial.user_model.source import calling_line

_SHARDED = {"FullyShardedDataParallel", "FSDPModule"}


class _SwappedMasters:
    """Weights that are in 16 bits from a forward pass to the step after it, and float32 masters at all other times.

    They stay the same parameters, so that the script's own calls work on them: what it does to its weights between a
    step and the next forward pass it does to the masters.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, row: Precision) -> None:
        self.optimizer = optimizer
        masters = {id(weight): weight.data for weight in model.parameters() if weight.dtype == torch.float32}
        norms = [norm for norm in model.modules() if isinstance(norm, nn.modules.batchnorm._BatchNorm)]
        states = [copy.deepcopy(norm.state_dict()) for norm in norms]
        convert_weights(model, row, _cast_inputs)
        for norm, state in zip(norms, states, strict=True):
            norm.load_state_dict(state)  # they are in float32 again, and rounded
        kept = [weight for weight in model.parameters() if id(weight) in masters and weight.dtype != torch.float32]
        self._weights = [weight for weight in kept if weight.requires_grad]
        self._masters = [masters[id(weight)] for weight in self._weights]
        self._low = [weight.data for weight in self._weights]
        self._gradients: list[Tensor | None] | None = None  # of 16 bits, while the masters are in their weights' places
        self.is_checked = True  # whether weights are compared with their masters, which a script might bypass

    @torch.no_grad()
    def put_in(self) -> None:
        """Give the weights their masters' values, and their gradients in float32."""
        if self._gradients is not None:
            return
        for low, master in zip(self._low, self._masters, strict=True):
            if self.is_checked and not torch.allclose(low, master.to(low.dtype), rtol=0, atol=0, equal_nan=True):
                raise TechniqueError("the script changes its weights during a step, which masters do not see")
        self._gradients = [weight.grad for weight in self._weights]
        wide = [
            gradient if gradient is None else torch.empty_like(gradient, dtype=torch.float32)
            for gradient in self._gradients
        ]
        _copy(wide, self._gradients)
        for weight, master, gradient in zip(self._weights, self._masters, wide, strict=True):
            weight.grad, weight.data = None, master
            weight.grad = gradient

    @torch.no_grad()
    def take_out(self) -> None:
        """Round the masters into the weights, and the gradients that the script has kept."""
        if self._gradients is None:
            return
        _copy(self._low, self._masters)
        _copy(self._gradients, [weight.grad for weight in self._weights])
        for weight, low, gradient in zip(self._weights, self._low, self._gradients, strict=True):
            was_dropped = weight.grad is None
            weight.grad, weight.data = None, low
            weight.grad = None if was_dropped else gradient
        self._gradients = None


class ScriptPrecision:
    """What stands around a script's own calls, so that it trains in a precision; `as-written` changes nothing."""

    def __init__(self, row: Precision, device_type: str) -> None:
        self.row = row
        self.optimizers: WeakSet[Optimizer] = WeakSet()  # that the script has made
        self.autocast = ScriptAutocast(row, device_type)
        self.weights = ScriptWeights(row, self.optimizers)
        self.scaling = ScriptScaling(row, device_type, self.autocast, self.optimizers)
        self._masters: _SwappedMasters | None = None
        self._fp32_precision = read_fp32_precision()  # PyTorch's defaults
        self._default_products = read_products(device_type)
        self._device_type = device_type
        self._rounded: tuple[str, ...] = ()
        self._narrowed_at: str | None = None  # the script's line that computes in 16 bits whatever the precision
        self._gradients: ReadGradients | None = None
        if row.name == AS_WRITTEN:
            return
        follow_policies(row)
        if row.loss_scale != "none" or row.master_weights:
            self._gradients = ReadGradients(self._read_gradient, self.scaling.give)
            replaces(Optimizer, "zero_grad")(self._zero_unread)
            replaces(nn.Module, "zero_grad")(self._zero_unread)
        elif row.autocast_dtype is None:
            self._note_narrowing()

    @property
    def notes(self) -> tuple[str, ...]:
        return self.weights.notes + self._rounded + ((self._narrowed_at,) if self._narrowed_at else ())

    def check_model(self, model: nn.Module) -> None:
        """Set the switches for float32 products, which the script may have set, too; refuse what cannot be replaced."""
        if self.row.name == AS_WRITTEN:
            return
        if self._masters is not None:
            raise TechniqueError(f"masters are for one model; the script trains {_kind(model)}, too")
        self.weights.take_model(model)
        self._check_is_replaceable(model)
        if self.row.float32_matmul is None:
            restore_fp32_precision(self._fp32_precision)
        else:
            set_fp32_precision(self.row.float32_matmul)

    def _check_is_replaceable(self, model: nn.Module) -> None:
        self.weights.check_model(model)
        is_changed = self.row.autocast_dtype is not None or self.weights.has_widened(model)
        if isinstance(model, torch.jit.ScriptModule) and is_changed:
            raise TechniqueError("the script's model is compiled by torch.jit, which castwise cannot change")
        for module in model.modules():
            policy = getattr(module, "mixed_precision", None)  # of DistributedDataParallel or FSDP
            if policy is None and hasattr(module, "_get_fsdp_state"):  # FSDP2
                policy = getattr(cast(Any, module)._get_fsdp_state(), "_mp_policy", None)
            if getattr(policy, "param_dtype", None) not in (None, torch.float32):
                raise TechniqueError(f"{type(module).__name__} has a mixed precision, which castwise cannot replace")
            if not {kind.__name__ for kind in type(module).__mro__} & _SHARDED:
                continue
            if not hasattr(module, "_get_fsdp_state"):
                self.scaling.share()
            self.weights.check_sharded(module)

    def same_as_written(self, models: Sequence[nn.Module], own: Collection[str]) -> tuple[str, ...]:
        """Return the precisions in which these models compute what they do as written.

        With weights in 16 bits that is one. Else the switches for float32 products are alike, which the script has set
        by now, and its autocast, of `own`: it has none, or calls its models in one of the row's type alone.
        """
        if not models or "GradScaler" in own:
            return ()
        if dtypes := self.weights.trained_dtypes():
            return tuple(name for name, dtype in TRUE_PRECISIONS.items() if dtypes == {dtype} and not own)
        try:
            for model in models:
                self._check_is_replaceable(model)
        except TechniqueError:
            return ()
        products = read_products(self._device_type)
        rows = (row for row in map(find_precision, OF_SCRIPTS) if row.name != AS_WRITTEN)
        return tuple(
            row.name
            for row in rows
            if (self.autocast.written_in == {getattr(torch, row.autocast_dtype)} if row.autocast_dtype else not own)
            and row.param_dtype == "float32"
            and row.loss_scale == "none"
            and all(
                part == (row.float32_matmul or default)
                for part, default in zip(products, self._default_products, strict=True)
            )
        )

    def check_effect(self) -> None:
        """Refuse a script whose steps, so far, had no part in the precision's autocast."""
        if self.row.autocast_dtype is not None and not self.autocast.has_been_on:
            raise TechniqueError("autocast was never on while the script trained: castwise sees no call of its model")

    def make_masters(self, models: Sequence[nn.Module], optimizer: Optimizer) -> None:
        """Cast the model after its first step, if the precision wants that, and keep its weights as masters."""
        if not self.row.master_weights:
            return
        if len(models) != 1:
            raise TechniqueError(f"masters are for one model; the script has {' and '.join(map(_kind, models))}")
        kinds = {kind.__name__ for module in models[0].modules() for kind in type(module).__mro__}
        if unfit := kinds & {*_SHARDED, "DistributedDataParallel", "ScriptModule"}:
            raise TechniqueError(f"{unfit.pop()} cannot be given masters from outside")
        if not takes_one_loss(optimizer):
            raise TechniqueError(f"{_kind(optimizer)} cannot be given masters from outside")
        self.weights.check_masters(models[0])
        self._rounded = rounded_buffers(models[0], self.row)
        self._masters = _SwappedMasters(models[0], optimizer, self.row)

    def put_masters_in(self) -> None:
        """Let the script see its masters, if there are any, until the next forward pass."""
        if self._masters is not None:
            self._masters.put_in()

    def before_forward(self) -> None:
        """Take masters out."""
        if self._masters is not None:
            self.scaling.scale_again()
            self._masters.take_out()

    def stop_checking(self) -> None:
        """Compare weights with their masters no more."""
        if self._masters is not None:
            self._masters.is_checked = False

    def before_backward(self, loss: Tensor) -> Tensor:
        """Return what backward begins with: the loss, times its scale."""
        self.autocast.leave()
        if self._gradients is not None:
            self._gradients.switch(is_on=False)
        return self.scaling.before_backward(loss)

    def after_backward(self) -> None:
        """Follow what the script reads of its gradients."""
        if self._gradients is not None:
            self.scaling.after_backward()
            self._gradients.switch(is_on=self.scaling.is_scaling or self._masters is not None)

    def before_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Take the loss scale out of an optimizer's gradients; let masters take their weights' places.

        Returns:
            The closure for the optimizer. With a loss scale or masters it has been called: its loss is what it returns.
        """
        self.autocast.leave()
        if self._gradients is None:
            return closure
        if closure is not None and (self.scaling.is_castwises or self._masters is not None):
            closure = with_loss(optimizer, closure)
        self._gradients.switch(is_on=False)
        if self._masters is not None:
            if optimizer is not self._masters.optimizer:
                raise TechniqueError(f"masters are for one optimizer; the script steps {_kind(optimizer)}, too")
            self._masters.put_in()
        self.scaling.before_step(optimizer)
        return closure

    def after_step(self, optimizer: Optimizer) -> bool:
        """Give back the gradients of a step that was skipped; return whether it was."""
        if self._gradients is None:
            return False
        was_skipped = self.scaling.after_step(optimizer)
        self._gradients.switch(is_on=self.scaling.wait_for_others())
        return was_skipped

    def _read_gradient(self, tensor: Tensor) -> None:
        self.put_masters_in()
        self.scaling.read(tensor)

    def _zero_unread(self, zero: Any, *args: Any, **kwargs: Any) -> None:
        """Let `zero_grad` look at gradients as they are."""
        with nullcontext() if torch.compiler.is_compiling() or self._gradients is None else self._gradients.off():
            zero(*args, **kwargs)

    def _note_narrowing(self) -> None:
        """Note the first line of the script that casts what it trains on to 16 bits, which no precision changes."""

        def cast_noted(cast: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            found = cast(tensor, *args, **kwargs)
            if self._narrowed_at is None and found.dtype in HALVES and found.requires_grad:
                is_cast = tensor.dtype not in HALVES and not torch.compiler.is_compiling()
                line = calling_line() if is_cast else ""
                if line:
                    name = str(found.dtype).removeprefix("torch.")
                    self._narrowed_at = f"{line} casts to {name} itself: what follows is not in {self.row.name}"
            return found

        for name in ("to", "half", "bfloat16"):
            replaces(Tensor, name)(cast_noted)


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Cast what a model is called with to its weights' type: a copy of it may be one of the masters."""
    is_low = any(weight.dtype == dtype for weight in module.parameters())
    found: tuple[Any, Any] = cast_floating((args, kwargs), dtype if is_low else torch.float32)
    return found


def _copy(targets: Sequence[Tensor | None], sources: Sequence[Tensor | None]) -> None:
    pairs = [(a, b) for a, b in zip(targets, sources, strict=True) if a is not None and b is not None]
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def _kind(value: object) -> str:
    return type(value).__name__
