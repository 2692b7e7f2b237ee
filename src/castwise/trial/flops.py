"""Count the multiply-adds of one training step, forward and backward, by kind of product and by number format.

They are the model's FLOPs, as papers count them for MFU: a multiply-add is two, attention is counted over the full
matrix even if it is causal, and what backward computes a second time (checkpoints, attention scores) does not count.
Source: Chowdhery et al., "PaLM" (2022), appendix B.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from castwise.apply.hardware import read_hardware
from castwise.apply.loss_scaling import stepped_by
from castwise.apply.precision import FP32_SWITCHES
from castwise.apply.pytree import tree_tensors
from castwise.records.schema import StepFlops
from castwise.registry.kernel_classes import OWN_NAMESPACES, VECTOR_BYTES
from castwise.registry.precisions import precision_row
from castwise.registry.techniques import hiding_operators
from castwise.spec.trial import TrialSpec
from castwise.trial.models.task import ComputeLoss, FakeCopy, Task
from castwise.trial.step import TrainingStep
from castwise.trial.user_model.source import calling_line

_aten: Any = torch.ops.aten
_LONGEST_REASON = 200
# FP8 is faster in products of matrices with so many rows and columns each. Source: GPTs on an H200, docs/precisions.md:
# a width of 1,024 loses, one of 1,536 gains.
_LARGE = 1280
_MOST_LINES = 3  # that are kept of a format
_NUM_PRODUCTS = 10  # that are timed

_FORMATS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64", torch.int8: "int8"}
# The switch of float32 products, by kind. Attention's own kernels read none of them.
_SWITCHES = {
    **dict.fromkeys(("linear", "batched"), "cuda.matmul"),
    **dict.fromkeys(("convolution", "grouped_convolution"), "cudnn.conv"),
    "recurrent": "cudnn.rnn",
}

_Factor = tuple[tuple[int, ...], torch.dtype, bool]  # a matrix or a batch of them: shape, dtype, whether by columns
# What an operator multiplies: the kind of product, FLOPs, and a tensor whose dtype is the factors'.
_Found = tuple[str, int, Tensor]


def _product(a: Tensor, b: Tensor) -> _Found:
    """Return the product of matrices, one or a batch of them, or of groups of rows (`_grouped_mm`)."""
    flops = 2 * a.numel() * (b.shape[-1] if b.dim() > 1 else 1)
    if (a.dim(), b.dim()) == (3, 2):
        flops = 2 * b.numel() * a.shape[-2]
    return "batched" if a.dim() == 3 and a.shape[0] > 1 else "linear", flops, a


def _convolution(args: Sequence[Any], out: Any) -> _Found:
    data, weight, transposed, groups = args[0], args[1], args[6], args[8]
    kind = "convolution" if groups == 1 else "grouped_convolution"
    # Every value of the output, or of the input if it is transposed, meets one filter of its group.
    return kind, 2 * (data if transposed else out).numel() * weight[0].numel(), data


def _convolution_backward(args: Sequence[Any], _: Any) -> _Found:
    gradient, *forward = args[:-1]
    kind, flops, _ = _convolution(forward, gradient)
    return kind, flops * sum(args[-1][:2]), gradient  # the bias's gradient multiplies nothing


def _attention(query: Tensor, key: Tensor, value: Tensor, times: int = 1) -> _Found:
    """Return the two products of attention: queries by keys, scores by values; `times` is 2 for backward."""
    return "attention", times * 2 * query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1]), query


def _recurrent(data: Tensor, weights: Iterable[Tensor], times: int = 1) -> _Found:
    """Return the products of all steps of recurrent layers with their matrices; `times` is 2 for backward."""
    tokens = data[..., 0].numel()
    return "recurrent", times * 2 * tokens * sum(each.numel() for each in weights if each.dim() == 2), data


def _recurrent_backward(args: Sequence[Any], _: Any) -> _Found:
    data, weights, num_each, is_bidirectional, mask = *args[:3], args[-5], args[-1]
    needs_data, needs_weights = mask[0], mask[3]
    kind, flops, factor = _recurrent(data, weights, 1 + needs_weights)
    if not needs_data:  # the first layer's input matrices pass no gradient on
        first = [weights[0], weights[num_each]] if is_bidirectional else weights[:1]
        flops -= _recurrent(data, first)[1]
    return kind, flops, factor


def _torch_formula(packet: Any, needed: int) -> Callable[..., _Found]:
    """Return torch's own formula of an operator of attention, of whose five products so many are needed."""
    own = flop_counter.flop_registry[packet]
    return lambda args, out: ("attention", own(*args, out_val=out) * needed // 5, args[0])


def _flash_attention(packet: Any, times: int) -> Callable[..., _Found]:
    """Return the formula of flash attention's own operator; `times` is 2 for backward.

    If the sequences' lengths vary, it is torch's. If not, torch 2.11 takes heads for tokens.
    """
    varying = _torch_formula(packet, 6 - times)

    def formula(args: Sequence[Any], out: Any) -> _Found:
        if args[3 * times] is not None:
            return varying(args, out)
        query, key, value = (each.transpose(-3, -2) for each in args[times - 1 : times + 2])
        return _attention(query, key, value, times)

    return formula


_FORMULAS: dict[Any, Callable[[Sequence[Any], Any], _Found]] = {
    _aten.linear: lambda args, _: ("linear", 2 * args[0].numel() * args[1].shape[0], args[0]),
    **dict.fromkeys((_aten.convolution, _aten._convolution, _aten.convolution_overrideable), _convolution),
    _aten.convolution_backward: _convolution_backward,
    **dict.fromkeys((_aten._cudnn_rnn, _aten.miopen_rnn), lambda args, _: _recurrent(args[0], args[1])),
    **dict.fromkeys((_aten._cudnn_rnn_backward, _aten.miopen_rnn_backward), _recurrent_backward),
    _aten._flash_attention_forward: _flash_attention(_aten._flash_attention_forward, 1),
    _aten._flash_attention_backward: _flash_attention(_aten._flash_attention_backward, 2),
    _aten.mkldnn_rnn_layer: lambda args, _: _recurrent(args[0], args[1:3]),
    _aten.mkldnn_rnn_layer_backward: lambda args, _: _recurrent(args[0], args[1:3], 2),
}
_NEWER = ("_scaled_mm_v2", "_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2")
for _name in ("mm", "bmm", "mv", "dot", "vdot", "_int_mm", "_scaled_mm", *filter(partial(hasattr, _aten), _NEWER)):
    _FORMULAS[getattr(_aten, _name)] = lambda args, _: _product(args[0], args[1])
for _name in ("addmm", "addmv", "addbmm", "baddbmm", "_addmm_activation"):
    _FORMULAS[getattr(_aten, _name)] = lambda args, _: _product(args[1], args[2])
for _name in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"):
    _forward, _backward = (getattr(_aten, f"_scaled_dot_product_{_name}{end}") for end in ("", "_backward"))
    _FORMULAS[_forward] = lambda args, _: _attention(args[0], args[1], args[2])
    _FORMULAS[_backward] = lambda args, _: _attention(args[1], args[2], args[3], 2)
for _packet in flop_counter.flop_registry:
    if _packet not in _FORMULAS and "attention" in str(_packet):  # varying lengths, and flex_attention
        # Of five products of backward, one computes the scores again.
        _FORMULAS[_packet] = _torch_formula(_packet, 4 if "backward" in str(_packet) else 5)


_TAKE_MASKS = (_aten._scaled_dot_product_efficient_attention, _aten._scaled_dot_product_cudnn_attention)
_MASKED_OUT = -1e3  # a score that is lowered by more is left out: masks have -inf, -1e4 or the lowest number


class ProductCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what runs inside it, and the bytes that are saved for backward, without changing what it computes."""

    supports_higher_order_operators = True

    def __init__(self, device: torch.device, held: Iterable[Tensor] = ()) -> None:
        """Count products on a device; saved tensors among `held` are not counted."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: dict[str, Counter[str]] = {}
        self.large_linear_flops = 0
        self.recomputed_flops = self.recomputed_bytes = 0
        self.masked: Counter[bool] = Counter()  # FLOPs of attention that was given a mask, by whether it is causal
        self.saved_bytes = 0
        self.uncounted: set[str] = set()
        self.misaligned: Counter[tuple[_Factor, ...]] = Counter()  # FLOPs
        self.lines: dict[str, Counter[str]] = {}  # of the user's code that have products in 32 and 64 bits, by format
        self.device = device
        self._held = {_address(tensor) for tensor in held}
        self.begin(1)
        has_tf32 = device.type == "cuda" and torch.version.hip is None
        self._has_tf32 = has_tf32 and read_hardware(device).support(precision_row("tf32")) == "native"
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)

    def begin(self, times: int) -> None:
        """Count what comes next so many times."""
        self._times, self._seen = times, set(self._held)

    def __enter__(self) -> "ProductCounter":
        self._hooks.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(each not in (Tensor, torch.nn.Parameter, FakeTensor) for each in types):
            return NotImplemented  # a tensor that says itself of which products it consists comes first
        result = func(*args, **(kwargs or {}))
        if torch._C._current_graph_task_id() != -1 and len(self._seen) > len(self._held):
            self._seen = set(self._held)  # backward frees what was saved, and other tensors get its addresses
        packet = getattr(func, "overloadpacket", func)
        if _recomputes() and hasattr(func, "_schema") and not any(each.alias_info for each in func._schema.returns):
            self.recomputed_bytes += self._times * sum(each.nbytes for each in tree_tensors(result))
        formula = _FORMULAS.get(packet)
        if formula is not None:
            inputs = _positional(func, args, kwargs or {})
            found = formula(inputs, result)
            self._add(*found, (*inputs, result))
            if packet in _TAKE_MASKS and isinstance(mask := inputs[3], Tensor) and not isinstance(mask, FakeTensor):
                self.masked[_is_causal(mask)] += found[1]
        elif getattr(func, "namespace", "") not in OWN_NAMESPACES:
            self.uncounted.add(str(packet))
        return result

    def _add(self, kind: str, flops: int, factor: Tensor, values: Sequence[Any]) -> None:
        if _recomputes():
            self.recomputed_flops += self._times * flops
        else:
            name = self._format(kind, factor.dtype)
            self.products.setdefault(kind, Counter())[name] += self._times * flops
            if name in ("fp32", "fp64"):  # without Tensor Cores, or with slow ones
                if torch._C._current_graph_task_id() == -1 and (line := calling_line()):
                    self.lines.setdefault(name, Counter())[line] += flops
            elif kind in ("linear", "batched"):
                tensors = [each for each in values[:-1] if isinstance(each, Tensor) and each.dtype == factor.dtype]
                if any(map(_is_misaligned, (*tensors, values[-1]))):
                    found = [each for each in tensors if each.dim() > 1][-2:]
                    self.misaligned[tuple(map(_factor, found))] += self._times * flops
            if kind == "linear" and flops:
                inputs = factor.shape[-1]
                if min(inputs, factor.numel() // inputs, flops // (2 * factor.numel())) >= _LARGE:
                    self.large_linear_flops += self._times * flops

    def _format(self, kind: str, dtype: torch.dtype) -> str:
        """Return the name of the format that products of a dtype are computed in, as `PEAK_DTYPES` has it."""
        if dtype == torch.float32:
            is_tf32 = self._has_tf32 and kind in _SWITCHES and FP32_SWITCHES[_SWITCHES[kind]].fp32_precision == "tf32"
            return "tf32" if is_tf32 else "fp32"
        name = str(dtype).removeprefix("torch.")
        return _FORMATS.get(dtype, "fp8" if name.startswith("float8") else name)

    def _save(self, tensor: Tensor) -> Tensor:
        address = _address(tensor)
        if address is not None and address not in self._seen:
            self._seen.add(address)
            self.saved_bytes += self._times * tensor.untyped_storage().nbytes()
        return tensor.detach()  # an output that saved itself would never be freed


def count_flops(spec: TrialSpec, step: TrainingStep, task: Task, batches: Sequence[Any]) -> StepFlops:
    """Count the FLOPs of a step, the mean over these batches; whatever goes wrong is said in `missing`.

    A step that runs operator by operator is run once more, without an update of the weights. For any other, and if that
    fails, a copy of the model runs on tensors that have shapes and no values.
    """
    is_hidden = bool(hiding_operators(spec.techniques))
    ways = [_count_without_memory] if is_hidden or spec.world_size > 1 else [_count_for_real, _count_without_memory]

    def count(way: Any) -> StepFlops:
        with torch.compiler.set_stance("force_eager"):  # what the user's code compiles runs as it is written
            counter = way(step, task, batches, torch.device(spec.device))
        return _flops_of(counter, step.model.parameters(), [step.optimizer], len(batches))

    for way in ways:
        if not (found := _try(partial(count, way))).missing:
            break
    return found


def count_flops_of_script(
    run: Callable[[int, AbstractContextManager[Any]], int],
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    device: torch.device,
    num_steps: int,
) -> StepFlops:
    """Count the FLOPs of a script's step, the mean over so many; whatever goes wrong is said in `missing`.

    `run` is that of `profile_step`. The steps are of their own, as a mode slows the host: the profiler's records of
    shapes would need none, but they have neither strides, TF32's switches, what is computed again, nor what is
    compiled, which runs operator by operator here.
    """

    def count() -> StepFlops:
        if any(isinstance(model, nn.DataParallel) and len(model.device_ids) > 1 for model in models):
            raise NotImplementedError("DataParallel computes in threads of its own")
        held = nn.ModuleList(models)
        counter = ProductCounter(device, [*held.parameters(), *held.buffers()])
        return _flops_of(counter, held.parameters(), optimizers, run(num_steps, _eagerly(counter)))

    return _try(count)


@contextmanager
def _eagerly(counter: ProductCounter) -> Iterator[None]:
    if _get_current_dispatch_mode() is not None:  # it would be left before this one, and take its place
        raise RuntimeError("the script's step is within a TorchDispatchMode of its own")
    with torch.compiler.set_stance("force_eager"), counter:
        yield


def _try(count: Callable[[], StepFlops]) -> StepFlops:
    try:
        return count()
    except Exception as error:  # noqa: BLE001  the user's code may raise anything, and all else is measured
        reason = f"{type(error).__name__}: {error}".partition("\n")[0][:_LONGEST_REASON]
    return StepFlops(missing=f"its products could not be counted: {reason}")


def _count_for_real(step: TrainingStep, task: Task, batches: Sequence[Any], device: torch.device) -> ProductCounter:
    del task  # only the other way needs it
    counter = ProductCounter(device, [*step.model.parameters(), *step.model.buffers(), *tree_tensors(list(batches))])
    for batch, times in _by_shape(batches):
        counter.begin(times)
        with counter:
            step.run_backward(batch)
    return counter


def _count_without_memory(
    step: TrainingStep, task: Task, batches: Sequence[Any], device: torch.device
) -> ProductCounter:
    """Count forward and backward passes of a copy of the model: state that the user's code keeps stays as it is."""
    parts = _by_shape(batches if step.accumulate == 1 else [part for batch in batches for part in batch])
    mode, model, compute_loss = task.fake_copy or make_fake_copy(step.model, task.compute_loss)
    with FakeCopyMode(mode):
        parts = copy.deepcopy(parts)
    counter = ProductCounter(device, [*model.parameters(), *model.buffers(), *tree_tensors(parts)])
    for batch, times in parts:
        counter.begin(times)
        with mode, counter:
            with step.autocast():
                loss = compute_loss(model, batch)
            torch.autograd.backward(loss)
    return counter


def make_fake_copy(model: nn.Module, compute_loss: ComputeLoss) -> FakeCopy:
    """Return a copy of a model and its loss that computes shapes alone."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(mode):
        return mode, *copy.deepcopy((model, compute_loss))


def _by_shape(batches: Sequence[Any]) -> list[tuple[Any, int]]:
    """Return the first batch of each shape, and how many there are of it."""
    shapes = [tuple(tensor.shape for tensor in tree_tensors(batch)) for batch in batches]
    return [(batches[shapes.index(shape)], times) for shape, times in Counter(shapes).items()]


def _flops_of(
    counter: ProductCounter, parameters: Iterable[Tensor], optimizers: Iterable[Optimizer], num_steps: int
) -> StepFlops:
    weights, stepped = list(parameters), list[Tensor]()
    for optimizer in optimizers:
        stepped += [*stepped_by(optimizer), *tree_tensors(list(optimizer.state.values()))]
    stepped = [each.to_local() if isinstance(each, DTensor) else each for each in stepped]  # a rank's own
    factors = next((each for each, _ in counter.misaligned.most_common(1)), ())
    is_most = 2 * counter.misaligned.total() >= sum(each.total() for each in counter.products.values())
    return StepFlops(
        products={
            kind: {name: flops // num_steps for name, flops in by_format.items()}
            for kind, by_format in sorted(counter.products.items())
        },
        large_linear_flops=counter.large_linear_flops // num_steps,
        recomputed_flops=counter.recomputed_flops // num_steps,
        recomputed_bytes=counter.recomputed_bytes // num_steps,
        causal_mask_share=counter.masked[True] / counter.masked.total() if counter.masked else None,
        saved_bytes=counter.saved_bytes // num_steps,
        weights_bytes=_total_bytes(weights),
        gradients_bytes=_total_bytes(each for each in weights if each.requires_grad),
        update_bytes=_total_bytes(stepped),
        uncounted=tuple(sorted(counter.uncounted)),
        misaligned_flops=counter.misaligned.total() // num_steps,
        misaligned_shapes=tuple(shape for shape, _, _ in factors),
        padded_speedup=_padded_speedup(factors, counter.device) if is_most else None,
        lines={name: tuple(dict(lines.most_common(_MOST_LINES))) for name, lines in counter.lines.items()},
    )


def _recomputes() -> bool:
    """Return whether what runs is a forward pass that a checkpoint repeats in backward.

    Backward computes gradients without a graph of their own, unless they are to have gradients (`create_graph`, which
    keeps its graph, too); what a checkpoint repeats has one.
    """
    keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
    return torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled() and not keeps_graph()


def _is_causal(mask: Tensor) -> bool:
    """Return whether what is added to the scores leaves each query the keys up to its own."""
    if mask.dim() < 2 or mask.shape[-1] != mask.shape[-2]:
        return False
    distinct = mask[tuple(slice(0, None if stride else 1) for stride in mask.stride()[:-2])]
    later = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    return all(bool(((each < _MASKED_OUT) == later).all()) for each in distinct.reshape(-1, *mask.shape[-2:]))


def _padded_speedup(factors: Sequence[_Factor], device: torch.device) -> float | None:
    """Return how much faster a GPU multiplies two matrices if their sizes are padded; None if it cannot be measured."""
    if device.type != "cuda" or len(factors) != 2 or factors[0][1] not in (*_FORMATS, torch.float32):
        return None

    def seconds(multiple: int) -> float:
        matrices, times = list[Tensor](), list[float]()
        for (*batch, rows, columns), dtype, by_columns in factors:
            sizes = [size + -size % multiple for size in ((columns, rows) if by_columns else (rows, columns))]
            made = torch.ones(*batch, *sizes, dtype=dtype, device=device)
            matrices.append(made.mT if by_columns else made)
        a, b = matrices
        for _ in range(_NUM_PRODUCTS):  # others may use the device: the fastest counts
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            a @ (b if a.shape[-1] == b.shape[-2] else b.mT)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return min(times)

    try:
        with torch.cuda.device(device), torch.no_grad():
            return seconds(1) / seconds(VECTOR_BYTES // factors[0][1].itemsize)
    except RuntimeError:  # too little memory is left
        return None


def _factor(matrix: Tensor) -> _Factor:
    return tuple(matrix.shape), matrix.dtype, matrix.stride(-2) == 1 != matrix.stride(-1)


def _is_misaligned(matrix: Tensor) -> bool:
    """Return whether the rows of a matrix, or of each one of a batch, are no multiple of what Tensor Cores load."""
    strides = [stride for size, stride in zip(matrix.shape, matrix.stride(), strict=True) if size > 1]
    return any(stride > 1 and stride % (VECTOR_BYTES // matrix.itemsize) for stride in strides)


def _positional(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return an operator's arguments in their order, as formulas read them."""
    if not kwargs or not hasattr(func, "_schema"):
        return args
    names = [each.name for each in func._schema.arguments[len(args) :]]
    return (*args, *(kwargs.get(name) for name in names))


def _address(tensor: Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else None


def _total_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())
