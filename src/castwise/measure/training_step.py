"""One training step of one cell: a task in a precision, ready to be run as often as one likes."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from castwise.measure.loss_scaling import NoScaling, make_loss_scaling
from castwise.measure.precision import autocast, convert_weights, make_weights
from castwise.measure.workloads.task import Batch, Task
from castwise.precisions import Precision
from castwise.workloads import OptimizerSpec


class TrainingStep:
    """Forward, backward and update, as one call.

    Attributes:
        model: The model, converted and on the device.
        optimizer: The optimizer, over the weights or their masters.
        scaling: The loss scaling.
    """

    def __init__(
        self,
        task: Task,
        precision: Precision,
        optimizer: OptimizerSpec,
        *,
        loss_scale: str,
        clip_grad_norm: float | None,
        device: torch.device,
    ) -> None:
        self.model: nn.Module = task.model.to(device)
        convert_weights(self.model, precision)
        self.model.train()
        self._weights = make_weights(self.model, precision)
        self.optimizer = make_optimizer(optimizer, self._weights.stepped)
        self.scaling: NoScaling = make_loss_scaling(loss_scale, device.type, self.optimizer)
        self._autocast = autocast(precision, device.type)
        self._compute_loss = task.compute_loss
        self._clip_grad_norm = clip_grad_norm

    def __call__(self, batch: Batch) -> Tensor:
        """Train on one batch and return its detached loss, still on the device."""
        self._weights.zero_grad()
        with self._autocast:
            loss = self._compute_loss(self.model, batch)
        self.scaling.backward(loss)
        self._weights.collect_gradients()
        self.scaling.step(self.optimizer, self._clip_grad_norm)
        self._weights.publish()
        return loss.detach()


def make_optimizer(spec: OptimizerSpec, tensors: Sequence[Tensor]) -> Optimizer:
    """Return the optimizer of `torch.optim` that the row names, over these tensors."""
    optimizer: Optimizer = getattr(torch.optim, spec.name)(list(tensors), **dict(spec.arguments))
    return optimizer


def describe_optimizer(spec: OptimizerSpec) -> str:
    """Return the optimizer as one would write it: `Adam(lr=0.0002, ...)`."""
    return f"{spec.name}({', '.join(f'{name}={value}' for name, value in spec.arguments)})"
