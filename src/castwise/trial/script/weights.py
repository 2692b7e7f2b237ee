"""Weights that a script trains in 16 bits, and float32 in their places in the rows that have it."""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from castwise.apply.pytree import tree_map_tensors, tree_tensors
from castwise.apply.techniques.optimizer_state import state_written
from castwise.errors import TechniqueError
from castwise.records.schema import LostUpdates
from castwise.registry.precisions import AS_WRITTEN, TRUE_PRECISIONS, Precision
from castwise.trial.numerics import Updates
from castwise.trial.script.autocast import HALVES
from castwise.trial.script.replacing import replaces
from castwise.trial.script.scaling import weights_of
from castwise.trial.user_model.source import calling_line, line_in_backward

_OTHERS = {*HALVES, torch.float64}  # types other than that in which PyTorch makes weights
# Whose layers have a precision of their own, that no autocast changes.
_LAYERS_OF_OTHERS = ("torchao.", "transformer_engine.", "bitsandbytes.", "msamp.")
_ABOUT_TYPES = re.compile(r"dtype|scalar type|BFloat16|Half\b|expected .*Float", re.IGNORECASE)


class ScriptWeights:
    """Where a script's weights got 16 bits, and what it trains with float32 in their places.

    A row with float32 weights gets them as if the script had made them so: `widen` gives the same parameters their
    values in float32 when an optimizer has them, or at the latest before the first forward pass in training. What no
    optimizer has, such as frozen weights and teachers, keeps its type. `as-written` changes nothing.
    """

    def __init__(self, row: Precision, optimizers: Collection[Optimizer]) -> None:
        self._row, self._optimizers = row, optimizers
        self._is_kept = row.name == AS_WRITTEN or row.name in TRUE_PRECISIONS
        self._made: Any = WeakTensorKeyDictionary()  # the type of each weight, and the script's line that gave it that
        self._widened: Any = WeakTensorKeyDictionary()  # the type that each had
        self.has_cast = False  # whether the script calls its model with 16 bits
        self._teacher = ""  # what keeps 16 bits
        self._updates: Updates | None = None  # of the step that is under way
        self._rate: float | None = None
        self.lost: LostUpdates | None = None  # of the last step that was looked at
        self._note_types()
        self._lines: Any = WeakKeyDictionary()  # where each optimizer was made
        self._follow_optimizers()
        if not self._is_kept:
            self._follow_weights()

    @property
    def notes(self) -> tuple[str, ...]:
        if not self._widened:
            return ()
        found = [f"its weights, in {self._origin}, are trained in float32"]
        found += ["what its model is called with is cast from 16 bits to float32"] if self.has_cast else []
        return (*found, *([self._teacher] if self._teacher else []))

    @property
    def _origin(self) -> str:
        """Return what the first of the widened weights were, and by which line: `bfloat16 by train.py:7`."""
        weight, dtype = next(iter(self._widened.items()))
        return " by ".join(filter(None, (_name(dtype), self._line_of(weight))))

    def _line_of(self, weight: Tensor) -> str:
        _, line = self._made.get(weight, (None, ""))
        return str(line)

    def widen(self, weights: Iterable[Tensor]) -> None:
        """Hold those weights that the script trains in 16 bits in float32, if the row does so."""
        for weight in weights if not self._is_kept else ():
            if not weight.requires_grad or weight.dtype not in HALVES:
                continue
            if not {type(weight), type(weight.data)} <= {Tensor, nn.Parameter, FakeTensor}:
                where = self._line_of(weight) or "the script"
                raise TechniqueError(
                    f"{where} has weights in {_name(weight.dtype)} that are shared out or quantised: load them "
                    f"in float32 to have {self._row.name}"
                )
            self._widened[weight] = weight.dtype
            gradient, weight.grad = weight.grad, None
            weight.data = weight.data.float()
            weight.grad = None if gradient is None else gradient.float()
        if self._widened and torch.get_default_dtype() in HALVES:
            torch.set_default_dtype(torch.float32)

    def check_model(self, model: nn.Module) -> None:
        """Refuse weights and layers of a model that is trained whose precision cannot be replaced."""
        for parameter in model.parameters():
            line = self._line_of(parameter) or "the script"
            if parameter.dtype is torch.float64 and parameter.requires_grad:
                raise TechniqueError(f"{line} trains weights in float64, which castwise does not change")
            dtype = TRUE_PRECISIONS.get(self._row.name, _name(parameter.dtype))
            if _name(parameter.dtype) != dtype and parameter.requires_grad:
                raise TechniqueError(
                    f"the script trains weights in {_name(parameter.dtype)}. Give it model.to(torch.{dtype}), and "
                    f"{self._row.name} is what it does as written"
                )
        for module in model.modules():
            if _is_of_others(module) and any(weight.requires_grad for weight in module.parameters(recurse=False)):
                raise TechniqueError(f"the script trains {_kind(module)}, whose precision castwise cannot replace")

    def check_sharded(self, wrapper: nn.Module) -> None:
        if self.has_widened(wrapper):
            name = type(wrapper).__name__
            raise TechniqueError(f"{name} shares out weights in {self._origin}: load them in float32")

    def check_masters(self, model: nn.Module) -> None:
        if found := next(filter(_is_of_others, model.modules()), None):
            raise TechniqueError(f"a model with {_kind(found)} cannot be given masters from outside")
        for weight in model.parameters():
            if weight.dtype in HALVES and _name(weight.dtype) != self._row.param_dtype:
                raise TechniqueError(
                    f"the script's frozen weights are in {_name(weight.dtype)}, and would be in {self._row.param_dtype}"
                )

    def prepare_model(self, model: nn.Module) -> bool:
        """Widen the buffers of a model with widened weights, as casting it does, but for parts that are frozen.

        Returns:
            Whether it has any.
        """
        if not self.has_widened(model):
            return False
        parts = [model]
        for part in parts:  # which grows
            weights = list(part.parameters())
            if weights and not any(weight.requires_grad for weight in weights):
                continue
            if isinstance(part, nn.RNNBase):
                part.flatten_parameters()
            for buffer in part.buffers(recurse=False):
                if buffer.dtype in HALVES:
                    buffer.data = buffer.data.float()
            parts += part.children()
        return True

    def take_model(self, model: nn.Module) -> None:
        """Widen a model that is trained."""
        self.widen(model.parameters())
        self.prepare_model(model)

    def widen_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return what a model with widened weights is called with, as it would be without casts to 16 bits."""
        if not any(tensor.dtype in HALVES for tensor in tree_tensors((args, kwargs))):
            return None
        self.has_cast = True
        found: tuple[Any, Any] = tree_map_tensors(
            lambda each: each.float() if each.dtype in HALVES else each, (args, kwargs)
        )
        return found

    def keep_teacher(self, module: nn.Module) -> None:
        """Note a module in 16 bits that no optimizer trains."""
        if self._widened and not self._teacher:
            dtype = next((weight.dtype for weight in module.parameters() if weight.dtype in HALVES), None)
            if dtype is not None:
                self._teacher = f"{type(module).__name__}, which no optimizer has, stays in {_name(dtype)}"

    def check_step(self, optimizer: Optimizer) -> None:
        """Refuse a step of weights in 16 bits: the script has begun to train them since it made its optimizer."""
        for weight in weights_of(optimizer) if not self._is_kept else ():
            if weight.dtype in HALVES and weight.grad is not None:
                raise TechniqueError(
                    f"the script begins to train weights in {_name(weight.dtype)}, by {self._line_of(weight)}, after "
                    f"its optimizer has them: load them in float32 to have {self._row.name}"
                )

    def explained(self, error: BaseException) -> BaseException:
        """Return why a script fails that says that types do not fit: in the row they are others, somewhere."""
        if not isinstance(error, RuntimeError | TypeError | ValueError) or not _ABOUT_TYPES.search(str(error)):
            return error
        said = str(error).strip().partition("\n")[0]
        if self._widened:
            message = (
                f"the script's weights are in {self._origin}, and with float32 in their places it fails: {said}. Load "
                "it in float32, and leave casts to 16 bits out"
            )
        elif self._row.autocast_dtype is not None and (line := line_in_backward(error)):
            message = (
                f"backward computes anew in {line} what forward computed in autocast, but without autocast: {said}. "
                "Decorate the two by torch.amp.custom_bwd and torch.amp.custom_fwd"
            )
        else:
            return error
        return TechniqueError(message).with_traceback(error.__traceback__)

    def own(self, models: Sequence[nn.Module]) -> dict[str, list[str]]:
        """Return the types of 16 bits that trained and frozen weights have, and others' layers, with their lines."""
        found: dict[str, list[str]] = {}
        frozen = (weight for model in models for weight in model.parameters() if not weight.requires_grad)
        for kind, weights in (("weights", self._trained()), ("frozen", frozen)):
            for weight in weights:
                if weight.dtype in HALVES:
                    lines, line = found.setdefault(f"{kind} {_name(weight.dtype)}", []), self._line_of(weight)
                    lines += [line] if line and line not in lines else []
        for module in (module for model in models for module in model.modules()):
            if _is_of_others(module):
                found.setdefault(f"layers {_kind(module)}", [])
        for optimizer in self._optimizers:
            if state := state_written(optimizer):
                found[f"state {state}"] = list(filter(None, [self._lines.get(optimizer)]))
        return found

    def trained_dtypes(self) -> set[str]:
        """Return the types of what the script trains, if one is of 16 bits."""
        found = {weight.dtype for weight in self._trained()}
        return set(map(_name, found)) if found & set(HALVES) else set()

    def _trained(self) -> Iterator[Tensor]:
        return (weight for weight in weights_of(*self._optimizers) if weight.requires_grad)

    def before_step(self, optimizer: Optimizer) -> None:
        """Look at the weights of a script as written that this step is to move."""
        weights = [
            weight
            for weight in weights_of(optimizer)
            if weight.dtype in HALVES and weight.requires_grad and type(weight.data) is Tensor
            if weight.grad is not None and weight.grad.layout is torch.strided
        ]
        self._updates = Updates(weights) if weights else None
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        self._rate = max(rates, default=None)

    def after_step(self, models: Sequence[nn.Module]) -> None:
        """Keep how many of them it has not moved."""
        updates, self._updates = self._updates, None
        if updates is None or not updates.are_finite:
            return
        named = [pair for model in models for pair in model.named_parameters()]
        shares = [(updates.lost_share([weight]), name) for name, weight in named]
        most, name = max(shares, key=lambda pair: pair[0], default=(0.0, ""))
        self.lost = LostUpdates(share=updates.lost_share(), weight=name, weight_share=most, learning_rate=self._rate)

    def _note_types(self) -> None:
        """Note the script's lines that give weights another type than float32."""

        def note(*parameters: Tensor | None) -> None:
            found = [
                parameter
                for parameter in parameters
                if parameter is not None and parameter.dtype in _OTHERS
                if self._made.get(parameter, (None,))[0] is not parameter.dtype
            ]
            if found:
                line = calling_line()
                for parameter in found:
                    self._made[parameter] = (parameter.dtype, line)

        def convert_noted(convert: Any, module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            converted: nn.Module = convert(module, *args, **kwargs)
            note(*converted.parameters())
            own = set(map(id, weights_of(*self._optimizers)))
            self.widen(weight for weight in converted.parameters() if id(weight) in own)
            return converted

        @replaces(nn.Module, "float")
        def convert_back(convert: Any, module: nn.Module) -> nn.Module:
            for parameter in module.parameters():
                self._widened.pop(parameter, None)  # the script itself trains it in float32, rounded as it was
            return cast("nn.Module", convert(module))

        for name in ("to", "half", "bfloat16", "double"):
            replaces(nn.Module, name)(convert_noted)
        register_module_parameter_registration_hook(lambda *registered: note(registered[-1]))

    def _follow_optimizers(self) -> None:
        """Note where an optimizer gets its weights, and widen them if the row does so."""

        @replaces(Optimizer, "add_param_group")
        def add_widened(add: Any, optimizer: Optimizer, group: dict[str, Any]) -> None:
            self._lines.setdefault(optimizer, calling_line())
            add(optimizer, group)
            self.widen(optimizer.param_groups[-1]["params"])

    def _follow_weights(self) -> None:
        """Widen what DistributedDataParallel makes its buckets of."""

        @replaces(nn.parallel.DistributedDataParallel, "__init__")
        def wrap_widened(wrap: Any, wrapper: nn.Module, module: nn.Module, *args: Any, **kwargs: Any) -> None:
            self.widen(module.parameters())
            self.prepare_model(module)
            wrap(wrapper, module, *args, **kwargs)

        @replaces(torch, "set_default_dtype")
        def set_wide(set_default: Any, dtype: torch.dtype) -> None:
            set_default(torch.float32 if self._widened and dtype in HALVES else dtype)

    def has_widened(self, module: nn.Module) -> bool:
        return bool(self._widened) and any(weight in self._widened for weight in module.parameters())


def _is_of_others(module: nn.Module) -> bool:
    return type(module).__module__.startswith(_LAYERS_OF_OTHERS)


def _kind(module: nn.Module) -> str:
    return f"{type(module).__module__.partition('.')[0]}'s {type(module).__name__}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
