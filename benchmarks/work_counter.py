"""What a training step of a workload computes and moves, counted on torch's meta device: no GPU, no data, no weights.

Counted are the operations that torch's own loop does, with these assumptions of how a fused loop moves their tensors:

- A product or convolution reads both factors and writes its result; in backward it does so for the gradient of its
  input and once more for that of its weights.
- Batch norm reads a convolution's output for its statistics, reads it again and writes it normalised; in backward it
  reads output and gradient for two sums, and both again to write the gradient.
- Element-wise operations (activations, dropout, casts, scaling) are part of the kernel before or behind them and move
  nothing; an addition of two tensors, of a residual or of gradients that meet, reads one of them more.
- Pooling, softmax and losses read what they take and write what they give. Concatenation, bias and their sums are free.
- A recurrent layer reads its weights once a pass over the sequence, not once a step.

Nothing stays in the cache from one operation to the next.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from kernel_products import Product, products_of
from least_time import Operation, Work
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from castwise.registry.workloads import Workload
from castwise.spec.recipe import Recipe
from castwise.worker.models import build_task
from castwise.worker.models.task import Task

_META = torch.device("meta")
_STATES = {"Adam": 2, "AdamW": 2, "Adadelta": 2}  # SGD has one with momentum
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def count_work(row: Workload, batch_size: int, recipe: Recipe | None = None) -> Work:
    """Return what one step does.

    Args:
        row: The workload.
        batch_size: Samples of the step.
        recipe: The training run, where its optimizer is another than the workload's.
    """
    return count_step(row, batch_size, recipe)[0]


def count_step(row: Workload, batch_size: int, recipe: Recipe | None = None) -> tuple[Work, tuple[Product, ...]]:
    """Return what one step does, and its products in their order; those of recurrent layers are not among them.

    Args:
        row: The workload.
        batch_size: Samples of the step.
        recipe: The training run, where its optimizer is another than the workload's.
    """
    with _META:
        task = build_task(row)
    operations, products = record_step(task, batch_size)
    own = recipe.optimizer if recipe is not None else None
    name, arguments = (
        (row.optimizer.name, dict(row.optimizer.arguments)) if own is None else (own.name, dict(own.arguments))
    )
    work = Work(
        operations=operations,
        num_parameters=sum(each.numel() for each in task.model.parameters() if each.requires_grad),
        num_states=_STATES.get(name, int(bool(arguments.get("momentum")))),
        clips=row.clip_grad_norm is not None,
    )
    return work, products


def record_step(task: Task, batch_size: int) -> tuple[tuple[Operation, ...], tuple[Product, ...]]:
    """Return the operations and the products of forward, loss and backward, in their order.

    Args:
        task: Its model is on the meta device.
        batch_size: Samples of the step.
    """
    batch = task.make_batches(1, batch_size, torch.device("cpu"), torch.Generator())[0]
    recorder = _Recorder()
    _replace_recurrent(task.model, recorder)
    with recorder:
        loss = task.compute_loss(task.model, tuple(part.to(_META) for part in batch))
        recorder.is_backward = True
        loss.backward()  # type: ignore[no-untyped-call]
    return tuple(recorder.operations), tuple(recorder.products)


def units_per_sample(row: Workload) -> int:
    """Return the units of throughput in a sample: the tokens of a language model's column, else 1."""
    with _META:
        return build_task(row).units_per_sample


