# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""Launches of the batch norm kernels, and these as operations that torch.compile and autograd know.

Imported only if Triton is installed.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import triton_op, wrap_triton

from castwise.worker.kernels.batch_norm.triton_kernels import (
    combine_kernel,
    combine_sums_kernel,
    gradient_kernel,
    gradient_sums_kernel,
    normalise_kernel,
    statistics_kernel,
)
from castwise.worker.kernels.batch_norm.types import NO_ACTIVATION

# The fastest of those tried on an H200, for tensors of 16 bits. Source: docs/techniques.md.
_WARPS = 4
_BLOCK_CHANNELS = 128
_REDUCTION_BLOCK_CHANNELS = 64  # of a reduction, if the number of channels is no multiple of _BLOCK_CHANNELS
_REDUCTION_ELEMENTS = 2048  # of a block whose statistics are computed
_NORMALISE_ELEMENTS = 4096  # of a block that is normalised
_GRADIENT_ELEMENTS = 2048  # of a block whose gradient is computed
_REDUCTION_PROGRAMS = 528  # four for each of an H200's multiprocessors
_STAGES = 3  # blocks whose loads are under way at once
_UNIT = 8  # channels in 16 bytes
_COMBINED_CHANNELS = 8
_COMBINED_WARPS = 8


@dataclass(frozen=True)
class Tiles:
    """How rows (pixels) and channels are cut into blocks of `elements` numbers."""

    num_rows: int
    channels: int
    block_channels: int
    elements: int

    @property
    def columns(self) -> int:
        """Return the number of blocks next to each other."""
        return int(triton.cdiv(self.channels, self.block_channels))

    @property
    def rows(self) -> int:
        """Return the rows of a block."""
        return max(1, self.elements // self.block_channels)

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks below each other."""
        return int(triton.cdiv(self.num_rows, self.rows))

    @property
    def parts(self) -> int:
        """Return the number of programs that reduce the blocks below each other, each about as many."""
        most = max(1, min(self.num_blocks, _REDUCTION_PROGRAMS // self.columns))
        return int(triton.cdiv(self.num_blocks, triton.cdiv(self.num_blocks, most)))

    @property
    def constants(self) -> dict[str, int]:
        """Return the compile-time arguments of a kernel."""
        return {"block_rows": self.rows, "block_channels": self.block_channels, "num_warps": _WARPS}


def _tiles(images: Tensor, elements: int, max_channels: int = _BLOCK_CHANNELS) -> Tiles:
    """Return how images of shape (N, C, H, W), channels last, are cut."""
    channels = images.shape[1]
    return Tiles(images.numel() // channels, channels, min(max_channels, triton.next_power_of_2(channels)), elements)


def _reduction_tiles(images: Tensor) -> Tiles:
    """Return how images are cut for a reduction, where a block's unused elements cost more."""
    max_channels = _REDUCTION_BLOCK_CHANNELS if images.shape[1] % _BLOCK_CHANNELS else _BLOCK_CHANNELS
    return _tiles(images, _REDUCTION_ELEMENTS, max_channels)


@dataclass(frozen=True)
class Draws:
    """Dropout's random draws.

    Attributes:
        seed: Shape (1,), int64, on the images' device; None drops nothing.
        layer: Number of the dropout layer: each draws its own numbers.
        level: Drop probability in 1 / 65,536.
    """

    seed: Tensor | None
    layer: int
    level: int


def _units(channels: int) -> tuple[int, int]:
    """Return the number of aligned units that the channels make, and the channels of a unit."""
    unit = _UNIT if channels % _UNIT == 0 else 1
    return channels // unit, unit


def launch_norm(  # noqa: PLR0913, PLR0917
    wrap: Any, images: Tensor, conv_bias: Tensor | None, draws: Draws, addend: Tensor | None, residual: Tensor | None,
    weight: Tensor, bias: Tensor, epsilon: float, activation: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Run the forward kernels.

    Args:
        wrap: Makes a kernel launchable: `wrap_triton` within an operation, identity outside.
        images: Shape (N, C, H, W), channels last.
        conv_bias: Shape (C,), added before dropout and normalising; None adds nothing. If nothing else is done before
            the norm, the returned mean does not include it.
        draws: Of dropout before the norm; C must be a multiple of 8 then.
        addend: Of the images' shape, dtype and layout, added before normalising; None adds nothing.
        residual: The same, added after normalising.
        weight: Shape (C,).
        bias: Shape (C,).
        epsilon: Added to the variance.
        activation: `NO_ACTIVATION`, `RELU`, or one of `NEEDS_INPUT`.

    Returns:
        The result; what was normalised, without elements if that is the images; its mean; its unbiased variance; one
        over its deviation.
    """
    tiles, channels = _reduction_tiles(images), images.shape[1]
    units, unit = _units(channels)
    sums, squares = (images.new_empty((tiles.parts, channels), dtype=torch.float32) for _ in range(2))
    pivots, mean, variance, inverse = (images.new_empty(channels, dtype=torch.float32) for _ in range(4))
    writes = addend is not None or draws.seed is not None
    conv_bias = conv_bias if writes else None  # alone it changes the mean only, which is subtracted
    total = torch.empty_like(images) if writes else images.new_empty(0)
    normalised = total if writes else images
    wrap(statistics_kernel)[(tiles.columns * tiles.parts,)](
        images, images if conv_bias is None else conv_bias, images if addend is None else addend,
        images if draws.seed is None else draws.seed, draws.layer, normalised, pivots, sums, squares, tiles.num_rows,
        tiles.columns, units, unit=unit, shifts=conv_bias is not None, adds_before=addend is not None,
        odds=0 if draws.seed is None else draws.level, stages=_STAGES, **tiles.constants,
    )  # fmt: skip
    wrap(combine_kernel)[(triton.cdiv(channels, _COMBINED_CHANNELS),)](
        pivots, sums, squares, mean, variance, inverse, tiles.parts, tiles.num_rows, channels, epsilon,
        block_parts=triton.next_power_of_2(tiles.parts), block_channels=_COMBINED_CHANNELS, num_warps=_COMBINED_WARPS,
    )  # fmt: skip
    out = torch.empty_like(images)
    tiles = _tiles(images, _NORMALISE_ELEMENTS)
    wrap(normalise_kernel)[(tiles.columns * tiles.num_blocks,)](
        normalised, normalised if residual is None else residual, weight, bias, mean, inverse, out, tiles.num_rows,
        tiles.columns, units, unit=unit, activation=activation, adds=residual is not None, **tiles.constants,
    )  # fmt: skip
    return out, total, mean, variance, inverse


def launch_norm_backward(  # noqa: PLR0913, PLR0917
    wrap: Any, gradients: Tensor, second: Tensor | None, skip: Tensor | None, images: Tensor, out: Tensor | None,
    draws: Draws, weight: Tensor, bias: Tensor, mean: Tensor, inverse: Tensor, activation: int, has_conv_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Run the backward kernels.

    Args:
        wrap: As in `launch_norm`, as are draws, weight, bias and activation.
        gradients: Of the result, channels last.
        second: The result's gradient as a residual, added to `gradients`; None adds nothing.
        skip: Added to the gradient of what was normalised; None adds nothing.
        images: What was normalised.
        out: The result, if a residual was added; None otherwise.
        draws: As in `launch_norm`.
        weight: As in `launch_norm`.
        bias: As in `launch_norm`.
        mean: Returned by `launch_norm`.
        inverse: Returned by `launch_norm`.
        activation: As in `launch_norm`; with a residual none of `NEEDS_INPUT`.
        has_conv_bias: Whether a convolution's bias was added.

    Returns:
        The gradients of the images; of the residual, without elements if that is `gradients` or is not needed; of the
        weight; of the bias; of the convolution's bias, without elements if there was none.
    """
    tiles, channels = _reduction_tiles(images), images.shape[1]
    units, unit = _units(channels)
    sums, products = (images.new_empty((tiles.parts, channels), dtype=torch.float32) for _ in range(2))
    bias_gradient, weight_gradient = (images.new_empty(channels, dtype=torch.float32) for _ in range(2))
    writes = second is not None or (out is not None and activation != NO_ACTIVATION)
    before = torch.empty_like(images) if writes else images.new_empty(0)
    wrap(gradient_sums_kernel)[(tiles.columns * tiles.parts,)](
        gradients, gradients if second is None else second, images, images if out is None else out, weight, bias, mean,
        inverse, before if writes else gradients, sums, products, tiles.num_rows, tiles.columns, units, unit=unit,
        activation=activation, adds=out is not None, has_second=second is not None, writes=writes, stages=_STAGES,
        **tiles.constants,
    )  # fmt: skip
    wrap(combine_sums_kernel)[(triton.cdiv(channels, _COMBINED_CHANNELS),)](
        sums, products, inverse, bias_gradient, weight_gradient, tiles.parts, channels,
        block_parts=triton.next_power_of_2(tiles.parts), block_channels=_COMBINED_CHANNELS, num_warps=_COMBINED_WARPS,
    )  # fmt: skip
    image_gradients = torch.empty_like(images)
    # The gradient of what was normalised sums to 0 over the rows: only what is added to it, or dropout, changes that.
    sums_up = has_conv_bias and (skip is not None or draws.seed is not None)
    tiles = tiles if sums_up else _tiles(images, _GRADIENT_ELEMENTS)
    parts = tiles.parts if sums_up else tiles.num_blocks
    bias_sums = images.new_empty((parts if sums_up else 0, channels), dtype=torch.float32)
    wrap(gradient_kernel)[(tiles.columns * parts,)](
        before if writes else gradients, images, images if skip is None else skip,
        images if draws.seed is None else draws.seed, draws.layer, weight, bias, mean, inverse, bias_gradient,
        weight_gradient, image_gradients, bias_sums if sums_up else mean, tiles.num_rows, tiles.columns, units,
        unit=unit, activation=NO_ACTIVATION if writes or out is not None else activation, skips=skip is not None,
        odds=0 if draws.seed is None else draws.level, shifts=sums_up, stages=_STAGES if sums_up else 1,
        **tiles.constants,
    )  # fmt: skip
    conv_bias_gradient = bias_sums.sum(0) if has_conv_bias else images.new_empty(0)
    return image_gradients, before, weight_gradient, bias_gradient, conv_bias_gradient


@triton_op("castwise::batch_norm", mutates_args={})
def batch_norm(  # noqa: PLR0913, PLR0917
    images: Tensor, conv_bias: Tensor | None, seed: Tensor | None, layer: int, drop_level: int, addend: Tensor | None,
    residual: Tensor | None, carrier: Tensor | None, weight: Tensor, bias: Tensor, epsilon: float,  # noqa: ARG001
    activation: int, makes_carrier: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the result, a gradient carrier and the rest of what `launch_norm` returns, as one operation.

    A result that two nodes read has two gradients, which torch would add in a kernel of its own. The carrier stands for
    the result at one of them: a tensor of its shape without memory, whose gradient arrives separately.

    Args:
        images: As in `launch_norm`, as are the arguments not named here.
        conv_bias: As in `launch_norm`.
        seed: As in `Draws`.
        layer: As in `Draws`.
        drop_level: As in `Draws`.
        addend: As in `launch_norm`.
        residual: As in `launch_norm`.
        carrier: Receives the residual's gradient in its place; None if the residual receives it.
        weight: As in `launch_norm`.
        bias: As in `launch_norm`.
        epsilon: As in `launch_norm`.
        activation: As in `launch_norm`.
        makes_carrier: Whether a carrier is returned; it has no elements otherwise.
    """
    draws = Draws(seed, layer, drop_level)
    out, total, mean, variance, inverse = launch_norm(
        wrap_triton, images, conv_bias, draws, addend, residual, weight, bias, epsilon, activation
    )
    own = images.new_zeros(()).expand(images.shape) if makes_carrier else images.new_empty(0)
    return out, own, total, mean, variance, inverse


@triton_op("castwise::batch_norm_backward", mutates_args={})
def batch_norm_backward(  # noqa: PLR0913, PLR0917
    gradients: Tensor, second: Tensor | None, skip: Tensor | None, images: Tensor, out: Tensor | None,
    seed: Tensor | None, layer: int, drop_level: int, weight: Tensor, bias: Tensor, mean: Tensor, inverse: Tensor,
    activation: int, has_conv_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what `launch_norm_backward` returns, as one operation."""
    draws = Draws(seed, layer, drop_level)
    return launch_norm_backward(
        wrap_triton, gradients, second, skip, images, out, draws, weight, bias, mean, inverse, activation, has_conv_bias
    )


def _remember_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    images, conv_bias, seed, ctx.layer, ctx.drop_level, addend, residual, carrier, weight, bias = inputs[:10]
    ctx.activation = inputs[11]
    out, _, total, mean, variance, inverse = output
    ctx.adds_before, ctx.adds, ctx.is_carried = addend is not None, residual is not None, carrier is not None
    ctx.conv_bias_dtype, ctx.writes = None if conv_bias is None else conv_bias.dtype, total.numel() > 0
    # Behind an addition only the result shows which pixels a ReLU let through.
    kept = out if ctx.adds and ctx.activation != NO_ACTIVATION else None
    ctx.save_for_backward(total if ctx.writes else images, weight, bias, mean, inverse, seed, kept)
    ctx.mark_non_differentiable(mean, variance, inverse)
    ctx.set_materialize_grads(False)


def _norm_backward(
    ctx: Any, of_out: Tensor | None, of_carrier: Tensor | None, of_total: Tensor | None, *_: object
) -> tuple[Tensor | None, ...]:
    images, weight, bias, mean, inverse, seed, kept = ctx.saved_tensors
    gradients, second, skip = (
        None if each is None else each.contiguous(memory_format=torch.channels_last)
        for each in (of_out, of_carrier, of_total if ctx.writes else None)
    )
    if gradients is None:
        gradients = torch.zeros_like(images) if second is None else second
        second = None
    out = gradients if ctx.adds and kept is None else kept
    own, before, by_weight, by_bias, bias_sum = batch_norm_backward(
        gradients, second, skip, images, out, seed, ctx.layer, ctx.drop_level, weight, bias, mean, inverse,
        ctx.activation, ctx.conv_bias_dtype is not None,
    )  # fmt: skip
    residual = (gradients if kept is None and second is None else before) if ctx.adds else None
    to_residual, to_carrier = (None, residual) if ctx.is_carried else (residual, None)
    to_addend = own if ctx.adds_before else None
    to_conv_bias = None if ctx.conv_bias_dtype is None else bias_sum.to(ctx.conv_bias_dtype)
    to_traits = by_weight.to(weight.dtype), by_bias.to(bias.dtype)
    return own, to_conv_bias, None, None, None, to_addend, to_residual, to_carrier, *to_traits, None, None, None


batch_norm.register_autograd(_norm_backward, setup_context=_remember_norm)
