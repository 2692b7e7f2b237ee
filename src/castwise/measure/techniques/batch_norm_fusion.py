"""Tells a model's batch norms what is beside them: torch.fx traces the model once, and each takes that over."""

import operator
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import fx, nn

from castwise.errors import UsageError
from castwise.measure.techniques.batch_norm import (
    NO_ACTIVATION,
    RELU,
    SILU,
    After,
    Before,
    BiasBesideConv2d,
    DropoutSeed,
    KernelBatchNorm,
    Normed,
    RunningStatistics,
)

_MODULES = {nn.ReLU: RELU, nn.SiLU: SILU}
_FUNCTIONS = {nn.functional.relu: RELU, torch.relu: RELU, nn.functional.silu: SILU}
_METHODS = {"relu": RELU, "relu_": RELU}
_ADDITIONS = (operator.add, operator.iadd, torch.add)
_DRAWN_CHANNELS = 8  # that dropout's draws are made for at once


class _Tracer(fx.Tracer):
    """Follows a model down to modules without children, whose code may choose by what it reads."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return super().is_leaf_module(m, module_qualified_name) or not any(m.children())


def use_batch_norm_kernel(model: nn.Module) -> None:
    """Let a model's batch norms, and the additions and activations beside them, run by castwise's kernels in training.

    Raises:
        UsageError: torch.fx cannot trace the model, it has no batch norm of the kind, or Triton is not installed.
    """
    try:
        traced = fx.GraphModule(model, _Tracer().trace(model))
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"batch-norm-kernel needs a model that torch.fx can trace: {reason}") from error
    if any(node.op == "get_attr" for node in traced.graph.nodes):  # these would not move with the model
        raise UsageError("batch-norm-kernel needs a model whose weights are all its modules'.")
    norms = list(_norms_in(traced))
    if not norms:
        raise UsageError("batch-norm-kernel finds no batch norm in this model.")
    if find_spec("triton") is None:
        raise UsageError("batch-norm-kernel needs Triton, and it is not installed. pip install triton")
    modules = [traced.get_submodule(str(node.target)) for node in norms]
    for module in modules:
        module.__class__ = KernelBatchNorm
    told = [_tell(traced, node) for node in norms]
    for node in told:
        _carry(traced, node, told)
    for node in told:
        _shift(traced, node)
    _draw(traced, told)
    traced.add_submodule("running_statistics", RunningStatistics(modules))  # type: ignore[arg-type]
    end = next(node for node in traced.graph.nodes if node.op == "output")
    with traced.graph.inserting_before(end):
        figures = [[_part(traced, node, name) for node in told] for name in ("mean", "variance")]
        traced.graph.call_module("running_statistics", tuple(figures))
    traced.recompile()
    _train_by(model, traced)


def _train_by(model: nn.Module, traced: fx.GraphModule) -> None:
    """Let a model's forward be another's in training; weights, their names and validation stay its own."""
    plain = model.forward

    def forward(*inputs: Any, **named: Any) -> Any:
        return traced.forward(*inputs, **named) if model.training else plain(*inputs, **named)

    model.forward = forward


def _norms_in(traced: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield where a batch norm of the kind is applied, if it is applied once."""
    called = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    for node in traced.graph.nodes:
        if node.op == "call_module" and called.count(node.target) == 1 and len(node.args) == 1 and not node.kwargs:
            module = traced.get_submodule(str(node.target))
            if type(module) is nn.BatchNorm2d and module.affine and module.track_running_stats and module.momentum:
                yield node


def _part(traced: fx.GraphModule, told: fx.Node, name: str) -> fx.Node:
    """Return a new node, where the graph is inserted into, with one of what a told norm gives."""
    return traced.graph.call_function(operator.getitem, (told, Normed._fields.index(name)))


def _tell(traced: fx.GraphModule, norm: fx.Node) -> fx.Node:
    """Put a told norm in the place of a norm and what is beside it; return where it is."""
    last, residual, activation = norm, None, NO_ACTIVATION
    after = _only_user(last)
    other = None if after is None else _other_of(after, last)
    if after is not None and other is not None:
        following = _only_user(after)
        if following is None or _activation_of(traced, following) != SILU:
            last, residual, after = after, other, following
    if after is not None and (found := _activation_of(traced, after)) is not None:
        last, activation = after, found
    images: Any = norm.args[0]
    before: Any = Before()
    first = norm
    if isinstance(images, fx.Node) and _is_taken_over(images, norm, last):
        (images, addend), first = images.args, images
        before = before._replace(addend=addend)
    elif (dropped := _dropped(traced, norm)) > 0:
        images, first = images.args[0], images
        before = before._replace(dropped=dropped)
    with traced.graph.inserting_after(last):
        then: Any = (residual, None, activation, False)
        told = traced.graph.call_module(str(norm.target), (images, tuple(before), then))
    with traced.graph.inserting_after(told):
        result = _part(traced, told, "out")
    last.replace_all_uses_with(result)
    while last is not norm:  # from the last on, so that nobody uses what is erased
        below = next(each for each in last.all_input_nodes if each is not residual)
        traced.graph.erase_node(last)
        last = below
    traced.graph.erase_node(norm)
    if first is not norm:
        with traced.graph.inserting_after(told):
            first.replace_all_uses_with(_part(traced, told, "total"))
        traced.graph.erase_node(first)
    return told


