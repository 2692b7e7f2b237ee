"""Which smaller batch of a loop fits into a memory limit, foretold from those that were measured.

A loop's memory is taken to be a line over its batch, and so is the time of its steps, between two batches that were
measured: the largest batch that fits is usually the fastest by units a second, since what a step takes whatever its
batch is shared by more of them. A trial may cost a compilation, so that a size is tried only where it promises
something. Nothing here measures.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from castwise.spec.trial import TrialSpec
from castwise.tune.candidates import TriedChange

# Sizes are multiples of this where that costs little of the batch: Tensor Cores take 16-bit numbers by eights.
# Source: NVIDIA, "Deep Learning Performance: Matrix Multiplication"; the share is chosen here.
_MULTIPLE, _COSTS_LITTLE = 8, 0.8
# Of the limit, what a size is foretold for: the allocator takes its memory in segments. Source: chosen here.
_AIMED_AT = 0.98
# From one batch alone, of its share by memory: what does not grow with the batch is not known. Source: chosen here.
_ALONE = 0.9
# A larger batch than one that fits is tried where it promises this. Source: chosen here; a trial costs half a minute.
_WORTH = 1.01


@dataclass(frozen=True)
class BatchPoint:
    """What a loop held on one batch.

    Attributes:
        batch_size: Samples a step.
        held_bytes: Memory, as the limit counts it; infinite where it ran out of it, or is not known.
        rate: Units a second, as a share of any one rate; None where its steps were not timed.
    """

    batch_size: int
    held_bytes: float
    rate: float | None


def half_batch(spec: TrialSpec) -> TrialSpec | None:
    """Return the same loop on half the batch, None where that is no whole number."""
    if spec.batch_size % 2:
        return None
    return spec.model_copy(update={"batch_size": spec.batch_size // 2})


def next_batch(measured: Sequence[BatchPoint], limit_bytes: float) -> int | None:
    """Return the batch to try next, None where no other one promises anything.

    Args:
        measured: One loop on the batches that were tried, the one that holds too much among them.
        limit_bytes: The limit.
    """
    by_size = sorted(measured, key=lambda each: each.batch_size)
    fits = [each for each in by_size if each.held_bytes <= limit_bytes]
    above = [each for each in by_size if not fits or each.batch_size > fits[-1].batch_size]
    if not above or not any(math.isfinite(each.held_bytes) for each in by_size):
        return None
    lowest, highest = (fits[-1].batch_size if fits else 0), above[0].batch_size
    aimed = min(_foretold(fits, above, _AIMED_AT * limit_bytes), highest - 1)
    aligned = aimed // _MULTIPLE * _MULTIPLE
    size = aligned if aligned >= _COSTS_LITTLE * aimed else aimed
    if not fits:
        return max(1, size) if highest > 1 else None
    return size if size > lowest and _promise(fits[-1], above, size) >= _WORTH else None


def min_memory_estimate(
    start: TrialSpec, attempts: Sequence[TriedChange], needs: Callable[[TrialSpec], float]
) -> float:
    """Return what a loop would hold, at the least, had it all that was seen to lessen memory, one on top of the other.

    Args:
        start: The plain loop.
        attempts: What was tried.
        needs: Returns what a loop that was measured holds, in bytes.
    """
    shares: dict[str, float] = {}
    for each in attempts:
        if each.ratio is not None:
            name = "precision" if each.move.precision else each.move.name  # a loop has one precision
            shares[name] = min(shares.get(name, 1.0), needs(each.spec) / needs(each.below))
    return needs(start) * math.prod(shares.values())


def _foretold(fits: Sequence[BatchPoint], above: Sequence[BatchPoint], aim_bytes: float) -> int:
    """Return the batch at which the line through the two batches nearest to it comes to an amount of memory."""
    near = [each for each in (*fits[-1:], *above) if math.isfinite(each.held_bytes)][:2]
    if len(near) < 2:
        only = near[0] if near else fits[-1]
        if fits:
            return (only.batch_size + above[0].batch_size) // 2
        return math.floor(_ALONE * only.batch_size * aim_bytes / only.held_bytes)
    small, large = near
    of_sample = (large.held_bytes - small.held_bytes) / (large.batch_size - small.batch_size)
    if of_sample <= 0:  # no line: the allocator's segments hide it
        return small.batch_size // 2
    return math.floor(small.batch_size + (aim_bytes - small.held_bytes) / of_sample)


def _promise(fits: BatchPoint, above: Sequence[BatchPoint], size: int) -> float:
    """Return how many times as fast as the batch that fits a larger one would be, by the line of their steps' times."""
    timed = next((each for each in above if each.rate is not None), None)
    if fits.rate is None or timed is None or timed.rate is None:
        return size / fits.batch_size
    of_fits, of_timed = fits.batch_size / fits.rate, timed.batch_size / timed.rate
    of_sample = (of_timed - of_fits) / (timed.batch_size - fits.batch_size)
    return size / (of_fits + (size - fits.batch_size) * of_sample) / fits.rate
