"""Tells a model's batch norms what is beside them: torch.fx traces the model once, and each takes that over."""

import operator
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from castwise.errors import TechniqueError
from castwise.worker.kernels.batch_norm.aliasing import add_in_place, can_be_one, order_of, sharing, written_by
from castwise.worker.kernels.batch_norm.module import (
    BY_INPUT,
    HARDSWISH,
    RELU,
    SILU,
    After,
    Before,
    BiasBesideConv2d,
    Normed,
    OddsDropout,
    draw_seed,
    kernel_class_of,
    move_statistics,
)
from castwise.worker.kernels.batch_norm.tracing import traced_in_training

_ACTIVATION_MODULES = {nn.ReLU: RELU, nn.SiLU: SILU, nn.Hardswish: HARDSWISH}
_ACTIVATION_FUNCTIONS = {
    nn.functional.relu: RELU,
    torch.relu: RELU,
    nn.functional.silu: SILU,
    nn.functional.hardswish: HARDSWISH,
}
_ACTIVATION_METHODS = {"relu": RELU, "relu_": RELU}
_ADDITIONS = (operator.add, torch.add, add_in_place)
_TRACED = (Tensor, int, float)
_DRAWN_CHANNELS = 8  # that dropout's draws are made for at once


def use_batch_norm_kernel(model: nn.Module) -> None:
    """Let a model's batch norms, and what is beside them, run by castwise's kernels in training.

    Of a model that cannot be traced whole, those parts do that can. What the code of a model or a part chooses by,
    other than its inputs, is what it is now; layers choose each time.

    Raises:
        TechniqueError: torch.fx can trace no part that has a batch norm of the kind, or Triton is not installed.
    """
    try:
        _use_in_whole(model)
    except TechniqueError:
        used = [_is_used_in(part) for part in model.children()]  # in all of them, and not up to the first
        if not any(used):
            raise


def _is_used_in(part: nn.Module) -> bool:
    """Let a part of a model use the kernels if it can, and return whether it does."""
    if not any(map(_is_norm, part.modules())) or not any(part.children()):  # a norm alone would have nothing beside it
        return False
    try:
        use_batch_norm_kernel(part)
    except TechniqueError:
        return False
    return True


def _use_in_whole(model: nn.Module) -> None:
    traced = traced_in_training(model)
    norms = list(_norms_in(traced))
    if not norms:
        raise TechniqueError("batch-norm-kernel finds no batch norm in this model.")
    if find_spec("triton") is None:
        raise TechniqueError("batch-norm-kernel needs Triton, and it is not installed. pip install triton")
    names = [str(node.target) for node in norms]
    for node, name in zip(norms, names, strict=True):
        _take_apart(traced, node)
        norm = traced.get_submodule(name)
        norm.__class__ = kernel_class_of(cast("Any", type(norm)))
    told = [_tell(traced, node) for node in norms]
    written = {target for node in traced.graph.nodes for target in written_by(traced, node)}
    for node in told:
        _carry(traced, node, told, written)
    for node in told:
        _shift(traced, node)
    _draw(traced, told)
    end = next(node for node in traced.graph.nodes if node.op == "output")
    with traced.graph.inserting_before(end):
        moved = [traced.graph.get_attr(name) for name in names]
        figures = [[_part(traced, node, name) for node in told] for name in ("mean", "variance")]
        traced.graph.call_function(move_statistics, (moved, *figures))
    traced.recompile()
    _train_by(model, type(traced).forward)


def _train_by(model: nn.Module, trained: Callable[..., Any]) -> None:
    """Let a model's forward be another one in training; weights, their names and validation stay its own.

    It is bound to the model, and reads the weights from there: a copy trains its own. One that was pickled computes as
    the class does; so does one that is called with anything but tensors and numbers, which the trace took for such.

    Args:
        model: The model.
        trained: Takes the model, then its inputs.
    """
    plain = type(model).forward

    def forward(self: nn.Module, *inputs: Any, **named: Any) -> Any:
        is_traced = self.training and all(isinstance(each, _TRACED) for each in (*inputs, *named.values()))
        return (trained if is_traced else plain)(self, *inputs, **named)

    model.forward = MethodType(forward, model)