class _Recorder(TorchDispatchMode):
    """Notes every operation that computes products or moves tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.products: list[Product] = []
        self.is_backward = False

    def add(self, name: str, flops: float, elements: float) -> None:
        """Note an operation."""
        if flops or elements:
            self.operations.append(Operation(name, flops, elements))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        rule = _RULES.get(packet.__name__)
        self.add(packet.__name__, _flops(packet, args, kwargs or {}, out), rule(args, out) if rule is not None else 0)
        self.products += products_of(packet.__name__, args, out, self.is_backward)
        return out


def _flops(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    if packet.__name__ == "convolution_backward":  # torch's own count takes no heed of groups there
        gradient, _, weight = args[:3]
        return sum(2.0 * gradient.numel() * weight[0].numel() for each in out[:2] if each is not None)
    count = flop_registry.get(packet)
    return float(count(*args, **kwargs, out_val=out)) if count is not None else 0.0


def _numel(values: Any) -> float:
    tensors = (each for each in tree_leaves(values) if isinstance(each, Tensor))
    return float(sum(each.numel() for each in tensors if each.is_floating_point()))


def _all(args: tuple[Any, ...], out: Any) -> float:
    return _numel(args) + _numel(out)


def _reads(args: tuple[Any, ...], out: Any) -> float:
    del out
    return _numel(args)


def _convolution_backward(args: tuple[Any, ...], out: Any) -> float:
    gradient, images, weight = args[:3]
    of_images, of_weight = out[0], out[1]
    moved = 0.0
    if of_images is not None:
        moved += _numel((gradient, weight, of_images))
    if of_weight is not None:
        moved += _numel((gradient, images, of_weight))
    return moved


def _batch_norm(args: tuple[Any, ...], out: Any) -> float:
    return 2 * _numel(args[0]) + _numel(out[0])


def _batch_norm_backward(args: tuple[Any, ...], out: Any) -> float:
    return 2 * _numel(args[:2]) + _numel(out[0])


def _max_pool(args: tuple[Any, ...], out: Any) -> float:
    return _numel(args[0]) + _numel(out[0])


def _embedding(args: tuple[Any, ...], out: Any) -> float:
    del args
    return 2 * _numel(out)  # the rows that are looked up, not the table


def _sum_of_two(args: tuple[Any, ...], out: Any) -> float:
    both = [each for each in args[:2] if isinstance(each, Tensor) and each.shape == out.shape]
    return _numel(out) if len(both) == 2 else 0.0


_RULES: dict[str, Callable[[tuple[Any, ...], Any], float]] = {
    **dict.fromkeys(("convolution", "mm", "addmm", "bmm", "mse_loss", "mse_loss_backward"), _all),
    **dict.fromkeys(("avg_pool2d", "avg_pool2d_backward", "max_pool2d_with_indices_backward"), _all),
    **dict.fromkeys(("mean", "_log_softmax"), _reads),
    "_log_softmax_backward_data": lambda args, out: _numel(args[1]) + _numel(out),
    "convolution_backward": _convolution_backward,
    "native_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "max_pool2d_with_indices": _max_pool,
    "embedding": _embedding,
    "embedding_dense_backward": lambda args, out: _numel(args[0]) + _numel(out),
    **dict.fromkeys(("add", "add_"), _sum_of_two),
}


def _replace_recurrent(model: nn.Module, recorder: _Recorder) -> None:
    """Put stand-ins in the place of recurrent layers: torch's own decompose into steps that cuDNN's kernels are not."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.RNNBase):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, _RecurrentStandIn(module, recorder))


class _RecurrentStandIn(nn.Module):
    """Returns empty outputs of a recurrent layer's shape, and notes what cuDNN's would compute and move."""

    def __init__(self, layer: nn.RNNBase, recorder: _Recorder) -> None:
        super().__init__()
        assert not layer.bidirectional
        assert not layer.batch_first
        self.layer, self._recorder = layer, recorder  # the layer's weights stay among the model's

    def forward(self, inputs: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        """Return the outputs, of shape (steps, batch, hidden), and no state."""
        del hidden
        layer, samples = self.layer, inputs.shape[0] * inputs.shape[1]
        gates = _GATES[layer.mode.split("_")[0]] * layer.hidden_size
        for index in range(layer.num_layers):
            width = layer.input_size if index == 0 else layer.hidden_size
            weights = gates * (width + layer.hidden_size)
            flops = 2.0 * samples * weights
            # Inputs, outputs, and the gates, which are kept for backward.
            moved = samples * (width + layer.hidden_size + gates)
            self._recorder.add("recurrent", flops, moved + weights)
            # Backward: of the inputs, and of the weights; gates and gradients are read, and gradients are written.
            self._recorder.add("recurrent_backward", 2 * flops, 2 * moved + 2 * weights)
        outputs: Tensor = _Through.apply(inputs, layer.hidden_size, next(iter(layer.parameters())))
        return outputs, _state(layer, inputs)


class _Through(torch.autograd.Function):
    """Outputs of another width that depend on the inputs, without an operation that is counted."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, width: int, weight: Tensor) -> Tensor:
        """Return empty outputs."""
        ctx.shapes = inputs.shape, weight.shape
        return inputs.new_empty(*inputs.shape[:-1], width)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
        """Return empty gradients."""
        inputs, weight = ctx.shapes
        return gradient.new_empty(inputs), None, gradient.new_empty(weight)


def _state(layer: nn.RNNBase, inputs: Tensor) -> Any:
    state = inputs.new_empty(layer.num_layers, inputs.shape[1], layer.hidden_size)
    return (state, state) if isinstance(layer, nn.LSTM) else state
