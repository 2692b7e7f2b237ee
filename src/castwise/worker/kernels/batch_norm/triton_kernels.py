# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""Batch norm with the additions, dropout and activation next to it, over channels-last images: Triton kernels.

Images of shape (N, C, H, W), channels last, are N·H·W rows of C numbers. Forward reads them twice and writes them once:
programs sum up some rows each, one kernel combines the sums, and the last kernel normalises, adds and activates.
Backward does the same with the sums of the gradient. Sums are of differences from the first row, in float32, so that a
mean far from 0 costs no digits.

What comes before the norm (a convolution's bias, an addition, dropout) is computed with the sums. Dropout's draws are
not stored: backward draws them again.

Programs that run at the same time read neighbouring rows. Sums start at the last row, which the convolution before them
wrote last, and the kernel that reads the rows again starts at the first, which the sums read last: both find them in
the cache.

Imported only if Triton is installed.
"""

import triton
import triton.language as tl


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
def _traits(weight, bias, mean, inverse, channel, there):
    """Return the channels' factor, bias and mean."""
    factor = tl.load(weight + channel, mask=there, other=0.0).to(tl.float32)
    factor *= tl.load(inverse + channel, mask=there, other=0.0)
    shift = tl.load(bias + channel, mask=there, other=0.0).to(tl.float32)
    return factor, shift, tl.load(mean + channel, mask=there, other=0.0)


@triton.jit
def _place(columns, channels, block_channels: tl.constexpr):
    """Return a program's channels, a mask of those that exist, and its first block of rows.

    Neighbouring programs have the same rows, so that a page of memory is read at one time.
    """
    program = tl.program_id(0)
    channel = (program % columns) * block_channels + tl.arange(0, block_channels)
    return channel, channel < channels, program // columns


@triton.jit
def _block(index, num_rows, channels, channel, there, block_rows: tl.constexpr):
    """Return the offset of a block of rows, its elements' offsets from there, and a mask of those that exist."""
    first = index * block_rows
    row = tl.arange(0, block_rows)
    inside = (row < num_rows - first)[:, None] & there[None, :]
    return first.to(tl.int64) * channels, row[:, None] * channels + channel[None, :], inside


@triton.jit
def _is_kept(
    seed, layer, index, column, units, block_rows: tl.constexpr, block_channels: tl.constexpr, odds: tl.constexpr
):
    """Return a mask of the elements that dropout keeps: each but for `odds` in 65,536.

    One draw of Philox has 128 bits, for the 8 channels of a unit. Seven rounds pass all tests of randomness.
    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    row = index.to(tl.int64) * block_rows + tl.arange(0, block_rows)
    unit = column * (block_channels // 8) + tl.arange(0, block_channels // 8)
    place = row[:, None] * units + unit[None, :]
    one, two, three, four = tl.philox(seed, place.to(tl.uint32), (place >> 32).to(tl.uint32), layer, 0, 7)
    low = tl.join(tl.join(one & 0xFFFF, two & 0xFFFF), tl.join(three & 0xFFFF, four & 0xFFFF))
    high = tl.join(tl.join(one >> 16, two >> 16), tl.join(three >> 16, four >> 16))
    return tl.reshape(tl.join(low, high), (block_rows, block_channels)) >= odds


@triton.jit
def statistics_kernel(
    images, shift, addend, seed, layer, total, pivots, sums, squares, num_rows, columns, units, unit: tl.constexpr,
    shifts: tl.constexpr, adds_before: tl.constexpr, odds: tl.constexpr,
    block_rows: tl.constexpr, block_channels: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Write each channel's sums of a program's rows minus the first row, and the sums of their squares.

    With a bias, an addend or dropout the rows that result are summed, and written to `total`.
    """
    channels = units * unit
    channel, there, part = _place(columns, channels, block_channels)
    parts = tl.num_programs(0) // columns
    column = tl.program_id(0) % columns
    writes: tl.constexpr = shifts or adds_before or odds > 0
    pivot = tl.load(images + channel, mask=there, other=0.0).to(tl.float32)
    if shifts:
        moved = tl.load(shift + channel, mask=there, other=0.0).to(tl.float32)
        pivot += moved
    if adds_before:
        pivot += tl.load(addend + channel, mask=there, other=0.0).to(tl.float32)
    pivot = pivot.to(total.dtype.element_ty)
    if part == 0:
        tl.store(pivots + channel, pivot.to(tl.float32), mask=there)
    drawn = tl.load(seed) if odds > 0 else 0
    held = tl.zeros((block_rows, block_channels), tl.float32)
    square = tl.zeros((block_rows, block_channels), tl.float32)
    last = tl.cdiv(num_rows, block_rows) - 1 - part
    for step in tl.range(0, last // parts + 1, num_stages=stages):
        index = last - step * parts
        base, place, inside = _block(index, num_rows, channels, channel, there, block_rows)
        if writes:
            value = tl.load(images + base + place, mask=inside, other=0.0).to(tl.float32)
            if shifts:
                value += moved[None, :]
            if odds > 0:
                kept = _is_kept(drawn, layer, index, column, units, block_rows, block_channels, odds)
                value = tl.where(kept, value * (65536 / (65536 - odds)), 0.0)
            if adds_before:
                value += tl.load(addend + base + place, mask=inside, other=0.0).to(tl.float32)
            value = tl.where(inside, value.to(total.dtype.element_ty), pivot[None, :])
            tl.store(total + base + place, value, mask=inside)
        else:
            value = tl.load(images + base + place, mask=inside, other=pivot[None, :])
        value = value.to(tl.float32) - pivot.to(tl.float32)[None, :]
        held += value
        square += value * value
    place = part * channels + channel
    tl.store(sums + place, tl.sum(held, 0), mask=there)
    tl.store(squares + place, tl.sum(square, 0), mask=there)


@triton.jit
def combine_kernel(
    pivots, sums, squares, mean_out, variance_out, inverse_out, num_parts, num_rows, channels, epsilon,
    block_parts: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """Write each channel's mean, its unbiased variance, and 1 / sqrt(biased variance + epsilon)."""
    channel = tl.program_id(0) * block_channels + tl.arange(0, block_channels)
    there = channel < channels
    part = tl.arange(0, block_parts)
    inside = (part < num_parts)[:, None] & there[None, :]
    place = part[:, None] * channels + channel[None, :]
    apart = tl.sum(tl.load(sums + place, mask=inside, other=0.0), 0) / num_rows
    square = tl.sum(tl.load(squares + place, mask=inside, other=0.0), 0) / num_rows
    variance = tl.maximum(square - apart * apart, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(mean_out + channel, tl.load(pivots + channel, mask=there, other=0.0) + apart, mask=there)
    tl.store(variance_out + channel, variance * num_rows / tl.maximum(num_rows - 1, 1), mask=there)
    tl.store(inverse_out + channel, 1 / tl.sqrt(variance + epsilon), mask=there)


@triton.jit
def normalise_kernel(
    images, residual, weight, bias, mean, inverse, out, num_rows, columns, units, unit: tl.constexpr,
    activation: tl.constexpr, adds: tl.constexpr, block_rows: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """Normalise, add and activate a block."""
    channels = units * unit
    channel, there, index = _place(columns, channels, block_channels)
    base, place, inside = _block(index, num_rows, channels, channel, there, block_rows)
    value = tl.load(images + base + place, mask=inside, other=0.0).to(tl.float32)
    factor, shift, middle = _traits(weight, bias, mean, inverse, channel, there)
    value = (value - middle[None, :]) * factor[None, :] + shift[None, :]
    if adds:
        value += tl.load(residual + base + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + base + place, _activated(value, activation), mask=inside)


@triton.jit
def gradient_sums_kernel(
    gradients, second, images, out, weight, bias, mean, inverse, before, sums, products, num_rows, columns, units,
    unit: tl.constexpr, activation: tl.constexpr, adds: tl.constexpr, has_second: tl.constexpr, writes: tl.constexpr,
    block_rows: tl.constexpr, block_channels: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Write the sums of a program's rows: of the gradient before the activation, and of it times the centred image.

    Where a second gradient is added, or the gradient is an addend's, too, that before the activation is written out;
    where something was added, the activation's input is known by its result.
    """
    channels = units * unit
    channel, there, part = _place(columns, channels, block_channels)
    parts = tl.num_programs(0) // columns
    factor, shift, middle = _traits(weight, bias, mean, inverse, channel, there)
    held = tl.zeros((block_rows, block_channels), tl.float32)
    product = tl.zeros((block_rows, block_channels), tl.float32)
    last = tl.cdiv(num_rows, block_rows) - 1 - part
    for step in tl.range(0, last // parts + 1, num_stages=stages):
        base, place, inside = _block(last - step * parts, num_rows, channels, channel, there, block_rows)
        gradient = tl.load(gradients + base + place, mask=inside, other=0.0).to(tl.float32)
        if has_second:
            gradient += tl.load(second + base + place, mask=inside, other=0.0).to(tl.float32)
        centred = tl.load(images + base + place, mask=inside, other=0.0).to(tl.float32) - middle[None, :]
        if adds:
            if activation != 0:
                result = tl.load(out + base + place, mask=inside, other=0.0).to(tl.float32)
                gradient = _before_activation(gradient, result, activation)
        else:
            gradient = _before_activation(gradient, centred * factor[None, :] + shift[None, :], activation)
        if writes:
            tl.store(before + base + place, gradient, mask=inside)
        held += gradient
        product += gradient * centred
    place = part * channels + channel
    tl.store(sums + place, tl.sum(held, 0), mask=there)
    tl.store(products + place, tl.sum(product, 0), mask=there)


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
    place = part[:, None] * channels + channel[None, :]
    tl.store(sum_out + channel, tl.sum(tl.load(sums + place, mask=inside, other=0.0), 0), mask=there)
    product = tl.sum(tl.load(products + place, mask=inside, other=0.0), 0)
    tl.store(product_out + channel, product * tl.load(inverse + channel, mask=there, other=0.0), mask=there)


@triton.jit
def gradient_kernel(
    gradients, images, skip, seed, layer, weight, bias, mean, inverse, sums, products, out, moved, num_rows, columns,
    units, unit: tl.constexpr, activation: tl.constexpr, skips: tl.constexpr, odds: tl.constexpr, shifts: tl.constexpr,
    block_rows: tl.constexpr, block_channels: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a program's rows, `skip` added; and its sums, where a bias was added to the rows.

    `activation` is none where the gradient is that before it already.
    """
    channels = units * unit
    channel, there, part = _place(columns, channels, block_channels)
    parts = tl.num_programs(0) // columns
    column = tl.program_id(0) % columns
    factor, shift, middle = _traits(weight, bias, mean, inverse, channel, there)
    sum_share = tl.load(sums + channel, mask=there, other=0.0) / num_rows
    product_share = tl.load(products + channel, mask=there, other=0.0) / num_rows
    product_share *= tl.load(inverse + channel, mask=there, other=0.0)
    drawn = tl.load(seed) if odds > 0 else 0
    if shifts:
        held = tl.zeros((block_rows, block_channels), tl.float32)
    rest = tl.cdiv(num_rows, block_rows) - 1 - part
    for step in tl.range(0, rest // parts + 1, num_stages=stages):
        index = part + step * parts
        base, place, inside = _block(index, num_rows, channels, channel, there, block_rows)
        gradient = tl.load(gradients + base + place, mask=inside, other=0.0).to(tl.float32)
        centred = tl.load(images + base + place, mask=inside, other=0.0).to(tl.float32) - middle[None, :]
        gradient = _before_activation(gradient, centred * factor[None, :] + shift[None, :], activation)
        gradient = factor[None, :] * (gradient - sum_share[None, :] - centred * product_share[None, :])
        if skips:
            gradient += tl.load(skip + base + place, mask=inside, other=0.0).to(tl.float32)
        if odds > 0:
            kept = _is_kept(drawn, layer, index, column, units, block_rows, block_channels, odds)
            gradient = tl.where(kept, gradient * (65536 / (65536 - odds)), 0.0)
        if shifts:
            held += tl.where(inside, gradient, 0.0)
        tl.store(out + base + place, gradient, mask=inside)
    if shifts:
        tl.store(moved + part * channels + channel, tl.sum(held, 0), mask=there)