def _norms_in(traced: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield where a batch norm of the kind is applied, if it is applied once."""
    called = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    for node in traced.graph.nodes:
        if node.op == "call_module" and called.count(node.target) == 1 and len(node.args) == 1 and not node.kwargs:
            module = traced.get_submodule(str(node.target))
            if _is_norm(module) and module.affine and module.track_running_stats and module.momentum:
                yield node


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module is a batch norm of a kind that the kernels know."""
    return type(module) is nn.BatchNorm2d or _has_parts(module)


def _has_parts(module: nn.Module) -> bool:
    """Return whether a module is timm's batch norm that drops out and activates, too."""
    kind = type(module)
    return kind.__module__.startswith("timm.") and kind.__name__ == "BatchNormAct2d"


def _take_apart(traced: fx.GraphModule, norm: fx.Node) -> None:
    """Apply what a norm that has parts does behind normalising where it is applied, so that it only normalises."""
    module = traced.get_submodule(str(norm.target))
    last = norm
    for name in ("drop", "act") if _has_parts(module) else ():
        if type(getattr(module, name)) is not nn.Identity:
            with traced.graph.inserting_after(last):
                part = traced.graph.call_module(f"{norm.target}.{name}", (last,))
            last.replace_all_uses_with(part, delete_user_cb=lambda user, part=part: user is not part)  # type: ignore[misc]
            last = part


def _part(traced: fx.GraphModule, told: fx.Node, name: str) -> fx.Node:
    """Return a new node, where the graph is inserted into, with one of what a told norm gives."""
    return traced.graph.call_function(operator.getitem, (told, Normed._fields.index(name)))


def _tell(traced: fx.GraphModule, norm: fx.Node) -> fx.Node:
    """Put a told norm in the place of a norm and what is beside it; return where it is."""
    chain, then = _chain_from(traced, norm)
    images: Any = norm.args[0]
    before: Any = Before()
    addition = None
    if isinstance(images, fx.Node) and _is_taken_over(traced, images, chain):
        addition = images
        (images, addend) = addition.args
        before = before._replace(addend=addend, keeps_dtype=addition.target is add_in_place)
    elif isinstance(images, fx.Node) and _is_dropped(traced, images, chain):
        chain = [images, *chain]
        traced.get_submodule(str(images.target)).__class__ = OddsDropout
        with traced.graph.inserting_before(images):
            before = before._replace(dropped=traced.graph.call_module(str(images.target), ()))
        images = images.args[0]
    with traced.graph.inserting_after(chain[-1]):
        told = traced.graph.call_module(str(norm.target), (images, tuple(before), tuple(then)))
    with traced.graph.inserting_after(told):
        chain[-1].replace_all_uses_with(_part(traced, told, "out"))
    for node in reversed(chain):  # from the last on, so that nobody uses what is erased
        traced.graph.erase_node(node)
    if addition is not None:
        with traced.graph.inserting_after(told):
            addition.replace_all_uses_with(_part(traced, told, "total"))
        traced.graph.erase_node(addition)
    return told


def _chain_from(traced: fx.GraphModule, norm: fx.Node) -> tuple[list[fx.Node], Any]:
    """Return a norm and what behind it can be one with it, and that as `After`, of nodes."""
    chain, then = [norm], cast("Any", After())
    after = _only_user(norm)
    other = None if after is None else _other_of(after, norm)
    if after is not None and other is not None:
        following = _only_user(after)
        is_lost = following is not None and _activation_of(traced, following) in BY_INPUT
        if not is_lost and can_be_one(traced, [norm, after]):
            chain, then = [norm, after], then._replace(residual=other, keeps_dtype=after.target is add_in_place)
            after = following
    found = None if after is None else _activation_of(traced, after)
    if after is not None and found is not None and can_be_one(traced, [*chain, after]):
        chain, then = [*chain, after], then._replace(activation=found)
    return chain, then


def _before(told: fx.Node) -> Any:
    """Return a told norm's `Before`, of nodes."""
    return Before(*cast("tuple[Any, ...]", told.args[1]))


def _after(told: fx.Node) -> Any:
    """Return a told norm's `After`, of nodes."""
    return After(*cast("tuple[Any, ...]", told.args[2]))


def _carry(traced: fx.GraphModule, told: fx.Node, others: list[fx.Node], written: set[fx.Node]) -> None:
    """Let a result's gradient from where it is a residual come by itself, if it has another one.

    Args:
        traced: The model.
        told: Where the result is computed.
        others: All told norms.
        written: Whose results may be written into.
    """
    result = next(node for node in told.users if node.args[1] == Normed._fields.index("out"))
    adding = [node for node in result.users if node in others and _after(node).residual is result]
    if len(adding) != 1 or len(result.users) == 1:
        return
    (other,) = adding
    if written & sharing(traced, result) or result in (other.args[0], _before(other).addend):
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
        is_read = isinstance(node, fx.Node) and _only_user(node) is told and node is not _after(told).residual
        if is_read and _has_bias_alone(traced, node):
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
    if node.op != "call_module" or len(node.args) != 1:
        return False
    module = traced.get_submodule(str(node.target))
    is_such = type(module) is nn.Conv2d and module.bias is not None
    return is_such and sum(other.target == node.target for other in traced.graph.nodes) == 1


def _draw(traced: fx.GraphModule, told: list[fx.Node]) -> None:
    """Give the norms that drop numbers out a step's seed, and each a layer of its own."""
    order = order_of(traced)
    dropping = sorted((node for node in told if isinstance(_before(node).dropped, fx.Node)), key=order.__getitem__)
    if not dropping:
        return
    with traced.graph.inserting_before(dropping[0]):
        seed = traced.graph.call_function(draw_seed, (dropping[0].args[0],))
    for layer, node in enumerate(dropping):
        node.update_arg(1, tuple(_before(node)._replace(seed=seed, layer=layer)))


def _is_dropped(traced: fx.GraphModule, node: fx.Node, chain: Sequence[fx.Node]) -> bool:
    """Return whether a node is dropout that a norm, the first of a chain, can do."""
    if node.op != "call_module" or len(node.args) != 1 or _only_user(node) is not chain[0]:
        return False
    channels = cast("nn.BatchNorm2d", traced.get_submodule(str(chain[0].target))).num_features
    dropout = traced.get_submodule(str(node.target))
    is_such = type(dropout) in (nn.Dropout, OddsDropout) and cast("nn.Dropout", dropout).p > 0
    return is_such and channels % _DRAWN_CHANNELS == 0 and can_be_one(traced, [node, *chain])


def _is_taken_over(traced: fx.GraphModule, addition: fx.Node, chain: Sequence[fx.Node]) -> bool:
    """Return whether a norm, the first of a chain, can do the addition before it: nobody else reads the sum earlier."""
    if not addition.args or _other_of(addition, addition.args[0]) is None or not isinstance(addition.args[0], fx.Node):
        return False
    order = order_of(traced)
    is_early = any(order[user] < order[chain[-1]] for user in addition.users if user is not chain[0])
    return not is_early and can_be_one(traced, [addition, *chain])


def _other_of(node: fx.Node, one: Any) -> fx.Node | None:
    """Return what a node adds to one of the two that it adds; None where it does anything else."""
    if node.target not in _ADDITIONS or len(node.args) != 2 or node.kwargs:
        return None
    if node.target is add_in_place and node.args[0] is not one:  # the sum is the other's
        return None
    other = next((each for each in node.args if each is not one), None)
    return other if isinstance(other, fx.Node) else None


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _activation_of(traced: fx.GraphModule, node: fx.Node) -> int | None:
    """Return which activation a node is; None where it is none of those."""
    if node.op == "call_module":
        return _ACTIVATION_MODULES.get(type(traced.get_submodule(str(node.target))))
    if node.op == "call_function":
        return _ACTIVATION_FUNCTIONS.get(node.target)  # type: ignore[arg-type]
    return _ACTIVATION_METHODS.get(str(node.target)) if node.op == "call_method" else None
