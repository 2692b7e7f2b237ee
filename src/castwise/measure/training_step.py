"""One training step of one cell: a task in a precision, ready to be run as often as one likes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from castwise.errors import UsageError
from castwise.loss_scales import DYNAMIC_SCALES
from castwise.measure.device_scaling import DeviceScaling
from castwise.measure.loss_scaling import NoScaling, make_loss_scaling
from castwise.measure.precision import autocast_maker, convert_weights, make_weights, read_fp32_precision
from castwise.measure.techniques.compiled import CompiledLoss, check_compiler
from castwise.measure.techniques.graph import StepGraph
from castwise.measure.techniques.loop import PLAIN, Loop
from castwise.measure.workloads.task import Batch, Task
from castwise.precisions import Precision
from castwise.record import Facts
from castwise.workloads import OptimizerSpec


class TrainingStep:
    """Forward, backward and update, as one call.

    Attributes:
        model: The model, converted and on the device.
        optimizer: The optimizer, over the weights or their masters.
        scaling: The loss scaling.
        graph: The step as a CUDA graph, None where it is not one.
    """

    def __init__(  # noqa: PLR0913  a setting each, by keyword
        self,
        task: Task,
        precision: Precision,
        optimizer: OptimizerSpec,
        *,
        loss_scale: str,
        clip_grad_norm: float | None,
        device: torch.device,
        loop: Loop = PLAIN,
    ) -> None:
        self.model: nn.Module = task.model.to(device)
        self._called = self.model
        convert_weights(self.model, precision)
        if loop.channels_last:
            self.model.to(memory_format=torch.channels_last)
        self.model.train()
        self._weights = make_weights(self.model, precision)
        groups = layer_groups(task, optimizer.group_rates, self._weights.stepped)
        self.optimizer = make_optimizer(optimizer, groups)
        self.scaling = scaling_of(loop, loss_scale, device, self.optimizer)
        # Masters keep their gradients' memory; all else does what a loop written by hand does.
        self._zero_grad = self._weights.zero_grad if precision.master_weights else self.optimizer.zero_grad
        self._autocast = autocast_maker(precision, device.type)
        self._compute_loss = task.compute_loss
        if loop.compile_mode is not None:
            check_compiler(device)
            self._compute_loss = CompiledLoss(task.compute_loss, loop.compile_mode)
        self.graph = StepGraph(self._train, device, task.carried) if loop.cuda_graph else None
        self._run = self.graph or self._train
        self._clip_grad_norm = clip_grad_norm

    def spread(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        """Let forward passes go through a wrapper of the converted model that runs it on several GPUs."""
        self._called = wrap(self.model)

    def __call__(self, batch: Batch) -> Tensor:
        """Train on one batch and return its loss, still on the device.

        It is not detached: that would cost the host some microseconds a step. Whoever keeps it for long detaches it.
        """
        return self._run(batch)

    def _train(self, batch: Batch) -> Tensor:
        self._zero_grad()
        with self._autocast():
            loss = self._compute_loss(self._called, batch)
        self.scaling.backward(loss)
        self._weights.collect_gradients()
        self.scaling.step(self.optimizer, self._clip_grad_norm)
        self._weights.publish()
        return loss

    def peak_allocated(self, seen: int | None) -> int | None:
        """Return the most bytes that tensors held at once, by what the allocator saw, which is not a graph's."""
        return seen if self.graph is None or seen is None else max(seen, self.graph.peak_bytes)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs to go on: model, masters, optimizer, loss scaling."""
        return {
            "model": self.model.state_dict(),
            "stepped": self._weights.stepped,
            "optimizer": self.optimizer.state_dict(),
            "scaling": self.scaling.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.model.load_state_dict(state["model"])
        for tensor, saved in zip(self._weights.stepped, state["stepped"], strict=True):
            tensor.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaling.load_state_dict(state["scaling"])


def scaling_of(loop: Loop, name: str, device: torch.device, optimizer: Optimizer) -> NoScaling:
    """Return the scaling for a canonical loss scale name: torch's own, or one that decides on the device."""
    row = next((row for row in DYNAMIC_SCALES if row.name == name), None)
    if row is not None and loop.scales_on_device:
        return DeviceScaling(row, device, optimizer)
    return make_loss_scaling(name, device.type, optimizer)


def layer_groups(task: Task, rates: Sequence[float], stepped: Sequence[Tensor]) -> list[Tensor] | list[dict[str, Any]]:
    """Return an optimizer's parameter groups, one a layer group that has anything to step; without rates the tensors.

    A group says which it is under "layer_group", for schedules that give it another rate later.

    Args:
        task: The task; its model's frozen parameters are in no group.
        rates: The learning rate of each layer group.
        stepped: What the optimizer steps, in the order of the model's parameters that are not frozen.

    Raises:
        UsageError: The task has no layer groups, or another number of them.
    """
    if not rates:
        return list(stepped)
    if task.group_of is None:
        raise UsageError("The recipe has group_rates, and the workload has no layer groups. Leave group_rates out.")
    groups = {name: task.group_of(name) for name, _ in task.model.named_parameters()}
    num_groups = max(groups.values()) + 1
    if len(rates) != num_groups:
        raise UsageError(
            f"The recipe's group_rates are {len(rates)}, and the workload has {num_groups} layer groups. "
            "Give each its rate."
        )
    members: dict[int, list[Tensor]] = {}
    learning = [name for name, parameter in task.model.named_parameters() if parameter.requires_grad]
    for name, tensor in zip(learning, stepped, strict=True):
        members.setdefault(groups[name], []).append(tensor)
    return [{"params": members[index], "lr": rates[index], "layer_group": index} for index in sorted(members)]


def make_optimizer(spec: OptimizerSpec, tensors: Sequence[Tensor] | Sequence[dict[str, Any]]) -> Optimizer:
    """Return the optimizer of `torch.optim` that the row names, over these tensors or parameter groups."""
    optimizer: Optimizer = getattr(torch.optim, spec.name)(list(tensors), **dict(spec.arguments))
    return optimizer


def describe_optimizer(spec: OptimizerSpec) -> str:
    """Return the optimizer as one would write it: `Adam(lr=0.0002, ...)`."""
    written = f"{spec.name}({', '.join(f'{name}={value}' for name, value in spec.arguments)})"
    return f"{written}, layer groups at lr {', '.join(map(str, spec.group_rates))}" if spec.group_rates else written


def describe(model: nn.Module, optimizer: OptimizerSpec, units_per_sample: int) -> Facts:
    """Return what is known of a trial once its precision is applied.

    Args:
        model: The converted model.
        optimizer: The optimizer's row.
        units_per_sample: Units of throughput in one sample.
    """
    dtypes: dict[str, int] = {}
    for p in model.parameters():
        name = str(p.dtype).removeprefix("torch.")
        dtypes[name] = dtypes.get(name, 0) + p.numel()
    return Facts(
        num_parameters=sum(dtypes.values()),
        units_per_sample=units_per_sample,
        param_dtypes=dtypes,
        optimizer=describe_optimizer(optimizer),
        fp32_precision=read_fp32_precision(),
    )
