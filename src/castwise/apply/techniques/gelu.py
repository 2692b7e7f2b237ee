"""GELU and its gradient by formulas of fewer instructions: `short-gelu`.

In Inductor's kernels tanh and erf take so many instructions that they, not memory, set the pace: GELU 29 (tanh) or 38
(erf) a number, its gradient 38 or 52; here 20 or 27, and 27 or 30 (Triton 3.9 for compute capability 9.0). On an H200
the fastest loops are 1.024 times as fast (ViT-B/16), 1.022 (BERT-base), 1.011 (GPT-2) and 1.008 (GPT of width 2,048):
2026-11-28, one run each, benchmarks/records/short_gelu/, without for GPT-2 in loss_kernel/read-16-bytes.json.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from castwise.apply.techniques.blocks import has_hooks
from castwise.errors import TechniqueError

# Classes by name, as not all are torch's: transformers or timm may not be installed.
_FORMS = {
    "GELU": "none",
    "GELUActivation": "none",
    "GELUTanh": "tanh",
    "NewGELUActivation": "tanh",
    "PytorchGELUTanh": "tanh",
}
_TWICE_SLOPE = 2 * (2 / math.pi) ** 0.5
_CUBIC = 0.044715 * _TWICE_SLOPE


class ShortGelu(nn.Module):
    """nn.GELU in one of its two forms."""

    def __init__(self, approximate: str) -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  as nn.GELU names it
        output: Tensor = _Gelu.apply(input, self.approximate == "tanh")
        return output


class _Gelu(torch.autograd.Function):
    """x times a cumulative distribution function, computed in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, has_tanh: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.has_tanh = has_tanh
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * _distribution(wide, has_tanh)[0]).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        share, density = _distribution(wide, ctx.has_tanh)
        return (grad * (share + wide * density)).to(x.dtype), None


def _distribution(x: Tensor, has_tanh: bool) -> tuple[Tensor, Tensor]:
    """Return the cumulative distribution function at x, and its derivative.

    (1 + tanh y) / 2 is the sigmoid of 2y. The normal one is wrong by less than 8e-8.
    Source: Abramowitz and Stegun 1964, 26.2.17.
    """
    square = x * x
    if has_tanh:
        share = torch.sigmoid(x * (_TWICE_SLOPE + _CUBIC * square))
        return share, share * (1 - share) * (_TWICE_SLOPE + 3 * _CUBIC * square)
    density = (2 * math.pi) ** -0.5 * torch.exp2(-0.5 / math.log(2) * square)
    t = 1 / (1 + 0.2316419 * x.abs())
    tail = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    return torch.where(x < 0, density * tail, 1 - density * tail), density


def use_short_gelu(model: nn.Module) -> None:
    found = {name: form for name, module in model.named_modules() if (form := form_of_gelu(module)) is not None}
    if not found:
        raise TechniqueError("short-gelu finds no module of GELU without hooks in this model.")
    for name, form in found.items():
        model.set_submodule(name, ShortGelu(form))


def form_of_gelu(module: nn.Module) -> str | None:
    """Return nn.GELU's argument `approximate` that describes a module, or None if it is no GELU or has hooks."""
    if has_hooks(module):
        return None
    return module.approximate if type(module) is nn.GELU else _FORMS.get(type(module).__name__)
