"""Break down the memory of one training step at its peak: which tensors are alive, and what they are for.

torch.distributed._tools.mem_tracker.MemTracker is similar, but does not tell casts of weights, masters, batches and
workspaces apart.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from castwise.apply.hardware import synchronize
from castwise.apply.loss_scaling import stepped_by
from castwise.apply.pytree import Batch, tree_tensors
from castwise.apply.techniques.optimizer_state import keeps_narrow_state
from castwise.records.schema import MemoryParts
from castwise.registry.techniques import hiding_operators
from castwise.spec.trial import TrialSpec
from castwise.trial.allocator import Event
from castwise.trial.fake_gpu import Saved
from castwise.trial.memory import CpuMemory, DeviceMemory, MpsMemory
from castwise.trial.step import TrainingStep

# Kinds of storages, as `MemoryParts` names them.
_TEMPORARIES = "temporaries"
_SAVED = "saved"
_CASTS = "weight_casts"
_GRADIENTS = "gradients"
_WEIGHTS = "weights"
_PRELIMINARY = (_TEMPORARIES, _SAVED)  # may change when it becomes clear what a tensor is for
_ROUNDING = 512  # of the caching allocator. Source: pytorch c10/core/AllocatorConfig.h (`kMinBlockSize`)
# Their mean or sum keeps a storage for all elements, and they take as much again while they compute it. Source: pytorch
# aten/src/ATen/native/Loss.cpp (the output is resized once it has been allocated).
_KEEP_ELEMENTS = (torch.ops.aten.mse_loss.default, torch.ops.aten.smooth_l1_loss.default)
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


def profile_memory(
    spec: TrialSpec, step: TrainingStep, batches: Iterable[Batch], memory: DeviceMemory | MpsMemory | CpuMemory
) -> MemoryParts:
    """Run one more step after the last timed one, on the first batch, and return what held memory at its peak."""
    if spec.world_size > 1:
        return MemoryParts(missing="steps of several GPUs are not broken down")
    # Compiled or captured code passes no dispatch mode.
    hidden = hiding_operators(spec.techniques)
    if hidden:
        return MemoryParts(missing=f"the tensors of a step with {hidden[0]} cannot be observed")
    if spec.device_type not in ("cpu", "cuda"):
        return MemoryParts(missing=f"torch keeps no peak by operation on {spec.device_type}")
    device = torch.device(spec.device)
    try:
        peak = _observe(step, list(batches), device)
    except torch.OutOfMemoryError:
        return MemoryParts(missing="memory ran out while the step was broken down")
    synchronize(device)
    used = memory.driver_used()
    # What the allocator does not hold: context, libraries, others'.
    outside = None if used is None else max(0, used - memory.reserved())
    return peak.parts.model_copy(update={"outside_bytes": outside})


def trace_step(step: TrainingStep, batches: Sequence[Batch], device: torch.device) -> MemoryParts:
    """Return what holds memory at the peak of a step on the first batch."""
    return _observe(step, list(batches), device).parts


def trace_steps(step: TrainingStep, batches: Sequence[Batch]) -> tuple[MemoryParts, list[Event]]:
    """Return what holds memory at the peak of a second step on fake tensors, and what became of all since the first."""
    made = [step.optimizer]
    if keeps_narrow_state(step.optimizer):
        step(batches[0])  # the state is made where no mode observes it
        step.optimizer.zero_grad()
        made = []  # as if it were made by the next update, between what backward leaves
    storages = fake_storages()
    peak = PeakMode(storages, None)
    for optimizers in (made, [step.optimizer]):  # the first one makes the optimizer's state
        _add_existing(storages, step.model, optimizers, list(batches))
        peak.parts, peak.most = MemoryParts(), -1
        _run_observed(storages, peak, step, batches[0])
    return peak.parts, storages.events


def _observe(step: TrainingStep, batches: list[Batch], device: torch.device) -> "PeakMode":
    """Run a step on the first batch and return what was seen."""
    storages = Storages(device.type)
    _add_existing(storages, step.model, [step.optimizer], batches)
    peak = PeakMode(storages, device)
    _run_observed(storages, peak, step, batches[0])
    return peak


def fake_storages() -> "Storages":
    """Return the storages on a GPU that is not there, as its allocator rounds them."""
    return Storages("cuda", _ROUNDING)


class Storages:
    """The storages alive on a device, by kind; `totals` has the bytes of each kind, `events` what became of them."""

    def __init__(self, device_type: str, rounding: int = 1) -> None:
        self.totals: Counter[str] = Counter()
        self._device_type, self._rounding = device_type, rounding
        self._kinds: dict[int, str] = {}
        self._references: dict[int, weakref.ref[Any]] = {}  # report the end of a storage
        self._sizes: dict[int, int] = {}
        self.events: list[Event] = []
        self._numbers: dict[int, int] = {}

    def add(self, tensor: Tensor, kind: str) -> None:
        """Register a tensor's storage, unless it is known."""
        storage = self._storage(tensor)
        if storage is None or storage._cdata in self._kinds:
            return
        address = storage._cdata
        self._kinds[address], self._sizes[address] = kind, self._rounded(storage)
        self.totals[kind] += self._sizes[address]
        self._note(address)
        self._references[address] = weakref.ref(storage, functools.partial(self._remove, address))

    def reclassify(self, tensor: Tensor, kind: str) -> None:
        """Change the kind of a tensor's storage, unless its kind is final."""
        before = self.kind_of(tensor)
        if before is None:
            self.add(tensor, kind)
        elif before in _PRELIMINARY:
            address = tensor.untyped_storage()._cdata
            self.totals[before] -= self._sizes[address]
            self.totals[kind] += self._sizes[address]
            self._kinds[address] = kind

    def note_size(self, storage: Any, num_bytes: int | None = None) -> None:
        """Note the new size of a storage that was resized, or has so many bytes on a GPU, if it is known."""
        address = storage._cdata
        if address in self._kinds:
            before, self._sizes[address] = self._sizes[address], num_bytes or self._rounded(storage)
            self.totals[self._kinds[address]] += self._sizes[address] - before
            self._note(address)

    def _note(self, address: int) -> None:
        """Note that a storage has its size from now on."""
        if address in self._numbers:
            self.events.append((-self._numbers.pop(address), 0))
        if address in self._sizes:
            self._numbers[address] = len(self.events) + 1
            self.events.append((len(self.events) + 1, self._sizes[address]))

    def _rounded(self, storage: Any) -> int:
        size: int = -(-storage.nbytes() // self._rounding) * self._rounding
        return size

    def kind_of(self, tensor: Tensor) -> str | None:
        storage = self._storage(tensor)
        return None if storage is None else self._kinds.get(storage._cdata)

    def _remove(self, address: int, _: object) -> None:
        self.totals[self._kinds.pop(address)] -= self._sizes.pop(address)
        self._note(address)
        del self._references[address]

    def _storage(self, tensor: Tensor) -> Any:
        if tensor.device.type != self._device_type or not torch._C._has_storage(tensor):
            return None
        return tensor.untyped_storage()


class PeakMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Registers the result of every operation, and keeps the moment with the most memory in use.

    A copy of a weight in another dtype is autocast's. The workspace is what the allocator gave to no tensor.
    """

    def __init__(self, storages: Storages, device: torch.device | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parts = MemoryParts()
        self._storages, self.most = storages, -1
        self._gpu = device if device is not None and device.type == "cuda" else None
        if self._gpu is not None:
            torch.cuda.reset_peak_memory_stats(self._gpu)

    def __enter__(self) -> Self:
        resize = torch.UntypedStorage.resize_

        def resize_followed(storage: Any, size: int) -> Any:
            resized = resize(storage, size)  # no operation tells of it
            self._storages.note_size(storage)
            return resized

        self._patch = patch.object(torch.UntypedStorage, "resize_", resize_followed)
        self._patch.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._patch.stop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        made = tree_tensors(result)
        for tensor in made:
            self._storages.add(tensor, _TEMPORARIES)
        if func in _COPIES:
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            if self._storages.kind_of(source) == _WEIGHTS and source.dtype != made[0].dtype:
                self._storages.reclassify(made[0], _CASTS)
        elements = 0  # bytes
        if self._gpu is None and func in _KEEP_ELEMENTS and not made[0].dim() and args[0].dim():
            elements = args[0].nbytes
            self._storages.note_size(made[0].untyped_storage(), elements)
        tensors = most = sum(self._storages.totals.values()) + elements
        if self._gpu is not None:  # the most since the last operation
            most = torch.cuda.max_memory_allocated(self._gpu)
            torch.cuda.reset_peak_memory_stats(self._gpu)
        if most > self.most:
            self.most = most
            parts = {f"{kind}_bytes": count for kind, count in self._storages.totals.items()}
            parts[f"{_TEMPORARIES}_bytes"] = parts.get(f"{_TEMPORARIES}_bytes", 0) + elements
            workspace = None if self._gpu is None else max(0, most - tensors)
            self.parts = MemoryParts.model_validate(parts | {"workspace_bytes": workspace})
        return result


def _add_existing(storages: Storages, model: nn.Module, optimizers: list[Optimizer], batches: list[Batch]) -> None:
    """Add the tensors that exist before the step.

    A function of its own, so that no variable outlives it: a list of gradients would keep the last step's alive.
    """
    add_by_kind(storages, [model], optimizers)
    for tensor in tree_tensors(batches):
        storages.add(tensor, "batches")


def add_by_kind(storages: Storages, models: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> None:
    """Add what models and optimizers have, or say what it is for if it is known; a storage keeps its first kind."""
    parameters = [weight for model in models for weight in model.parameters()]
    stepped = [weight for optimizer in optimizers for weight in stepped_by(optimizer)]
    states = tree_tensors([state for optimizer in optimizers for state in optimizer.state.values()])
    kinds = {
        # A script may step weights of no module; masters are no parameters.
        _WEIGHTS: [
            *(weight for weight in (*parameters, *stepped) if isinstance(weight, nn.Parameter)),
            *(buffer for model in models for buffer in model.buffers()),
        ],
        _GRADIENTS: [tensor.grad for tensor in (*parameters, *stepped) if tensor.grad is not None],
        "masters": stepped,
        "optimizer": [part for each in states for part in _parts_of(each)],
    }
    for kind, tensors in kinds.items():
        for tensor in tensors:
            storages.reclassify(tensor, kind)


def _parts_of(tensor: Any) -> list[Tensor]:
    """Return the tensors that hold a tensor's values, if it is of a subclass that has no storage itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _parts_of(getattr(tensor, name))]


def saving(storages: Storages) -> saved_tensors_hooks:
    """Return a context in which what is saved for backward is known as such; of fake tensors, until it is used."""

    def save(tensor: Tensor) -> Any:
        if storages.kind_of(tensor) != _CASTS:
            storages.reclassify(tensor, _SAVED)
        # An output that saved itself would never be freed.
        return Saved(tensor.detach()) if isinstance(tensor, FakeTensor) else tensor.detach()

    def read(saved: Any) -> Tensor:
        return saved.read() if isinstance(saved, Saved) else saved

    return saved_tensors_hooks(save, read)


def note_gradients(storages: Storages, parameters: Iterable[Tensor]) -> list[RemovableHandle]:
    """Let gradients of parameters be known as such as soon as there are any."""

    def note(parameter: Tensor) -> None:
        if parameter.grad is not None:
            storages.reclassify(parameter.grad, _GRADIENTS)

    trained = (parameter for parameter in parameters if parameter.requires_grad)
    return [each.register_post_accumulate_grad_hook(note) for each in trained]  # type: ignore[no-untyped-call]


def _run_observed(storages: Storages, peak: PeakMode, step: TrainingStep, batch: Batch) -> None:
    def update(*args: Any) -> Any:
        add_by_kind(storages, [], [step.optimizer])
        with _disable_current_modes():  # it is compiled, which no mode can observe; it makes little
            return type(step.optimizer).step(step.optimizer, *args)

    with ExitStack() as stack:
        if keeps_narrow_state(step.optimizer):
            stack.enter_context(patch.object(step.optimizer, "step", update))
        for handle in note_gradients(storages, step.model.parameters()):
            stack.callback(handle.remove)
        stack.enter_context(saving(storages))
        stack.enter_context(peak)
        step(batch)
