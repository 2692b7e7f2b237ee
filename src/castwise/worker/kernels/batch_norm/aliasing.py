"""Which nodes of a traced model can be computed as one, where others write into tensors in place."""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn

# What gives a tensor of its own, whatever it reads.
_FRESH_MODULES = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.Linear,
)
_FRESH_FUNCTIONS = (operator.add, operator.mul, torch.add, torch.mul, torch.cat)


# Those of `operator` by the same names are written into a traced model's code as `a += b`, which changes what `a` is
# where it is no tensor.


def add_in_place(one: Any, other: Any) -> Any:
    """Return one with another added."""
    one += other
    return one


def subtract_in_place(one: Any, other: Any) -> Any:
    """Return one with another subtracted."""
    one -= other
    return one


def multiply_in_place(one: Any, other: Any) -> Any:
    """Return one times another."""
    one *= other
    return one


def divide_in_place(one: Any, other: Any) -> Any:
    """Return one by another."""
    one /= other
    return one


_IN_PLACE = (add_in_place, subtract_in_place, multiply_in_place, divide_in_place)


def order_of(traced: fx.GraphModule) -> dict[fx.Node, int]:
    """Return the place of each node in the order that a model computes them in."""
    return {node: index for index, node in enumerate(traced.graph.nodes)}


def can_be_one(traced: fx.GraphModule, chain: Sequence[fx.Node]) -> bool:
    """Return whether nodes can be computed together where the last of them is, and write nothing in place.

    They cannot where something that one of them reads is written into in between, nor where one of them writes into
    what others read later.

    Args:
        traced: The model.
        chain: The nodes, in the model's order; none but the last is read by others.
    """
    order = order_of(traced)
    nodes = list(order)
    for node in chain:
        others = (each for each in nodes[order[node] : order[chain[-1]]] if each not in chain)
        written = {target for other in others for target in written_by(traced, other)}
        if written and any(written & sharing(traced, each) for each in node.all_input_nodes if each not in chain):
            return False
        before = {each for target in written_by(traced, node) for each in sharing(traced, target)}
        before = {each for each in before if order[each] < order[node] and each not in chain}
        if any(each.op in ("placeholder", "get_attr") for each in before):
            return False
        if any(order[user] > order[node] for each in before for user in each.users):
            return False
    return True


def written_by(traced: fx.GraphModule, node: fx.Node) -> Sequence[fx.Node]:
    """Return whose results a node may write into: by its name or its settings, or because nothing is known of it."""
    read = node.all_input_nodes
    if node.op == "call_module":
        module = traced.get_submodule(str(node.target))
        known = isinstance(module, _FRESH_MODULES) or type(module).__module__.startswith("torch.nn.")
        return read[:1] if getattr(module, "inplace", False) else () if known else read
    if node.op not in ("call_function", "call_method"):
        return ()
    name: Any = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    named = name.endswith("_") and not name.endswith("__")
    if node.target in _IN_PLACE or named or node.kwargs.get("inplace") or any(each is True for each in node.args):
        return read[:1]
    target = node.kwargs.get("out")
    return (target,) if isinstance(target, fx.Node) else ()


def sharing(traced: fx.GraphModule, node: fx.Node) -> set[fx.Node]:
    """Return whose results may share memory with a node's, itself among them: those that come of what it comes of."""
    origins = _reached([node], lambda each: _sources(traced, each))
    return _reached(origins, lambda each: [user for user in each.users if each in _sources(traced, user)])


def _reached(first: Iterable[fx.Node], next_of: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    waiting = list(first)
    found = set(waiting)
    while waiting:
        new = set(next_of(waiting.pop())) - found
        found |= new
        waiting += new
    return found


def _sources(traced: fx.GraphModule, node: fx.Node) -> Sequence[fx.Node]:
    """Return what a node reads and may give back, whole or in part."""
    if node.op == "call_module" and isinstance(traced.get_submodule(str(node.target)), _FRESH_MODULES):
        return ()
    if node.op == "call_function" and node.target in _FRESH_FUNCTIONS:
        return ()
    return node.all_input_nodes[:1] if node.target in _IN_PLACE else node.all_input_nodes
