"""Trace the memory that a script's steps take on a GPU that is not there: it sees a GPU, whose tensors are fake.

What the script has on the CPU is real, so that it reads its data as it always does.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from castwise.apply.pytree import tree_map_tensors, tree_tensors
from castwise.errors import UsageError, shortened
from castwise.records.schema import MemoryParts, TracedMemory
from castwise.registry.precisions import AS_WRITTEN
from castwise.spec.trial import TrialSpec
from castwise.trial.fake_gpu import Kernels, Values, replaced
from castwise.trial.fake_ranks import fake_ranks
from castwise.trial.memory_breakdown import PeakMode, add_by_kind, fake_storages, note_gradients, saving
from castwise.trial.memory_trace import ERRORS, WORKSPACE_BYTES, why_untraced
from castwise.trial.script.hooks import ScriptHooks
from castwise.trial.script.run import Order, ScriptRun, ScriptTrial
from castwise.trial.script.scaling import weights_of
from castwise.trial.user_model.source import calling_line, is_own

# The GPU that a script sees: the records that predictions are compared with are of such GPUs.
_NAME, _BYTES = "NVIDIA H100 80GB HBM3", 85_029_158_912
_OF_GPU = {"get_device_name", "get_device_capability", "get_device_properties", "mem_get_info"}
_SILENT = (
    *("empty_cache", "init", "ipc_collect", "manual_seed", "manual_seed_all", "reset_peak_memory_stats"),
    *("set_device", "set_per_process_memory_fraction", "set_rng_state", "set_stream"),
)

_FINITE = {"isfinite": True, "isinf": False, "isnan": False}  # of values on the GPU: scripts end if a loss is not

_VALUE = "castwise_value"  # of a fake tensor, in its attributes
_UNKNOWN = object()
_MOST_VALUES = 2**20  # of a tensor whose values are kept; chosen here
_aten: Any = torch.ops.aten
_READING = (_aten._local_scalar_dense.default, _aten.allclose.default, _aten.equal.default)
_INDEXING = (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_)


def trace_script(spec: TrialSpec, start: Callable[[ScriptRun], ScriptRun], note: Callable[[str], None]) -> TracedMemory:
    """Return what holds memory at the peak of a script's first steps, or before them.

    `start` lets it run; `note` receives a line now and then on what is waited for.

    Raises:
        UsageError: The script needs what a GPU computes, or runs code that is none of torch's operators.
    """
    gpu = _FakeGpu()
    trial = ScriptTrial(spec.model_copy(update={"device": "cuda:0"}))
    trial.run.around, trial.run.is_traced, trial.on_note = gpu.modes, True, note
    start(trial.run)
    try:
        parts = gpu.peak_of(trial)
    except ERRORS as error:
        why = shortened(why_untraced(error)).rstrip(".")
        if isinstance(error, RuntimeError):  # others are the script's own
            why += ". That needs a GPU: there, castwise run shows the memory"
        raise UsageError(why).with_traceback(error.__traceback__) from error
    return TracedMemory(
        batches={trial.run.samples_per_step or 1: parts.model_copy(update={"workspace_bytes": WORKSPACE_BYTES})},
        guesses=tuple(gpu.guesses),
        compiling=tuple(gpu.compiling),
        notes=tuple(gpu.notes),
    )


class _FakeGpu:
    """A GPU that a script sees in all threads; its tensors are followed in the threads that enter `modes`."""

    def __init__(self) -> None:
        self.guesses: dict[str, None] = {}
        self.compiling: dict[str, None] = {}
        self.notes: dict[str, None] = {}
        self._storages = fake_storages()
        self._peak = PeakMode(self._storages, None)
        self._shapes = _Shapes(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        buckets = functools.partial(self._storages.reclassify, kind="gradients")
        for owner, name, function in (*replaced(), *self._seen(), *fake_ranks(buckets)):
            patch.object(owner, name, function, create=True).start()
        torch._C._ensureCUDADeviceGuardSet()

    def peak_of(self, trial: ScriptTrial) -> MemoryParts:
        """Return what holds memory at the peak, from a script's begin until all its optimizers have their state."""
        with _OnGpu(self.guesses, self._shapes):  # masters are made here
            trial.set_up()
        hooks = trial.run.hooks
        assert hooks is not None, "it has run"
        add_by_kind(self._storages, hooks.models, list(hooks.optimizers))
        note_gradients(self._storages, weights_of(*hooks.optimizers))
        if not (is_as_written := hooks.precision.row.name == AS_WRITTEN):
            hooks.stop_looking()  # for which outputs are kept in float32, too
        first, self._peak.parts, self._peak.most = self._peak.parts, MemoryParts(), -1
        # The first optimizer counts the steps; further ones have their state in its third step at the latest.
        num_steps = 1 if len(hooks.optimizers) < 2 else 2
        trial.carry_out(Order(lambda moments: None if moments else num_steps), may_end=True)
        trial.run.stop()
        if not is_as_written:
            kinds = (kind for kind in hooks.precision.weights.own(hooks.models) if kind.startswith("frozen "))
            notes = *hooks.precision.notes, *(f"its frozen weights stay in {kind.split()[1]}" for kind in kinds)
            self.notes |= dict.fromkeys(f"{hooks.precision.row.name}: {note}" for note in notes)
        return max([self._peak.parts, first][: 1 + is_as_written], key=lambda parts: parts.tensors_bytes)

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Let this thread's tensors on the GPU be fake, and follow them."""
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(…, device="cuda")` makes its tensor on the CPU
        with _OnGpu(self.guesses, self._shapes), Kernels(), saving(self._storages), self._peak:
            yield

    def _seen(self) -> list[tuple[Any, str, Any]]:
        """Return what a script sees of the GPU: an object, the attribute, and what takes its place."""
        properties = SimpleNamespace(name=_NAME, major=9, minor=0, total_memory=_BYTES, multi_processor_count=132)
        answers: dict[str, Any] = {
            **dict.fromkeys(("current_device", "_exchange_device", "_maybe_exchange_device"), 0),
            "get_device_name": _NAME,
            "get_device_capability": (9, 0),
            "get_device_properties": properties,
            "is_current_stream_capturing": False,
            "get_rng_state": torch.get_rng_state(),
            "mem_get_info": (_BYTES, _BYTES),
            "stream": nullcontext(),
            **dict.fromkeys(_SILENT),
        }
        of_accelerator = {"current_accelerator": torch.device("cuda", 0), "current_device_index": 0}
        of_accelerator |= dict.fromkeys(("set_device_index", "synchronize"))
        of_both = {"is_available": True, "device_count": int(os.environ.get("LOCAL_WORLD_SIZE", "1"))}
        held = "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"
        return [
            *((torch.cuda, name, self._telling(name, answer)) for name, answer in answers.items()),
            *((torch.accelerator, name, _answering(answer)) for name, answer in of_accelerator.items()),
            *(
                (owner, name, _answering(each))
                for name, each in of_both.items()
                for owner in (torch.cuda, torch.accelerator)
            ),
            *((torch.cuda, name, lambda *_, **__: self._storages.totals.total()) for name in held),
            *((torch.cuda, name, _Queue) for name in ("Stream", "Event", "current_stream", "default_stream")),
            (torch, "compile", self._leave_as_is),
            (torch, "save", _answering(None)),
            *((owner, name, _told(name, each)) for name, each in _FINITE.items() for owner in (torch, Tensor)),
            (ScriptHooks, "_note_padding", _answering(None)),
            (ScriptHooks, "_check_updates", _answering(None)),
            (torch.utils, "swap_tensors", _adopt),
            (torch.__future__, "get_swap_module_params_on_conversion", _answering(True)),
            (Tensor, "data", property(_DATA.__get__, _adopt)),
            (Tensor, "pin_memory", lambda tensor, *_: tensor),
            (Tensor, "record_stream", _answering(None)),
            (FakeTensor, "tolist", lambda tensor: tensor.cpu().tolist()),
        ]

    def _telling(self, name: str, answer: Any) -> Callable[..., Any]:
        def tell(*_: Any, **__: Any) -> Any:
            if name in _OF_GPU and is_own(sys._getframe(1).f_code.co_filename):
                self.notes[f"{calling_line()} asks which GPU it has, and sees an H100, whatever --gpu names"] = None
            return answer

        return tell

    def _leave_as_is(self, code: Any = None, *_: Any, **__: Any) -> Any:
        """Compile nothing: what compiled code holds is the compiler's, which needs a GPU."""
        self.compiling[calling_line()] = None
        return code


class _Shapes(FakeTensorMode):  # type: ignore[no-untyped-call]
    avoid_device_init = True  # torch.cuda.is_available says that there is one


class _OnGpu(Values):  # type: ignore[no-untyped-call]
    """Lets operations on the GPU make fake tensors, and those on the CPU real ones.

    Values of small tensors on the GPU are kept on the CPU as long as they follow from what is known, such as labels and
    masks that the script reads or draws: shapes and branches may depend on them.
    """

    def __init__(self, guesses: dict[str, None], shapes: FakeTensorMode) -> None:
        super().__init__(guesses)
        self._shapes = shapes
        self._outdated: set[int] = set()  # storages of values to which something unknown was written

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if not any(isinstance(each, FakeTensor) or _is_gpu(each) for each in leaves):
            return func(*args, **kwargs | ({"pin_memory": False} if kwargs.get("pin_memory") else {}))
        values = [self._value_of(each) for each in leaves]
        known = None  # the same arguments on the CPU, if all are known; products would take long there
        if all(each is not _UNKNOWN for each in values) and func._overloadpacket not in flop_registry:
            known = pytree.tree_unflatten(values, structure)
            if func in _READING:
                return func(*known[0], **known[1])
        if func is _aten._pack_padded_sequence.default:
            rows, sizes = func(torch.empty(args[0].shape[:2]), *args[1:])
            return args[0].new_empty((len(rows), *args[0].shape[2:])), sizes
        if func._overloadpacket in _INDEXING:
            args = (args[0], self._positions(args[1]), *args[2:])
        made, value = self._make(func, types, args, kwargs, known)
        if value is None:
            self._forget(func, args, kwargs)
        if func._schema.is_mutable and args and isinstance(args[0], Tensor) and not isinstance(args[0], FakeTensor):
            return args[0]
        found = iter(tree_tensors(value))
        return tree_map_tensors(lambda each: self._with_value(each, next(found, None)), made)

    def _make(self, func: Any, types: Any, args: Any, kwargs: Any, known: Any) -> tuple[Any, Any]:
        """Return what an operation makes on the GPU, and its values; None if they are not known, or too many."""
        made: Any = _UNKNOWN
        try:
            with self._shapes:
                made = super().__torch_dispatch__(func, types, args, kwargs)
        except DynamicOutputShapeException:
            if known is None:
                raise
        value: Any = None
        if known and (made is _UNKNOWN or sum(each.numel() for each in tree_tensors(made)) <= _MOST_VALUES):
            with suppress(RuntimeError):  # the CPU may lack it
                value = func(*known[0], **known[1])
        if made is _UNKNOWN:
            with self._shapes:
                made = tree_map_tensors(lambda each: torch.empty_like(each, device="cuda"), value)
        return made, value

    def _value_of(self, leaf: Any) -> Any:
        if not isinstance(leaf, FakeTensor):
            return torch.device("cpu") if _is_gpu(leaf) else leaf
        value = vars(leaf).get(_VALUE)
        return _UNKNOWN if value is None or value.untyped_storage()._cdata in self._outdated else value

    def _with_value(self, made: Tensor, value: Tensor | None) -> Tensor:
        """Return a tensor on the GPU with its value, if that is known; on the CPU a real one, which may be read."""
        if made.device.type == "cuda":
            if value is not None:
                vars(made)[_VALUE] = value
                self._outdated.discard(value.untyped_storage()._cdata)
            return made
        if value is not None:
            return value
        real = torch.zeros(made.shape, dtype=made.dtype)
        return real.fill_(made.dtype != torch.bool) if self.note_guess() and made.numel() == 1 else real

    def _forget(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Know no longer what an operation writes to."""
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[number] if number < len(args) else kwargs.get(argument.name)
                values = (vars(each).get(_VALUE) for each in tree_tensors(given))
                self._outdated |= {each.untyped_storage()._cdata for each in values if each is not None}

    def _positions(self, indices: Sequence[Any]) -> list[Any]:
        """Return indices with positions instead of masks whose values are known."""
        found: list[Any] = []
        for index in indices:
            value = self._value_of(index)
            is_mask = isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8)
            found += value.nonzero().unbind(1) if is_mask else [index]
        return found


class _Queue(nullcontext[None]):
    """Stands for a stream or an event, whose work is always done."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __getattr__(self, name: str) -> Any:
        return _answering({"query": True, "elapsed_time": 1.0}.get(name, self))


def _is_gpu(leaf: Any) -> bool:
    return isinstance(leaf, torch.device) and leaf.type == "cuda"


def _told(name: str, answer: bool) -> Callable[..., Any]:
    function = getattr(torch, name)

    def told(values: Tensor) -> Tensor:
        if not isinstance(values, FakeTensor):
            return function(values)  # type: ignore[no-any-return]
        return torch.full(values.shape, answer, dtype=torch.bool, device=values.device)

    return told


def _answering(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


_DATA: Any = torch._C.TensorBase.data


def _adopt(old: Any, new: Any) -> None:
    """Give a tensor another one's values, as assigning to its `data` does, also between the CPU and the GPU."""
    if isinstance(old, FakeTensor) == isinstance(new, FakeTensor):
        _DATA.__set__(old, _DATA.__get__(new))
        if isinstance(old, FakeTensor):
            old.fake_device, vars(old)[_VALUE] = new.fake_device, vars(new).get(_VALUE)
        return
    needs_grad, value = old.requires_grad, new.detach()
    kept = vars(old) | vars(value) | ({"_is_param": True} if isinstance(old, torch.nn.Parameter) else {})
    old.__class__, value.__class__ = value.__class__, old.__class__
    old.__dict__ = kept
    torch._C._swap_tensor_impl(old, value)
    old.requires_grad_(needs_grad)
