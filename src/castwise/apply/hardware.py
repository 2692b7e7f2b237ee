"""What decides about the precisions of a device."""

import os
import platform
from pathlib import Path

import torch

from castwise.registry.precisions import KNOWN_CPU_FEATURES, Hardware


def read_hardware(device: torch.device) -> Hardware:
    """Return what decides about precisions of a device, without making it the current one."""
    if device.type == "cuda":
        return Hardware(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    name = next(iter(_cpu_lines("model name")), platform.processor() or platform.machine())
    if hasattr(os, "sched_getaffinity"):
        name = f"{name} ({len(os.sched_getaffinity(0))} cores)"
    features = set(" ".join((_cpu_lines("flags") or _cpu_lines("Features"))[:1]).split())  # on x86, and on Arm
    return Hardware(name, None, tuple(sorted(features & KNOWN_CPU_FEATURES)))


def _cpu_lines(prefix: str) -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return [line.partition(":")[2].strip() for line in lines if line.startswith(prefix)]
