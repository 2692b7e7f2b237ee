"""A technique that castwise does not have: one row and one function, for the test that this is all it takes."""

import math

import torch
from torch import nn

from castwise.registry.techniques import ModelChange, Technique

_SCALE = 1 / math.sqrt(4)


class ScaledConv(nn.Conv2d):
    """A convolution whose result is scaled."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  as nn.Conv2d names it
        """Return half of what the convolution gives."""
        return super().forward(input) * _SCALE


def scale_convolutions(model: nn.Module, how_many: int) -> None:
    """Make the first convolutions of a model scale what they give."""
    found = [module for module in model.modules() if type(module) is nn.Conv2d]
    for module in found[:how_many]:
        module.__class__ = ScaledConv


ROW = Technique(
    name="scaled-convolutions",
    summary="the first convolutions scale what they give",
    cost="none",
    numerics="rounding",
    settings={"model_changes": (ModelChange("sample_technique:scale_convolutions", (2,)),)},
    units=("images",),
)
