"""Read the machine and the software of a trial from inside its process."""

import os
import platform
import socket
from pathlib import Path

import torch

from castwise._version import __version__
from castwise.records.schema import Environment
from castwise.registry.precisions import KNOWN_CPU_FEATURES, Hardware
from castwise.telemetry.nvml import driver_version, power_limit
from castwise.worker.float8 import version_of
from castwise.worker.precision import read_fp32_precision


def read_environment(device: torch.device, commit: str | None) -> Environment:
    """Open the device, make it the process's current one, and return the environment.

    Raises:
        RuntimeError: The device cannot be opened.
    """
    shared = Environment(
        castwise=__version__,
        commit=commit,
        python=platform.python_version(),
        torch=torch.__version__,
        torchvision=version_of("torchvision"),
        torchao=version_of("torchao"),
        fp32_precision=read_fp32_precision(),
        host=socket.gethostname(),
        system=f"{platform.system()} {platform.release()}",
        cpu=_cpu_name(),
        num_threads=torch.get_num_threads(),
        cpu_features=_cpu_features(),
    )
    if device.type != "cuda":
        return shared
    torch.cuda.set_device(device)  # events, streams and library handles are the current device's
    torch.empty(1, device=device)  # opens CUDA
    properties = torch.cuda.get_device_properties(device)
    # The properties open no context on a GPU.
    uuids = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(torch.cuda.device_count())]
    return shared.model_copy(
        update={
            "gpu": properties.name,
            "capability": (properties.major, properties.minor),
            "gpu_memory_bytes": properties.total_memory,
            "num_gpus": len(uuids),
            "driver": driver_version(),
            "gpu_uuid": f"GPU-{properties.uuid}",
            "gpu_uuids": tuple(uuids),
            "power_limit_watts": power_limit(f"GPU-{properties.uuid}"),
            "cuda": torch.version.cuda,
            "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        }
    )


def read_hardware(device: torch.device) -> Hardware:
    """Return what decides about precisions of a device, without making it the current one."""
    if device.type != "cuda":
        return Hardware(_cpu_name(), None, _cpu_features())
    return Hardware(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def _cpu_name() -> str:
    name = next(iter(_cpu_lines("model name")), platform.processor() or platform.machine())
    return f"{name} ({len(os.sched_getaffinity(0))} cores)" if hasattr(os, "sched_getaffinity") else name


def _cpu_features() -> tuple[str, ...]:
    features = set(" ".join((_cpu_lines("flags") or _cpu_lines("Features"))[:1]).split())  # on x86, and on Arm
    return tuple(sorted(features & KNOWN_CPU_FEATURES))


def _cpu_lines(prefix: str) -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return [line.partition(":")[2].strip() for line in lines if line.startswith(prefix)]
