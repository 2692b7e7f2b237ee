# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""Max pooling of 3 by 3 with stride 2 over channels-last images: Triton kernels, only imported if Triton is there."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

# Torch's backward, Inductor's too, looks for each input pixel at all windows that could hold it. With stride 2 the rows
# of the input come in pairs: one that only window i has (its middle), and one that windows i and i + 1 share. A program
# that writes such pairs reads each window's gradient about once.

_BLOCK = 1024
_SIDE = 3
_STRIDE = 2


@triton.jit
def forward_kernel(
    images, out, positions, height, width, out_height, out_width, channels, padding: tl.constexpr, block: tl.constexpr
):
    """Pool, for every image, the rows of a program; a program has one output row, or a part of it."""
    row = tl.program_id(0) + tl.zeros((block,), tl.int32)  # of all images' rows, once for each element
    image, i = row // out_height, row % out_height
    element = tl.program_id(1) * block + tl.arange(0, block)
    j, channel = element // channels, element % channels
    inside = element < out_width * channels
    best = tl.full((block,), float("-inf"), tl.float32)
    position = tl.full((block,), -1, tl.int32)
    for a in tl.static_range(3):
        for b in tl.static_range(3):
            y, x = 2 * i - padding + a, 2 * j - padding + b
            mask = inside & (y >= 0) & (y < height) & (x >= 0) & (x < width)
            offset = ((image * height + y).to(tl.int64) * width + x) * channels + channel
            value = tl.load(images + offset, mask=mask, other=float("-inf")).to(tl.float32)
            # As torch: the first of equals, and a NaN before all.
            better = mask & ((value > best) | (value != value) | (position < 0))
            best = tl.where(better, value, best)
            position = tl.where(better, 3 * a + b, position)
    offset = row.to(tl.int64) * out_width * channels + element
    tl.store(out + offset, best, mask=inside)
    tl.store(positions + offset, position, mask=inside)


@triton.jit
def _window(gradients, positions, offset, is_row, j, out_width, inside):
    """Return a window's position and gradient; position 255 if there is no such window."""
    mask = inside & is_row & (j >= 0) & (j < out_width)
    position = tl.load(positions + offset, mask=mask, other=255)
    return position, tl.load(gradients + offset, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def backward_kernel(
    gradients, positions, out, height, width, out_height, out_width, channels, num_rows, num_columns,
    padding: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a pair of rows, or a part of it."""
    program = tl.program_id(0) + tl.zeros((block,), tl.int32)
    image = program // num_rows
    i = program % num_rows - (1 - padding)  # the window whose middle row is written, and the next row
    element = tl.program_id(1) * block + tl.arange(0, block)
    j, channel = element // channels - (1 - padding), element % channels
    inside = element < num_columns * channels
    above, below = (i >= 0) & (i < out_height), i + 1 < out_height
    row = (image * out_height + i).to(tl.int64) * out_width * channels
    here = j * channels + channel
    p00, g00 = _window(gradients, positions, row + here, above, j, out_width, inside)
    p01, g01 = _window(gradients, positions, row + here + channels, above, j + 1, out_width, inside)
    row += out_width * channels
    p10, g10 = _window(gradients, positions, row + here, below, j, out_width, inside)
    p11, g11 = _window(gradients, positions, row + here + channels, below, j + 1, out_width, inside)
    y, x = 2 * i - padding + 1, 2 * j - padding + 1
    offset = ((image * height + y).to(tl.int64) * width + x) * channels + channel
    is_y, is_y1 = (y >= 0) & (y < height), y + 1 < height
    is_x, is_x1 = inside & (x >= 0) & (x < width), inside & (x + 1 >= 0) & (x + 1 < width)
    middle = tl.where(p00 == 4, g00, 0.0)
    right = tl.where(p00 == 5, g00, 0.0) + tl.where(p01 == 3, g01, 0.0)
    under = tl.where(p00 == 7, g00, 0.0) + tl.where(p10 == 1, g10, 0.0)
    corner = tl.where(p00 == 8, g00, 0.0) + tl.where(p01 == 6, g01, 0.0)
    corner += tl.where(p10 == 2, g10, 0.0) + tl.where(p11 == 0, g11, 0.0)
    tl.store(out + offset, middle, mask=is_y & is_x)
    tl.store(out + offset + channels, right, mask=is_y & is_x1)
    offset += width * channels
    tl.store(out + offset, under, mask=is_y1 & is_x)
    tl.store(out + offset + channels, corner, mask=is_y1 & is_x1)


@triton_op("castwise::max_pool", mutates_args={})
def max_pool(images: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """Return the pooled images and, for each pixel of theirs, the position of the largest in its window, 0 to 8.

    Args:
        images: Shape (N, C, H, W), channels last.
        padding: 0 or 1.
    """
    count, channels, height, width = images.shape
    out_height, out_width = ((size + 2 * padding - _SIDE) // _STRIDE + 1 for size in (height, width))
    shape, layout = (count, channels, out_height, out_width), torch.channels_last
    out = torch.empty(shape, dtype=images.dtype, device=images.device, memory_format=layout)
    positions = torch.empty(shape, dtype=torch.uint8, device=images.device, memory_format=layout)
    grid = (count * out_height, triton.cdiv(out_width * channels, _BLOCK))
    wrap_triton(forward_kernel)[grid](
        images, out, positions, height, width, out_height, out_width, channels, padding=padding, block=_BLOCK
    )
    return out, positions


@triton_op("castwise::max_pool_backward", mutates_args={})
def max_pool_backward(gradients: Tensor, positions: Tensor, height: int, width: int, padding: int) -> Tensor:
    """Return the gradients of images of this height and width, channels last, from those of the pooled images."""
    count, channels, out_height, out_width = gradients.shape
    shape = (count, channels, height, width)
    out = torch.empty(shape, dtype=gradients.dtype, device=gradients.device, memory_format=torch.channels_last)
    # Without padding the first pair of rows begins one row before the images.
    num_rows, num_columns = ((size - 2 + padding) // _STRIDE + 2 - padding for size in (height, width))
    grid = (count * num_rows, triton.cdiv(num_columns * channels, _BLOCK))
    wrap_triton(backward_kernel)[grid](
        gradients, positions, out, height, width, out_height, out_width, channels, num_rows, num_columns,
        padding=padding, block=_BLOCK,
    )  # fmt: skip
    return out


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, int], output: tuple[Tensor, Tensor]) -> None:
    images, ctx.padding = inputs
    ctx.height, ctx.width = images.shape[2:]
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gradients: Tensor, _: object) -> tuple[Tensor, None]:
    (positions,) = ctx.saved_tensors
    gradients = gradients.contiguous(memory_format=torch.channels_last)
    return max_pool_backward(gradients, positions, ctx.height, ctx.width, ctx.padding), None


max_pool.register_autograd(_backward, setup_context=_save_for_backward)
