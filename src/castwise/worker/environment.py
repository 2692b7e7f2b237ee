"""Read the machine and the software of a trial from inside its process."""

import os
import platform
import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from castwise._version import __version__
from castwise.records.schema import Environment
from castwise.registry.precisions import KNOWN_CPU_FEATURES
from castwise.telemetry.nvml import driver_version
from castwise.worker.precision import read_fp32_precision


def read_environment(device: torch.device, commit: str | None) -> Environment:
    """Open the device, make it the process's current one, and return the environment.

    Args:
        device: The device trials will use; on a GPU this opens CUDA.
        commit: castwise's commit, found by the parent.

    Raises:
        RuntimeError: The device cannot be opened.
    """
    shared = Environment(
        castwise=__version__,
        commit=commit,
        python=platform.python_version(),
        torch=torch.__version__,
        torchvision=_torchvision_version(),
        fp32_precision=read_fp32_precision(),
        host=socket.gethostname(),
        system=f"{platform.system()} {platform.release()}",
        cpu=_cpu_name(),
        num_threads=torch.get_num_threads(),
        cpu_features=tuple(sorted(_cpu_features() & KNOWN_CPU_FEATURES)),
    )
    if device.type != "cuda":
        return shared
    torch.cuda.set_device(device)  # events, streams and library handles are the current device's
    torch.empty(1, device=device)  # opens CUDA
    properties = torch.cuda.get_device_properties(device)
    return shared.model_copy(
        update={
            "gpu": properties.name,
            "capability": (properties.major, properties.minor),
            "gpu_memory_bytes": properties.total_memory,
            "num_gpus": torch.cuda.device_count(),
            "driver": driver_version(),
            "gpu_uuid": _uuid(device),
            "gpu_uuids": tuple(_uuid(torch.device("cuda", index)) for index in range(torch.cuda.device_count())),
            "cuda": torch.version.cuda,
            "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        }
    )


def _uuid(device: torch.device) -> str:
    """Return a GPU's UUID as in NVML; this opens no context on the GPU."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _cpu_lines(prefix: str) -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return [line.partition(":")[2].strip() for line in lines if line.startswith(prefix)]


def _cpu_features() -> set[str]:
    lines = _cpu_lines("flags") or _cpu_lines("Features")  # on x86, and on Arm
    return set(lines[0].split()) if lines else set()


def _cpu_name() -> str:
    names = _cpu_lines("model name")
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name} ({len(os.sched_getaffinity(0))} cores)" if hasattr(os, "sched_getaffinity") else name


def _torchvision_version() -> str | None:
    try:
        return version("torchvision")
    except PackageNotFoundError:
        return None
