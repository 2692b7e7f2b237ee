"""How the memory of a training step grows with its batch size: lines between the sizes at which it is known."""

from collections.abc import Mapping


def needed_bytes(known: Mapping[int, int], batch_size: int) -> float:
    """Return what a batch takes, given the bytes that at least two batch sizes take, or that one itself.

    The peak is the largest of several lines, so that a line between two sizes is never too low.
    """
    if batch_size in known or len(known) == 1:
        return known.get(batch_size, next(iter(known.values())))
    sizes = sorted(known)
    above = next((index for index, size in enumerate(sizes) if size > batch_size), len(sizes) - 1)
    low, high = sizes[max(0, above - 1)], sizes[max(1, above)]
    return known[low] + (known[high] - known[low]) * (batch_size - low) / (high - low)


def largest_batch(known: Mapping[int, int], room_bytes: float) -> int | None:
    """Return the largest batch that takes no more than this, 0 if not even one sample fits; None if none is too large.

    `known` has at least two batch sizes.
    """
    sizes = sorted(known)
    above = next((index for index, size in enumerate(sizes) if known[size] > room_bytes), len(sizes) - 1)
    low, high = sizes[max(0, above - 1)], sizes[max(1, above)]
    each = (known[high] - known[low]) / (high - low)
    return None if each <= 0 else max(0, int(low + (room_bytes - known[low]) / each))
