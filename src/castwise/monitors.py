"""Whose management library knows a GPU."""

from contextlib import suppress

from castwise.amd import AmdMonitor
from castwise.gpu import GpuUnreadableError, Monitor
from castwise.nvml import GpuMonitor


def open_monitor(uuid: str) -> Monitor:
    """Return the management library of the GPU with this UUID.

    Raises:
        GpuUnreadableError: There is none that knows it.
    """
    try:
        return GpuMonitor(uuid)
    except GpuUnreadableError as why:
        with suppress(GpuUnreadableError):
            return AmdMonitor(uuid)
        raise why from None
