"""What NVIDIA's management library says of a GPU; every answer may be missing and says why."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


class NvmlUnavailableError(Exception):
    """NVML did not answer; the message says why."""


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory on a GPU.

    Attributes:
        pid: Its process id.
        name: Its program, or "?" where it may not be read.
        memory_bytes: The GPU memory it holds; None where the driver hides it.
    """

    pid: int
    name: str
    memory_bytes: int | None


def driver_version() -> str | None:
    """Return the driver's version, None without NVML."""
    try:
        with _opened() as nvml:
            return str(nvml.nvmlSystemGetDriverVersion())
    except NvmlUnavailableError:
        return None


def compute_processes(uuid: str) -> tuple[GpuProcess, ...]:
    """Return the processes that compute on the GPU with this UUID ("GPU-...").

    Raises:
        NvmlUnavailableError: NVML is not there or does not tell.
    """
    with _opened() as nvml:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        return tuple(
            GpuProcess(pid=process.pid, name=_process_name(process.pid), memory_bytes=process.usedGpuMemory)
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        )


@contextmanager
def _opened() -> Iterator[Any]:
    try:
        import pynvml
    except ImportError:
        raise NvmlUnavailableError("nvidia-ml-py is not installed (pip install nvidia-ml-py)") from None
    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise NvmlUnavailableError(str(error)) from None


def _process_name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "?"
