"""Optimizers as a loop's techniques want them."""

import inspect
from collections.abc import Container
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import SGD, Adadelta, Adam, Adamax, AdamW, Optimizer, RAdam, RMSprop, lr_scheduler

from castwise.errors import TechniqueError
from castwise.registry.techniques import StepConfig
from castwise.registry.workloads import OptimizerSpec

# Those whose state begins at zero, so that a skipped first step leaves zeros.
_FROM_ZEROS = (SGD, Adam, AdamW, Adamax, RAdam, RMSprop, Adadelta)


def optimizer_for(loop: StepConfig, spec: OptimizerSpec, device: torch.device) -> OptimizerSpec:
    """Return an optimizer's row with the arguments that a loop adds to it.

    One whose steps are captured, or skipped on the device, counts them there: `capturable`, where the class has it.
    """
    known = inspect.signature(getattr(torch.optim, spec.name)).parameters
    added = dict(loop.optimizer_arguments) | _counting(loop, device, known)
    return replace(spec, arguments=(*spec.arguments, *added.items()))


def _counting(loop: StepConfig, device: torch.device, known: Container[str]) -> dict[str, bool]:
    """Return the setting by which steps are counted on the device, where a loop needs it and an optimizer has it."""
    wanted = loop.scales_on_device and device.type == "cuda" and "capturable" in known
    return {"capturable": True} if wanted else {}


def set_as_wanted(optimizer: Optimizer, loop: StepConfig, device: torch.device, *, may_skip: bool = False) -> None:
    """Set an optimizer that a user has made as a loop's techniques want it, before its first step here.

    Args:
        optimizer: The optimizer.
        loop: The loop.
        device: Where its tensors lie.
        may_skip: Whether loss scaling may skip steps.

    Raises:
        TechniqueError: It is none of torch's that can be set so, or it is so already.
    """
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
                f"{kind.__name__} is set otherwise here: its rate is a tensor, or it is differentiable."
            )
        wanted = {name: wanted.get(name, False) for name in ("fused", "foreach") if name in known}
        optimizer._step_supports_amp_scaling = wanted.get("fused", False)  # type: ignore[attr-defined]  # as it does
    wanted |= _counting(loop, device, known)
    for settings in (optimizer.defaults, *optimizer.param_groups):
        settings.update(wanted)


def _check_steps(optimizer: Optimizer, loop: StepConfig, *, may_skip: bool, counts_on_device: bool) -> None:
    """Make sure that a user's optimizer can be stepped as a loop steps it.

    Raises:
        TechniqueError: It cannot.
    """
    name = type(optimizer).__name__
    if loop.cuda_graph and not counts_on_device:
        raise TechniqueError(f"A graph would hold fixed what {name} counts on the host; torch's Adam can do without.")
    check_hooks(optimizer, loop)
    if loop.scales_on_device and may_skip and type(optimizer) not in _FROM_ZEROS:
        raise TechniqueError(
            f"Loss scaling on the device cannot take back a step of {name}, only of torch's SGD and Adams."
        )
    fused = {bool(group.get("fused")) for group in optimizer.param_groups}
    if loop.scales_on_device and (len(fused) > 1 or fused != {bool(optimizer.defaults.get("fused"))}):
        raise TechniqueError(f"Some groups of {name} are fused and others are not.")


def check_hooks(optimizer: Optimizer, loop: StepConfig) -> None:
    """Make sure that a step is the optimizer's own where a graph or a compiled update takes its place.

    Raises:
        TechniqueError: Something is hooked to it.
    """
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    if loop.reads_rates_on_device and (any(hooks) or _is_wrapped(optimizer)):
        name = type(optimizer).__name__
        raise TechniqueError(f"A graph or a compiled update would leave out what is hooked to the steps of {name}.")


def _is_wrapped(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step is not its class's; torch's schedulers wrap it, to note that it was called.

    Source: torch.optim.lr_scheduler (`wrap_step`).
    """
    if "step" not in vars(optimizer):
        return False
    code = getattr(optimizer.step, "__code__", None)
    is_torch_s = code is not None and code.co_filename == lr_scheduler.__file__
    return not (is_torch_s and getattr(optimizer.step, "__wrapped__", None) is type(optimizer).step)


def keep_rates_on_device(optimizer: Optimizer, device: torch.device) -> None:
    """Make the learning rates tensors on the device: a graph reads them where a schedule writes them.

    Schedulers of torch write into a rate that is a tensor. Source: torch.optim.lr_scheduler
    (`_update_param_group_val`).
    """
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32, device=device)


def check_reads_rates(optimizer: Optimizer, loop: StepConfig) -> None:
    """Make sure that an optimizer computes with rates on the device as with numbers.

    A graph would hold fixed what it reads on the host. Source: torch.optim.sgd (`_to_scalar`, and the `item` of its
    foreach kernels).

    Raises:
        TechniqueError: It does not.
    """
    if loop.compiled_update or not loop.cuda_graph:
        return
    unfused = [group for group in optimizer.param_groups if not group.get("fused")]
    if type(optimizer) is SGD and unfused:
        raise TechniqueError("cuda-graph needs fused-optimizer or compiled-update where a scheduler moves SGD's rate.")
    # Its steps by the tensor divide by a rate that is one: where it and a moment are 0, by which warm-ups begin, NaN.
    # Source: torch.optim.adam (`_single_tensor_adam`, capturable).
    if isinstance(optimizer, Adam) and any(group.get("foreach") is False for group in unfused):
        raise TechniqueError(
            "cuda-graph needs fused-optimizer or compiled-update where a scheduler moves the rate of an Adam with "
            "foreach=False."
        )
