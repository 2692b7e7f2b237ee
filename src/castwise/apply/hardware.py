"""What decides about the precisions of a device."""

import torch

from castwise.registry.precisions import Hardware, this_cpu


def read_hardware(device: torch.device) -> Hardware:
    """Return what decides about precisions of a device, without making it the current one."""
    if device.type == "cuda":
        code = ""
        if torch.version.hip is not None:  # "gfx942:sramecc+:xnack-"
            code = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
        return Hardware(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device), code=code)
    return this_cpu()
