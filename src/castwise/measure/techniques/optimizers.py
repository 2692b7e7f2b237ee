"""Optimizers as a loop's techniques want them."""

import inspect
from dataclasses import replace

import torch
from torch.optim import Optimizer

from castwise.measure.techniques.loop import Loop
from castwise.workloads import OptimizerSpec


def optimizer_for(loop: Loop, spec: OptimizerSpec, device: torch.device) -> OptimizerSpec:
    """Return an optimizer's row with the arguments that a loop adds to it.

    One whose steps are captured, or skipped on the device, counts them there: `capturable`, where the class has it.
    """
    added: dict[str, bool] = dict(loop.optimizer)
    on_device = loop.scales_on_device and device.type == "cuda"
    if on_device and "capturable" in inspect.signature(getattr(torch.optim, spec.name)).parameters:
        added["capturable"] = True
    return replace(spec, arguments=(*spec.arguments, *added.items()))


def keep_rates_on_device(optimizer: Optimizer, device: torch.device) -> None:
    """Make the learning rates tensors on the device: a graph reads them where a schedule writes them.

    Schedulers of torch write into a rate that is a tensor. Source: torch.optim.lr_scheduler
    (`_update_param_group_val`).
    """
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]), device=device)
