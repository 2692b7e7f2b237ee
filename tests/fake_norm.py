"""Torch's operations in place of the batch norm kernels, so that models are tested without a GPU."""

import sys
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from castwise.trial.kernels.batch_norm import module
from castwise.trial.kernels.batch_norm.types import Epilogue, Prologue


class Fork(torch.autograd.Function):
    """A result, and a carrier that receives its gradient as a residual."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return value.clone(), torch.zeros(()).expand(value.shape).to(value.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # type: ignore[override]
        return sum(gradients)  # type: ignore[return-value]


class Carried(torch.autograd.Function):
    """A residual whose gradient goes to its carrier."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, carrier: Tensor) -> Tensor:  # type: ignore[override]
        return residual.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        return None, gradient


class KernelCall(NamedTuple):
    """What one call of the kernels had to compute."""

    conv_bias: bool = False
    drops: bool = False
    adds_before: bool = False
    adds: bool = False
    carries: bool = False
    activation: int = 0
    makes_carrier: bool = False


def let_torch_compute(monkeypatch: pytest.MonkeyPatch) -> list[KernelCall]:
    """Let torch compute what the kernels would, and return the list in which their calls are recorded."""
    calls: list[KernelCall] = []

    def compute(  # noqa: PLR0917
        images: Tensor, conv_bias: Tensor | None, seed: Tensor | None, layer: int, drop_level: int,
        addend: Tensor | None, residual: Tensor | None, carrier: Tensor | None, weight: Tensor, bias: Tensor,
        epsilon: float, activation: int, makes_carrier: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, None]:  # fmt: skip
        given = (each is not None for each in (conv_bias, seed, addend, residual, carrier))
        calls.append(KernelCall(*given, activation, makes_carrier))
        if residual is not None and carrier is not None:
            assert not residual.requires_grad
            residual = Carried.apply(residual, carrier)
        prologue = Prologue(conv_bias, drop_level / 65536 if seed is not None else 0.0, seed, layer, addend)
        normalised = prologue.reference(images)
        is_written = addend is not None or seed is not None
        variance, mean = torch.var_mean(normalised if is_written else images, (0, 2, 3))
        value = nn.functional.batch_norm(normalised, None, None, weight, bias, True, 0.0, epsilon)
        value = Epilogue(residual, activation=activation).reference(value)
        out, own = Fork.apply(value) if makes_carrier else (value, value.new_empty(0))
        return out, own, normalised if is_written else images.new_empty(0), mean.detach(), variance.detach(), None

    kernels = ModuleType("kernels")
    kernels.batch_norm = compute  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "castwise.trial.kernels.batch_norm.ops", kernels)
    monkeypatch.setattr(module, "fits_kernels", are_alike)
    return calls


def are_alike(_: Tensor, images: Tensor, *others: Tensor | None) -> bool:
    """Return what `fits_kernels` does, except for device and layout."""
    given = [each for each in others if each is not None]
    return all(isinstance(each, Tensor) and (each.shape, each.dtype) == (images.shape, images.dtype) for each in given)
