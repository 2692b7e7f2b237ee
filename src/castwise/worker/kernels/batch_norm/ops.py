# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""The launches of the batch norm kernels, and these as operations that torch.compile and autograd know.

Imported only where Triton is installed.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import triton_op, wrap_triton

from castwise.worker.kernels.batch_norm.module import NO_ACTIVATION
from castwise.worker.kernels.batch_norm.triton_kernels import (
    combine_kernel,
    combine_sums_kernel,
    gradient_kernel,
    gradient_sums_kernel,
    normalise_kernel,
    statistics_kernel,
)

# What was fastest of what was tried on an H200, for tensors of 16 bits: docs/techniques.md.
_WARPS = 4
_BLOCK_CHANNELS = 128  # of a block
_SUMMED_CHANNELS = 64  # of one that is summed, where channels are no multiple of those above
_SUMMED = 2048  # numbers of a block that is summed,
_NORMALISED = 4096  # of one that is normalised,
_DERIVED = 2048  # and of one whose gradient is computed
_PROGRAMS = 528  # of those that sum, four for each of an H200's multiprocessors
_STAGES = 3  # loads of so many blocks are under way
_UNIT = 8  # channels in 16 bytes
_COMBINED_CHANNELS = 8
_COMBINED_WARPS = 8


@dataclass(frozen=True)
class Tiles:
    """How rows and channels are cut into blocks.

    Attributes:
        num_rows: Rows.
        channels: Channels.
        block_channels: Channels of a block.
        elements: Numbers of a block.
    """

    num_rows: int
    channels: int
    block_channels: int
    elements: int

    @property
    def columns(self) -> int:
        """Return how many blocks a row is cut into."""
        return int(triton.cdiv(self.channels, self.block_channels))

    @property
    def rows(self) -> int:
        """Return the rows of a block."""
        return max(1, self.elements // self.block_channels)

    @property
    def num_blocks(self) -> int:
        """Return how many blocks lie below each other."""
        return int(triton.cdiv(self.num_rows, self.rows))

    @property
    def parts(self) -> int:
        """Return how many programs sum the blocks below each other, each about as many."""
        most = max(1, min(self.num_blocks, _PROGRAMS // self.columns))
        return int(triton.cdiv(self.num_blocks, triton.cdiv(self.num_blocks, most)))

    @property
    def constants(self) -> dict[str, int]:
        """Return what kernels are compiled for."""
        return {"block_rows": self.rows, "block_channels": self.block_channels, "num_warps": _WARPS}


def tiles_of(images: Tensor, elements: int, most_channels: int = _BLOCK_CHANNELS) -> Tiles:
    """Return how images are cut.

    Args:
        images: Shape (N, C, H, W), channels innermost.
        elements: Numbers of a block.
        most_channels: Of a block.
    """
    channels = images.shape[1]
    return Tiles(images.numel() // channels, channels, min(most_channels, triton.next_power_of_2(channels)), elements)


def _summed(images: Tensor) -> Tiles:
    """Return how images are cut that are summed: a block's idle places cost more there."""
    most = _SUMMED_CHANNELS if images.shape[1] % _BLOCK_CHANNELS else _BLOCK_CHANNELS
    return tiles_of(images, _SUMMED, most)


@dataclass(frozen=True)
class Draws:
    """What dropout draws.

    Attributes:
        seed: Shape (1,), int64, on the images' device; None drops nothing out.
        layer: Which of a model's layers it is: each draws by itself.
        odds: In 65,536.
    """

    seed: Tensor | None
    layer: int
    odds: int


def _units(channels: int) -> tuple[int, int]:
    """Return channels as a number of units that lie aligned, and such a unit."""
    unit = _UNIT if channels % _UNIT == 0 else 1
    return channels // unit, unit


def launch_norm(  # noqa: PLR0913, PLR0917
    kernels: Any, images: Tensor, shift: Tensor | None, draws: Draws, addend: Tensor | None, residual: Tensor | None,
    weight: Tensor, bias: Tensor, epsilon: float, activation: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the activated sum of the normalised images and the residual.

    Besides what was normalised, of no elements where that is the images; its mean, unbiased variance and one over the
    deviation.

    Args:
        kernels: Wraps a kernel as whoever calls has to.
        images: Shape (N, C, H, W), channels innermost.
        shift: Shape (C,), added before dropout and normalising; None adds nothing. If nothing else is done before, it
            is not in the mean that is returned.
        draws: Those of dropout before normalising; for C a multiple of 8.
        addend: Of the images' shape, dtype and layout, added before normalising; None adds nothing.
        residual: The same, added after.
        weight: Shape (C,).
        bias: Shape (C,).
        epsilon: Added to the variance.
        activation: `NO_ACTIVATION`, `RELU`, or one of `BY_INPUT`.
    """
    tiles, channels = _summed(images), images.shape[1]
    units, unit = _units(channels)
    sums, squares = (images.new_empty((tiles.parts, channels), dtype=torch.float32) for _ in range(2))
    pivots, mean, variance, inverse = (images.new_empty(channels, dtype=torch.float32) for _ in range(4))
    writes = addend is not None or draws.seed is not None
    shift = shift if writes else None  # alone it moves the mean, and nothing that is less the mean
    total = torch.empty_like(images) if writes else images.new_empty(0)
    normalised = total if writes else images
    kernels(statistics_kernel)[(tiles.columns * tiles.parts,)](
        images, images if shift is None else shift, images if addend is None else addend,
        images if draws.seed is None else draws.seed, draws.layer, normalised, pivots, sums, squares, tiles.num_rows,
        tiles.columns, units, unit=unit, shifts=shift is not None, adds_before=addend is not None,
        odds=0 if draws.seed is None else draws.odds, stages=_STAGES, **tiles.constants,
    )  # fmt: skip
    kernels(combine_kernel)[(triton.cdiv(channels, _COMBINED_CHANNELS),)](
        pivots, sums, squares, mean, variance, inverse, tiles.parts, tiles.num_rows, channels, epsilon,
        block_parts=triton.next_power_of_2(tiles.parts), block_channels=_COMBINED_CHANNELS, num_warps=_COMBINED_WARPS,
    )  # fmt: skip
    out = torch.empty_like(images)
    tiles = tiles_of(images, _NORMALISED)
    kernels(normalise_kernel)[(tiles.columns * tiles.num_blocks,)](
        normalised, normalised if residual is None else residual, weight, bias, mean, inverse, out, tiles.num_rows,
        tiles.columns, units, unit=unit, activation=activation, adds=residual is not None, **tiles.constants,
    )  # fmt: skip
    return out, total, mean, variance, inverse


def launch_norm_backward(  # noqa: PLR0913, PLR0917
    kernels: Any, gradients: Tensor, second: Tensor | None, skip: Tensor | None, images: Tensor, out: Tensor | None,
    draws: Draws, weight: Tensor, bias: Tensor, mean: Tensor, inverse: Tensor, activation: int, shifts: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of the images, before the activation, of the weight, of the bias, and of the shift.

    That before the activation is a residual's, and has no elements where it is `gradients`, or nobody needs it; that of
    a shift has none where there is none.

    Args:
        kernels: Wraps a kernel as whoever calls has to.
        gradients: Of the result, channels innermost.
        second: The same, added to it; None adds nothing.
        skip: Added to the gradient of what was normalised; None adds nothing.
        images: What was normalised.
        out: `launch_norm`'s result, where a residual was added; None where none was.
        draws: As there.
        weight: As there.
        bias: As there.
        mean: Its result.
        inverse: Its result.
        activation: As there; with a residual none of `BY_INPUT`.
        shifts: Whether there was a shift.
    """
    tiles, channels = _summed(images), images.shape[1]
    units, unit = _units(channels)
    sums, products = (images.new_empty((tiles.parts, channels), dtype=torch.float32) for _ in range(2))
    bias_gradient, weight_gradient = (images.new_empty(channels, dtype=torch.float32) for _ in range(2))
    writes = second is not None or (out is not None and activation != NO_ACTIVATION)
    before = torch.empty_like(images) if writes else images.new_empty(0)
    kernels(gradient_sums_kernel)[(tiles.columns * tiles.parts,)](
        gradients, gradients if second is None else second, images, images if out is None else out, weight, bias, mean,
        inverse, before if writes else gradients, sums, products, tiles.num_rows, tiles.columns, units, unit=unit,
        activation=activation, adds=out is not None, has_second=second is not None, writes=writes, stages=_STAGES,
        **tiles.constants,
    )  # fmt: skip
    kernels(combine_sums_kernel)[(triton.cdiv(channels, _COMBINED_CHANNELS),)](
        sums, products, inverse, bias_gradient, weight_gradient, tiles.parts, channels,
        block_parts=triton.next_power_of_2(tiles.parts), block_channels=_COMBINED_CHANNELS, num_warps=_COMBINED_WARPS,
    )  # fmt: skip
    image_gradients = torch.empty_like(images)
    # The gradient of what was normalised sums to 0 over the rows: only what comes to it moves a shift.
    sums_up = shifts and (skip is not None or draws.seed is not None)
    tiles = tiles if sums_up else tiles_of(images, _DERIVED)
    parts = tiles.parts if sums_up else tiles.num_blocks
    moved = images.new_empty((parts if sums_up else 0, channels), dtype=torch.float32)
    kernels(gradient_kernel)[(tiles.columns * parts,)](
        before if writes else gradients, images, images if skip is None else skip,
        images if draws.seed is None else draws.seed, draws.layer, weight, bias, mean, inverse, bias_gradient,
        weight_gradient, image_gradients, moved if sums_up else mean, tiles.num_rows, tiles.columns, units, unit=unit,
        activation=NO_ACTIVATION if writes or out is not None else activation, skips=skip is not None,
        odds=0 if draws.seed is None else draws.odds, shifts=sums_up, stages=_STAGES if sums_up else 1,
        **tiles.constants,
    )  # fmt: skip
    shift_gradient = moved.sum(0) if shifts else images.new_empty(0)
    return image_gradients, before, weight_gradient, bias_gradient, shift_gradient


@triton_op("castwise::batch_norm", mutates_args={})
def batch_norm(  # noqa: PLR0913, PLR0917
    images: Tensor, shift: Tensor | None, seed: Tensor | None, layer: int, odds: int, addend: Tensor | None,
    residual: Tensor | None, carrier: Tensor | None, weight: Tensor, bias: Tensor, epsilon: float,  # noqa: ARG001
    activation: int, is_forked: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the result, a carrier for its second gradient, and the rest of `launch_norm`'s, as one operation.

    A result that two read has two gradients, and torch would add them before their sum is read here. The carrier stands
    for it where the second reads it: a tensor of its shape in no memory, whose gradient comes by itself.

    Args:
        images: As in `launch_norm`.
        shift: As there.
        seed: As in `Draws`.
        layer: As there.
        odds: As there.
        addend: As in `launch_norm`.
        residual: As there.
        carrier: What the residual's gradient goes to, if not to the residual itself.
        weight: As there.
        bias: As there.
        epsilon: As there.
        activation: As there.
        is_forked: Whether a carrier is wanted; it is of no elements else.
    """
    draws = Draws(seed, layer, odds)
    out, total, mean, variance, inverse = launch_norm(
        wrap_triton, images, shift, draws, addend, residual, weight, bias, epsilon, activation
    )
    own = images.new_zeros(()).expand(images.shape) if is_forked else images.new_empty(0)
    return out, own, total, mean, variance, inverse


@triton_op("castwise::batch_norm_backward", mutates_args={})
def batch_norm_backward(  # noqa: PLR0913, PLR0917
    gradients: Tensor, second: Tensor | None, skip: Tensor | None, images: Tensor, out: Tensor | None,
    seed: Tensor | None, layer: int, odds: int, weight: Tensor, bias: Tensor, mean: Tensor, inverse: Tensor,
    activation: int, shifts: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return `launch_norm_backward`'s, as one operation."""
    draws = Draws(seed, layer, odds)
    return launch_norm_backward(
        wrap_triton, gradients, second, skip, images, out, draws, weight, bias, mean, inverse, activation, shifts
    )


def _remember_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    images, shift, seed, ctx.layer, ctx.odds, addend, residual, carrier, weight, bias, _, ctx.activation, _ = inputs
    out, _, total, mean, variance, inverse = output
    ctx.adds_before, ctx.adds, ctx.is_carried = addend is not None, residual is not None, carrier is not None
    ctx.shift_dtype, ctx.writes = None if shift is None else shift.dtype, total.numel() > 0
    # Only the result tells which of its pixels a ReLU behind an addition let through.
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
        gradients, second = torch.zeros_like(images) if second is None else second, None
    out = gradients if ctx.adds and kept is None else kept
    own, before, by_weight, by_bias, by_shift = batch_norm_backward(
        gradients, second, skip, images, out, seed, ctx.layer, ctx.odds, weight, bias, mean, inverse, ctx.activation,
        ctx.shift_dtype is not None,
    )  # fmt: skip
    residual = (gradients if kept is None and second is None else before) if ctx.adds else None
    to_residual, to_carrier = (None, residual) if ctx.is_carried else (residual, None)
    to_addend = own if ctx.adds_before else None
    to_shift = None if ctx.shift_dtype is None else by_shift.to(ctx.shift_dtype)
    to_traits = by_weight.to(weight.dtype), by_bias.to(bias.dtype)
    return own, to_shift, None, None, None, to_addend, to_residual, to_carrier, *to_traits, None, None, None


batch_norm.register_autograd(_norm_backward, setup_context=_remember_norm)
