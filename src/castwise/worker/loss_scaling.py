"""Scale the loss before backward and the gradients after it: not at all, by a constant, or dynamically."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from castwise.spec.loss_scale import DYNAMIC_SCALES, DynamicScale


class NoScaling:
    """Plain backward and step; also the interface of the others."""

    skipped_steps = 0
    may_skip = False

    def backward(self, loss: Tensor) -> None:
        """Run backward on the (scaled) loss."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer, clip_grad_norm: float | None) -> None:
        """Unscale the gradients of the optimizer's tensors, clip them, and step unless the step is to be skipped."""
        if clip_grad_norm is not None:
            clip(optimizer, clip_grad_norm)
        optimizer.step()

    def inverse(self) -> float | Tensor | None:
        """Return what gradients are multiplied by; None leaves them. For those who unscale and step themselves."""
        return None

    def settle(self, overflowed: Tensor | None) -> None:
        """Take note of a step that somebody else made: 1 where a gradient overflowed, else 0; None: nobody looked."""

    def read_scale(self) -> float | None:
        """Return the present loss scale, None without scaling. Reads from the device: not for timed steps."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs to go on."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""


class StaticScaling(NoScaling):
    """A constant scale with no overflow check and no skipped step.

    Source: NVIDIA/apex apex/fp16_utils/loss_scaler.py at 79ad5a88 (LossScaler.has_overflow returns False).
    """

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def backward(self, loss: Tensor) -> None:
        """Run backward on the scaled loss."""
        (loss * self._scale).backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer, clip_grad_norm: float | None) -> None:
        """Multiply the gradients by the scale's inverse, clip, step."""
        torch._foreach_mul_([p.grad for p in stepped_by(optimizer) if p.grad is not None], 1.0 / self._scale)
        super().step(optimizer, clip_grad_norm)

    def inverse(self) -> float | Tensor | None:
        """Return the scale's inverse."""
        return 1.0 / self._scale

    def read_scale(self) -> float | None:
        """Return the constant."""
        return self._scale


class DynamicScaling(NoScaling):
    """torch's GradScaler, with the steps it skipped counted without a synchronisation of their own."""

    def __init__(self, row: DynamicScale, device_type: str, optimizer: Optimizer) -> None:
        self._scaler = _HalfGradScaler(
            device_type,
            init_scale=row.init,
            growth_factor=row.factor,
            backoff_factor=1.0 / row.factor,
            growth_interval=row.window,
        )
        self._maximum = row.maximum
        self._asked = 0
        self._taken = 0
        optimizer.register_step_post_hook(self._count_step)

    @property
    def skipped_steps(self) -> int:  # type: ignore[override]
        """Return the steps skipped so far."""
        return self._asked - self._taken

    def _count_step(self, *_: object) -> None:
        self._taken += 1

    def backward(self, loss: Tensor) -> None:
        """Run backward on the scaled loss."""
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer, clip_grad_norm: float | None) -> None:
        """Unscale and clip; step unless a gradient overflowed; update the scale."""
        if clip_grad_norm is not None:
            self._scaler.unscale_(optimizer)
            clip(optimizer, clip_grad_norm)
        self._asked += 1
        self._scaler.step(optimizer)
        self._scaler.update()
        if self._maximum is not None:
            # The scaler's own tensor, so that the bound costs no synchronisation.
            self._scaler._scale.clamp_(max=self._maximum)  # type: ignore[union-attr]

    def read_scale(self) -> float | None:
        """Return the present scale."""
        return float(self._scaler.get_scale())

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a scaler's state."""
        self._scaler.load_state_dict(state)


class _HalfGradScaler(torch.amp.GradScaler):
    """A GradScaler that also unscales float16 gradients, which `fp16-true` has and torch's refuses."""

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        del allow_fp16
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16=True)


def make_loss_scaling(name: str, device_type: str, optimizer: Optimizer) -> NoScaling:
    """Return the scaling for a canonical loss scale name.

    Args:
        name: `none`, the name of a dynamic scale, or a number.
        device_type: "cuda" or "cpu".
        optimizer: The optimizer whose steps are counted.
    """
    if name == "none":
        return NoScaling()
    for row in DYNAMIC_SCALES:
        if row.name == name:
            return DynamicScaling(row, device_type, optimizer)
    return StaticScaling(float(name))


def stepped_by(optimizer: Optimizer) -> Iterable[Any]:
    """Return the tensors that an optimizer steps."""
    for group in optimizer.param_groups:
        yield from group["params"]


def clip(optimizer: Optimizer, norm: float) -> None:
    """Scale an optimizer's gradients so that their common norm is no larger than this."""
    torch.nn.utils.clip_grad_norm_(list(stepped_by(optimizer)), norm)
