# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""The batch norm kernels as operations of torch.compile and autograd. Imported only if Triton is installed."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.library import triton_op, wrap_triton

from castwise.trial.kernels.batch_norm.triton_kernels import (
    combine_kernel,
    combine_sums_kernel,
    gradient_kernel,
    gradient_sums_kernel,
    normalise_kernel,
    statistics_kernel,
)
from castwise.trial.kernels.batch_norm.types import NO_ACTIVATION

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


class Tiles(NamedTuple):
    """How images are cut into blocks of some rows (pixels) and channels, as arguments of the kernels."""

    columns: int  # blocks next to each other
    num_blocks: int  # blocks below each other
    parts: int  # programs that reduce the blocks below each other, each about as many
    sizes: tuple[int, int, int]  # the rows, the columns, the units of channels
    constants: dict[str, int]


def _cut(images: Tensor, elements: int, max_channels: int = _BLOCK_CHANNELS) -> Tiles:
    """Cut images of shape (N, C, H, W), channels last, into blocks of about so many elements."""
    channels = images.shape[1]
    num_rows = images.numel() // channels
    block_channels = min(max_channels, triton.next_power_of_2(channels))
    block_rows = max(1, elements // block_channels)
    columns, num_blocks = int(triton.cdiv(channels, block_channels)), int(triton.cdiv(num_rows, block_rows))
    most_parts = max(1, min(num_blocks, _REDUCTION_PROGRAMS // columns))
    parts = int(triton.cdiv(num_blocks, triton.cdiv(num_blocks, most_parts)))
    unit = _UNIT if channels % _UNIT == 0 else 1
    constants = {"unit": unit, "block_rows": block_rows, "block_channels": block_channels, "num_warps": _WARPS}
    return Tiles(columns, num_blocks, parts, (num_rows, columns, channels // unit), constants)


def _cut_for_reduction(images: Tensor) -> Tiles:
    """Cut images for a reduction, where a block's unused elements cost more."""
    max_channels = _REDUCTION_BLOCK_CHANNELS if images.shape[1] % _BLOCK_CHANNELS else _BLOCK_CHANNELS
    return _cut(images, _REDUCTION_ELEMENTS, max_channels)


def _given(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """Return a tensor, or what a kernel is passed in its place and does not read."""
    return stand_in if tensor is None else tensor


@triton_op("castwise::batch_norm", mutates_args={})
def batch_norm(  # noqa: PLR0913, PLR0917
    images: Tensor, conv_bias: Tensor | None, seed: Tensor | None, layer: int, drop_level: int, addend: Tensor | None,
    residual: Tensor | None, carrier: Tensor | None, weight: Tensor, bias: Tensor, epsilon: float,  # noqa: ARG001
    activation: int, makes_carrier: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Run the forward kernels.

    A result that two nodes read has two gradients, which torch would add in a kernel of its own. The carrier stands for
    the result at one of them: a tensor of its shape without memory, whose gradient arrives separately.

    Args:
        images: Shape (N, C, H, W), channels last.
        conv_bias: Shape (C,), added before dropout and normalising; None adds nothing. If nothing else is done before
            the norm, the returned mean does not include it.
        seed: Of dropout's draws before the norm, shape (1,), int64; None drops nothing. C must be a multiple of 8 then.
        layer: Number of the dropout layer: each draws its own numbers.
        drop_level: Drop probability in 1 / 65,536.
        addend: Of the images' shape, dtype and layout, added before normalising; None adds nothing.
        residual: The same, added after normalising.
        carrier: Receives the residual's gradient; None if the residual itself receives it.
        weight: Shape (C,).
        bias: Shape (C,).
        epsilon: Added to the variance.
        activation: `NO_ACTIVATION`, `RELU`, or one of `NEEDS_INPUT`.
        makes_carrier: Whether a carrier of the result is returned; it has no elements otherwise.

    Returns:
        The result; a carrier; what was normalised, without elements if that is the images; its mean; its unbiased
        variance; one over its deviation.
    """
    tiles, channels = _cut_for_reduction(images), images.shape[1]
    sums, squares = (images.new_empty((tiles.parts, channels), dtype=torch.float32) for _ in range(2))
    pivots, mean, variance, inverse = (images.new_empty(channels, dtype=torch.float32) for _ in range(4))
    writes_total = addend is not None or seed is not None
    conv_bias = conv_bias if writes_total else None  # alone it changes the mean only, which is subtracted
    total = torch.empty_like(images) if writes_total else images.new_empty(0)
    normalised = total if writes_total else images
    wrap_triton(statistics_kernel)[(tiles.columns * tiles.parts,)](
        images, _given(conv_bias, images), _given(addend, images),
        _given(seed, images), layer, normalised, pivots, sums, squares, *tiles.sizes,
        has_conv_bias=conv_bias is not None, has_addend=addend is not None,
        drop_level=0 if seed is None else drop_level, stages=_STAGES, **tiles.constants,
    )  # fmt: skip
    wrap_triton(combine_kernel)[(triton.cdiv(channels, _COMBINED_CHANNELS),)](
        pivots, sums, squares, mean, variance, inverse, tiles.parts, tiles.sizes[0], channels, epsilon,
        block_parts=triton.next_power_of_2(tiles.parts), block_channels=_COMBINED_CHANNELS, num_warps=_COMBINED_WARPS,
    )  # fmt: skip
    out = torch.empty_like(images)
    tiles = _cut(images, _NORMALISE_ELEMENTS)
    wrap_triton(normalise_kernel)[(tiles.columns * tiles.num_blocks,)](
        normalised, _given(residual, normalised), weight, bias, mean, inverse, out, *tiles.sizes,
        activation=activation, has_residual=residual is not None, **tiles.constants,
    )  # fmt: skip
    own_carrier = images.new_zeros(()).expand(images.shape) if makes_carrier else images.new_empty(0)
    return out, own_carrier, total, mean, variance, inverse


@triton_op("castwise::batch_norm_backward", mutates_args={})
def batch_norm_backward(  # noqa: PLR0913, PLR0917
    gradients: Tensor, carried: Tensor | None, of_total: Tensor | None, images: Tensor, out: Tensor | None,
    seed: Tensor | None, layer: int, drop_level: int, weight: Tensor, bias: Tensor, mean: Tensor, inverse: Tensor,
    activation: int, has_conv_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Run the backward kernels.

    `gradients`, channels last, are of the result; `carried`, added to them, is its gradient as a residual, and
    `of_total` is added to the gradient of what was normalised. `images` are what was normalised. `out` is the result if
    a residual was added; the activation is none of `NEEDS_INPUT` then. The rest `batch_norm` takes or returns.

    Returns:
        The gradients of the images; of the residual, without elements if that is `gradients` or is not needed; of the
        weight; of the bias; of the convolution's bias, without elements if there was none.
    """
    tiles, channels = _cut_for_reduction(images), images.shape[1]
    sums, products = (images.new_empty((tiles.parts, channels), dtype=torch.float32) for _ in range(2))
    bias_gradient, weight_gradient = (images.new_empty(channels, dtype=torch.float32) for _ in range(2))
    # The gradient before the activation is written if it is the residual's, too, or a sum of two.
    writes_before = carried is not None or (out is not None and activation != NO_ACTIVATION)
    before = torch.empty_like(images) if writes_before else images.new_empty(0)
    wrap_triton(gradient_sums_kernel)[(tiles.columns * tiles.parts,)](
        gradients, _given(carried, gradients), images, _given(out, images), weight, bias,
        mean, inverse, before if writes_before else gradients, sums, products, *tiles.sizes, activation=activation,
        has_residual=out is not None, has_carried=carried is not None, writes_before=writes_before, stages=_STAGES,
        **tiles.constants,
    )  # fmt: skip
    wrap_triton(combine_sums_kernel)[(triton.cdiv(channels, _COMBINED_CHANNELS),)](
        sums, products, inverse, bias_gradient, weight_gradient, tiles.parts, channels,
        block_parts=triton.next_power_of_2(tiles.parts), block_channels=_COMBINED_CHANNELS, num_warps=_COMBINED_WARPS,
    )  # fmt: skip
    image_gradients = torch.empty_like(images)
    # The gradient of what was normalised sums to 0 over the rows: only what is added to it, or dropout, changes that.
    sums_rows = has_conv_bias and (of_total is not None or seed is not None)
    tiles = tiles if sums_rows else _cut(images, _GRADIENT_ELEMENTS)
    parts = tiles.parts if sums_rows else tiles.num_blocks
    bias_sums = images.new_empty((parts if sums_rows else 0, channels), dtype=torch.float32)
    wrap_triton(gradient_kernel)[(tiles.columns * parts,)](
        before if writes_before else gradients, images, _given(of_total, images),
        _given(seed, images), layer, weight, bias, mean, inverse, bias_gradient, weight_gradient,
        image_gradients, bias_sums if sums_rows else mean, *tiles.sizes,
        activation=NO_ACTIVATION if writes_before or out is not None else activation, has_of_total=of_total is not None,
        drop_level=0 if seed is None else drop_level, sums_rows=sums_rows, stages=_STAGES if sums_rows else 1,
        **tiles.constants,
    )  # fmt: skip
    conv_bias_gradient = bias_sums.sum(0) if has_conv_bias else images.new_empty(0)
    return image_gradients, before, weight_gradient, bias_gradient, conv_bias_gradient


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    images, conv_bias, seed, ctx.layer, ctx.drop_level, addend, residual, carrier, weight, bias = inputs[:10]
    ctx.activation = inputs[11]
    out, _, total, mean, variance, inverse = output
    ctx.has_addend, ctx.has_residual, ctx.has_carrier = addend is not None, residual is not None, carrier is not None
    ctx.conv_bias_dtype, ctx.has_total = None if conv_bias is None else conv_bias.dtype, total.numel() > 0
    # After an addition only the result shows which pixels a ReLU let through.
    kept = out if ctx.has_residual and ctx.activation != NO_ACTIVATION else None
    ctx.save_for_backward(total if ctx.has_total else images, weight, bias, mean, inverse, seed, kept)
    ctx.mark_non_differentiable(mean, variance, inverse)
    ctx.set_materialize_grads(False)


def _norm_backward(
    ctx: Any, of_out: Tensor | None, of_carrier: Tensor | None, of_total: Tensor | None, *_: object
) -> tuple[Tensor | None, ...]:
    images, weight, bias, mean, inverse, seed, kept = ctx.saved_tensors
    gradients, carried, of_total = (
        None if gradient is None else gradient.contiguous(memory_format=torch.channels_last)
        for gradient in (of_out, of_carrier, of_total if ctx.has_total else None)
    )
    if gradients is None:
        gradients = torch.zeros_like(images) if carried is None else carried
        carried = None
    out = gradients if ctx.has_residual and kept is None else kept
    of_images, before, of_weight, of_bias, of_conv_bias = batch_norm_backward(
        gradients, carried, of_total, images, out, seed, ctx.layer, ctx.drop_level, weight, bias, mean, inverse,
        ctx.activation, ctx.conv_bias_dtype is not None,
    )  # fmt: skip
    of_conv_bias = None if ctx.conv_bias_dtype is None else of_conv_bias.to(ctx.conv_bias_dtype)
    of_addend = of_images if ctx.has_addend else None
    of_residual = (gradients if kept is None and carried is None else before) if ctx.has_residual else None
    of_residual, of_given_carrier = (None, of_residual) if ctx.has_carrier else (of_residual, None)
    of_weight, of_bias = of_weight.to(weight.dtype), of_bias.to(bias.dtype)
    # In the order of `batch_norm`'s arguments.
    return (
        of_images, of_conv_bias, None, None, None, of_addend, of_residual, of_given_carrier, of_weight, of_bias,
        None, None, None,
    )  # fmt: skip


batch_norm.register_autograd(_norm_backward, setup_context=_save_norm)
