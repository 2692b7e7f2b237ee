"""Peak memory of a phase of a trial: the caching allocator's on a GPU, the resident set's on a CPU."""

from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from castwise.apply.hardware import module_of
from castwise.records.schema import Shortfall
from castwise.spec.quantities import format_bytes

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class MemoryLimitError(MemoryError):
    """A trial took more memory than its limit; `shortfall` has both."""

    def __init__(self, taken_bytes: int, limit_bytes: int) -> None:
        taken, limit = format_bytes(taken_bytes), format_bytes(limit_bytes)
        super().__init__(f"out of memory: the process grew by {taken} of the {limit} allowed")
        self.shortfall = Shortfall(needed_bytes=taken_bytes, free_bytes=limit_bytes)


class DeviceMemory:
    """The caching allocator's peaks since `reset_peak`, in bytes; of several devices, the largest."""

    def __init__(self, *devices: torch.device) -> None:
        self._devices = devices
        self._module = module_of(devices[0])

    def reset_peak(self) -> None:
        self._module.init()  # the allocator must know the devices
        for device in self._devices:
            self._module.reset_peak_memory_stats(device)

    def peak_allocated(self) -> int | None:
        return max(int(self._module.max_memory_allocated(device)) for device in self._devices)

    def peak_reserved(self) -> int | None:
        return max(int(self._module.max_memory_reserved(device)) for device in self._devices)

    def driver_used(self) -> int | None:
        """Return what is in use on the whole device now, as nvidia-smi shows it."""
        states = [self._module.mem_get_info(device) for device in self._devices]
        return max(int(total - free) for free, total in states)

    def current_bytes(self) -> int | None:
        """Return what tensors hold now, on all devices."""
        return sum(int(self._module.memory_allocated(device)) for device in self._devices)

    def reserved(self) -> int:
        """Return what the allocator holds now, on all devices."""
        return sum(int(self._module.memory_reserved(device)) for device in self._devices)

    def refused_allocations(self) -> int:
        """Return how often the allocator had no memory, so far: libraries may go on with less."""
        return sum(int(self._module.memory_stats(device).get("num_ooms", 0)) for device in self._devices)

    def set_limit(self, limit_bytes: int) -> None:
        """Limit what the allocator may hold on each device; more is an out-of-memory error."""
        for device in self._devices:
            whole = self._module.get_device_properties(device).total_memory
            self._module.set_per_process_memory_fraction(min(1.0, limit_bytes / whole), device)

    def check(self) -> None:
        """Do nothing: the allocator itself enforces the limit."""


class MpsMemory:
    """What the driver holds for Apple's GPU: an upper bound for tensors, which only grows within a phase.

    torch keeps no peak there.
    """

    def reset_peak(self) -> None:
        torch.mps.empty_cache()

    def peak_allocated(self) -> int | None:
        return torch.mps.driver_allocated_memory()

    def peak_reserved(self) -> int | None:
        return torch.mps.driver_allocated_memory()

    def driver_used(self) -> int | None:
        return None

    def current_bytes(self) -> int | None:
        return torch.mps.current_allocated_memory()

    def reserved(self) -> int:
        return torch.mps.driver_allocated_memory()

    def refused_allocations(self) -> int:
        return 0

    def set_limit(self, limit_bytes: int) -> None:
        torch.mps.set_per_process_memory_fraction(min(1.0, limit_bytes / torch.mps.recommended_max_memory()))

    def check(self) -> None:
        """Do nothing: the allocator itself enforces the limit."""


class CpuMemory:
    """Growth of the process's resident set since this object was made; an upper bound for what tensors hold.

    A CPU has no caching allocator and no driver, so their figures are None or 0.
    Source: Linux, Documentation/filesystems/proc.rst: VmHWM, and writing 5 to clear_refs resets it.
    """

    def __init__(self) -> None:
        self._before = _read_status_bytes("VmRSS")
        self._limit: int | None = None

    def reset_peak(self) -> None:
        try:
            _CLEAR_REFS.write_text("5")
        except OSError:
            return  # the peak stays that of the whole trial, which is an upper bound

    def peak_allocated(self) -> int | None:
        peak = _read_status_bytes("VmHWM")
        return None if peak is None or self._before is None else max(0, peak - self._before)

    def peak_reserved(self) -> int | None:
        return None

    def driver_used(self) -> int | None:
        return None

    def current_bytes(self) -> int | None:
        return _read_status_bytes("VmRSS")

    def reserved(self) -> int:
        """Return 0: there is no allocator whose growth shows that the warm-up is not over."""
        return 0

    def refused_allocations(self) -> int:
        return 0

    def set_limit(self, limit_bytes: int) -> None:
        """Let `check` refuse more growth than this; the kernel's own limits count address space."""
        self._limit = limit_bytes

    def check(self) -> None:
        """Raise MemoryLimitError if the process has grown beyond its limit in this phase."""
        peak = self.peak_allocated()
        if self._limit is not None and peak is not None and peak > self._limit:
            raise MemoryLimitError(peak, self._limit)


def without_storage(loss: Tensor) -> Tensor:
    """Return a loss that may be kept for many steps: detached, and in a storage of its own size.

    torch returns the mean of `mse_loss` and `smooth_l1_loss` in the storage of all elements (aten's Loss.cpp resizes).
    One without a gradient is left as it is: a graph of several steps fills its losses later, at its launch.
    """
    kept = loss.detach()
    with suppress(RuntimeError):  # wrappers have no storage
        if loss.requires_grad and kept.untyped_storage().nbytes() > kept.numel() * kept.element_size():
            return kept.clone()
    return kept


def memory_meter(*devices: torch.device) -> DeviceMemory | MpsMemory | CpuMemory:
    return (
        CpuMemory() if devices[0].type == "cpu" else MpsMemory() if devices[0].type == "mps" else DeviceMemory(*devices)
    )


def _read_status_bytes(field: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), None)
