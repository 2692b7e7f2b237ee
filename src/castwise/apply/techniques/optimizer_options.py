"""Optimizers with the settings that techniques require: fused, foreach, capturable, rates on the device."""

import inspect
from collections.abc import Container
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import SGD, Adadelta, Adam, Adamax, AdamW, Optimizer, RAdam, RMSprop, lr_scheduler

from castwise.errors import TechniqueError
from castwise.registry.techniques import StepConfig
from castwise.registry.workloads import OptimizerSpec

# Optimizers whose state begins at zero: after a skipped first step it is zeros.
_FROM_ZEROS = (SGD, Adam, AdamW, Adamax, RAdam, RMSprop, Adadelta)


def optimizer_for(loop: StepConfig, spec: OptimizerSpec, device: torch.device) -> OptimizerSpec:
    """Return an optimizer's row with the arguments that the techniques add."""
    known = inspect.signature(getattr(torch.optim, spec.name)).parameters
    added = dict(loop.optimizer_arguments) | _capturable(loop, device, known)
    return replace(spec, arguments=(*spec.arguments, *added.items()))


def _capturable(loop: StepConfig, device: torch.device, known: Container[str]) -> dict[str, bool]:
    """Return `capturable`, which counts steps on the device, if steps are skipped there and the optimizer has it."""
    is_needed = loop.scales_on_device and device.type == "cuda" and "capturable" in known
    return {"capturable": True} if is_needed else {}


def set_as_wanted(optimizer: Optimizer, loop: StepConfig, device: torch.device, *, may_skip: bool = False) -> None:
    """Apply the settings of the techniques to a user's optimizer before its first step; loss scaling may skip steps."""
    kind, wanted = type(optimizer), dict(loop.optimizer_arguments)
    known = inspect.signature(kind).parameters if kind.__module__.startswith("torch.optim.") else {}
    _check_steps(optimizer, loop, may_skip=may_skip, counts_on_device=kind is SGD or "capturable" in known)
    for name in wanted:
        if name not in known:
            raise TechniqueError(f"{kind.__name__} has no {name} kernels; torch's SGD, Adam and AdamW have.")
        if not loop.compiled_update and all(group.get(name) for group in optimizer.param_groups):
            raise TechniqueError(f"{name}-optimizer finds nothing to do: {kind.__name__} is {name} already.")
    if wanted:  # they exclude each other
        if any(isinstance(group["lr"], Tensor) or group.get("differentiable") for group in optimizer.param_groups):
            raise TechniqueError(
                f"{kind.__name__} cannot be changed: its learning rate is a tensor, or it is differentiable."
            )
        wanted = {name: wanted.get(name, False) for name in ("fused", "foreach") if name in known}
        optimizer._step_supports_amp_scaling = wanted.get("fused", False)  # type: ignore[attr-defined]  # as it does
    wanted |= _capturable(loop, device, known)
    for settings in (optimizer.defaults, *optimizer.param_groups):
        settings.update(wanted)


def _check_steps(optimizer: Optimizer, loop: StepConfig, *, may_skip: bool, counts_on_device: bool) -> None:
    """Raise TechniqueError if a user's optimizer cannot be stepped as these techniques step it."""
    name = type(optimizer).__name__
    if loop.cuda_graph and not counts_on_device:
        raise TechniqueError(f"{name} counts its steps on the host, which a CUDA graph cannot repeat. Use Adam or SGD.")
    check_hooks(optimizer, loop)
    if loop.scales_on_device and may_skip and type(optimizer) not in _FROM_ZEROS:
        known = ", ".join(kind.__name__ for kind in _FROM_ZEROS)
        raise TechniqueError(f"Loss scaling on the device cannot undo a step of {name}, only of {known}.")
    fused = {bool(group.get("fused")) for group in optimizer.param_groups}
    if loop.scales_on_device and (len(fused) > 1 or fused != {bool(optimizer.defaults.get("fused"))}):
        raise TechniqueError(f"Some groups of {name} are fused and others are not. Make them all the same.")


def check_hooks(optimizer: Optimizer, loop: StepConfig) -> None:
    """Check that nothing is hooked to the steps of an optimizer that a graph or a compiled update replaces."""
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    if loop.reads_rates_on_device and (any(hooks) or _is_wrapped(optimizer)):
        name = type(optimizer).__name__
        raise TechniqueError(f"Hooks on the steps of {name} would not run in a CUDA graph or a compiled update.")


def _is_wrapped(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step is neither its class's nor the wrapper of torch's schedulers.

    Source: torch.optim.lr_scheduler (`wrap_step`).
    """
    if "step" not in vars(optimizer):
        return False
    code = getattr(optimizer.step, "__code__", None)
    is_torch_s = code is not None and code.co_filename == lr_scheduler.__file__
    return not (is_torch_s and getattr(optimizer.step, "__wrapped__", None) is type(optimizer).step)


def keep_rates_on_device(optimizer: Optimizer, device: torch.device) -> None:
    """Make the learning rates tensors on the device, into which a schedule writes and which a graph reads.

    Source: torch.optim.lr_scheduler (`_update_param_group_val` writes into a rate that is a tensor).
    """
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32, device=device)


def check_reads_rates(optimizer: Optimizer, loop: StepConfig) -> None:
    """Check that an optimizer reads rates on the device: a graph would keep the value that the host has read.

    Source: torch.optim.sgd (`_to_scalar`, and the `item` of its foreach kernels).
    """
    if loop.compiled_update or not loop.cuda_graph:
        return
    unfused = [group for group in optimizer.param_groups if not group.get("fused")]
    if type(optimizer) is SGD and unfused:
        raise TechniqueError("cuda-graph needs fused-optimizer or compiled-update if a scheduler changes SGD's rate.")
    # With foreach=False it divides by the rate. Warm-ups begin with a rate and moments of 0, and 0 / 0 is NaN.
    # Source: torch.optim.adam (`_single_tensor_adam`, capturable).
    if isinstance(optimizer, Adam) and any(group.get("foreach") is False for group in unfused):
        raise TechniqueError(
            "cuda-graph needs fused-optimizer or compiled-update if a scheduler changes the rate of an Adam with "
            "foreach=False."
        )
