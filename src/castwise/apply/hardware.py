"""What a device is: the one that torch has, what decides about its precisions, how it is waited for and timed.

CUDA, Intel's XPU and Apple's MPS have one interface in torch: torch.accelerator, and the modules that
torch.get_device_module returns. What MPS lacks of it is here. XPU and MPS were tried on fake devices only.
"""

from typing import Any

import torch

from castwise.errors import UsageError
from castwise.registry.precisions import Hardware, this_cpu


def find_device(asked: str) -> torch.device:
    """Return the device of a name, with its number; "auto" is the first GPU, or the CPU if there is none.

    Raises:
        UsageError: torch has no such device.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    kind, _, number = (
        ("cpu" if found is None else found.type).partition(":") if asked == "auto" else asked.partition(":")
    )
    if kind == "cpu":
        return torch.device(kind)
    if found is None or found.type != kind:
        sees = "no GPU" if found is None else f"{found.type} only"
        raise UsageError(f"There is no device '{asked}': torch sees {sees}. `castwise doctor` shows what there is.")
    return torch.device(kind, int(number or 0))  # torch.cuda.set_device takes none without a number


def read_hardware(device: torch.device) -> Hardware:
    """Return what decides about precisions of a device, without making it the current one."""
    if device.type == "cuda":
        code = ""
        if torch.version.hip is not None:  # "gfx942:sramecc+:xnack-"
            code = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
        return Hardware(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device), code=code)
    if device.type == "cpu":
        return this_cpu()
    if device.type == "mps":
        get_name = getattr(torch.backends.mps, "get_name", None)  # torch 2.11 has none
        return Hardware("Apple GPU" if get_name is None else get_name(), None, code="mps")
    return Hardware(module_of(device).get_device_name(device), None, code=device.type)


def memory_bytes(device: torch.device) -> int:
    """Return the memory of a GPU: of MPS what Metal recommends to take of the machine's."""
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    return int(module_of(device).get_device_properties(device).total_memory)


def module_of(device: torch.device) -> Any:
    """Return torch.cuda, torch.xpu or torch.mps."""
    return torch.get_device_module(device)


def set_current(device: torch.device) -> None:
    """Make a GPU the process's current one: events, streams and library handles are those of the current device."""
    if device.type != "mps":  # there is one only
        module_of(device).set_device(device)


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that was launched; a CPU always has."""
    if device.type == "mps":
        torch.mps.synchronize()
    elif device.type != "cpu":
        module_of(device).synchronize(device)


def make_event(device: torch.device) -> Any:
    """Return an event that marks a moment on a GPU; `elapsed_time` has the milliseconds between two."""
    return module_of(device).Event(enable_timing=True)
