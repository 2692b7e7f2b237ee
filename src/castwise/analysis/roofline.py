"""The least time that a step can take on a GPU, and the most that another precision can gain.

Roofline: no step is faster than its FLOPs at the peak of their formats, or than the bytes that it must move at the
memory's bandwidth. Source: Williams, Waterman, Patterson, "Roofline" (2009).

Ceiling: of the time of a step only some work gets faster, and the rest stays. Source: G. Amdahl, "Validity of the
single processor approach" (1967).
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from castwise.records.schema import StepFlops
from castwise.registry.gpus import GpuModel, peak
from castwise.registry.precisions import Precision, precision_row


@dataclass(frozen=True)
class Roofline:
    """The least seconds of one step in one process, by its arithmetic and by its memory traffic."""

    compute_seconds: float
    memory_seconds: float

    @property
    def seconds(self) -> float:
        """Return the least time of the step."""
        return max(self.compute_seconds, self.memory_seconds)

    @property
    def bound(self) -> Literal["compute", "memory"]:
        """Return which of the two is longer."""
        return "compute" if self.compute_seconds >= self.memory_seconds else "memory"


@dataclass(frozen=True)
class Ceiling:
    """The most that a step can gain from another precision, from the time of its kernels by class."""

    precision: str
    target: str
    gain: float  # if products get faster and work that is bound by memory moves fewer bytes
    products_gain: float  # if nothing but products gets faster
    products_share: float  # of the step's time
    others: tuple[str, ...]  # all other classes that take time, the longest first

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


def roofline(flops: StepFlops, gpu: GpuModel | None, clock_hertz: float | None = None) -> Roofline | None:
    """Return the least time of a step, at the datasheet's clock or at this one; None if a peak is not known."""
    compute = _compute_seconds(flops.by_format, gpu, clock_hertz)
    if compute is None or gpu is None:
        return None
    return Roofline(compute, least_bytes(flops) / gpu.bandwidth_bytes_per_second)


def target_roofline(
    flops: StepFlops,
    precision: str,
    target: str,
    gpu: GpuModel | None,
    *,
    kinds: Collection[str] | None = None,
    clock_hertz: float | None = None,
) -> Roofline | None:
    """Return the least time that a step could take in another precision; None if a peak is not known.

    A step's seconds over it are the most that the precision can gain, as far as is known without a profile: `kinds` of
    products (None: all) run in the target's format, and saved activations take as many bytes as it stores them in.
    """
    limit = peak(gpu, precision_row(target).peak_dtype, clock_hertz)
    kept = {kind: formats for kind, formats in flops.products.items() if kinds is not None and kind not in kinds}
    rest = StepFlops(products=kept)
    compute = _compute_seconds(rest.by_format, gpu, clock_hertz)
    if gpu is None or limit is None or compute is None:
        return None
    shrink = _storage_ratio(precision_row(precision), precision_row(target))
    saved = flops.model_copy(update={"saved_bytes": int(flops.saved_bytes / shrink)})
    seconds = least_bytes(saved) / gpu.bandwidth_bytes_per_second
    return Roofline(compute + (flops.total - rest.total) / limit, seconds)


def ceiling(  # noqa: PLR0913  what it is computed from, by keyword
    seconds: Mapping[str, float],
    precision: str,
    target: str,
    gpu: GpuModel | None,
    *,
    products: Collection[str],
    bound_by_memory: Collection[str],
    flops: StepFlops | None = None,
    kinds: Collection[str] | None = None,
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
        flops: The step's in `precision`; needed for PyTorch's default, which computes in two formats, and for `kinds`.
        kinds: The kinds of products that the target's format can compute; None: all.
    """
    total = sum(seconds.values())
    ratio = _peak_ratio(precision_row(precision), precision_row(target), gpu, flops)
    if ratio is None or total <= 0 or (kinds is not None and flops is None):
        return None
    product_seconds = sum(seconds.get(name, 0.0) for name in products)
    memory_seconds = sum(seconds.get(name, 0.0) for name in bound_by_memory)
    share = 1.0
    if kinds is not None and flops is not None and flops.total:
        share = sum(sum(formats.values()) for kind, formats in flops.products.items() if kind in kinds) / flops.total
    saved = share * product_seconds * (1 - 1 / max(1.0, ratio))
    shrink = _storage_ratio(precision_row(precision), precision_row(target))
    others = [name for name in seconds if name not in products and seconds[name] > 0]
    return Ceiling(
        precision=precision,
        target=target,
        gain=total / (total - saved - memory_seconds * (1 - 1 / shrink)),
        products_gain=total / (total - saved),
        products_share=product_seconds / total,
        others=tuple(sorted(others, key=seconds.__getitem__, reverse=True)),
    )


def _compute_seconds(by_format: Mapping[str, int], gpu: GpuModel | None, clock_hertz: float | None) -> float | None:
    """Return the time of FLOPs at the peaks of their formats, None if one is not known."""
    seconds = 0.0
    for name, flops in by_format.items():
        limit = peak(gpu, name, clock_hertz)
        if limit is None:
            return None
        seconds += flops / limit
    return seconds


def _peak_ratio(row: Precision, target: Precision, gpu: GpuModel | None, flops: StepFlops | None) -> float | None:
    """Return how many times as fast products are at the target's peak as at the peaks of what they run in."""
    wanted = peak(gpu, target.peak_dtype)
    if wanted is None:
        return None
    now = _compute_seconds(flops.by_format, gpu, None) if flops is not None and flops.total else None
    if now is not None and flops is not None:
        return now * wanted / flops.total
    own = peak(gpu, row.peak_dtype)
    return None if own is None else wanted / own


def _storage_ratio(row: Precision, target: Precision) -> float:
    """Return how many times as many bytes a precision stores an activation in as the target does, at least 1."""
    return 2.0 if target.is_16_bit and not row.is_16_bit else 1.0
