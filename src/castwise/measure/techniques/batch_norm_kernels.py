# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""Batch norm with what follows it, an addition and an activation, over channels that lie innermost: in Triton.

Pictures of shape (N, C, H, W) with channels innermost are N·H·W rows of C numbers. A forward reads them twice and
writes once: each program takes a few thousand rows' sums, one kernel puts them together, and the last normalises, adds
and activates. A backward does the same with the gradient's sums. Sums are of differences from the program's first row,
in float32, so that a mean far from 0 costs no digits.

Imported only where Triton is installed.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from castwise.measure.techniques.batch_norm import NO_ACTIVATION

_ELEMENTS = 8192  # of a program's block: 16 bytes four times a thread, of 16 bits
_WARPS = 8
_MOST_CHANNELS = 64  # of a block
_MOST_PARTS = 256  # sums that are put together at once
_PROGRAMS = 528  # four for each of an H200's multiprocessors
_COMBINED_CHANNELS = 16


@triton.jit
def _activated(value, activation: tl.constexpr):
    if activation == 1:
        value = tl.maximum(value, 0.0)
    elif activation == 2:
        value = value * tl.sigmoid(value)
    return value


@triton.jit
def _before_activation(gradient, value, activation: tl.constexpr):
    """Return the gradient of what was activated, from that of the result and what was activated."""
    if activation == 1:
        gradient = tl.where(value > 0, gradient, 0.0)
    elif activation == 2:
        share = tl.sigmoid(value)
        gradient = gradient * share * (1 + value * (1 - share))
    return gradient


@triton.jit
def _traits(weight, bias, mean, inverse, channel, there):
    """Return the channels' factor, bias and mean."""
    factor = tl.load(weight + channel, mask=there, other=0.0).to(tl.float32)
    factor *= tl.load(inverse + channel, mask=there, other=0.0)
    shift = tl.load(bias + channel, mask=there, other=0.0).to(tl.float32)
    return factor, shift, tl.load(mean + channel, mask=there, other=0.0)


@triton.jit
def statistics_kernel(
    images, means, squares, num_rows, channels, rows_each, block_rows: tl.constexpr, block_channels: tl.constexpr
):
    """Write the mean of a program's rows, and the sum of their squared differences from it, for each channel."""
    part = tl.program_id(0)
    channel = tl.program_id(1) * block_channels + tl.arange(0, block_channels)
    there = channel < channels
    first = part * rows_each
    count = tl.minimum(rows_each, num_rows - first)
    pivot = tl.load(images + first.to(tl.int64) * channels + channel, mask=there, other=0.0).to(tl.float32)
    total = tl.zeros((block_rows, block_channels), tl.float32)
    square = tl.zeros((block_rows, block_channels), tl.float32)
    for start in range(0, rows_each, block_rows):
        row = start + tl.arange(0, block_rows)
        inside = (row < count)[:, None] & there[None, :]
        offset = (first + row).to(tl.int64)[:, None] * channels + channel[None, :]
        value = tl.load(images + offset, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside, value - pivot[None, :], 0.0)
        total += value
        square += value * value
    sums = tl.sum(total, 0)
    offset = part * channels + channel
    tl.store(means + offset, pivot + sums / count, mask=there)
    tl.store(squares + offset, tl.sum(square, 0) - sums * sums / count, mask=there)


