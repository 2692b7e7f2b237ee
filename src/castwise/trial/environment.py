"""Read the machine and the software of a trial from inside its process."""

import platform
import socket

import torch

from castwise._version import __version__
from castwise.apply.float8 import version_of
from castwise.apply.hardware import memory_bytes, module_of, read_hardware, set_current
from castwise.apply.precision import read_fp32_precision
from castwise.records.schema import Environment
from castwise.telemetry.nvml import driver_version, power_limit


def read_environment(device: torch.device, commit: str | None) -> Environment:
    """Open the device, make it the process's current one, and return the environment.

    Raises:
        RuntimeError: The device cannot be opened.
    """
    cpu = read_hardware(torch.device("cpu"))
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
        cpu=cpu.name,
        num_threads=torch.get_num_threads(),
        cpu_features=cpu.cpu_features,
    )
    if device.type == "cpu":
        return shared
    set_current(device)
    torch.empty(1, device=device)  # opens it
    if device.type != "cuda":
        hardware, memory = read_hardware(device), memory_bytes(device)
        update = {"gpu": hardware.name, "architecture": hardware.code, "gpu_memory_bytes": memory}
        return shared.model_copy(update=update | {"num_gpus": module_of(device).device_count()})
    properties = torch.cuda.get_device_properties(device)
    # The properties open no context on a GPU.
    uuids = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(torch.cuda.device_count())]
    return shared.model_copy(
        update={
            "gpu": properties.name,
            "capability": (properties.major, properties.minor),
            "architecture": read_hardware(device).code or None,
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
