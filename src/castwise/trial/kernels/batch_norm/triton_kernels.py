# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""Batch norm with additions, dropout and activation: Triton kernels. Imported only if Triton is installed."""

import triton
import triton.language as tl

# Images of shape (N, C, H, W), channels last, are N·H·W rows of C numbers. Forward reads them twice and writes them
# once: programs sum up some rows each, one kernel combines the sums, and the last one normalises, adds and activates.
# Backward does the same with the sums of the gradient. Sums are of differences from the first row, in float32, so that
# a mean far from 0 costs no digits.
#
# What comes before the norm (a convolution's bias, an addition, dropout) is computed with the sums. Dropout's draws are
# not stored: backward draws them again.
#
# Programs that run at the same time read neighbouring rows. Sums start at the last row, which the convolution before
# them wrote last, and the kernel that reads the rows again starts at the first, which the sums read last: both find
# them in the cache.


@triton.jit
def _activated(value, activation: tl.constexpr):
    if activation == 1:
        value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif activation == 2:
        value = value * tl.sigmoid(value)
    elif activation == 3:
        value = value * (tl.minimum(tl.maximum(value + 3, 0.0), 6.0) / 6)
    return value


@triton.jit
def _before_activation(gradient, value, activation: tl.constexpr):
    """Return the gradient of an activation's input, from the gradient of its output and from its input."""
    if activation == 1:
        gradient = tl.where(value <= 0, 0.0, gradient)  # torch's lets it through where the value is NaN
    elif activation == 2:
        share = tl.sigmoid(value)
        gradient = gradient * share * (1 + value * (1 - share))
    elif activation == 3:
        gradient = tl.where(value <= -3, 0.0, tl.where(value < 3, gradient * (value / 3 + 0.5), gradient))
    return gradient


@triton.jit
def _channel_values(weight, bias, mean, inverse, channel, is_channel):
    """Return the channels' scale, bias and mean."""
    scale = tl.load(weight + channel, mask=is_channel, other=0.0).to(tl.float32)
    scale *= tl.load(inverse + channel, mask=is_channel, other=0.0)
    bias_value = tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)
    return scale, bias_value, tl.load(mean + channel, mask=is_channel, other=0.0)


@triton.jit
def _own_channels(columns, channels, block_channels: tl.constexpr):
    """Return a program's channels, a mask of those that exist, and its first block of rows.

    Neighbouring programs have the same rows, so that a page of memory is read at one time.
    """
    program = tl.program_id(0)
    channel = (program % columns) * block_channels + tl.arange(0, block_channels)
    return channel, channel < channels, program // columns


@triton.jit
def _offsets(index, num_rows, channels, channel, is_channel, block_rows: tl.constexpr):
    """Return the offset of a block of rows, its elements' offsets from there, and a mask of those that exist."""
    first = index * block_rows
    row = tl.arange(0, block_rows)
    inside = (row < num_rows - first)[:, None] & is_channel[None, :]
    return first.to(tl.int64) * channels, row[:, None] * channels + channel[None, :], inside


