"""Take one training step apart: which tensors are alive when memory is at its peak, and what they are there for.

Every operation of the step passes a dispatch mode, which sees each new storage, and learns of its end by a weak
reference. What a storage is for is known from where it comes from: weights, optimizer state and batches are there
before; autograd says what it saves for backward, and which gradients it keeps; a copy of a weight in another dtype is
autocast's. On a GPU the allocator tells the peak within each operation, so that workspaces show too.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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

_TEMPORARIES, _SAVED, _CASTS, _GRADIENTS, _WEIGHTS = "temporaries", "saved", "weight_casts", "gradients", "weights"
# What a tensor is for may become clear after it was made; of these it may.
_OPEN = (_TEMPORARIES, _SAVED)
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


def profile_memory(
    spec: TrialSpec, step: TrainingStep, batches: Iterable[Batch], memory: CudaMemory | CpuMemory
) -> MemoryParts:
    """Run one more step, and return what held memory at its peak.

    Args:
        spec: The trial.
        step: Its training step, after the last timed one.
        batches: The batches that lie on the device; the first is trained on.
        memory: Asked for what lies outside the allocator.
    """
    if spec.world_size > 1:
        return MemoryParts(missing="steps of several GPUs are not taken apart")
    # What is compiled or captured passes no dispatch mode.
    hidden = [row.name for row in rows_of(spec.techniques) if row.compile_cost or "cuda_graph" in row.settings]
    if hidden:
        return MemoryParts(missing=f"what is in a step with {hidden[0]} cannot be seen from outside")
    device, held = torch.device(spec.device), list(batches)
    storages = _Storages(device.type)
    _register(storages, step, held)
    try:
        peak = _run(storages, step, held[0], device)
    except torch.OutOfMemoryError:
        return MemoryParts(missing="memory ran out while the step was taken apart")
    found = {f"{kind}_bytes": count for kind, count in peak.tensors.items()}
    outside = memory.outside()
    return MemoryParts.model_validate({**found, "workspace_bytes": peak.workspace, "outside_bytes": outside})


class _Storages:
    """The storages alive on a device, by what they are for.

    Attributes:
        totals: Bytes by kind.
    """

    def __init__(self, device_type: str) -> None:
        self.totals: Counter[str] = Counter()
        self._device_type = device_type
        self._kinds: dict[int, str] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}

    def add(self, tensor: Tensor, kind: str) -> None:
        """Take note of a tensor's storage; one that is known stays what it is."""
        storage = self._storage(tensor)
        if storage is None or storage._cdata in self._kinds:
            return
        address = storage._cdata
        self._kinds[address], self._sizes[address] = kind, storage.nbytes()
        self.totals[kind] += self._sizes[address]
        self._references[address] = weakref.ref(storage, functools.partial(self._ended, address))

    def turn(self, tensor: Tensor, kind: str) -> None:
        """Say what a tensor turns out to be for, unless that was known."""
        storage = self._storage(tensor)
        before = None if storage is None else self._kinds.get(storage._cdata)
        if storage is None or before is None:
            self.add(tensor, kind)
        elif before in _OPEN:
            size = self._sizes[storage._cdata]
            self.totals[before] -= size
            self.totals[kind] += size
            self._kinds[storage._cdata] = kind

    def kind_of(self, tensor: Tensor) -> str | None:
        """Return what a tensor's storage is for, None for one never seen."""
        storage = self._storage(tensor)
        return None if storage is None else self._kinds.get(storage._cdata)

    def _ended(self, address: int, _: object) -> None:
        self.totals[self._kinds.pop(address)] -= self._sizes.pop(address)
        del self._references[address]

    def _storage(self, tensor: Tensor) -> Any:
        if tensor.device.type != self._device_type or not torch._C._has_storage(tensor):
            return None
        return tensor.untyped_storage()


class _Peak:
    """The fullest moment of a step so far.

    Attributes:
        tensors: Bytes by kind at that moment.
        workspace: What the allocator had given out besides, None where there is none to ask.
    """

    def __init__(self, storages: _Storages, device: torch.device) -> None:
        self.tensors: dict[str, int] = {}
        self.workspace: int | None = 0 if device.type == "cuda" else None
        self._storages, self._device, self._most = storages, device, -1
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def look(self) -> None:
        """Compare what is held now, or was since the last look, with the most so far."""
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


class _Watched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes note of what every operation makes."""

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
                self._storages.turn(made[0], _CASTS)
        self._peak.look()
        return result


def _register(storages: _Storages, step: TrainingStep, batches: list[Batch]) -> None:
    """Say what those tensors are for that are there before the step begins."""
    parameters = list(step.model.parameters())
    for tensor in (*parameters, *step.model.buffers()):
        storages.add(tensor, _WEIGHTS)
    stepped = [tensor for group in step.optimizer.param_groups for tensor in group["params"]]
    for tensor in (*parameters, *stepped):
        if tensor.grad is not None:
            storages.add(tensor.grad, _GRADIENTS)
    for tensor in stepped:
        storages.add(tensor, "masters")  # the weights themselves, where there are none, are known
    for tensor in tree_tensors(list(step.optimizer.state.values())):
        storages.add(tensor, "optimizer")
    for tensor in tree_tensors(batches):
        storages.add(tensor, "batches")


def _run(storages: _Storages, step: TrainingStep, batch: Batch, device: torch.device) -> _Peak:
    peak = _Peak(storages, device)
    saved = torch.autograd.graph.saved_tensors_hooks(_saver(storages), _same)
    with _gradients_told(step, storages), saved, _Watched(storages, peak):
        step(batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return peak


def _saver(storages: _Storages) -> Callable[[Tensor], Tensor]:
    def save(tensor: Tensor) -> Tensor:
        if storages.kind_of(tensor) != _CASTS:
            storages.turn(tensor, _SAVED)
        return tensor.detach()  # an output that saved itself would never be freed

    return save


def _same(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def _gradients_told(step: TrainingStep, storages: _Storages) -> Iterator[None]:
    """Let every parameter say when it has its gradient."""

    def tell(parameter: Tensor) -> None:
        if parameter.grad is not None:
            storages.turn(parameter.grad, _GRADIENTS)

    learning = [parameter for parameter in step.model.parameters() if parameter.requires_grad]
    handles = [each.register_post_accumulate_grad_hook(tell) for each in learning]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
