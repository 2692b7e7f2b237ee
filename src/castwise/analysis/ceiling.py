"""The least bytes that a step moves, and the most that another precision can gain.

Ceiling: of the time of a step only some work gets faster, and the rest stays. Source: G. Amdahl, "Validity of the
single processor approach" (1967).
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from castwise.records.schema import StepFlops
from castwise.registry.gpus import GpuModel, peak
from castwise.registry.precisions import Precision, precision_row


@dataclass(frozen=True)
class Ceiling:
    """The most that a step can gain from another precision, from the time of its kernels by class."""

    precision: str
    target: str
    gain: float  # if products get faster and work that is bound by memory moves fewer bytes
    products_gain: float  # if nothing but products gets faster

    @property
    def sentence(self) -> str:
        """Return it in words: gains are rounded up, so that no measurement in line with it is above it."""
        most, by_products = (f"{math.ceil(100 * gain - 1e-6) / 100:.2f}×" for gain in (self.gain, self.products_gain))
        alone = "" if most == by_products else f" ({by_products} if nothing but its products gets faster)"
        return f"{self.precision} → {self.target} can gain at most {most}{alone}."


def least_bytes(flops: StepFlops) -> int:
    """Return the bytes that a step moves at least to and from the device's memory.

    Forward and backward read the weights. Gradients are written and read, what the optimizer steps and its state is
    read and written, and saved activations are written and read. What fits into a cache may move less: the L2 of an
    H200 holds 50 MB.
    """
    return 2 * (flops.weights_bytes + flops.gradients_bytes + flops.update_bytes + flops.saved_bytes)


def ceiling(  # noqa: PLR0913  what it is computed from, by keyword
    seconds: Mapping[str, float],
    precision: str,
    target: str,
    gpu: GpuModel | None,
    *,
    products: Collection[str],
    bound_by_memory: Collection[str],
    flops: StepFlops | None = None,
) -> Ceiling | None:
    """Return the most that a step can gain from another precision; None if that is not known.

    gain = T ÷ (T - P (1 - 1/r) - M (1 - 1/b)), with the time T of all classes, P of products and M of work that is
    bound by memory; r is the ratio of the peaks, since products are taken to reach the same share of the peak in both
    formats; b is the ratio of the bytes that activations are stored in. A ratio below 1 counts as 1.

    Args:
        seconds: Of each class of kernels in a step in `precision`, idle time included.
        precision: What it was measured in.
        target: The other precision.
        gpu: The GPU's row.
        products: The classes that are products of matrices and convolutions.
        bound_by_memory: The classes whose time is that of the bytes that they move.
        flops: The step's in `precision`; needed for PyTorch's default, which computes in two formats.
    """
    total, row, other = sum(seconds.values()), precision_row(precision), precision_row(target)
    ratio = _peak_ratio(row, other, gpu, flops)
    if ratio is None or total <= 0:
        return None
    saved = (1 - 1 / max(1.0, ratio)) * sum(seconds.get(name, 0.0) for name in products)
    moved = sum(seconds.get(name, 0.0) for name in bound_by_memory)
    # Activations are stored in 16 bits instead of 32.
    halved = moved / 2 if other.is_16_bit and not row.is_16_bit else 0.0
    return Ceiling(precision, target, total / (total - saved - halved), total / (total - saved))


def _compute_seconds(flops: StepFlops, gpu: GpuModel | None) -> float | None:
    """Return the time of FLOPs at the peaks of their formats, None if one is not known."""
    seconds = 0.0
    for name, count in flops.by_format.items():
        limit = peak(gpu, name)
        if limit is None:
            return None
        seconds += count / limit
    return seconds


def _peak_ratio(row: Precision, target: Precision, gpu: GpuModel | None, flops: StepFlops | None) -> float | None:
    """Return how many times as fast products are at the target's peak as at the peaks of what they run in."""
    wanted = peak(gpu, target.peak_dtype)
    if wanted is None:
        return None
    if flops is not None and flops.total and (now := _compute_seconds(flops, gpu)) is not None:
        return now * wanted / flops.total
    own = peak(gpu, row.peak_dtype)
    return None if own is None else wanted / own