@triton.jit
def _keeps(
    seed, layer, block_index, column, units,
    block_rows: tl.constexpr, block_channels: tl.constexpr, drop_level: tl.constexpr,
):  # fmt: skip
    """Return a mask of the elements that dropout keeps: each but for `drop_level` in 65,536.

    One draw of Philox has 128 bits, for the 8 channels of a unit. Seven rounds pass all tests of randomness.
    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    row = block_index.to(tl.int64) * block_rows + tl.arange(0, block_rows)
    unit = column * (block_channels // 8) + tl.arange(0, block_channels // 8)
    number = row[:, None] * units + unit[None, :]
    one, two, three, four = tl.philox(seed, number.to(tl.uint32), (number >> 32).to(tl.uint32), layer, 0, 7)
    low_bits = tl.join(tl.join(one & 0xFFFF, two & 0xFFFF), tl.join(three & 0xFFFF, four & 0xFFFF))
    high_bits = tl.join(tl.join(one >> 16, two >> 16), tl.join(three >> 16, four >> 16))
    return tl.reshape(tl.join(low_bits, high_bits), (block_rows, block_channels)) >= drop_level


@triton.jit
def statistics_kernel(
    images, conv_bias, addend, seed, layer, total, pivots, sums, squares, num_rows, columns, units, unit: tl.constexpr,
    has_conv_bias: tl.constexpr, has_addend: tl.constexpr, drop_level: tl.constexpr,
    block_rows: tl.constexpr, block_channels: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Write each channel's sums of a program's rows minus the first row, and the sums of their squares.

    With a convolution's bias, an addend or dropout, the rows that result are summed, and written to `total`.
    """
    channels = units * unit
    channel, is_channel, part = _own_channels(columns, channels, block_channels)
    parts = tl.num_programs(0) // columns
    column = tl.program_id(0) % columns
    writes_total: tl.constexpr = has_conv_bias or has_addend or drop_level > 0
    pivot = tl.load(images + channel, mask=is_channel, other=0.0).to(tl.float32)
    if has_conv_bias:
        conv_bias_value = tl.load(conv_bias + channel, mask=is_channel, other=0.0).to(tl.float32)
        pivot += conv_bias_value
    if has_addend:
        pivot += tl.load(addend + channel, mask=is_channel, other=0.0).to(tl.float32)
    pivot = pivot.to(total.dtype.element_ty)
    if part == 0:
        tl.store(pivots + channel, pivot.to(tl.float32), mask=is_channel)
    seed_value = tl.load(seed) if drop_level > 0 else 0
    row_sums = tl.zeros((block_rows, block_channels), tl.float32)
    row_squares = tl.zeros((block_rows, block_channels), tl.float32)
    last = tl.cdiv(num_rows, block_rows) - 1 - part
    for step in tl.range(0, last // parts + 1, num_stages=stages):
        block_index = last - step * parts
        start, offset, inside = _offsets(block_index, num_rows, channels, channel, is_channel, block_rows)
        if writes_total:
            value = tl.load(images + start + offset, mask=inside, other=0.0).to(tl.float32)
            if has_conv_bias:
                value += conv_bias_value[None, :]
            if drop_level > 0:
                is_kept = _keeps(seed_value, layer, block_index, column, units, block_rows, block_channels, drop_level)
                value = tl.where(is_kept, value * (65536 / (65536 - drop_level)), 0.0)
            if has_addend:
                value += tl.load(addend + start + offset, mask=inside, other=0.0).to(tl.float32)
            value = tl.where(inside, value.to(total.dtype.element_ty), pivot[None, :])
            tl.store(total + start + offset, value, mask=inside)
        else:
            value = tl.load(images + start + offset, mask=inside, other=pivot[None, :])
        value = value.to(tl.float32) - pivot.to(tl.float32)[None, :]
        row_sums += value
        row_squares += value * value
    offset = part * channels + channel
    tl.store(sums + offset, tl.sum(row_sums, 0), mask=is_channel)
    tl.store(squares + offset, tl.sum(row_squares, 0), mask=is_channel)


@triton.jit
def combine_kernel(
    pivots, sums, squares, mean_out, variance_out, inverse_out, num_parts, num_rows, channels, epsilon,
    block_parts: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """Write each channel's mean, its unbiased variance, and 1 / sqrt(biased variance + epsilon)."""
    channel = tl.program_id(0) * block_channels + tl.arange(0, block_channels)
    is_channel = channel < channels
    part = tl.arange(0, block_parts)
    inside = (part < num_parts)[:, None] & is_channel[None, :]
    offset = part[:, None] * channels + channel[None, :]
    shift = tl.sum(tl.load(sums + offset, mask=inside, other=0.0), 0) / num_rows
    square = tl.sum(tl.load(squares + offset, mask=inside, other=0.0), 0) / num_rows
    variance = tl.maximum(square - shift * shift, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(mean_out + channel, tl.load(pivots + channel, mask=is_channel, other=0.0) + shift, mask=is_channel)
    tl.store(variance_out + channel, variance * num_rows / tl.maximum(num_rows - 1, 1), mask=is_channel)
    tl.store(inverse_out + channel, 1 / tl.sqrt(variance + epsilon), mask=is_channel)


@triton.jit
def normalise_kernel(
    images, residual, weight, bias, mean, inverse, out, num_rows, columns, units, unit: tl.constexpr,
    activation: tl.constexpr, has_residual: tl.constexpr, block_rows: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """Normalise, add and activate a block."""
    channels = units * unit
    channel, is_channel, block_index = _own_channels(columns, channels, block_channels)
    start, offset, inside = _offsets(block_index, num_rows, channels, channel, is_channel, block_rows)
    value = tl.load(images + start + offset, mask=inside, other=0.0).to(tl.float32)
    scale, bias_value, mean_value = _channel_values(weight, bias, mean, inverse, channel, is_channel)
    value = (value - mean_value[None, :]) * scale[None, :] + bias_value[None, :]
    if has_residual:
        value += tl.load(residual + start + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + start + offset, _activated(value, activation), mask=inside)


@triton.jit
def gradient_sums_kernel(
    gradients, carried, images, out, weight, bias, mean, inverse, before, sums, products, num_rows, columns, units,
    unit: tl.constexpr, activation: tl.constexpr, has_residual: tl.constexpr, has_carried: tl.constexpr,
    writes_before: tl.constexpr,
    block_rows: tl.constexpr, block_channels: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Write the sums of a program's rows: of the gradient before the activation, and of it times the centred image.

    If a carried gradient is added, or the residual needs it, the gradient before the activation is written to `before`.
    If a residual was added, the activation's input is known by its result.
    """
    channels = units * unit
    channel, is_channel, part = _own_channels(columns, channels, block_channels)
    parts = tl.num_programs(0) // columns
    scale, bias_value, mean_value = _channel_values(weight, bias, mean, inverse, channel, is_channel)
    row_sums = tl.zeros((block_rows, block_channels), tl.float32)
    row_products = tl.zeros((block_rows, block_channels), tl.float32)
    last = tl.cdiv(num_rows, block_rows) - 1 - part
    for step in tl.range(0, last // parts + 1, num_stages=stages):
        start, offset, inside = _offsets(last - step * parts, num_rows, channels, channel, is_channel, block_rows)
        gradient = tl.load(gradients + start + offset, mask=inside, other=0.0).to(tl.float32)
        if has_carried:
            gradient += tl.load(carried + start + offset, mask=inside, other=0.0).to(tl.float32)
        centred = tl.load(images + start + offset, mask=inside, other=0.0).to(tl.float32) - mean_value[None, :]
        if has_residual:
            if activation != 0:
                result = tl.load(out + start + offset, mask=inside, other=0.0).to(tl.float32)
                gradient = _before_activation(gradient, result, activation)
        else:
            gradient = _before_activation(gradient, centred * scale[None, :] + bias_value[None, :], activation)
        if writes_before:
            tl.store(before + start + offset, gradient, mask=inside)
        row_sums += gradient
        row_products += gradient * centred
    offset = part * channels + channel
    tl.store(sums + offset, tl.sum(row_sums, 0), mask=is_channel)
    tl.store(products + offset, tl.sum(row_products, 0), mask=is_channel)


@triton.jit
def combine_sums_kernel(
    sums, products, inverse, sum_out, product_out, num_parts, channels,
    block_parts: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the bias and of the weight."""
    channel = tl.program_id(0) * block_channels + tl.arange(0, block_channels)
    part = tl.arange(0, block_parts)
    is_channel = channel < channels
    inside = (part < num_parts)[:, None] & is_channel[None, :]
    offset = part[:, None] * channels + channel[None, :]
    tl.store(sum_out + channel, tl.sum(tl.load(sums + offset, mask=inside, other=0.0), 0), mask=is_channel)
    product = tl.sum(tl.load(products + offset, mask=inside, other=0.0), 0)
    tl.store(product_out + channel, product * tl.load(inverse + channel, mask=is_channel, other=0.0), mask=is_channel)


@triton.jit
def gradient_kernel(
    gradients, images, of_total, seed, layer, weight, bias, mean, inverse, sums, products, out, bias_sums, num_rows,
    columns, units, unit: tl.constexpr, activation: tl.constexpr, has_of_total: tl.constexpr,
    drop_level: tl.constexpr, sums_rows: tl.constexpr,
    block_rows: tl.constexpr, block_channels: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a program's rows, `of_total` added; and its sums, if a convolution's bias was added.

    There is no `activation` if the gradient is that before it already.
    """
    channels = units * unit
    channel, is_channel, part = _own_channels(columns, channels, block_channels)
    parts = tl.num_programs(0) // columns
    column = tl.program_id(0) % columns
    scale, bias_value, mean_value = _channel_values(weight, bias, mean, inverse, channel, is_channel)
    sum_share = tl.load(sums + channel, mask=is_channel, other=0.0) / num_rows
    product_share = tl.load(products + channel, mask=is_channel, other=0.0) / num_rows
    product_share *= tl.load(inverse + channel, mask=is_channel, other=0.0)
    seed_value = tl.load(seed) if drop_level > 0 else 0
    if sums_rows:
        row_sums = tl.zeros((block_rows, block_channels), tl.float32)
    last = tl.cdiv(num_rows, block_rows) - 1 - part
    for step in tl.range(0, last // parts + 1, num_stages=stages):
        block_index = part + step * parts
        start, offset, inside = _offsets(block_index, num_rows, channels, channel, is_channel, block_rows)
        gradient = tl.load(gradients + start + offset, mask=inside, other=0.0).to(tl.float32)
        centred = tl.load(images + start + offset, mask=inside, other=0.0).to(tl.float32) - mean_value[None, :]
        gradient = _before_activation(gradient, centred * scale[None, :] + bias_value[None, :], activation)
        gradient = scale[None, :] * (gradient - sum_share[None, :] - centred * product_share[None, :])
        if has_of_total:
            gradient += tl.load(of_total + start + offset, mask=inside, other=0.0).to(tl.float32)
        if drop_level > 0:
            is_kept = _keeps(seed_value, layer, block_index, column, units, block_rows, block_channels, drop_level)
            gradient = tl.where(is_kept, gradient * (65536 / (65536 - drop_level)), 0.0)
        if sums_rows:
            row_sums += tl.where(inside, gradient, 0.0)
        tl.store(out + start + offset, gradient, mask=inside)
    if sums_rows:
        tl.store(bias_sums + part * channels + channel, tl.sum(row_sums, 0), mask=is_channel)
