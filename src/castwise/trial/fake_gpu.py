"""A GPU that is not there: CUDA tensors without values, and backward passes over them, on any machine.

FakeTensorMode makes tensors of shapes alone, for which autocast and autograd follow CUDA's rules. Without a driver
torch lacks the rest: its engine asks the driver for streams, so `_run_backward` takes its place; which kernels
attention and recurrent layers take depends on the GPU, so `Kernels` names those of GPUs since Ampere.
"""

import heapq
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from traceback import walk_stack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from castwise.trial.user_model.source import calling_line, is_own

_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_RUN_BACKWARD = torch.autograd.graph._engine_run_backward
_aten: Any = torch.ops.aten
_HOOKS = f"{Path(__file__).parent / 'script'}{os.sep}"
_LEAF = "torch::autograd::AccumulateGrad"
# A gradient that backward alone holds has this many references: two variables, and the argument of getrefcount.
_UNSHARED = 3
# The widest head of flash attention. Source: pytorch aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
_WIDEST_HEAD = 256
# Matrices of a recurrent layer, by torch's function.
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@contextmanager
def fake_gpu(guesses: dict[str, None]) -> Iterator[None]:
    """Let all new tensors be fake, those on "cuda" too. A number that the host reads is 1, a truth value False.

    `guesses` gets the lines of the user's code that read such a value. It is for a process of its own: libraries may
    keep what they read, as torchao keeps its maps of 8 bits.
    """
    with ExitStack() as stack:
        for owner, name, function in replaced():
            stack.enter_context(patch.object(owner, name, function))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False))
        stack.enter_context(Values(guesses))
        stack.enter_context(Kernels())
        yield


def replaced() -> list[tuple[Any, str, Any]]:
    """Return what torch has to do otherwise, in all threads: an object, the attribute, and what takes its place."""

    def step(_: Any, optimizer: Any, __: Any, *args: Any, **named: Any) -> Any:
        return optimizer.step(*args, **named)

    optimizers = sys.modules["torch.optim.optimizer"]  # torch.optim hides it behind a function
    return [
        (fake_tensor, "init_gpu_context", lambda _: None),
        (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        (torch.cuda, "is_bf16_supported", lambda *_, **__: True),
        (torch.cuda, "_lazy_init", lambda: None),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch, "Generator", _CpuGenerator),
        (torch, "compile", lambda function=None, **_: function),  # by which torchao's optimizers step
        (torch.nn.functional, "scaled_dot_product_attention", _attention),  # as nn.MultiheadAttention calls it
        (torch.utils, "swap_tensors", _adopt),
        (fake_tensor.FakeTensor, "__deepcopy__", _copy),
        (torch.autograd, "_engine_run_backward", _run_backward),
        (torch.autograd.graph, "_engine_run_backward", _run_backward),
        (torch._C, "_current_graph_task_id", lambda: _Backward.task),  # one for what a checkpoint computes again
        (torch.amp.GradScaler, "_maybe_opt_step", step),  # no gradient overflows
        (optimizers, "_foreach_supported_types", [Tensor, torch.nn.Parameter, fake_tensor.FakeTensor]),
    ]


class Saved:
    """A tensor that is saved for backward, until backward has used it."""

    read_now: list["Saved"] = []  # noqa: RUF012  by the node that runs

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor

    def read(self) -> Tensor:
        if self._tensor is None:
            raise RuntimeError("Trying to backward through the graph a second time, which is not retained.")
        self.read_now.append(self)
        return self._tensor

    def release(self) -> None:
        self._tensor = None


class _CpuGenerator(torch.Generator):
    """A generator of the CPU, whatever device is named: a fake GPU draws nothing."""

    def __new__(cls, device: Any = None) -> "_CpuGenerator":
        del device
        return super().__new__(cls)


def _adopt(old: Any, new: Any) -> None:
    """Change a module's weight in place: torch's own function refuses fake tensors, to which weak references exist."""
    old.data, old.fake_device = new.data, new.fake_device


def _copy(tensor: Any, memo: dict[int, Any]) -> Any:
    if id(tensor) not in memo:
        made = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        memo[id(tensor)] = torch.nn.Parameter(made, tensor.requires_grad) if hasattr(tensor, "_is_param") else made
    return memo[id(tensor)]


