"""Batch norm fused with its neighbours: `use_batch_norm_kernel` rewrites a model's forward pass for training.

Measured on one H200: steps 1.10 to 1.17 times as fast, 1.23 with torch.compile (docs/climbs.md of castwise 77838da).
"""

import operator
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from castwise.errors import TechniqueError
from castwise.trial.kernels.batch_norm.aliasing import add_in_place, aliases, can_fuse, node_positions, written_inputs
from castwise.trial.kernels.batch_norm.module import (
    FusableBiasConv2d,
    FusableDropout,
    draw_seed,
    kernel_class,
    update_running_statistics,
)
from castwise.trial.kernels.batch_norm.tracing import trace_in_training
from castwise.trial.kernels.batch_norm.types import HARDSWISH, NEEDS_INPUT, RELU, SILU, Epilogue, FusedOutput, Prologue

_ACTIVATION_MODULES = {nn.ReLU: RELU, nn.SiLU: SILU, nn.Hardswish: HARDSWISH}
_ACTIVATION_FUNCTIONS = {
    nn.functional.relu: RELU,
    torch.relu: RELU,
    nn.functional.silu: SILU,
    nn.functional.hardswish: HARDSWISH,
}
_ACTIVATION_METHODS = {"relu": RELU, "relu_": RELU}
_ADDITIONS = (operator.add, torch.add, add_in_place)
_TRACED_INPUTS = (Tensor, int, float)
_CHANNELS_A_DRAW = 8  # dropout's random numbers are drawn for this many channels at once


def use_batch_norm_kernel(model: nn.Module) -> None:
    """Let a model's batch norms, and what is next to them, run by castwise's kernels in training.

    torch.fx traces the model once (`tracing.py`). Each batch norm then also computes its neighbours, as far as writes
    in place allow (`aliasing.py`): before it an addition or dropout and the biases of convolutions (`Prologue`), after
    it an addition and an activation (`Epilogue`). On a GPU Triton kernels compute all of that at once (`ops.py`).

    If the model cannot be traced as a whole, its parts that can be traced use the kernels. A trace keeps the branches
    that the code takes now, whatever they depend on; leaf modules still decide in each step.

    Raises:
        TechniqueError: torch.fx can trace no part with a batch norm that the kernels know, or Triton is not installed.
    """
    try:
        _rewrite(model)
    except TechniqueError:
        num_rewritten = 0
        for part in model.children():
            if any(part.children()) and any(map(_is_known_norm, part.modules())):  # a lone norm has no neighbours
                with suppress(TechniqueError):
                    use_batch_norm_kernel(part)
                    num_rewritten += 1
        if not num_rewritten:
            raise


def _rewrite(model: nn.Module) -> None:
    traced = trace_in_training(model)
    norms = list(_norm_nodes(traced))
    if not norms:
        raise TechniqueError("batch-norm-kernel finds no batch norm in this model.")
    if find_spec("triton") is None:
        raise TechniqueError("batch-norm-kernel needs Triton, and it is not installed. pip install triton")
    names = [str(node.target) for node in norms]
    for node in norms:
        _split_timm_norm(traced, node)
        norm = traced.get_submodule(str(node.target))
        norm.__class__ = kernel_class(cast("Any", type(norm)))
    fused = [_fuse_neighbours(traced, node) for node in norms]
    written = {target for node in traced.graph.nodes for target in written_inputs(traced, node)}
    for node in fused:
        _connect_carrier(traced, node, fused, written)
    for node in fused:
        _take_conv_biases(traced, node)
    _share_dropout_seed(traced, fused)
    output = next(node for node in traced.graph.nodes if node.op == "output")
    with traced.graph.inserting_before(output):
        modules = [traced.graph.get_attr(name) for name in names]
        statistics = [[_output_field(traced, node, name) for node in fused] for name in ("mean", "variance")]
        traced.graph.call_function(update_running_statistics, (modules, *statistics))
    traced.recompile()
    plain, trained = type(model).forward, type(traced).forward

    # The method is bound to the model and reads its weights, so that a copy trains its own. A pickled model runs the
    # forward of its class, and so does a call with anything but tensors and numbers, which the trace assumes.
    def forward(self: nn.Module, *inputs: Any, **named: Any) -> Any:
        is_traced = self.training and all(isinstance(value, _TRACED_INPUTS) for value in (*inputs, *named.values()))
        return (trained if is_traced else plain)(self, *inputs, **named)

    model.forward = MethodType(forward, model)


