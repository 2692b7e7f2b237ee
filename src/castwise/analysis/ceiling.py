"""The least bytes that a step moves, and the most that another precision can gain.

Ceiling: of the time of a step only some work gets faster, and the rest stays. Source: G. Amdahl, "Validity of the
single processor approach" (1967).
"""

import math
from dataclasses import dataclass

from castwise.records.schema import StepFlops
from castwise.registry.gpus import GpuModel, peak
from castwise.registry.precisions import precision_row

_TARGET = "bf16-mixed"


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


def ceiling(
    precision: str,
    gpu: GpuModel | None,
    *,
    total: float,
    products: float,
    moved: float,
    flops: StepFlops | None = None,
) -> Ceiling | None:
    """Return the most that a step can gain from the fastest 16-bit precision; None if that is not known.

    gain = T ÷ (T - P (1 - 1/r) - M (1 - 1/b)), with the seconds T (`total`) of the step in `precision`, idle time
    included, P (`products`) of matrix products and convolutions, and M (`moved`) of work whose time is that of the
    bytes that it moves. r is the ratio of the peaks, since products are taken to reach the same share of the peak in
    both formats; b is the ratio of the bytes that activations are stored in. A ratio below 1 counts as 1. PyTorch's
    default computes in two formats, so that its FLOPs are needed.
    """
    row, other = precision_row(precision), precision_row(_TARGET)
    wanted = peak(gpu, other.peak_dtype)
    if wanted is None or total <= 0:
        return None
    formats = {} if flops is None else flops.by_format
    limits = {name: limit for name in formats if (limit := peak(gpu, name)) is not None}
    if flops is not None and flops.total and len(limits) == len(formats):
        at_peak = sum(count / limits[name] for name, count in formats.items())
        ratio = at_peak * wanted / flops.total
    elif (own := peak(gpu, row.peak_dtype)) is not None:
        ratio = wanted / own
    else:
        return None
    saved = (1 - 1 / max(1.0, ratio)) * products
    # Activations are stored in 16 bits instead of 32.
    halved = 0.0 if row.is_16_bit else moved / 2
    return Ceiling(precision, _TARGET, total / (total - saved - halved), total / (total - saved))
