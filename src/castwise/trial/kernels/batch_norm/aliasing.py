"""Which nodes of a traced model can be computed as one, although other nodes write into tensors in place."""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn

# Modules and functions whose result shares no memory with their inputs.
_FRESH_MODULES = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.Linear,
)
_FRESH_FUNCTIONS = (operator.add, operator.mul, torch.add, torch.mul, torch.cat)


# torch.fx would write operator.iadd into a model's code as `a += b`, which rebinds `a` if it is no tensor.


def add_in_place(one: Any, other: Any) -> Any:
    one += other
    return one


def subtract_in_place(one: Any, other: Any) -> Any:
    one -= other
    return one


def multiply_in_place(one: Any, other: Any) -> Any:
    one *= other
    return one


def divide_in_place(one: Any, other: Any) -> Any:
    one /= other
    return one


_IN_PLACE = (add_in_place, subtract_in_place, multiply_in_place, divide_in_place)


def node_positions(traced: fx.GraphModule) -> dict[fx.Node, int]:
    return {node: position for position, node in enumerate(traced.graph.nodes)}


def can_fuse(traced: fx.GraphModule, chain: Sequence[fx.Node]) -> bool:
    """Return whether nodes can be computed together at the position of the last, and write nothing in place.

    They cannot if something that one of them reads is written in between, or if one of them writes into what others
    read later. Only the last of the chain is read by other nodes.
    """
    positions = node_positions(traced)
    nodes = list(positions)
    for node in chain:
        between = (other for other in nodes[positions[node] : positions[chain[-1]]] if other not in chain)
        written = {target for other in between for target in written_inputs(traced, other)}
        if written and any(written & aliases(traced, source) for source in node.all_input_nodes if source not in chain):
            return False
        own_targets = {alias for target in written_inputs(traced, node) for alias in aliases(traced, target)}
        earlier = {target for target in own_targets if positions[target] < positions[node] and target not in chain}
        if any(target.op in ("placeholder", "get_attr") for target in earlier):
            return False
        if any(positions[user] > positions[node] for target in earlier for user in target.users):
            return False
    return True


def written_inputs(traced: fx.GraphModule, node: fx.Node) -> Sequence[fx.Node]:
    """Return the inputs that a node may write into: by its name or settings, or because nothing is known of it."""
    inputs = node.all_input_nodes
    if node.op == "call_module":
        module = traced.get_submodule(str(node.target))
        if getattr(module, "inplace", False):
            return inputs[:1]
        is_known = isinstance(module, _FRESH_MODULES) or type(module).__module__.startswith("torch.nn.")
        return () if is_known else inputs
    if node.op not in ("call_function", "call_method"):
        return ()
    name: Any = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    is_named_in_place = name.endswith("_") and not name.endswith("__")
    has_flag = node.kwargs.get("inplace") or any(argument is True for argument in node.args)
    if node.target in _IN_PLACE or is_named_in_place or has_flag:
        return inputs[:1]
    target = node.kwargs.get("out")
    return (target,) if isinstance(target, fx.Node) else ()


def aliases(traced: fx.GraphModule, node: fx.Node) -> set[fx.Node]:
    """Return the nodes whose results may share memory with a node's, itself included: those of the same origins."""
    origins = _reachable([node], lambda one: _aliased_inputs(traced, one))
    return _reachable(origins, lambda one: [user for user in one.users if one in _aliased_inputs(traced, user)])


def _reachable(start: Iterable[fx.Node], neighbours: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    waiting = list(start)
    found = set(waiting)
    while waiting:
        new = set(neighbours(waiting.pop())) - found
        found |= new
        waiting += new
    return found


def _aliased_inputs(traced: fx.GraphModule, node: fx.Node) -> Sequence[fx.Node]:
    """Return the inputs that a node may return, whole or in part."""
    if node.op == "call_module" and isinstance(traced.get_submodule(str(node.target)), _FRESH_MODULES):
        return ()
    if node.op == "call_function" and node.target in _FRESH_FUNCTIONS:
        return ()
    return node.all_input_nodes[:1] if node.target in _IN_PLACE else node.all_input_nodes
