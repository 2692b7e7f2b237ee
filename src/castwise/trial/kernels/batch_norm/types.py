"""What a batch norm kernel computes besides the norm: its prologue, its epilogue, and what it returns."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

# Activation codes, which the kernels are compiled for.
NO_ACTIVATION = 0
RELU = 1
SILU = 2
HARDSWISH = 3
# Activations whose gradient needs their input: the output does not determine it.
NEEDS_INPUT = (SILU, HARDSWISH)

DROP_LEVELS = 65_536  # the kernels draw 16 bits an element, so a drop probability is a multiple of 1 / 65,536

_ACTIVATIONS: dict[int, Callable[[Tensor], Tensor]] = {
    NO_ACTIVATION: lambda value: value,
    RELU: nn.functional.relu,
    SILU: nn.functional.silu,
    HARDSWISH: nn.functional.hardswish,
}


class Prologue(NamedTuple):
    """The operations on images before they are normalised, in this order."""

    conv_bias: Tensor | None = None  # shape (C,), added
    dropout: float = 0.0  # the probability of dropping an element
    seed: Tensor | None = None  # of dropout's draws, shape (1,), int64; None drops nothing
    layer: int = 0  # the dropout layer's number: each layer draws its own numbers from the seed
    addend: Tensor | None = None  # of the images' shape, added
    keeps_dtype: bool = False  # the sum has the images' dtype, as a sum in place has

    @property
    def drop_level(self) -> int:
        """Return the drop probability as a number of `DROP_LEVELS`."""
        return round(self.dropout * DROP_LEVELS)

    def reference(self, images: Tensor) -> Tensor:
        """Return what is to be normalised, computed by torch's own operations."""
        if self.conv_bias is not None:
            images = images + self.conv_bias.to(images.dtype)[:, None, None]
        return _add(nn.functional.dropout(images, self.dropout), self.addend, keeps_dtype=self.keeps_dtype)


class Epilogue(NamedTuple):
    """The operations on normalised images, in this order."""

    residual: Tensor | None = None  # of the images' shape, added
    carrier: Tensor | None = None  # receives the residual's gradient instead of the residual
    activation: int = NO_ACTIVATION
    makes_carrier: bool = False  # a gradient carrier of the result is returned
    keeps_dtype: bool = False  # the sum has the images' dtype, as a sum in place has

    def reference(self, images: Tensor) -> Tensor:
        """Return the activated sum, computed by torch's own operations."""
        return _ACTIVATIONS[self.activation](_add(images, self.residual, keeps_dtype=self.keeps_dtype))


class FusedOutput(NamedTuple):
    out: Tensor
    mean: Tensor | None  # of what was normalised, shape (C,); None if torch has updated the running statistics itself
    variance: Tensor | None  # the same, unbiased
    total: Tensor  # what was normalised, if there was a prologue; without elements otherwise
    # A tensor of the result's shape that takes no memory. It receives the result's gradient as a residual, so that the
    # backward kernel adds both gradients as it reads them. None if torch computed the result.
    carrier: Tensor | None


def _add(images: Tensor, other: Tensor | None, *, keeps_dtype: bool) -> Tensor:
    total = images if other is None else images + other
    return total.to(images.dtype) if keeps_dtype else total
