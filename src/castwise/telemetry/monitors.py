"""The management library that knows a GPU."""

from contextlib import suppress

from castwise.telemetry.amdsmi import AmdMonitor
from castwise.telemetry.gpu import GpuUnreadableError, Monitor
from castwise.telemetry.nvml import GpuMonitor


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
