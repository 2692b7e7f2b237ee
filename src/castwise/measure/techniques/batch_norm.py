"""Batch norm by kernels of castwise's own, with the addition and the activation that follow it in the same ones."""

import operator
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, fx, nn

from castwise.errors import UsageError

NO_ACTIVATION = 0
RELU = 1
SILU = 2

_MODULES = {nn.ReLU: RELU, nn.SiLU: SILU}
_FUNCTIONS = {nn.functional.relu: RELU, torch.relu: RELU, nn.functional.silu: SILU}
_METHODS = {"relu": RELU, "relu_": RELU}
_ADDITIONS = (operator.add, operator.iadd, torch.add)
_COMPUTED: dict[int, Callable[[Tensor], Tensor]] = {
    NO_ACTIVATION: lambda value: value,
    RELU: nn.functional.relu,
    SILU: nn.functional.silu,
}


class KernelBatchNorm(nn.BatchNorm2d):
    """A batch norm that, where it is told what follows it, does that too, by castwise's kernels."""

    def forward(self, input: Tensor, residual: Tensor | None = None, activation: int | None = None) -> Any:  # noqa: A002
        """Return the normalised images; told what follows, the result of that, the images' means and variances.

        The running statistics are left to `RunningStatistics` then; where torch computed it, there are no means and
        variances, and torch has done so.

        Args:
            input: Shape (N, C, H, W).
            residual: The same shape; None adds nothing.
            activation: `NO_ACTIVATION`, `RELU` or `SILU`; None is not told.
        """
        if activation is None:
            return super().forward(input)
        if not (self.training and _is_for_kernels(input, residual)):
            value = super().forward(input)
            return _COMPUTED[activation](value if residual is None else value + residual), None, None
        from castwise.measure.techniques.batch_norm_kernels import batch_norm

        out, mean, variance, _ = batch_norm(input, residual, self.weight, self.bias, self.eps, activation)
        return out, mean, variance


def _is_for_kernels(images: Tensor, residual: Tensor | None) -> bool:
    both = [images] if residual is None else [images, residual]
    return images.device.type == "cuda" and all(
        each.shape == images.shape
        and each.dtype == images.dtype
        and each.is_contiguous(memory_format=torch.channels_last)
        for each in both
    )


class RunningStatistics(nn.Module):
    """Brings the running statistics of batch norms up to date, all at once."""

    def __init__(self, norms: Sequence[nn.BatchNorm2d]) -> None:
        """Remember whose they are, without making them its own.

        Args:
            norms: The batch norms, all with a momentum.
        """
        super().__init__()
        self.norms = tuple(norms)

    @torch.no_grad()
    def forward(self, means: Sequence[Tensor | None], variances: Sequence[Tensor | None]) -> None:
        """Move each norm's statistics by its momentum towards these; None where torch has done so.

        Args:
            means: Of a norm's images, of shape (C,), one for each norm.
            variances: The same, unbiased.
        """
        for momentum in dict.fromkeys(norm.momentum for norm in self.norms):
            own = [
                (norm, mean, variance)
                for norm, mean, variance in zip(self.norms, means, variances, strict=True)
                if norm.momentum == momentum and mean is not None and variance is not None
            ]
            if not own:
                continue
            running = [each for norm, _, _ in own for each in (norm.running_mean, norm.running_var)]
            now = [each.to(norm.running_mean.dtype) for norm, *both in own for each in both]  # type: ignore[union-attr]
            torch._foreach_lerp_(running, now, momentum)  # type: ignore[arg-type]
            torch._foreach_add_([norm.num_batches_tracked for norm, _, _ in own], 1)  # type: ignore[misc]


def use_batch_norm_kernel(model: nn.Module) -> None:
    """Let a model's batch norms, and the additions and activations behind them, run by castwise's kernels in training.

    Raises:
        UsageError: torch.fx cannot trace the model, it has no batch norm of the kind, or Triton is not installed.
    """
    try:
        traced = fx.symbolic_trace(model)
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
    told = [_tell(traced, node) for node in norms]
    modules = [traced.get_submodule(str(node.target)) for node in norms]
    for module in modules:
        module.__class__ = KernelBatchNorm
    traced.add_submodule("running_statistics", RunningStatistics(modules))  # type: ignore[arg-type]
    end = next(node for node in traced.graph.nodes if node.op == "output")
    with traced.graph.inserting_before(end):
        figures = [[traced.graph.call_function(operator.getitem, (node, place)) for node in told] for place in (1, 2)]
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


def _tell(traced: fx.GraphModule, norm: fx.Node) -> fx.Node:
    """Put a norm with what follows it in the place of both; return where its result and statistics are."""
    last, residual, activation = norm, None, NO_ACTIVATION
    after = _only_user(last)
    if after is not None and after.target in _ADDITIONS and len(after.args) == 2 and not after.kwargs:
        other = next((each for each in after.args if each is not last), None)
        following = _only_user(after)
        if isinstance(other, fx.Node) and (following is None or _activation_of(traced, following) != SILU):
            last, residual, after = after, other, following
    if after is not None and (found := _activation_of(traced, after)) is not None:
        last, activation = after, found
    with traced.graph.inserting_after(last):
        told = traced.graph.call_module(str(norm.target), (norm.args[0], residual, activation))
    with traced.graph.inserting_after(told):
        result = traced.graph.call_function(operator.getitem, (told, 0))
    last.replace_all_uses_with(result)
    while last is not norm:  # from the last on, so that nobody uses what is erased
        below = next(each for each in last.all_input_nodes if each is not residual)
        traced.graph.erase_node(last)
        last = below
    traced.graph.erase_node(norm)
    return told


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _activation_of(traced: fx.GraphModule, node: fx.Node) -> int | None:
    """Return which activation a node is; None where it is none of those."""
    if node.op == "call_module":
        return _MODULES.get(type(traced.get_submodule(str(node.target))))
    if node.op == "call_function":
        return _FUNCTIONS.get(node.target)  # type: ignore[arg-type]
    return _METHODS.get(str(node.target)) if node.op == "call_method" else None
