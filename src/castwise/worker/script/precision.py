"""A precision applied to a script from outside: around its forward, its backward and its optimizers' steps."""

import copy
import functools
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import LBFGS, Optimizer

from castwise.errors import TechniqueError
from castwise.registry.precisions import AS_WRITTEN, OF_SCRIPTS, Precision, find_precision
from castwise.worker.precision import (
    autocast_maker,
    cast_weights,
    read_fp32_precision,
    read_products,
    restore_fp32_precision,
    set_fp32_precision,
)
from castwise.worker.script.replacing import replaces
from castwise.worker.user_model.source import calling_line, is_users

# Modules that hand a script's arguments on to `torch.autocast`: who called them decides.
_OF_AUTOCAST = ("torch.amp.", "torch.cuda.amp.", "torch.cpu.amp.")
_KEPT_DTYPES = {torch.float16, torch.bfloat16, torch.float64}  # weights in one of them are not taken back
# Whose layers have a precision of their own, that no autocast changes.
_LAYERS_OF_OTHERS = ("torchao.", "transformer_engine.", "bitsandbytes.", "msamp.")
_SHARDED = {"FullyShardedDataParallel", "FSDPModule"}
_CHECKED_STEPS = 3  # before which weights are compared with their masters, which a script might bypass


class _SwappedMasters:
    """Weights of 16 bits, whose float32 masters take their places while the optimizer steps.

    They stay the same parameters, so that the script's own calls work on them.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, row: Precision) -> None:
        self.optimizer = optimizer
        weights = [each for each in model.parameters() if each.dtype == torch.float32]
        masters = [each.data for each in weights]
        norms = [each for each in model.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
        states = [copy.deepcopy(each.state_dict()) for each in norms]
        cast_weights(model, getattr(torch, row.param_dtype), getattr(torch, row.batch_norm_dtype))
        for norm, state in zip(norms, states, strict=True):
            norm.load_state_dict(state)  # they are in float32 again, and rounded
        pairs = [
            (weight, master)
            for weight, master in zip(weights, masters, strict=True)
            if weight.requires_grad and weight.dtype != torch.float32
        ]
        self._weights, self._masters = [weight for weight, _ in pairs], [master for _, master in pairs]
        self._low = [weight.data for weight in self._weights]
        self._gradients: list[Tensor | None] | None = None  # of 16 bits, while the masters are in their weights' places
        self._num_checks = _CHECKED_STEPS

    @torch.no_grad()
    def put_in(self) -> None:
        """Give the weights their masters' values, and their gradients in float32."""
        if self._gradients is not None:
            return
        if self._num_checks:
            self._num_checks -= 1
            for low, master in zip(self._low, self._masters, strict=True):
                if not torch.allclose(low, master.to(low.dtype), rtol=0, atol=0, equal_nan=True):
                    raise TechniqueError("the script changes its weights between steps, which masters do not see")
        self._gradients = [weight.grad for weight in self._weights]
        wide = [each if each is None else torch.empty_like(each, dtype=torch.float32) for each in self._gradients]
        _copy(wide, self._gradients)
        for weight, master, gradient in zip(self._weights, self._masters, wide, strict=True):
            weight.grad, weight.data = None, master
            weight.grad = gradient

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the weights their masters' values, and no gradients, for a while between steps."""
        gradients = [weight.grad for weight in self._weights]
        for weight, master in zip(self._weights, self._masters, strict=True):
            weight.grad, weight.data = None, master
        try:
            yield
        finally:
            for weight, low, gradient in zip(self._weights, self._low, gradients, strict=True):
                weight.data, weight.grad = low, gradient

    @torch.no_grad()
    def take_out(self, *, has_stepped: bool) -> None:
        """Round the masters into the weights, or if none stepped the gradients, which may have been clipped."""
        if self._gradients is None:
            return
        if has_stepped:
            _copy(self._low, self._masters)
        else:
            _copy(self._gradients, [weight.grad for weight in self._weights])
        for weight, low, gradient in zip(self._weights, self._low, self._gradients, strict=True):
            was_dropped = weight.grad is None
            weight.grad, weight.data = None, low
            weight.grad = None if was_dropped else gradient
        self._gradients = None


