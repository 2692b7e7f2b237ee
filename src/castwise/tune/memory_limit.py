"""Which smaller batch fits into a memory limit: memory and step time are taken to be linear in the batch size.

The largest batch that fits is usually the fastest per unit. A trial may compile, so that a size must promise a gain.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Sizes are multiples of this if that costs little of the batch: Tensor Cores take 16-bit numbers by eights.
# Source: NVIDIA, "Deep Learning Performance: Matrix Multiplication"; the share is chosen here.
_MULTIPLE, _COSTS_LITTLE = 8, 0.8
# The share of the limit that is aimed at: the allocator takes its memory in segments. Source: chosen here.
_AIM = 0.98
# The same if one batch alone is known: what does not grow with the batch is not known then. Source: chosen here.
_AIM_ALONE = 0.9
# A larger batch than one that fits is tried if it promises this speed-up; the second if it is compiled anew, which
# takes a minute. Source: chosen here.
_WORTH, _WORTH_COMPILING = 1.01, 1.03


@dataclass(frozen=True)
class BatchPoint:
    """What a configuration held on one batch."""

    batch_size: int
    held_bytes: float  # as the limit counts it; infinite if it ran out of memory, or if it is not known
    rate: float | None  # units per second, relative to any one rate; None if its steps were not timed


def next_batch(measured: Sequence[BatchPoint], limit_bytes: float, *, compiles: bool = False) -> int | None:
    """Return the batch to try next, given those measured; None if no other one promises anything."""
    by_size = sorted(measured, key=lambda point: point.batch_size)
    fits = [point for point in by_size if point.held_bytes <= limit_bytes]
    above = [point for point in by_size if not fits or point.batch_size > fits[-1].batch_size]
    if not above or not any(math.isfinite(point.held_bytes) for point in by_size):
        return None
    predicted = min(_predict(fits, above, _AIM * limit_bytes), above[0].batch_size - 1)
    aligned = predicted // _MULTIPLE * _MULTIPLE
    size = aligned if aligned >= _COSTS_LITTLE * predicted else predicted
    if not fits:
        return max(1, size) if above[0].batch_size > 1 else None
    is_new = size > fits[-1].batch_size
    worth = _WORTH_COMPILING if compiles else _WORTH
    return size if is_new and _predicted_speedup(fits[-1], above, size) >= worth else None


def _predict(fits: Sequence[BatchPoint], above: Sequence[BatchPoint], aim_bytes: float) -> int:
    """Return the batch at which the line through the two nearest batches reaches an amount of memory."""
    near = [point for point in (*fits[-1:], *above) if math.isfinite(point.held_bytes)][:2]
    if len(near) < 2:
        if fits:
            return (fits[-1].batch_size + above[0].batch_size) // 2
        return math.floor(_AIM_ALONE * near[0].batch_size * aim_bytes / near[0].held_bytes)
    small, large = near
    sample_bytes = (large.held_bytes - small.held_bytes) / (large.batch_size - small.batch_size)
    if sample_bytes <= 0:  # the allocator's segments hide the line
        return small.batch_size // 2
    return math.floor(small.batch_size + (aim_bytes - small.held_bytes) / sample_bytes)


def _predicted_speedup(fits: BatchPoint, above: Sequence[BatchPoint], size: int) -> float:
    """Return how many times as fast as the batch that fits a larger one would be, if step time is linear."""
    timed = next((point for point in above if point.rate is not None), None)
    if fits.rate is None or timed is None or timed.rate is None:
        return size / fits.batch_size
    fits_step, timed_step = fits.batch_size / fits.rate, timed.batch_size / timed.rate
    sample_seconds = (timed_step - fits_step) / (timed.batch_size - fits.batch_size)
    return size / (fits_step + (size - fits.batch_size) * sample_seconds) / fits.rate