def _norm_nodes(traced: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield the nodes that apply a batch norm which the kernels know and which is applied once."""
    called = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    for node in traced.graph.nodes:
        if node.op == "call_module" and called.count(node.target) == 1 and len(node.args) == 1 and not node.kwargs:
            module = traced.get_submodule(str(node.target))
            if _is_known_norm(module) and module.affine and module.track_running_stats and module.momentum:
                yield node


def _is_known_norm(module: nn.Module) -> bool:
    return type(module) is nn.BatchNorm2d or _is_timm_norm(module)


def _is_timm_norm(module: nn.Module) -> bool:
    # It has dropout and an activation of its own.
    return type(module).__module__.startswith("timm.") and type(module).__name__ == "BatchNormAct2d"


def _split_timm_norm(traced: fx.GraphModule, norm: fx.Node) -> None:
    """Apply dropout and activation of timm's norm as nodes of their own, so that the norm only normalises."""
    module = traced.get_submodule(str(norm.target))
    last = norm
    for name in ("drop", "act") if _is_timm_norm(module) else ():
        if type(getattr(module, name)) is not nn.Identity:
            with traced.graph.inserting_after(last):
                part = traced.graph.call_module(f"{norm.target}.{name}", (last,))
            last.replace_all_uses_with(part, delete_user_cb=lambda user, part=part: user is not part)  # type: ignore[misc]
            last = part


def _output_field(traced: fx.GraphModule, fused: fx.Node, name: str) -> fx.Node:
    return traced.graph.call_function(operator.getitem, (fused, FusedOutput._fields.index(name)))


def _fuse_neighbours(traced: fx.GraphModule, norm: fx.Node) -> fx.Node:
    """Replace a norm and its neighbours by one call of the norm's module, and return the new node."""
    chain, epilogue = _epilogue_chain(traced, norm)
    images: Any = norm.args[0]
    prologue: Any = Prologue()
    addition = None
    if isinstance(images, fx.Node) and _can_take_addition(traced, images, chain):
        addition = images
        (images, addend) = addition.args
        prologue = prologue._replace(addend=addend, keeps_dtype=addition.target is add_in_place)
    elif isinstance(images, fx.Node) and _can_take_dropout(traced, images, chain):
        dropout = images
        chain = [dropout, *chain]
        traced.get_submodule(str(dropout.target)).__class__ = FusableDropout
        with traced.graph.inserting_before(dropout):
            prologue = prologue._replace(dropout=traced.graph.call_module(str(dropout.target), ()))
        images = dropout.args[0]
    with traced.graph.inserting_after(chain[-1]):
        fused = traced.graph.call_module(str(norm.target), (images, tuple(prologue), tuple(epilogue)))
    with traced.graph.inserting_after(fused):
        chain[-1].replace_all_uses_with(_output_field(traced, fused, "out"))
    for node in reversed(chain):  # the last first: a node that is erased must have no users
        traced.graph.erase_node(node)
    if addition is not None:
        with traced.graph.inserting_after(fused):
            addition.replace_all_uses_with(_output_field(traced, fused, "total"))
        traced.graph.erase_node(addition)
    return fused


def _epilogue_chain(traced: fx.GraphModule, norm: fx.Node) -> tuple[list[fx.Node], Any]:
    """Return a norm with the nodes after it that can be fused, and these as an `Epilogue` of nodes."""
    chain, epilogue = [norm], cast("Any", Epilogue())
    following = _only_user(norm)
    residual = None if following is None else _other_addend(following, norm)
    if following is not None and residual is not None:
        after_sum = _only_user(following)
        loses_input = after_sum is not None and _activation_code(traced, after_sum) in NEEDS_INPUT
        if not loses_input and can_fuse(traced, [norm, following]):
            chain = [norm, following]
            epilogue = epilogue._replace(residual=residual, keeps_dtype=following.target is add_in_place)
            following = after_sum
    activation = None if following is None else _activation_code(traced, following)
    if following is not None and activation is not None and can_fuse(traced, [*chain, following]):
        chain, epilogue = [*chain, following], epilogue._replace(activation=activation)
    return chain, epilogue


def _prologue_of(fused: fx.Node) -> Any:
    return Prologue(*cast("tuple[Any, ...]", fused.args[1]))


def _epilogue_of(fused: fx.Node) -> Any:
    return Epilogue(*cast("tuple[Any, ...]", fused.args[2]))


def _connect_carrier(traced: fx.GraphModule, fused: fx.Node, others: list[fx.Node], written: set[fx.Node]) -> None:
    """If a norm's result is a residual of another norm and is also read elsewhere, keep its two gradients separate.

    `written` are the nodes whose results may be written into.
    """
    result = next(node for node in fused.users if node.args[1] == FusedOutput._fields.index("out"))
    adding = [node for node in result.users if node in others and _epilogue_of(node).residual is result]
    if len(adding) != 1 or len(result.users) == 1:
        return
    (other,) = adding
    if written & aliases(traced, result) or result in (other.args[0], _prologue_of(other).addend):
        return
    fused.update_arg(2, tuple(_epilogue_of(fused)._replace(makes_carrier=True)))
    with traced.graph.inserting_after(fused):
        carrier = _output_field(traced, fused, "carrier")
    other.update_arg(2, tuple(_epilogue_of(other)._replace(carrier=carrier)))


def _take_conv_biases(traced: fx.GraphModule, fused: fx.Node) -> None:
    """Let a norm add the biases of the convolutions that feed it."""
    prologue = _prologue_of(fused)
    inputs, biases = {"images": fused.args[0], "addend": prologue.addend}, []
    for name, node in inputs.items():
        is_read_once = isinstance(node, fx.Node) and _only_user(node) is fused
        if not is_read_once or node is _epilogue_of(fused).residual or node.op != "call_module" or len(node.args) != 1:
            continue
        conv = traced.get_submodule(str(node.target))
        is_applied_once = sum(other.target == node.target for other in traced.graph.nodes) == 1
        if type(conv) is nn.Conv2d and conv.bias is not None and is_applied_once:
            conv.__class__ = FusableBiasConv2d
            node.args = (node.args[0], True)
            with traced.graph.inserting_after(node):
                biases.append(traced.graph.call_function(operator.getitem, (node, 1)))
                inputs[name] = traced.graph.call_function(operator.getitem, (node, 0))
    if biases:
        with traced.graph.inserting_before(fused):
            bias = biases[0] if len(biases) == 1 else traced.graph.call_function(operator.add, tuple(biases))
        fused.update_arg(0, inputs["images"])
        fused.update_arg(1, tuple(prologue._replace(conv_bias=bias, addend=inputs["addend"])))


def _share_dropout_seed(traced: fx.GraphModule, fused: list[fx.Node]) -> None:
    """Give all norms with dropout the step's seed, and each a layer number of its own."""
    positions = node_positions(traced)
    with_dropout = [node for node in fused if isinstance(_prologue_of(node).dropout, fx.Node)]
    with_dropout.sort(key=positions.__getitem__)
    if not with_dropout:
        return
    with traced.graph.inserting_before(with_dropout[0]):
        seed = traced.graph.call_function(draw_seed, (with_dropout[0].args[0],))
    for layer, node in enumerate(with_dropout):
        node.update_arg(1, tuple(_prologue_of(node)._replace(seed=seed, layer=layer)))


def _can_take_dropout(traced: fx.GraphModule, node: fx.Node, chain: Sequence[fx.Node]) -> bool:
    """Return whether a node is dropout that the norm at the start of a chain can compute."""
    if node.op != "call_module" or len(node.args) != 1 or _only_user(node) is not chain[0]:
        return False
    channels = cast("nn.BatchNorm2d", traced.get_submodule(str(chain[0].target))).num_features
    dropout = traced.get_submodule(str(node.target))
    is_dropout = type(dropout) in (nn.Dropout, FusableDropout) and cast("nn.Dropout", dropout).p > 0
    return is_dropout and channels % _CHANNELS_A_DRAW == 0 and can_fuse(traced, [node, *chain])


def _can_take_addition(traced: fx.GraphModule, addition: fx.Node, chain: Sequence[fx.Node]) -> bool:
    """Return whether the norm at the start of a chain can compute the addition before it.

    It cannot if another node reads the sum earlier than the chain's end.
    """
    if not addition.args or not isinstance(addition.args[0], fx.Node):
        return False
    if _other_addend(addition, addition.args[0]) is None:
        return False
    positions = node_positions(traced)
    is_read_early = any(positions[user] < positions[chain[-1]] for user in addition.users if user is not chain[0])
    return not is_read_early and can_fuse(traced, [addition, *chain])


def _other_addend(node: fx.Node, one: Any) -> fx.Node | None:
    """Return what a node adds to one of its two inputs; None if it does anything else."""
    if node.target not in _ADDITIONS or len(node.args) != 2 or node.kwargs:
        return None
    if node.target is add_in_place and node.args[0] is not one:  # the sum is written into the other
        return None
    other = next((addend for addend in node.args if addend is not one), None)
    return other if isinstance(other, fx.Node) else None


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _activation_code(traced: fx.GraphModule, node: fx.Node) -> int | None:
    """Return the code of the activation that a node applies; None if the kernels do not know it."""
    if node.op == "call_module":
        return _ACTIVATION_MODULES.get(type(traced.get_submodule(str(node.target))))
    if node.op == "call_function":
        return _ACTIVATION_FUNCTIONS.get(node.target)  # type: ignore[arg-type]
    return _ACTIVATION_METHODS.get(str(node.target)) if node.op == "call_method" else None
