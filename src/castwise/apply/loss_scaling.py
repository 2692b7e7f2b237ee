"""Scale the loss before backward and the gradients after it: not at all, by a constant, or dynamically."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from castwise.errors import TechniqueError
from castwise.spec.loss_scale import DYNAMIC_SCALES, DynamicScale


class NoScaling:
    """Plain backward and step; also the interface of the other scalings."""

    skipped_steps = 0
    may_skip = False

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer, clip_grad_norm: float | None) -> None:
        """Unscale the gradients of the optimizer's tensors, clip them, and step unless the step is to be skipped."""
        if clip_grad_norm is not None:
            clip(optimizer, clip_grad_norm)
        optimizer.step()

    def inverse(self) -> float | Tensor | None:
        """Return the factor that unscales gradients, None if they are not scaled; for callers that step themselves."""
        return None

    def settle(self, overflowed: Tensor | None) -> None:
        """Count a step that the caller took; `overflowed` is 1 if a gradient overflowed, else 0, None if unknown."""

    def read_scale(self) -> float | None:
        """Return the loss scale, None without scaling. Reads from the device: not for timed steps."""
        return None

    def state_dict(self) -> dict[str, Any]:
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
        (loss * self._scale).backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer, clip_grad_norm: float | None) -> None:
        torch._foreach_mul_([p.grad for p in stepped_by(optimizer) if p.grad is not None], 1.0 / self._scale)
        super().step(optimizer, clip_grad_norm)

    def inverse(self) -> float | Tensor | None:
        return 1.0 / self._scale

    def read_scale(self) -> float | None:
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
        return self._asked - self._taken

    def _count_step(self, *_: object) -> None:
        self._taken += 1

    def backward(self, loss: Tensor) -> None:
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer, clip_grad_norm: float | None) -> None:
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
        return float(self._scaler.get_scale())

    def state_dict(self) -> dict[str, Any]:
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scaler.load_state_dict(state)


class _HalfGradScaler(torch.amp.GradScaler):
    """A GradScaler that also unscales float16 gradients, which `fp16-true` has and torch's refuses."""

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        del allow_fp16
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16=True)


class DeviceScaling(NoScaling):
    """What torch's GradScaler does, with scale, overflow flag and count of skipped steps on the device throughout.

    GradScaler reads the flag on the host unless the optimizer is fused, and counts nothing; a CUDA graph cannot wait
    for a host. A fused optimizer takes the flag into its kernel. Around any other, weights and state are copied before
    the step and put back where the flag is set.

    Source: torch.amp.GradScaler; pytorch/pytorch torch/amp/grad_scaler.py (`_check_inf_per_device`, `update`).
    """

    may_skip = True

    def __init__(self, row: DynamicScale, device: torch.device, optimizer: Optimizer) -> None:
        self._row = row
        self._scale = torch.full((), row.init, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._overflowed = torch.zeros((), device=device)
        self._skipped = torch.zeros((), device=device, dtype=torch.float64)
        self._is_fused = bool(optimizer.defaults.get("fused"))
        if self._is_fused:
            optimizer.found_inf = self._overflowed  # type: ignore[attr-defined]
            optimizer.grad_scale = None  # type: ignore[attr-defined]
        _fill_momentum(optimizer)

    @property
    def skipped_steps(self) -> int:  # type: ignore[override]
        """Return the steps skipped so far. Reads from the device: not for timed steps."""
        return int(self._skipped)

    def backward(self, loss: Tensor) -> None:
        (loss * self._scale).backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def step(self, optimizer: Optimizer, clip_grad_norm: float | None) -> None:
        self._overflowed.zero_()
        inverse = self.inverse()
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in stepped_by(optimizer):
            if tensor.grad is not None:
                by_dtype.setdefault(tensor.grad.dtype, []).append(tensor.grad)
        for gradients in by_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._overflowed, inverse)
        if clip_grad_norm is not None:
            clip(optimizer, clip_grad_norm)
        if self._is_fused:
            optimizer.step()
        else:
            self._guarded_step(optimizer)
        self.settle(self._overflowed)

    def inverse(self) -> Tensor:
        """Return the scale's inverse, a float32 scalar; the reciprocal is taken in float64, as GradScaler takes it."""
        return self._scale.double().reciprocal().float()

    def settle(self, overflowed: Tensor | None) -> None:
        assert overflowed is not None, "dynamic scaling looks at every step"
        self._skipped += overflowed
        row = self._row
        torch._amp_update_scale_(self._scale, self._good_steps, overflowed, row.factor, 1.0 / row.factor, row.window)
        if row.maximum is not None:
            self._scale.clamp_(max=row.maximum)

    def _guarded_step(self, optimizer: Optimizer) -> None:
        """Step, and put back what the step changed where the flag is set."""
        touched = [tensor for tensor in stepped_by(optimizer) if tensor.grad is not None]
        before = [(tensor, tensor.clone()) for tensor in (*touched, *_state_of(optimizer, touched))]
        had_state = {id(tensor) for tensor, _ in before}
        optimizer.step()
        is_skipped = self._overflowed > 0
        for tensor, old in before:
            torch.where(is_skipped.to(tensor.device), old, tensor, out=tensor)
        for tensor in _state_of(optimizer, touched):
            if id(tensor) not in had_state:  # made in this step, from zeros
                tensor.masked_fill_(is_skipped.to(tensor.device), 0)

    def read_scale(self) -> float | None:
        return float(self._scale)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self._scale, "good_steps": self._good_steps, "skipped": self._skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; the tensors stay the same, because kernels may refer to them."""
        self._scale.copy_(state["scale"])
        self._good_steps.copy_(state["good_steps"])
        self._skipped.copy_(state["skipped"])


def _state_of(optimizer: Optimizer, tensors: list[Tensor]) -> list[Tensor]:
    states = (optimizer.state.get(tensor, {}) for tensor in tensors)
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


@torch.no_grad()
def _fill_momentum(optimizer: Optimizer) -> None:
    """Set SGD's momentum to zeros before the first step, unless the optimizer came with a state.

    Torch copies the first gradient, and if that overflowed the fused kernel leaves the momentum uninitialised. With
    zeros the first step is the same if dampening is 0; otherwise a TechniqueError is raised.
    """
    if not isinstance(optimizer, SGD):
        return
    for group in optimizer.param_groups:
        if not group["momentum"]:
            continue
        if group["dampening"]:
            raise TechniqueError(
                "Loss scaling on the device starts SGD's momentum at zero, where dampening weakens it."
            )
        for tensor in group["params"]:
            if optimizer.state[tensor].get("momentum_buffer") is None:
                optimizer.state[tensor]["momentum_buffer"] = torch.zeros_like(tensor)


def make_loss_scaling(
    name: str, device: torch.device, optimizer: Optimizer, *, decides_on_device: bool = False
) -> NoScaling:
    """Return the scaling of this name: `none`, that of a dynamic scale, or a number.

    With `decides_on_device`, dynamic scaling decides on the device whether a step is skipped.
    """
    if name == "none":
        return NoScaling()
    row = next((row for row in DYNAMIC_SCALES if row.name == name), None)
    if row is None:
        return StaticScaling(float(name))
    return DeviceScaling(row, device, optimizer) if decides_on_device else DynamicScaling(row, device.type, optimizer)


def stepped_by(optimizer: Optimizer) -> Iterable[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


def clip(optimizer: Optimizer, norm: float) -> None:
    """Scale an optimizer's gradients so that their common norm is no larger than this."""
    torch.nn.utils.clip_grad_norm_(list(stepped_by(optimizer)), norm)
