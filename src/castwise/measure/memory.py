"""Peak memory of a stretch of a trial: the caching allocator's on a GPU, the resident set's on a CPU."""

from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class CudaMemory:
    """The caching allocator's peaks; of several devices, those of the one with the largest."""

    def __init__(self, *devices: torch.device) -> None:
        self._devices = devices

    def restart(self) -> None:
        """Begin a new stretch."""
        torch.cuda.init()  # type: ignore[no-untyped-call]  # before that the allocator knows no device
        for device in self._devices:
            torch.cuda.reset_peak_memory_stats(device)

    def peak_allocated(self) -> int | None:
        """Return the most bytes that tensors held at once in this stretch."""
        return max(torch.cuda.max_memory_allocated(device) for device in self._devices)

    def peak_reserved(self) -> int | None:
        """Return the most bytes the allocator held in this stretch."""
        return max(torch.cuda.max_memory_reserved(device) for device in self._devices)

    def driver_used(self) -> int | None:
        """Return the bytes in use on the whole device by the driver's word, as nvidia-smi shows them."""
        states = [torch.cuda.mem_get_info(device) for device in self._devices]
        return max(total - free for free, total in states)

    def held(self) -> int | None:
        """Return the bytes that tensors hold now, on all devices."""
        return sum(torch.cuda.memory_allocated(device) for device in self._devices)

    def reserved(self) -> int:
        """Return the bytes the allocator holds now, on all devices."""
        return sum(torch.cuda.memory_reserved(device) for device in self._devices)


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

    def held(self) -> int | None:
        """Return the bytes of the resident set now, None where /proc is not to be had."""
        return _read_status_bytes("VmRSS")

    def reserved(self) -> int:
        """Return 0: nothing whose growth would tell that warm-up goes on."""
        return 0


def memory_of(*devices: torch.device) -> CudaMemory | CpuMemory:
    """Return the meter for the devices of a process."""
    return CudaMemory(*devices) if devices[0].type == "cuda" else CpuMemory()


def _read_status_bytes(field: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return None
