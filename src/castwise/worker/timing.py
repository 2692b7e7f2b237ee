"""Time work on a device: by CUDA events on a GPU, by the host's clock on a CPU."""

import time
from collections.abc import Callable

import torch


class CudaStopwatch:
    """CUDA events before and after the work, and one synchronisation after it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def time(self, work: Callable[[], None], *, rested: bool = True) -> float:
        """Run the work and return its seconds on the device, from its first launch to its last kernel's end.

        Args:
            work: What is timed.
            rested: Whether to wait first for all that was launched before; if not, the time begins when it is done.
        """
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        if rested:
            torch.cuda.synchronize(self._device)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize(self._device)
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1e3


class HostStopwatch:
    """The host's monotonic clock."""

    def time(self, work: Callable[[], None], *, rested: bool = True) -> float:
        """Run the work and return its seconds; a host has always finished what came before."""
        del rested
        start = time.perf_counter()
        work()
        return time.perf_counter() - start


def stopwatch_of(device: torch.device) -> CudaStopwatch | HostStopwatch:
    """Return the stopwatch for a device."""
    return CudaStopwatch(device) if device.type == "cuda" else HostStopwatch()
