"""Trace a model in training mode with torch.fx; refuse it if the trace would compute something else."""

import copy
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from castwise.apply.techniques.blocks import has_hooks
from castwise.errors import TechniqueError
from castwise.trial.kernels.batch_norm.aliasing import (
    add_in_place,
    divide_in_place,
    multiply_in_place,
    subtract_in_place,
)

_AUTOCAST_DEVICES = ("cpu", "cuda")
_COLLECTIONS = (list, dict, set)
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def _recorded(function: Callable[[Any, Any], Any]) -> Any:
    """Return a method that records a call of a function with the proxy and another value."""
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


class _Proxy(fx.Proxy):
    """Stands for a tensor that may be written in place: torch.fx's own proxy records `a += b` as `a = a + b`."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Refuse `isinstance`: a proxy is no tensor, and the model would go another way than with tensors."""
        raise ValueError(
            "its forward asks for the type of a tensor, by isinstance, by keeping one as an attribute or in a function "
            "that needs real tensors"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("tracer", "node"):  # `weight.data = …` would be lost
            raise ValueError(f"it sets '{name}' of what it computes")
        super().__setattr__(name, value)

    def _refuse(self, _: Any) -> Any:
        raise ValueError("it writes in place by another operator than += -= *= /=")

    __ifloordiv__ = __imod__ = __ipow__ = __imatmul__ = __iand__ = __ior__ = __ixor__ = __ilshift__ = _refuse
    __irshift__ = _refuse

    __iadd__ = _recorded(add_in_place)
    __isub__ = _recorded(subtract_in_place)
    __imul__ = _recorded(multiply_in_place)
    __itruediv__ = _recorded(divide_in_place)


class _Tracer(fx.Tracer):
    """Traces a model down to batch norms and modules without children, whose code may depend on their inputs."""

    proxy_buffer_attributes = True  # otherwise code that counts in a buffer would count while tracing, and never again

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_last = isinstance(m, nn.BatchNorm2d) or not any(m.children())
        return is_last or super().is_leaf_module(m, module_qualified_name)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def trace(self, *args: Any, **kwargs: Any) -> fx.Graph:
        self._modes = _grad_and_autocast_modes()
        return super().trace(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        if type(a) is _Proxy:  # torch.fx would ask whether it is a parameter first
            return a.node
        if issubclass(type(a), dict) and type(a) is not dict:
            raise ValueError(f"its {type(a).__name__} would become a dict")
        return super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _grad_and_autocast_modes() != self._modes:  # an autograd.Function's forward too: its backward would be lost
            raise ValueError("it turns gradients, autocast or checkpoints on or off within its forward")
        return super().create_node(*args, **kwargs)


def _grad_and_autocast_modes() -> tuple[Any, ...]:
    """Return the modes that a model's code can switch and torch.fx does not record; checkpoints hook saved tensors."""
    autocast = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _AUTOCAST_DEVICES]
    return torch.is_grad_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(True), *autocast


def trace_in_training(model: nn.Module) -> fx.GraphModule:
    """Return a model as torch.fx traces it in training mode; the model itself is left as it was.

    Raises:
        TechniqueError: torch.fx cannot trace it, or would leave something out.
    """
    _check_traceable(model)
    training = {part for part in model.modules() if part.training}
    attributes = {part: _own_attributes(part) for part in model.modules()}
    random_states = _random_states()
    if not model.training:
        model.train()
    try:
        with _marked_autocast():
            traced = fx.GraphModule(model, _without_identities(model, _Tracer().trace(model)))
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise TechniqueError(f"batch-norm-kernel needs a model that torch.fx can trace: {reason}") from error
    finally:
        for part in model.modules():
            part.training = part in training
        changed = [part for part, before in attributes.items() if _restore_attributes(part, before)]
    if changed:
        raise _refused("whose forward keeps nothing in the model: it would be lost")
    if random_states != _random_states():  # the draw chose a branch, and the trace would keep that branch
        raise _refused("whose layers alone draw random numbers")
    kinds = (model.named_parameters, model.named_buffers)
    known = {name for named in kinds for name, _ in named(remove_duplicate=False)}
    if any(node.op == "get_attr" and node.target not in known for node in traced.graph.nodes):
        raise _refused("whose tensors are parameters or buffers: others do not move with it")
    return traced


def _refused(model: str) -> TechniqueError:
    """Return the error that says of what kind a model has to be."""
    return TechniqueError(f"batch-norm-kernel needs a model {model}.")


def _check_traceable(model: nn.Module) -> None:
    if any("forward" in vars(part) for part in model.modules()):
        raise _refused("whose forward is its class's; this one replaces it")
    inputs = list(inspect.signature(type(model).forward).parameters.values())[1:]
    if any(one.default is not one.empty or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in inputs):
        raise _refused("whose inputs are all required: torch.fx would fix the optional ones")
    if any(has_hooks(part) for part in model.modules() if part is not model):
        raise _refused("without hooks on its parts: some would not be called")


def _without_identities(model: nn.Module, graph: fx.Graph) -> fx.Graph:
    """Return the graph without `nn.Identity`, which many models use for options that are off."""
    for node in graph.nodes:
        if node.op != "call_module" or len(node.args) != 1 or not isinstance(node.args[0], fx.Node):
            continue
        if type(model.get_submodule(str(node.target))) is nn.Identity:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    return graph


@contextmanager
def _marked_autocast() -> Iterator[None]:
    """Turn autocast on, to a dtype that no model uses, so that a model that turns it off or on is noticed."""
    before = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST_DEVICES]
    try:
        for device in _AUTOCAST_DEVICES:
            torch.set_autocast_enabled(device, True)
            torch.set_autocast_dtype(device, torch.float64)
        yield
    finally:
        for device, was_enabled, dtype in before:
            torch.set_autocast_enabled(device, was_enabled)
            torch.set_autocast_dtype(device, dtype)


_Attributes = dict[str, tuple[Any, Any]]  # by name: the value, and a copy of a collection's contents


def _own_attributes(part: nn.Module) -> _Attributes:
    values = {name: value for name, value in vars(part).items() if name not in _MODULE_ATTRIBUTES}
    return {name: (value, copy.copy(value) if type(value) in _COLLECTIONS else None) for name, value in values.items()}


def _restore_attributes(part: nn.Module, before: _Attributes) -> bool:
    """Restore a module's attributes, and return whether any had changed."""
    now = _own_attributes(part)
    if now.keys() == before.keys() and all(_is_same(before[name], now[name]) for name in now):
        return False
    for name in now.keys() - before.keys():
        delattr(part, name)
    for name, (value, contents) in before.items():
        if contents is not None:
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(contents)
        setattr(part, name, value)
    return True


def _is_same(before: tuple[Any, Any], now: tuple[Any, Any]) -> bool:
    """Return whether two attributes are one object with the same contents, or equal numbers or strings."""
    (value, contents), (other, other_contents) = before, now
    if value is not other:
        return type(value) is type(other) and isinstance(value, int | float | str) and value == other
    return contents is None or list(map(id, _elements(contents))) == list(map(id, _elements(other_contents)))


def _elements(contents: Any) -> list[Any]:
    return [*contents, *contents.values()] if isinstance(contents, dict) else list(contents)


def _random_states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    numpy_state = () if numpy is None else tuple(map(str, numpy.random.get_state()))
    return random.getstate(), torch.get_rng_state().tolist(), numpy_state
