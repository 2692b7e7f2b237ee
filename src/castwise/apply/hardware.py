"""What decides about the precisions of a device."""

import torch

from castwise.registry.precisions import Hardware, this_cpu


def read_hardware(device: torch.device) -> Hardware:
    """Return what decides about precisions of a device, without making it the current one."""
    if device.type == "cuda":
        return Hardware(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    return this_cpu()