class OutsidePrecision:
    """What stands around a script's own calls, so that it trains in a precision; `as-written` changes nothing.

    The script's own autocast and loss scaling are switched off and replaced.
    """

    def __init__(self, row: Precision, device_type: str) -> None:
        self.row = row
        self._autocast: Any = autocast_maker(row, device_type)()  # entered and left time after time
        self._is_on = False
        self._scaler = torch.amp.GradScaler(device_type) if row.loss_scale != "none" else None
        self._unscaled: dict[int, Optimizer] = {}  # those whose gradients are without the scale, until their step
        self._stepped: set[int] = set()  # the optimizers that have, since the last backward
        self._masters: _SwappedMasters | None = None
        self._withheld: list[tuple[Tensor, Tensor]] = []  # gradients of a step that is skipped
        self._fp32_precision = read_fp32_precision()  # PyTorch's defaults
        self._default_products = read_products(device_type)
        self._device_type = device_type
        self._converted_at: dict[int, str] = {}  # the script's line that gave a parameter its type
        if row.name != AS_WRITTEN:
            _switch_off_scripts_own()
            self._note_conversions()

    @property
    def scale(self) -> float | None:
        """Return the loss scale."""
        return None if self._scaler is None else self._scaler.get_scale()

    def check_model(self, model: nn.Module) -> None:
        """Set the switches for float32 products, which the script may have set, too; refuse what cannot be replaced.

        Raises:
            TechniqueError: The script's weights are not in float32, or its layers compute in formats of their own.
        """
        if self.row.name == AS_WRITTEN:
            return
        if self._masters is not None:
            raise TechniqueError(f"masters are for one model; the script trains {_kind(model)}, too")
        self._check_is_replaceable(model)
        if self.row.float32_matmul is None:
            restore_fp32_precision(self._fp32_precision)
        else:
            set_fp32_precision(self.row.float32_matmul)

    def _check_is_replaceable(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.dtype in _KEPT_DTYPES:
                name = str(parameter.dtype).removeprefix("torch.")
                who = self._converted_at.get(id(parameter)) or "the script"
                raise TechniqueError(f"{who} converts its model to {name}, which castwise cannot take back")
        if isinstance(model, torch.jit.ScriptModule) and self.row.autocast_dtype is not None:
            raise TechniqueError("the script's model is compiled by torch.jit, which castwise cannot change")
        for module in model.modules():
            if type(module).__module__.startswith(_LAYERS_OF_OTHERS):
                name = f"{type(module).__module__.partition('.')[0]}'s {type(module).__name__}"
                raise TechniqueError(f"the script's model has {name}, whose precision castwise cannot replace")
            # That of DistributedDataParallel or FSDP, and of FSDP2.
            policy = getattr(module, "mixed_precision", None) or _policy_of_fsdp2(module)
            if getattr(policy, "param_dtype", None) not in (None, torch.float32):
                raise TechniqueError(f"{type(module).__name__} has a mixed precision, which castwise cannot replace")
            if self._scaler is not None and {each.__name__ for each in type(module).__mro__} & _SHARDED:
                raise TechniqueError(
                    f"{type(module).__name__} needs a loss scale that its shards share; bf16-mixed needs none"
                )

    def same_as_written(self, models: Sequence[nn.Module]) -> tuple[str, ...]:
        """Return the precisions in which these models compute what they do as written, if no autocast has an effect.

        They differ in the switches for float32 products alone, which the script has set by now.
        """
        if not models:
            return ()
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
            if row.autocast_dtype is None
            and not row.master_weights
            and all(
                part == (row.float32_matmul or default)
                for part, default in zip(products, self._default_products, strict=True)
            )
        )

    def check_gradients(self) -> None:
        """Refuse gradients of the weights that no backward computes, if there is a loss scale."""
        if self._scaler is not None:
            raise TechniqueError("the script computes its gradients without backward, where loss scaling begins")

    def make_masters(self, models: Sequence[nn.Module], optimizer: Optimizer) -> None:
        """Cast the model after its first step, if the precision wants that, and keep its weights as masters.

        Raises:
            TechniqueError: The script has several models, or one or an optimizer that cannot be given masters.
        """
        if not self.row.master_weights:
            return
        if len(models) != 1:
            raise TechniqueError(f"masters are for one model; the script has {' and '.join(map(_kind, models))}")
        kinds = {each.__name__ for module in models[0].modules() for each in type(module).__mro__}
        if unfit := kinds & {*_SHARDED, "DistributedDataParallel", "ScriptModule"}:
            raise TechniqueError(f"{unfit.pop()} cannot be given masters from outside")
        if not _takes_one_loss(optimizer):
            raise TechniqueError(f"{_kind(optimizer)} cannot be given masters from outside")
        self._masters = _SwappedMasters(models[0], optimizer, self.row)

    def before_forward(self) -> None:
        """Take masters out, if gradients were clipped and no step came."""
        if self._masters is not None:
            self._scale_again()
            self._masters.take_out(has_stepped=False)

    def masters_in_place(self) -> AbstractContextManager[None]:
        """Let what averages the weights see their masters, if there are any."""
        self.before_forward()
        return nullcontext() if self._masters is None else self._masters.in_place()

    def enter(self) -> bool:
        """Switch autocast on, at the beginning of a forward pass; return False if it is on already, or never."""
        if self._is_on or self.row.autocast_dtype is None:
            return False
        self._autocast.__enter__()
        self._is_on = True
        return True

    def leave(self) -> None:
        """Switch autocast off, at the end of a forward pass."""
        if self._is_on:
            self._is_on = False
            self._autocast.__exit__(None, None, None)

    def before_backward(self, loss: Tensor) -> Tensor:
        """Return what backward begins with: the loss, times its scale."""
        self.leave()
        if self._scaler is None:
            return loss
        self._scale_again()
        if self._stepped:  # not after each optimizer's step: others may hold gradients with the old scale
            self._scaler.update()
            self._stepped.clear()
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def before_clipping(self, parameters: Iterable[Tensor], optimizers: Iterable[Optimizer]) -> None:
        """Take the loss scale out of the gradients of these parameters."""
        if self._masters is not None:
            self._masters.put_in()
        if self._scaler is None:
            return
        wanted = {id(parameter) for parameter in parameters}
        for optimizer in optimizers:
            if not wanted.isdisjoint(map(id, weights_of(optimizer))):
                self._unscale(optimizer)

    def before_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Take the loss scale out of an optimizer's gradients; withhold them if one overflowed, so that none steps.

        Masters take their weights' places.

        Returns:
            The closure for the optimizer. With a loss scale or masters it has been called: its loss is what it returns.
        """
        self.leave()
        if self._scaler is None and self._masters is None:
            return closure
        if closure is not None:
            if not _takes_one_loss(optimizer):
                raise TechniqueError(
                    f"{type(optimizer).__name__} may compute the loss more than once in a step, which no loss scaling "
                    "goes with"
                )
            with torch.enable_grad():
                loss = closure()
            closure = functools.partial(_identity, loss)
            self.leave()
        if self._masters is not None:
            if optimizer is not self._masters.optimizer:
                raise TechniqueError(f"masters are for one optimizer; the script steps {_kind(optimizer)}, too")
            self._masters.put_in()
        if self._scaler is None:
            return closure
        self._unscale(optimizer)
        found = self._scaler._found_inf_per_device(optimizer)
        if getattr(optimizer, "_step_supports_amp_scaling", False) and found:
            optimizer.found_inf = sum(found.values())  # type: ignore[attr-defined]  # skips the step on the device
        elif sum(each.item() for each in found.values()):
            self._withheld = [(each, each.grad) for each in weights_of(optimizer) if each.grad is not None]
            for parameter, _ in self._withheld:
                parameter.grad = None
        if found:
            self._stepped.add(id(optimizer))
        return closure

    def after_step(self, optimizer: Optimizer) -> bool:
        """Give back the gradients of a step that was skipped, and the weights of 16 bits; return whether it was."""
        self._unscaled.pop(id(optimizer), None)
        if self._scaler is not None and hasattr(optimizer, "found_inf"):
            del optimizer.found_inf
        withheld, self._withheld = self._withheld, []
        for parameter, gradient in withheld:
            parameter.grad = gradient
        if self._masters is not None:
            self._masters.take_out(has_stepped=True)
        return bool(withheld)

    def _unscale(self, optimizer: Optimizer) -> None:
        assert self._scaler is not None, "it is asked for with a scale"
        if self._scaler._scale is None:
            self.check_gradients()
        if id(optimizer) not in self._unscaled:
            if id(optimizer) in self._stepped:  # a second step without a backward between them
                self._scaler.update()
                self._stepped.clear()
            self._scaler.unscale_(optimizer)
            self._unscaled[id(optimizer)] = optimizer

    def _scale_again(self) -> None:
        """Give gradients the scale again that were clipped, if no step came; a lower one if they overflowed."""
        for optimizer in self._unscaled.values():
            assert self._scaler is not None, "they had it"
            if sum(each.item() for each in self._scaler._found_inf_per_device(optimizer).values()):
                self._scaler.update()
            self._scaler._per_optimizer_states.pop(id(optimizer), None)
            scale = self._scaler.get_scale()
            for weight in weights_of(optimizer):
                if weight.grad is not None:
                    weight.grad.mul_(scale)
        self._unscaled.clear()

    def _note_conversions(self) -> None:
        """Note the script's lines that give weights another type than float32."""

        def note(*parameters: Tensor | None) -> None:
            found = [id(each) for each in parameters if each is not None and each.dtype in _KEPT_DTYPES]
            if found:
                self._converted_at.update(dict.fromkeys(found, calling_line()))

        def convert_noted(convert: Any, module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            converted: nn.Module = convert(module, *args, **kwargs)
            note(*converted.parameters())
            return converted

        for name in ("to", "half", "bfloat16", "double"):
            replaces(nn.Module, name)(convert_noted)
        register_module_parameter_registration_hook(lambda *registered: note(registered[-1]))


def weights_of(*optimizers: Optimizer) -> Iterator[Tensor]:
    """Yield the weights that optimizers train."""
    return (each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"])


def _copy(targets: Sequence[Tensor | None], sources: Sequence[Tensor | None]) -> None:
    """Copy tensors into tensors, where there are both."""
    pairs = [(a, b) for a, b in zip(targets, sources, strict=True) if a is not None and b is not None]
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def note_scripts_own() -> list[str]:
    """Return a list that gets the name of each autocast and GradScaler that has an effect."""
    found: list[str] = []
    for kind in (torch.autocast, torch.amp.GradScaler):

        @replaces(kind, "__init__")
        def make_noted(make: Any, self: Any, *args: Any, **kwargs: Any) -> None:
            make(self, *args, **kwargs)
            if self._enabled:
                found.append(_kind(self))

    return found


def _switch_off_scripts_own() -> None:
    """Make the script's own autocast do nothing, and its GradScaler scale nothing.

    One of PyTorch's own autocasts keeps its effect, as in recomputing checkpoints, and so does one with a literal
    `enabled=False`. With `enabled=args.amp` it is the script's switch, and does nothing either way.
    """

    @replaces(torch.amp.GradScaler, "__init__")
    def make_disabled(make: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args[:5], **{**kwargs, "enabled": False})

    @replaces(torch.autocast, "__init__")
    def make_marked(make: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        frame = sys._getframe(2)
        while frame.f_back is not None and _module_of(frame).startswith(_OF_AUTOCAST):
            frame = frame.f_back
        self.is_scripts_own = not _module_of(frame).startswith(("torch.", "castwise.")) and (
            self._enabled or not _says_false(frame.f_code, frame.f_lasti)
        )

    @replaces(torch.autocast, "__enter__")
    def enter(method: Any, self: Any) -> Any:
        return self if getattr(self, "is_scripts_own", False) else method(self)

    @replaces(torch.autocast, "__exit__")
    def leave(method: Any, self: Any, *args: Any) -> Any:
        return False if getattr(self, "is_scripts_own", False) else method(self, *args)


def _policy_of_fsdp2(module: Any) -> Any:
    return getattr(module._get_fsdp_state(), "_mp_policy", None) if hasattr(module, "_get_fsdp_state") else None


def _takes_one_loss(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known to compute the loss once in a step."""
    return type(optimizer).__module__.startswith("torch.optim") and not isinstance(optimizer, LBFGS)


def _kind(value: object) -> str:
    return type(value).__name__


def _identity(value: Any) -> Any:
    return value


@functools.cache
def _says_false(code: CodeType, instruction: int) -> bool:
    """Return whether a call has `False` among its arguments as written; of a library's call it is assumed."""
    first, last, *_ = list(code.co_positions())[instruction // 2]
    if not is_users(code.co_filename) or first is None or last is None:
        return True
    return any("False" in linecache.getline(code.co_filename, number) for number in range(first, last + 1))


def _module_of(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", ""))
