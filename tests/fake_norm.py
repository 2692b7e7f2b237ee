"""Torch's operations in the place of the batch norm kernels, so that models are tried without a GPU."""

import sys
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from castwise.worker.kernels.batch_norm import module


class Fork(torch.autograd.Function):
    """A result, and a carrier of its gradient from where it is a residual."""

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


class Asked(NamedTuple):
    """What was asked of a norm."""

    shifts: bool = False
    drops: bool = False
    adds_before: bool = False
    adds: bool = False
    carries: bool = False
    activation: int = 0
    is_forked: bool = False


def let_torch_compute(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """Let torch compute what the kernels would, and return where it is noted what was asked."""
    asked: list[Asked] = []

    def compute(  # noqa: PLR0917
        images: Tensor, shift: Tensor | None, seed: Tensor | None, layer: int, odds: int, addend: Tensor | None,
        residual: Tensor | None, carrier: Tensor | None, weight: Tensor, bias: Tensor, epsilon: float, activation: int,
        is_forked: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, None]:  # fmt: skip
        sides = (each is not None for each in (shift, seed, addend, residual, carrier))
        asked.append(Asked(*sides, activation, is_forked))
        if residual is not None and carrier is not None:
            assert not residual.requires_grad
            residual = Carried.apply(residual, carrier)
        before = module.Before(shift, odds / 65536 if seed is not None else 0.0, seed, layer, addend)
        normalised = before.compute(images)
        is_written = addend is not None or seed is not None
        known = normalised if is_written else images
        variance, mean = torch.var_mean(known, (0, 2, 3))
        value = nn.functional.batch_norm(normalised, None, None, weight, bias, True, 0.0, epsilon)
        value = module.After(residual, activation=activation).compute(value)
        out, own = Fork.apply(value) if is_forked else (value, value.new_empty(0))
        return out, own, normalised if is_written else images.new_empty(0), mean.detach(), variance.detach(), None

    kernels = ModuleType("kernels")
    kernels.batch_norm = compute  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "castwise.worker.kernels.batch_norm.ops", kernels)
    monkeypatch.setattr(module, "_is_for_kernels", are_alike)
    return asked


def are_alike(_: Tensor, images: Tensor, *others: Tensor | None) -> bool:
    """What kernels ask of images but for where and how these lie."""
    asked = [each for each in others if each is not None]
    return all(isinstance(each, Tensor) and (each.shape, each.dtype) == (images.shape, images.dtype) for each in asked)
