"""A model as torch.fx traces it in training, where nothing of what it does is lost in that."""

import copy
import inspect
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from castwise.errors import TechniqueError
from castwise.worker.kernels.batch_norm.aliasing import (
    add_in_place,
    divide_in_place,
    multiply_in_place,
    subtract_in_place,
)
from castwise.worker.techniques.hooks import has_hooks

_AUTOCAST = ("cpu", "cuda")
_COLLECTIONS = (list, dict, set)
_OWN_NAMES = frozenset(vars(nn.Module()))


class _Proxy(fx.Proxy):
    """Stands for a tensor that can be written into: torch.fx's own takes `a += b` for `a = a + b`."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Return its class to those of torch that ask; a model that asks chooses by the answer, and it is no tensor."""
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] != "torch":
            raise ValueError("it asks what kind its inputs are, or has a gradient of its own")
        return _Proxy

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("tracer", "node"):  # `weight.data = …` would be lost
            raise ValueError(f"it sets '{name}' of what it computes")
        super().__setattr__(name, value)

    def _refused(self, _: Any) -> Any:
        raise ValueError("it writes in place by another operator than += -= *= /=")

    __ifloordiv__ = __imod__ = __ipow__ = __imatmul__ = __iand__ = __ior__ = __ixor__ = __ilshift__ = _refused
    __irshift__ = _refused

    def _written(self, function: Any, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    def __iadd__(self, other: Any) -> Any:
        return self._written(add_in_place, other)

    def __isub__(self, other: Any) -> Any:
        return self._written(subtract_in_place, other)

    def __imul__(self, other: Any) -> Any:
        return self._written(multiply_in_place, other)

    def __itruediv__(self, other: Any) -> Any:
        return self._written(divide_in_place, other)


class _Tracer(fx.Tracer):
    """Follows a model down to batch norms and to modules without children, whose code may choose by what it reads."""

    proxy_buffer_attributes = True  # else code that counts in a buffer would count as it is traced, and never again

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_last = isinstance(m, nn.BatchNorm2d) or not any(m.children())
        return is_last or super().is_leaf_module(m, module_qualified_name)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def trace(self, *args: Any, **kwargs: Any) -> fx.Graph:
        self._modes = _modes()
        return super().trace(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        if issubclass(type(a), dict) and type(a) is not dict:
            raise ValueError(f"its {type(a).__name__} would become a dict")
        return super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self._modes:  # within the forward of an autograd.Function, too: its backward would be lost
            raise ValueError("it turns gradients, autocast or checkpoints on or off within its forward")
        return super().create_node(*args, **kwargs)


def _modes() -> tuple[Any, ...]:
    """Return what a model's code can switch without its being traced: checkpointing hooks what is saved."""
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST]
    return torch.is_grad_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(True), *autocast


def traced_in_training(model: nn.Module) -> fx.GraphModule:
    """Return a model as torch.fx traces it, in training.

    Raises:
        TechniqueError: It cannot, or would leave something out.
    """
    _check(model)
    training, drawn = {part for part in model.modules() if part.training}, _random_states()
    held = {part: _held_by(part) for part in model.modules()}
    if not model.training:
        model.train()
    try:
        with _under_autocast():
            traced = fx.GraphModule(model, _without_identities(model, _Tracer().trace(model)))
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise TechniqueError(f"batch-norm-kernel needs a model that torch.fx can trace: {reason}") from error
    finally:
        for part in model.modules():
            part.training = part in training
        changed = [part for part, before in held.items() if _put_back(part, before)]
    if changed:
        raise TechniqueError(
            "batch-norm-kernel needs a model whose forward keeps nothing in the model: it would be lost."
        )
    if drawn != _random_states():  # what was drawn chose which way the trace went, for good
        raise TechniqueError("batch-norm-kernel needs a model whose layers alone draw random numbers.")
    own = {name for named in (model.named_parameters, model.named_buffers) for name, _ in named(remove_duplicate=False)}
    if any(node.op == "get_attr" and node.target not in own for node in traced.graph.nodes):
        raise TechniqueError(
            "batch-norm-kernel needs a model whose tensors are parameters or buffers: others do not move."
        )
    return traced


def _without_identities(model: nn.Module, graph: fx.Graph) -> fx.Graph:
    """Return a graph without the modules that hand on what they get, which models have in the place of options."""
    for node in graph.nodes:
        if node.op != "call_module" or len(node.args) != 1 or not isinstance(node.args[0], fx.Node):
            continue
        if type(model.get_submodule(str(node.target))) is nn.Identity:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    return graph


def _check(model: nn.Module) -> None:
    """Make sure that nothing of what a model does is hidden from torch.fx.

    Raises:
        TechniqueError: Something is.
    """
    if any("forward" in vars(part) for part in model.modules()):
        raise TechniqueError(
            "batch-norm-kernel needs a model whose forward is its class's; this one has one of its own."
        )
    inputs = list(inspect.signature(type(model).forward).parameters.values())[1:]
    if any(each.default is not each.empty or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in inputs):
        raise TechniqueError(
            "batch-norm-kernel needs a model whose inputs are all given: torch.fx would fix the others."
        )
    if any(has_hooks(part) for part in model.modules() if part is not model):
        raise TechniqueError(
            "batch-norm-kernel needs a model without hooks on its parts: they would not all be called."
        )


@contextmanager
def _under_autocast() -> Iterator[None]:
    """Have autocast on, to a dtype that nobody takes, so that it is seen where a model turns it off, or on."""
    before = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST]
    try:
        for kind in _AUTOCAST:
            torch.set_autocast_enabled(kind, True)
            torch.set_autocast_dtype(kind, torch.float64)
        yield
    finally:
        for kind, was_on, dtype in before:
            torch.set_autocast_enabled(kind, was_on)
            torch.set_autocast_dtype(kind, dtype)


_Held = dict[str, tuple[Any, Any]]


def _held_by(part: nn.Module) -> _Held:
    """Return what is kept in a module besides what nn.Module keeps, and what collections among it hold."""
    own = {name: value for name, value in vars(part).items() if name not in _OWN_NAMES}
    return {name: (value, copy.copy(value) if type(value) in _COLLECTIONS else None) for name, value in own.items()}


def _put_back(part: nn.Module, before: _Held) -> bool:
    """Put back what is kept in a module, and return whether anything was changed."""
    now = _held_by(part)
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
    """Return whether something is the same object and holds the same ones; equal numbers and words are the same."""
    (value, contents), (other, others) = before, now
    if contents is None or value is not other:
        return value is other or (
            type(value) is type(other) and isinstance(value, int | float | str) and value == other
        )
    return list(map(id, _listed(contents))) == list(map(id, _listed(others)))


def _listed(contents: Any) -> list[Any]:
    return [*contents, *contents.values()] if isinstance(contents, dict) else list(contents)


def _random_states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    drawn = () if numpy is None else tuple(map(str, numpy.random.get_state()))
    return random.getstate(), torch.get_rng_state().tolist(), drawn
