"""Break down the memory of one training step at its peak: which tensors are alive, and what they are for.

A dispatch mode sees each new storage, and a weak reference reports its end. What a storage is for follows from its
origin: weights, optimizer state and batches exist before the step; autograd reports what it saves for backward and
which gradients it keeps; a copy of a weight in another dtype is autocast's. On a GPU the allocator also reports the
peak within each operation, which includes workspaces.

torch.distributed._tools.mem_tracker.MemTracker is similar, but does not tell casts of weights, masters, batches and
workspaces apart.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from castwise.records.schema import MemoryParts
from castwise.registry.techniques import rows_of
from castwise.spec.trial import TrialSpec
from castwise.worker.memory import CpuMemory, CudaMemory
from castwise.worker.models.task import Batch
from castwise.worker.pytree import tree_tensors
from castwise.worker.step import TrainingStep

_TEMPORARIES = "temporaries"
_SAVED = "saved"
_CASTS = "weight_casts"
_GRADIENTS = "gradients"
_WEIGHTS = "weights"
# Kinds that may change when it becomes clear what a tensor is for.
_PRELIMINARY = (_TEMPORARIES, _SAVED)
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


def profile_memory(
    spec: TrialSpec, step: TrainingStep, batches: Iterable[Batch], memory: CudaMemory | CpuMemory
) -> MemoryParts:
    """Run one more step after the last timed one, and return what held memory at its peak.

    Args:
        spec: The trial.
        step: Its training step.
        batches: The batches on the device; the first is trained on.
        memory: The memory meter of the trial's device.
    """
    if spec.world_size > 1:
        return MemoryParts(missing="steps of several GPUs are not broken down")
    # Compiled or captured code passes no dispatch mode.
    hidden = [row.name for row in rows_of(spec.techniques) if row.compile_cost or "cuda_graph" in row.settings]
    if hidden:
        return MemoryParts(missing=f"the tensors of a step with {hidden[0]} cannot be observed")
    device, held = torch.device(spec.device), list(batches)
    storages = _Storages(device.type)
    _register(storages, step, held)
    try:
        peak = _run(storages, step, held[0], device)
    except torch.OutOfMemoryError:
        return MemoryParts(missing="memory ran out while the step was broken down")
    found = {f"{kind}_bytes": count for kind, count in peak.tensors.items()}
    outside = memory.outside()
    return MemoryParts.model_validate({**found, "workspace_bytes": peak.workspace, "outside_bytes": outside})


class _Storages:
    """The storages alive on a device, by kind; `totals` has the bytes of each kind."""

    def __init__(self, device_type: str) -> None:
        self.totals: Counter[str] = Counter()
        self._device_type = device_type
        self._kinds: dict[int, str] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
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
        storage = self._storage(tensor)
        before = None if storage is None else self._kinds.get(storage._cdata)
        if storage is None or before is None:
            self.add(tensor, kind)
        elif before in _PRELIMINARY:
            size = self._sizes[storage._cdata]
            self.totals[before] -= size
            self.totals[kind] += size
            self._kinds[storage._cdata] = kind

    def kind_of(self, tensor: Tensor) -> str | None:
        """Return the kind of a tensor's storage; None if it is unknown."""
        storage = self._storage(tensor)
        return None if storage is None else self._kinds.get(storage._cdata)

    def _remove(self, address: int, _: object) -> None:
        self.totals[self._kinds.pop(address)] -= self._sizes.pop(address)
        del self._references[address]

    def _storage(self, tensor: Tensor) -> Any:
        if tensor.device.type != self._device_type or not torch._C._has_storage(tensor):
            return None
        return tensor.untyped_storage()


class _Peak:
    """The moment of a step with the most memory in use so far.

    Attributes:
        tensors: Bytes by kind at that moment.
        workspace: Bytes that the allocator had given out besides; None on a CPU.
    """

    def __init__(self, storages: _Storages, device: torch.device) -> None:
        self.tensors: dict[str, int] = {}
        self.workspace: int | None = 0 if device.type == "cuda" else None
        self._storages, self._device, self._most = storages, device, -1
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def update(self) -> None:
        """Update the peak with the memory in use now, on a GPU since the last update."""
        tensors = sum(self._storages.totals.values())
        given_out = self._given_out()
        most = tensors if given_out is None else given_out
        if most > self._most:
            self._most, self.tensors = most, dict(self._storages.totals)
            self.workspace = None if given_out is None else max(0, given_out - tensors)

    def _given_out(self) -> int | None:
        if self._device.type != "cuda":
            return None
        most = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return most


class _StorageMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Registers the result of every operation."""

    def __init__(self, storages: _Storages, peak: _Peak) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages, self._peak = storages, peak

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
        self._peak.update()
        return result


def _register(storages: _Storages, step: TrainingStep, batches: list[Batch]) -> None:
    """Register the tensors that exist before the step."""
    parameters = list(step.model.parameters())
    for tensor in (*parameters, *step.model.buffers()):
        storages.add(tensor, _WEIGHTS)
    stepped = [tensor for group in step.optimizer.param_groups for tensor in group["params"]]
    for tensor in (*parameters, *stepped):
        if tensor.grad is not None:
            storages.add(tensor.grad, _GRADIENTS)
    for tensor in stepped:
        storages.add(tensor, "masters")  # without masters these are the weights, which are known
    for tensor in tree_tensors(list(step.optimizer.state.values())):
        storages.add(tensor, "optimizer")
    for tensor in tree_tensors(batches):
        storages.add(tensor, "batches")


def _run(storages: _Storages, step: TrainingStep, batch: Batch, device: torch.device) -> _Peak:
    peak = _Peak(storages, device)

    def save(tensor: Tensor) -> Tensor:
        if storages.kind_of(tensor) != _CASTS:
            storages.reclassify(tensor, _SAVED)
        return tensor.detach()  # an output that saved itself would never be freed

    saved = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
    with _watched_gradients(step, storages), saved, _StorageMode(storages, peak):
        step(batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return peak


@contextmanager
def _watched_gradients(step: TrainingStep, storages: _Storages) -> Iterator[None]:
    """Classify every parameter's gradient as soon as backward has accumulated it."""

    def classify(parameter: Tensor) -> None:
        if parameter.grad is not None:
            storages.reclassify(parameter.grad, _GRADIENTS)

    learning = [parameter for parameter in step.model.parameters() if parameter.requires_grad]
    handles = [each.register_post_accumulate_grad_hook(classify) for each in learning]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