@triton.jit
def combine_kernel(
    means, squares, mean_out, variance_out, inverse_out, num_parts, num_rows, channels, rows_each, epsilon,
    block_parts: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """Write each channel's mean, its unbiased variance, and one over the root of the rows' own and epsilon."""
    channel = tl.program_id(0) * block_channels + tl.arange(0, block_channels)
    part = tl.arange(0, block_parts)
    inside = (part < num_parts)[:, None] & (channel < channels)[None, :]
    count = tl.where(part < num_parts, tl.minimum(rows_each, num_rows - part * rows_each), 0).to(tl.float32)
    offset = part[:, None] * channels + channel[None, :]
    own = tl.load(means + offset, mask=inside, other=0.0)
    square = tl.load(squares + offset, mask=inside, other=0.0)
    mean = tl.sum(own * count[:, None], 0) / num_rows
    apart = tl.where(inside, own - mean[None, :], 0.0)
    variance = tl.maximum(tl.sum(square + count[:, None] * apart * apart, 0) / num_rows, 0.0)
    tl.store(mean_out + channel, mean, mask=channel < channels)
    tl.store(variance_out + channel, variance * num_rows / tl.maximum(num_rows - 1, 1), mask=channel < channels)
    tl.store(inverse_out + channel, 1 / tl.sqrt(variance + epsilon), mask=channel < channels)


@triton.jit
def normalise_kernel(
    images, residual, weight, bias, mean, inverse, out, num_rows, channels,
    activation: tl.constexpr, adds: tl.constexpr, block_rows: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """Normalise, add and activate a block."""
    channel = tl.program_id(1) * block_channels + tl.arange(0, block_channels)
    there = channel < channels
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    inside = (row < num_rows)[:, None] & there[None, :]
    offset = row.to(tl.int64)[:, None] * channels + channel[None, :]
    factor, shift, middle = _traits(weight, bias, mean, inverse, channel, there)
    value = tl.load(images + offset, mask=inside, other=0.0).to(tl.float32)
    value = (value - middle[None, :]) * factor[None, :] + shift[None, :]
    if adds:
        value += tl.load(residual + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + offset, _activated(value, activation), mask=inside)


@triton.jit
def gradient_sums_kernel(
    gradients, images, out, weight, bias, mean, inverse, before, sums, products, num_rows, channels, rows_each,
    activation: tl.constexpr, adds: tl.constexpr, block_rows: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """Write the sums of a program's rows: of the gradient before the activation, and of it times the centred image.

    Where something was added, that gradient is the addend's, too, and is written out; the activation's input is known
    by its result then.
    """
    part = tl.program_id(0)
    channel = tl.program_id(1) * block_channels + tl.arange(0, block_channels)
    there = channel < channels
    first = part * rows_each
    count = tl.minimum(rows_each, num_rows - first)
    factor, shift, middle = _traits(weight, bias, mean, inverse, channel, there)
    total = tl.zeros((block_rows, block_channels), tl.float32)
    product = tl.zeros((block_rows, block_channels), tl.float32)
    for start in range(0, rows_each, block_rows):
        row = start + tl.arange(0, block_rows)
        inside = (row < count)[:, None] & there[None, :]
        offset = (first + row).to(tl.int64)[:, None] * channels + channel[None, :]
        gradient = tl.load(gradients + offset, mask=inside, other=0.0).to(tl.float32)
        centred = tl.load(images + offset, mask=inside, other=0.0).to(tl.float32)
        centred = tl.where(inside, centred - middle[None, :], 0.0)
        if adds:
            if activation != 0:
                result = tl.load(out + offset, mask=inside, other=0.0).to(tl.float32)
                gradient = _before_activation(gradient, result, activation)
                tl.store(before + offset, gradient, mask=inside)
        else:
            gradient = _before_activation(gradient, centred * factor[None, :] + shift[None, :], activation)
        total += gradient
        product += gradient * centred
    offset = part * channels + channel
    tl.store(sums + offset, tl.sum(total, 0), mask=there)
    tl.store(products + offset, tl.sum(product, 0), mask=there)


@triton.jit
def combine_sums_kernel(
    sums, products, inverse, sum_out, product_out, num_parts, channels,
    block_parts: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the bias and of the weight."""
    channel = tl.program_id(0) * block_channels + tl.arange(0, block_channels)
    part = tl.arange(0, block_parts)
    there = channel < channels
    inside = (part < num_parts)[:, None] & there[None, :]
    offset = part[:, None] * channels + channel[None, :]
    tl.store(sum_out + channel, tl.sum(tl.load(sums + offset, mask=inside, other=0.0), 0), mask=there)
    product = tl.sum(tl.load(products + offset, mask=inside, other=0.0), 0)
    tl.store(product_out + channel, product * tl.load(inverse + channel, mask=there, other=0.0), mask=there)


@triton.jit
def gradient_kernel(
    gradients, images, weight, bias, mean, inverse, sums, products, out, num_rows, channels,
    activation: tl.constexpr, block_rows: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """Write a block of the images' gradient; `activation` is none where the gradient is that before it already."""
    channel = tl.program_id(1) * block_channels + tl.arange(0, block_channels)
    there = channel < channels
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    inside = (row < num_rows)[:, None] & there[None, :]
    offset = row.to(tl.int64)[:, None] * channels + channel[None, :]
    factor, shift, middle = _traits(weight, bias, mean, inverse, channel, there)
    sum_share = tl.load(sums + channel, mask=there, other=0.0) / num_rows
    product_share = tl.load(products + channel, mask=there, other=0.0) / num_rows
    product_share *= tl.load(inverse + channel, mask=there, other=0.0)
    gradient = tl.load(gradients + offset, mask=inside, other=0.0).to(tl.float32)
    centred = tl.load(images + offset, mask=inside, other=0.0).to(tl.float32) - middle[None, :]
    gradient = _before_activation(gradient, centred * factor[None, :] + shift[None, :], activation)
    gradient = factor[None, :] * (gradient - sum_share[None, :] - centred * product_share[None, :])
    tl.store(out + offset, gradient, mask=inside)


def launch_norm(
    kernels: Any, images: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, epsilon: float, activation: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the activated sum of the normalised images and the residual; mean, unbiased variance, inverse deviation.

    Args:
        kernels: Wraps a kernel as whoever calls has to.
        images: Shape (N, C, H, W), channels innermost.
        residual: The same shape, dtype and layout; None adds nothing.
        weight: Shape (C,).
        bias: Shape (C,).
        epsilon: Added to the variance.
        activation: `NO_ACTIVATION`, `RELU` or `SILU`.
    """
    num_rows, channels = images.numel() // images.shape[1], images.shape[1]
    block, parts, rows_each = _blocks_of(num_rows, channels)
    means, squares = (images.new_empty((parts, channels), dtype=torch.float32) for _ in range(2))
    mean, variance, inverse = (images.new_empty(channels, dtype=torch.float32) for _ in range(3))
    columns = triton.cdiv(channels, block["block_channels"])
    kernels(statistics_kernel)[(parts, columns)](
        images, means, squares, num_rows, channels, rows_each, **block, num_warps=_WARPS
    )
    kernels(combine_kernel)[(triton.cdiv(channels, _COMBINED_CHANNELS),)](
        means, squares, mean, variance, inverse, parts, num_rows, channels, rows_each, epsilon,
        block_parts=triton.next_power_of_2(parts), block_channels=_COMBINED_CHANNELS,
    )  # fmt: skip
    out = torch.empty_like(images)
    kernels(normalise_kernel)[(triton.cdiv(num_rows, block["block_rows"]), columns)](
        images, images if residual is None else residual, weight, bias, mean, inverse, out, num_rows, channels,
        activation=activation, adds=residual is not None, **block, num_warps=_WARPS,
    )  # fmt: skip
    return out, mean, variance, inverse


def launch_norm_backward(
    kernels: Any, gradients: Tensor, images: Tensor, out: Tensor | None, weight: Tensor, bias: Tensor, mean: Tensor,
    inverse: Tensor, activation: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of the images, of the residual, of the weight and of the bias.

    Args:
        kernels: Wraps a kernel as whoever calls has to.
        gradients: Of the result, channels innermost.
        images: As in `launch_norm`.
        out: Its result, where a residual was added; None where none was.
        weight: As there.
        bias: As there.
        mean: Its result.
        inverse: Its result.
        activation: As there; with a residual not `SILU`, whose input is not known by its result.
    """
    num_rows, channels = images.numel() // images.shape[1], images.shape[1]
    block, parts, rows_each = _blocks_of(num_rows, channels)
    sums, products = (images.new_empty((parts, channels), dtype=torch.float32) for _ in range(2))
    bias_gradient, weight_gradient = (images.new_empty(channels, dtype=torch.float32) for _ in range(2))
    is_written = out is not None and activation != NO_ACTIVATION
    before = torch.empty_like(gradients) if is_written else gradients
    columns = triton.cdiv(channels, block["block_channels"])
    kernels(gradient_sums_kernel)[(parts, columns)](
        gradients, images, gradients if out is None else out, weight, bias, mean, inverse, before, sums, products,
        num_rows, channels, rows_each, activation=activation, adds=out is not None, **block, num_warps=_WARPS,
    )  # fmt: skip
    kernels(combine_sums_kernel)[(triton.cdiv(channels, _COMBINED_CHANNELS),)](
        sums, products, inverse, bias_gradient, weight_gradient, parts, channels,
        block_parts=triton.next_power_of_2(parts), block_channels=_COMBINED_CHANNELS,
    )  # fmt: skip
    image_gradients = torch.empty_like(images)
    kernels(gradient_kernel)[(triton.cdiv(num_rows, block["block_rows"]), columns)](
        before, images, weight, bias, mean, inverse, bias_gradient, weight_gradient, image_gradients, num_rows,
        channels, activation=activation if out is None else NO_ACTIVATION, **block, num_warps=_WARPS,
    )  # fmt: skip
    residual_gradients = before if is_written else gradients.new_empty(0)
    return image_gradients, residual_gradients, weight_gradient, bias_gradient


def _blocks_of(num_rows: int, channels: int) -> tuple[dict[str, int], int, int]:
    """Return a block's rows and channels, how many programs share the rows, and the rows of each."""
    block_channels = min(_MOST_CHANNELS, triton.next_power_of_2(channels))
    block_rows = _ELEMENTS // block_channels
    columns = triton.cdiv(channels, block_channels)
    parts = min(_MOST_PARTS, max(1, _PROGRAMS // columns), triton.cdiv(num_rows, block_rows))
    rows_each = triton.cdiv(triton.cdiv(num_rows, parts), block_rows) * block_rows
    return {"block_rows": block_rows, "block_channels": block_channels}, triton.cdiv(num_rows, rows_each), rows_each


@triton_op("castwise::batch_norm", mutates_args={})
def batch_norm(
    images: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, epsilon: float, activation: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `launch_norm`'s, as one operation that torch.compile knows."""
    return launch_norm(wrap_triton, images, residual, weight, bias, epsilon, activation)


@triton_op("castwise::batch_norm_backward", mutates_args={})
def batch_norm_backward(
    gradients: Tensor, images: Tensor, out: Tensor | None, weight: Tensor, bias: Tensor, mean: Tensor, inverse: Tensor,
    activation: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return `launch_norm_backward`'s, as one operation that torch.compile knows."""
    return launch_norm_backward(wrap_triton, gradients, images, out, weight, bias, mean, inverse, activation)


def _remember_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    images, residual, weight, bias, _, ctx.activation = inputs
    out, mean, variance, inverse = output
    ctx.adds = residual is not None
    kept = (out,) if ctx.adds and ctx.activation != NO_ACTIVATION else ()
    ctx.save_for_backward(images, weight, bias, mean, inverse, *kept)
    ctx.mark_non_differentiable(mean, variance, inverse)


def _norm_backward(ctx: Any, gradients: Tensor, *_: object) -> tuple[Tensor | None, ...]:
    images, weight, bias, mean, inverse, *kept = ctx.saved_tensors
    gradients = gradients.contiguous(memory_format=torch.channels_last)
    out = kept[0] if kept else (gradients if ctx.adds else None)
    own, before, by_weight, by_bias = batch_norm_backward(
        gradients, images, out, weight, bias, mean, inverse, ctx.activation
    )
    residual = (before if kept else gradients) if ctx.adds else None
    return own, residual, by_weight.to(weight.dtype), by_bias.to(bias.dtype), None, None


batch_norm.register_autograd(_norm_backward, setup_context=_remember_norm)
