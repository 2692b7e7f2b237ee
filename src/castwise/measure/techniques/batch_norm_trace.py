"""A model as torch.fx traces it in training, where nothing of what it does is lost in that."""

import inspect
import random
from typing import Any

import torch
from torch import fx, nn

from castwise.errors import TechniqueError
from castwise.measure.techniques.hooks import has_hooks
from castwise.measure.techniques.in_place import add_in_place, divide_in_place, multiply_in_place, subtract_in_place


class _Proxy(fx.Proxy):
    """Stands for a tensor that can be written into: torch.fx's own takes `a += b` for `a = a + b`."""

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

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self._modes:  # within the forward of an autograd.Function, too: its backward would be lost
            raise ValueError("it turns gradients or autocast on or off within its forward")
        return super().create_node(*args, **kwargs)


def _modes() -> tuple[Any, ...]:
    """Return what a model's code can switch without its being traced."""
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    return torch.is_grad_enabled(), *autocast


def traced_in_training(model: nn.Module) -> fx.GraphModule:
    """Return a model as torch.fx traces it, in training.

    Raises:
        TechniqueError: It cannot, or would leave something out.
    """
    _check(model)
    training, drawn = {part for part in model.modules() if part.training}, _random_states()
    if not model.training:
        model.train()
    try:
        traced = fx.GraphModule(model, _without_identities(model, _Tracer().trace(model)))
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise TechniqueError(f"batch-norm-kernel needs a model that torch.fx can trace: {reason}") from error
    finally:
        for part in model.modules():
            part.training = part in training
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
        if node.op == "call_module" and type(model.get_submodule(str(node.target))) is nn.Identity:
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
    return graph


def _check(model: nn.Module) -> None:
    """Make sure that nothing of what a model does is hidden from torch.fx.

    Raises:
        TechniqueError: Something is.
    """
    if "forward" in vars(model):
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


def _random_states() -> tuple[Any, ...]:
    return random.getstate(), torch.get_rng_state().tolist()