class Values(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stands in for values, which fake tensors have none of."""

    def __init__(self, guesses: dict[str, None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._guesses = guesses

    def note_guess(self) -> bool:
        """Note the line that reads a value; return False if castwise's own hooks in a script do."""
        for frame, _ in walk_stack(sys._getframe()):
            if frame.f_code.co_filename.startswith(_HOOKS):
                return False
            if is_own(frame.f_code.co_filename):
                self._guesses[calling_line()] = None
                break
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if func is _aten._local_scalar_dense.default:
            number = int(self.note_guess())
            dtype = args[0].dtype
            return False if dtype == torch.bool else float(number) if dtype.is_floating_point else number
        if func in (_aten.equal.default, _aten.allclose.default):
            return True
        if func.__name__.startswith("_fused_sgd_"):  # in place, and unknown to fake tensors
            return None
        kwargs = kwargs or {}
        return func(*args, **kwargs | ({"generator": None} if "generator" in kwargs else {}))  # it is the CPU's


class Kernels(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func is _ATTENTION:
            return _attention(*args, **kwargs)
        if getattr(func, "__name__", "") in _GATES and args and args[0].device.type == "cuda":
            return _recur(_GATES[func.__name__], *args)
        return func(*args, **kwargs)


def _attention(*args: Any, **kwargs: Any) -> Any:
    made = _attend(*args, **kwargs)
    return _ATTENTION(*args, **kwargs) if made is None else made


def _attend(  # noqa: PLR0913, PLR0917  as torch has them
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Return what the flash or the memory-efficient kernel does; None if torch takes neither."""
    if query.device.type != "cuda" or query.dim() != 4:
        return None
    given = [query, key, value]
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        given = [each.to(dtype) if each.dtype != torch.float64 else each for each in given]
    dtype, width = given[0].dtype, query.shape[-1]
    is_narrow = dtype in (torch.float16, torch.bfloat16)
    with torch.autocast("cuda", enabled=False):
        if is_narrow and attn_mask is None and width <= _WIDEST_HEAD and width % 8 == 0:
            made: Tensor = _aten._scaled_dot_product_flash_attention(*given, dropout_p, is_causal, scale=scale)[0]
            return made
        shares_heads = enable_gqa and query.shape[1] != key.shape[1]
        if dtype == torch.float64 or width % (8 if is_narrow else 4) or shares_heads:
            return None
        if attn_mask is not None:
            attn_mask = attn_mask.to(dtype).expand(*query.shape[:-1], key.shape[-2])
        needs_grad = torch.is_grad_enabled() and any(each.requires_grad for each in given)
        outputs: tuple[Tensor, ...] = _aten._scaled_dot_product_efficient_attention(
            *given, attn_mask, needs_grad, dropout_p, is_causal, scale=scale
        )
        return outputs[0]


def _recur(gates: int, data: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """Return what recurrent layers do in cuDNN, where all of them are one operation."""
    num_rows = data.shape[:-1].numel()
    if isinstance(others[0], Tensor) and not others[0].is_floating_point():  # of packed sequences, how many have a step
        sizes, others = others[0], others[1:]
        num_rows = len(sizes) * int(sizes[0])
    states, weights, _, num_layers, _, _, is_bidirectional, *_ = others
    num_rows *= num_layers
    states = tuple(states) if isinstance(states, tuple | list) else (states,)
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        data, states = data.to(dtype), tuple(state.to(dtype) for state in states)
    made: tuple[Tensor, ...] = _Recurrent.apply(gates, num_rows, 1 + is_bidirectional, data, *states, *weights)
    return made


class _Recurrent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gates: int, num_rows: int, num_directions: int, data: Tensor, *others: Tensor) -> Any:
        num_states = 2 if gates == _GATES["lstm"] else 1
        states, weights = others[:num_states], others[num_states:]
        output = data.new_empty(*data.shape[:-1], num_directions * states[0].shape[-1])
        # cuDNN keeps gates and states of each layer and step; of packed sequences those of the longest for all.
        # Source: NVIDIA's documentation of cudnnGetRNNTempSpaceSizes.
        kept = data.new_empty(num_rows * output.shape[-1] * (gates + num_states))
        is_cast = weights[0].dtype != data.dtype
        whole = sum(weight.numel() for weight in weights)
        ctx.save_for_backward(data, output, kept, *states, *([data.new_empty(whole)] if is_cast else weights))
        ctx.inputs, ctx.weights = [data, *states], weights
        return output, *(torch.empty_like(state) for state in states)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        saved = ctx.saved_tensors
        sizes = [weight.numel() for weight in ctx.weights]
        parts = saved[0].new_empty(sum(sizes)).split(sizes)
        views = [part.view(weight.shape) for part, weight in zip(parts, ctx.weights, strict=True)]
        return None, None, None, *(torch.empty_like(each) for each in ctx.inputs), *views


def _run_backward(  # noqa: PLR0913, PLR0917  as torch has them
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    keep_graph: bool,
    create_graph: bool,
    inputs: Sequence[Any] = (),
    allow_unreachable: bool = True,
    accumulate_grad: bool = True,
) -> tuple[Tensor | None, ...] | None:
    """Run backward as torch's engine does: what was made last goes first, and what a node has saved ends with it."""
    if not any(isinstance(output, fake_tensor.FakeTensor) for output in outputs):  # a script computes it on the CPU
        return _RUN_BACKWARD(
            *(outputs, gradients, keep_graph, create_graph, inputs),
            allow_unreachable=allow_unreachable,
            accumulate_grad=accumulate_grad,
        )
    wanted: dict[Any, int] = {}
    for index, each in enumerate(() if accumulate_grad else inputs):
        wanted[tuple(torch.autograd.graph.get_gradient_edge(each))[:2]] = index
    found: list[Tensor | None] = [None] * len(inputs)
    run = _Backward(create_graph)
    for output, gradient in zip(outputs, gradients, strict=True):
        edge = torch.autograd.graph.get_gradient_edge(output)
        run.add(edge.node, edge.output_nr, torch.ones_like(output) if gradient is None else gradient)
    run.count_edges()
    # `Tensor.backward` leaves torch's function modes, and checkpoints compute attention again.
    with (
        torch.set_grad_enabled(create_graph),
        torch.autocast("cuda", enabled=False),
        Kernels(),
        patch.object(_Backward, "task", 0),
    ):
        while run.queue:
            node = heapq.heappop(run.queue)[-1]
            own = run.take(node)
            for number, gradient in enumerate(own):
                if (node, number) in wanted:
                    found[wanted[node, number]] = gradient
            made = _accumulate(node, own) if node.name() == _LEAF else _call(node, own, keep_graph)
            for number, (following, position) in enumerate(node.next_functions):
                if following is not None:
                    gradient = made[number] if number < len(made) else None
                    if number < len(made):
                        made[number] = None
                    run.add(following, position, gradient)
                    del gradient
                    run.pass_edge(following)
    return None if accumulate_grad else tuple(found)


class _Backward:
    """The gradients that wait for their node, and the nodes that wait for no other gradient."""

    task = -1  # the number of the backward pass that runs; none

    def __init__(self, creates_graph: bool) -> None:
        self.queue: list[tuple[int, int, Any]] = []
        self._creates_graph = creates_graph
        self._gradients: dict[Any, list[Tensor | None]] = {}
        self._edges: dict[Any, int] = {}  # that have not been passed, by the node that they lead to
        self._numbers = itertools.count()

    def add(self, node: Any, number: int, gradient: Tensor | None) -> None:
        own = self._gradients.setdefault(node, [None] * len(node._input_metadata))
        if gradient is None:
            return
        # What forward has broadcast is summed, and the dtype is forward's.
        expected = node._input_metadata[number]
        if gradient.shape != expected.shape:
            gradient = gradient.sum_to_size(expected.shape)
        gradient = gradient.to(expected.dtype)
        before = own[number]
        own[number] = None
        if before is None:
            own[number] = gradient
        elif not self._creates_graph and sys.getrefcount(before) < _UNSHARED:
            own[number] = before.add_(gradient)
        else:
            own[number] = before + gradient

    def take(self, node: Any) -> list[Tensor | None]:
        return self._gradients.pop(node)

    def count_edges(self) -> None:
        """Count the edges below the first nodes, and queue those of them that no edge leads to."""
        nodes = list(self._gradients)
        left, seen = list(nodes), set(nodes)
        while left:
            for following, _ in left.pop().next_functions:
                if following is not None:
                    self._edges[following] = self._edges.get(following, 0) + 1
                    if following not in seen:
                        seen.add(following)
                        left.append(following)
        for node in nodes:
            if node not in self._edges:
                self._push(node)

    def pass_edge(self, node: Any) -> None:
        self._edges[node] -= 1
        if not self._edges[node]:
            self._push(node)

    def _push(self, node: Any) -> None:
        order = -sys.maxsize if node.name() == _LEAF else -node._sequence_nr()
        heapq.heappush(self.queue, (order, next(self._numbers), node))


def _accumulate(leaf: Any, gradients: list[Tensor | None]) -> list[Tensor | None]:
    weight, gradient = leaf.variable, gradients.pop()
    if gradient is not None:
        weight.grad = gradient.detach() if weight.grad is None else weight.grad.add_(gradient)
        for hook in (weight._post_accumulate_grad_hooks or {}).values():
            hook(weight)
    return []


def _call(node: Any, gradients: list[Tensor | None], keep_graph: bool) -> list[Tensor | None]:
    """Run a node, and release what it has saved; return a gradient for each of its edges."""
    if all(gradient is None for gradient in gradients):
        return []
    outer, Saved.read_now = Saved.read_now, []
    try:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            given = node.apply(*gradients)  # type: ignore[no-untyped-call]
            # It returns one for each argument; the edges are those of tensors.
            given = given if isinstance(given, tuple) else (given,)
            needed = iter([each for each, is_needed in zip(given, node.needs_input_grad, strict=False) if is_needed])
            made = [None if following is None else next(needed) for following, _ in node.next_functions]
            del given
        else:
            returned = node(*gradients)
            made = list(returned) if isinstance(returned, tuple | list) else [returned]
        for saved in () if keep_graph else Saved.read_now:
            saved.release()
    finally:
        Saved.read_now = outer
        gradients.clear()
    return made
