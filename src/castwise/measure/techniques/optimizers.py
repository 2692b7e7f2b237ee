"""Optimizers as a loop's techniques want them."""

import inspect
from dataclasses import replace

import torch
from torch.optim import SGD, Optimizer

from castwise.errors import TechniqueError
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


def set_as_wanted(optimizer: Optimizer, loop: Loop, device: torch.device) -> None:
    """Set an optimizer that a user has made as a loop's techniques want it, before its first step here.

    Raises:
        TechniqueError: It is none of torch's that can be set so, or it is so already.
    """
    kind, wanted = type(optimizer), dict(loop.optimizer)
    known = inspect.signature(kind).parameters if kind.__module__.startswith("torch.optim.") else {}
    if loop.cuda_graph and kind is not SGD and "capturable" not in known:
        raise TechniqueError(
            f"A graph would hold fixed what {kind.__name__} counts on the host; torch's Adam can do without."
        )
    for name in wanted:
        if name not in known:
            raise TechniqueError(f"{kind.__name__} has no {name} kernels; torch's SGD, Adam and AdamW have.")
        if not loop.compiled_update and all(group.get(name) for group in optimizer.param_groups):
            raise TechniqueError(f"{name}-optimizer finds nothing to do: {kind.__name__} is {name} already.")
    if wanted:  # they exclude each other
        wanted = {name: wanted.get(name, False) for name in ("fused", "foreach") if name in known}
    if loop.scales_on_device and device.type == "cuda" and "capturable" in known:
        wanted["capturable"] = True
    for settings in (optimizer.defaults, *optimizer.param_groups):
        settings.update(wanted)


def keep_rates_on_device(optimizer: Optimizer, device: torch.device) -> None:
    """Make the learning rates tensors on the device: a graph reads them where a schedule writes them.

    Schedulers of torch write into a rate that is a tensor. Source: torch.optim.lr_scheduler
    (`_update_param_group_val`).
    """
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]), device=device)