def _before(told: fx.Node) -> Any:
    """Return a told norm's `Before`, of nodes."""
    return Before(*cast("tuple[Any, ...]", told.args[1]))


def _after(told: fx.Node) -> Any:
    """Return a told norm's `After`, of nodes."""
    return After(*cast("tuple[Any, ...]", told.args[2]))


def _carry(traced: fx.GraphModule, told: fx.Node, others: list[fx.Node]) -> None:
    """Let a result's gradient from where it is a residual come by itself, if it has another one."""
    result = next(node for node in told.users if node.args[1] == Normed._fields.index("out"))
    adding = [node for node in result.users if node in others and _after(node).residual is result]
    if len(adding) != 1 or len(result.users) == 1:
        return
    (other,) = adding
    if result in (other.args[0], _before(other).addend):
        return
    told.update_arg(2, tuple(_after(told)._replace(is_forked=True)))
    with traced.graph.inserting_after(told):
        carrier = _part(traced, told, "carrier")
    other.update_arg(2, tuple(_after(other)._replace(carrier=carrier)))


def _shift(traced: fx.GraphModule, told: fx.Node) -> None:
    """Let a norm add the biases of the convolutions before it."""
    before = _before(told)
    results, biases = {"images": told.args[0], "addend": before.addend}, []
    for name, node in results.items():
        if isinstance(node, fx.Node) and _only_user(node) is told and _has_bias_alone(traced, node):
            traced.get_submodule(str(node.target)).__class__ = BiasBesideConv2d
            node.args = (node.args[0], True)
            with traced.graph.inserting_after(node):
                biases.append(traced.graph.call_function(operator.getitem, (node, 1)))
                results[name] = traced.graph.call_function(operator.getitem, (node, 0))
    if biases:
        with traced.graph.inserting_before(told):
            shift = biases[0] if len(biases) == 1 else traced.graph.call_function(operator.add, tuple(biases))
        told.update_arg(0, results["images"])
        told.update_arg(1, tuple(before._replace(shift=shift, addend=results["addend"])))


def _has_bias_alone(traced: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a node applies a convolution that has a bias, and is applied nowhere else."""
    if node.op != "call_module":
        return False
    module = traced.get_submodule(str(node.target))
    is_such = type(module) is nn.Conv2d and module.bias is not None
    return is_such and sum(other.target == node.target for other in traced.graph.nodes) == 1


def _draw(traced: fx.GraphModule, told: list[fx.Node]) -> None:
    """Give the norms that drop numbers out a step's seed, and each a layer of its own."""
    dropping = [node for node in told if _before(node).dropped > 0]
    if not dropping:
        return
    traced.add_submodule("dropout_seed", DropoutSeed())
    images = next(node for node in traced.graph.nodes if node.op == "placeholder")
    with traced.graph.inserting_after(images):
        seed = traced.graph.call_module("dropout_seed", (images,))
    for layer, node in enumerate(dropping):
        node.update_arg(1, tuple(_before(node)._replace(seed=seed, layer=layer)))


def _dropped(traced: fx.GraphModule, norm: fx.Node) -> float:
    """Return the probability of the dropout whose result a norm alone reads; 0 where there is none."""
    node = norm.args[0]
    if not (isinstance(node, fx.Node) and node.op == "call_module" and _only_user(node) is norm):
        return 0.0
    module = traced.get_submodule(str(node.target))
    channels = cast("nn.BatchNorm2d", traced.get_submodule(str(norm.target))).num_features
    if type(module) is not nn.Dropout or not 0 < module.p < 1 or channels % _DRAWN_CHANNELS:
        return 0.0
    return module.p


def _is_taken_over(addition: fx.Node, norm: fx.Node, last: fx.Node) -> bool:
    """Return whether a norm can do the addition before it: nobody else reads the sum before `last`."""
    one = addition.args[0] if addition.args else None
    if not isinstance(one, fx.Node) or _other_of(addition, one) is None:
        return False
    if addition.target is operator.iadd and len(one.users) > 1:  # who reads it later reads the sum
        return False
    order = {node: index for index, node in enumerate(addition.graph.nodes)}
    return all(order[user] > order[last] for user in addition.users if user is not norm)


def _other_of(node: fx.Node, one: Any) -> fx.Node | None:
    """Return what a node adds to one of the two that it adds; None where it does anything else."""
    if node.target not in _ADDITIONS or len(node.args) != 2 or node.kwargs:
        return None
    other = next((each for each in node.args if each is not one), None)
    return other if isinstance(other, fx.Node) else None


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _activation_of(traced: fx.GraphModule, node: fx.Node) -> int | None:
    """Return which activation a node is; None where it is none of those."""
    if node.op == "call_module":
        return _MODULES.get(type(traced.get_submodule(str(node.target))))
    if node.op == "call_function":
        return _FUNCTIONS.get(node.target)  # type: ignore[arg-type]
    return _METHODS.get(str(node.target)) if node.op == "call_method" else None
