"""Break down the memory of one training step at its peak: which tensors are alive, and what they are for.

torch.distributed._tools.mem_tracker.MemTracker is similar, but does not tell casts of weights, masters, batches and
workspaces apart.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass

from castwise.apply.loss_scaling import stepped_by
from castwise.apply.pytree import Batch, tree_tensors
from castwise.apply.techniques.optimizer_state import keeps_narrow_state
from castwise.records.schema import MemoryParts
from castwise.registry.techniques import hiding_operators
from castwise.spec.trial import TrialSpec
from castwise.trial.memory import CpuMemory, CudaMemory
from castwise.trial.step import TrainingStep

# Kinds of storages, as `MemoryParts` names them.
_TEMPORARIES = "temporaries"
_SAVED = "saved"
_CASTS = "weight_casts"
_GRADIENTS = "gradients"
_WEIGHTS = "weights"
_PRELIMINARY = (_TEMPORARIES, _SAVED)  # may change when it becomes clear what a tensor is for
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


def profile_memory(
    spec: TrialSpec, step: TrainingStep, batches: Iterable[Batch], memory: CudaMemory | CpuMemory
) -> MemoryParts:
    """Run one more step after the last timed one, on the first batch, and return what held memory at its peak."""
    if spec.world_size > 1:
        return MemoryParts(missing="steps of several GPUs are not broken down")
    # Compiled or captured code passes no dispatch mode.
    hidden = hiding_operators(spec.techniques)
    if hidden:
        return MemoryParts(missing=f"the tensors of a step with {hidden[0]} cannot be observed")
    device, held = torch.device(spec.device), list(batches)
    storages = _Storages(device.type)
    _add_existing(storages, step, held)
    peak = _PeakMode(storages, device)
    try:
        _run_observed(storages, peak, step, held[0])
    except torch.OutOfMemoryError:
        return MemoryParts(missing="memory ran out while the step was broken down")
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    used = memory.driver_used()
    return MemoryParts.model_validate(
        {f"{kind}_bytes": count for kind, count in peak.bytes_by_kind.items()}
        | {
            "workspace_bytes": peak.workspace_bytes,
            # What the allocator does not hold: context, libraries, others'.
            "outside_bytes": None if used is None else max(0, used - memory.reserved()),
        }
    )


class _Storages:
    """The storages alive on a device, by kind; `totals` has the bytes of each kind."""

    def __init__(self, device_type: str) -> None:
        self.totals: Counter[str] = Counter()
        self._device_type = device_type
        self._kinds: dict[int, str] = {}
        self._references: dict[int, weakref.ref[Any]] = {}  # report the end of a storage
        self._sizes: dict[int, int] = {}

    def add(self, tensor: Tensor, kind: str) -> None:
        """Register a tensor's storage, unless it is known."""
        storage = self._storage(tensor)
        if storage is None or storage._cdata in self._kinds:
            return
        address = storage._cdata
        self._kinds[address], self._sizes[address] = kind, storage.nbytes()
        self.totals[kind] += self._sizes[address]
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

    def kind_of(self, tensor: Tensor) -> str | None:
        storage = self._storage(tensor)
        return None if storage is None else self._kinds.get(storage._cdata)

    def _remove(self, address: int, _: object) -> None:
        self.totals[self._kinds.pop(address)] -= self._sizes.pop(address)
        del self._references[address]

    def _storage(self, tensor: Tensor) -> Any:
        if tensor.device.type != self._device_type or not torch._C._has_storage(tensor):
            return None
        return tensor.untyped_storage()


class _PeakMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Registers the result of every operation, and keeps the moment with the most memory in use.

    A copy of a weight in another dtype is autocast's. The workspace is what the allocator gave to no tensor.
    """

    def __init__(self, storages: _Storages, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes_by_kind: dict[str, int] = {}
        self.workspace_bytes: int | None = 0 if device.type == "cuda" else None
        self._storages, self._device, self._most = storages, device, -1
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

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
        tensors = most = sum(self._storages.totals.values())
        if self._device.type == "cuda":  # the most since the last operation
            most = torch.cuda.max_memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        if most > self._most:
            self._most, self.bytes_by_kind = most, dict(self._storages.totals)
            if self._device.type == "cuda":
                self.workspace_bytes = max(0, most - tensors)
        return result


def _add_existing(storages: _Storages, step: TrainingStep, batches: list[Batch]) -> None:
    """Add the tensors that exist before the step.

    A function of its own, so that no variable outlives it: a list of gradients would keep the last step's alive.
    """
    parameters, stepped = list(step.model.parameters()), list(stepped_by(step.optimizer))
    kinds = {  # a storage keeps the first kind that it gets
        _WEIGHTS: [*parameters, *step.model.buffers()],
        _GRADIENTS: [tensor.grad for tensor in (*parameters, *stepped) if tensor.grad is not None],
        "masters": stepped,  # without masters these are the weights
        "optimizer": [part for each in tree_tensors(list(step.optimizer.state.values())) for part in _parts_of(each)],
        "batches": tree_tensors(batches),
    }
    for kind, tensors in kinds.items():
        for tensor in tensors:
            storages.add(tensor, kind)


def _parts_of(tensor: Any) -> list[Tensor]:
    """Return the tensors that hold a tensor's values, if it is of a subclass that has no storage itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _parts_of(getattr(tensor, name))]


def _run_observed(storages: _Storages, peak: _PeakMode, step: TrainingStep, batch: Batch) -> None:
    def save(tensor: Tensor) -> Tensor:
        if storages.kind_of(tensor) != _CASTS:
            storages.reclassify(tensor, _SAVED)
        return tensor.detach()  # an output that saved itself would never be freed

    def note_gradient(parameter: Tensor) -> None:
        if parameter.grad is not None:
            storages.reclassify(parameter.grad, _GRADIENTS)

    def update(*args: Any) -> Any:
        with _disable_current_modes():  # it is compiled, which no mode can observe; it makes little
            return type(step.optimizer).step(step.optimizer, *args)

    with ExitStack() as stack:
        if keeps_narrow_state(step.optimizer):
            stack.enter_context(patch.object(step.optimizer, "step", update))
        for parameter in step.model.parameters():
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(note_gradient)  # type: ignore[no-untyped-call]
                stack.callback(handle.remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor))
        stack.enter_context(peak)
        step(batch)
