"""Peak memory of a stretch of a trial: the caching allocator's on a GPU, the resident set's on a CPU."""

from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class CudaMemory:
    """The caching allocator's peaks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def restart(self) -> None:
        """Begin a new stretch."""
        torch.cuda.init()  # type: ignore[no-untyped-call]  # before that the allocator knows no device
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_allocated(self) -> int | None:
        """Return the most bytes that tensors held at once in this stretch."""
        return torch.cuda.max_memory_allocated(self._device)

    def peak_reserved(self) -> int | None:
        """Return the most bytes the allocator held in this stretch."""
        return torch.cuda.max_memory_reserved(self._device)

    def driver_used(self) -> int | None:
        """Return the bytes in use on the whole device by the driver's word, as nvidia-smi shows them."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def reserved(self) -> int:
        """Return the bytes the allocator holds now."""
        return torch.cuda.memory_reserved(self._device)


class CpuMemory:
    """Growth of the process's resident set since this object was made; an upper bound for what tensors hold.

    Source: Linux, Documentation/filesystems/proc.rst: VmHWM, and writing 5 to clear_refs resets it.
    """

    def __init__(self) -> None:
        self._before = _read_status_bytes("VmRSS")

    def restart(self) -> None:
        """Begin a new stretch."""
        try:
            _CLEAR_REFS.write_text("5")
        except OSError:
            return  # without the reset the peak is the whole trial's: still an upper bound

    def peak_allocated(self) -> int | None:
        """Return the most bytes the resident set grew by in this stretch, None where /proc is not to be had."""
        peak = _read_status_bytes("VmHWM")
        if peak is None or self._before is None:
            return None
        return max(0, peak - self._before)

    def peak_reserved(self) -> int | None:
        """Return None: a CPU has no caching allocator."""
        return None

    def driver_used(self) -> int | None:
        """Return None: a CPU has no driver of its own."""
        return None

    def reserved(self) -> int:
        """Return 0: nothing whose growth would tell that warm-up goes on."""
        return 0


def memory_of(device: torch.device) -> CudaMemory | CpuMemory:
    """Return the meter for a device."""
    return CudaMemory(device) if device.type == "cuda" else CpuMemory()


def _read_status_bytes(field: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return None
