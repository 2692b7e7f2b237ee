"""What bounds a loop, by measurements of the same step as a CUDA graph, on half the batch, and in TF32.

The data of a steady step lies on the device, so that input never bounds it; epochs are compared with resident data.
"""

import statistics
from dataclasses import dataclass

from castwise.analysis.causes import PowerLimit, power_limit_of
from castwise.analysis.speedup import speedup_estimate
from castwise.analysis.training_metrics import data_share
from castwise.registry.precisions import find_precision
from castwise.registry.techniques import captures_graph, probe_technique
from castwise.spec.quantities import format_share
from castwise.spec.trial import TrialSpec
from castwise.tune.candidates import Change
from castwise.tune.measurements import Measurements, key_of
from castwise.tune.memory_limit import half_batch

# A smaller gain proves no bound. Source: chosen here.
_GAIN = 1.05
# If half the batch takes this share of the time or more, most of a step does not depend on the batch. From the third
# to the second all of it does. Less cannot be: it is noise. Source: chosen here.
_FIXED, _SCALES, _IMPOSSIBLE = 0.8, 0.6, 0.4


@dataclass(frozen=True)
class Evidence:
    """Speed-ups that tell what bounds a loop; None if one was not measured, or is in doubt."""

    is_graph: bool = False  # whether the loop's step is a CUDA graph
    graph: float | None = None  # as a CUDA graph
    half: float | None = None  # on half the batch: 2 if time is proportional to the batch, 1 if it does not matter
    tf32: float | None = None  # in TF32, which changes the arithmetic of products and moves the same bytes
    sixteen: float | None = None  # of a 16-bit mixed precision over TF32: fewer bytes, and faster products
    resident: float | None = None  # of an epoch with its data on the device
    waiting: float | None = None  # the share of training that the host waited for batches
    power: PowerLimit | None = None


def evidence_of(measured: Measurements, loop: TrialSpec) -> Evidence:
    """Return the measurements that show what bounds a loop."""

    def speedup(base: TrialSpec, other: TrialSpec | None) -> float | None:
        if other is None or key_of(base) == key_of(other):
            return None
        sides = [[trial for trial in measured.of(each) if trial.status == "ok"] for each in (base, other)]
        ratio = speedup_estimate(*sides)
        # An interval that holds both a gain and none proves nothing. The interval of one process is NaN.
        is_in_doubt = ratio is not None and ratio.low < 1 and ratio.high >= _GAIN
        return None if ratio is None or is_in_doubt else ratio.value

    trials = measured.of(loop)
    waits = [share for trial in trials if (share := data_share(trial)) is not None]
    is_graph = captures_graph(loop.techniques)
    is_fp32 = find_precision(loop.precision).name == "fp32"
    tf32, *mixed = (Change(precision=name).on(loop) for name in ("tf32", "bf16-mixed", "fp16-mixed"))
    return Evidence(
        is_graph=is_graph,
        graph=None if is_graph else speedup(loop, Change(techniques=(probe_technique("launches"),)).on(loop)),
        half=speedup(loop, half_batch(loop)),
        tf32=speedup(loop, tf32) if is_fp32 else None,
        sixteen=max(filter(None, (speedup(tf32, each) for each in mixed)), default=None) if is_fp32 else None,
        resident=speedup(loop, Change(techniques=(probe_technique("data"),)).on(loop)),
        waiting=statistics.median(waits) if waits else None,
        power=power_limit_of(trials),
    )


def explain(evidence: Evidence) -> str:
    """Return in words what bounds a loop, and how that is known."""
    found: list[str] = []
    if evidence.resident is not None:
        found.append(_bound("input", evidence.resident, "with its data on the device"))
        if evidence.waiting is not None:
            found.append(f"the host waits for batches {format_share(evidence.waiting)} of the time")
    if evidence.is_graph:
        found.append("launches do not bound it: the step is a CUDA graph")
    elif evidence.graph is not None:
        found.append(_bound("launches", evidence.graph, "as one CUDA graph"))
    if evidence.half is not None:
        found.append(_dependence_on_batch(1 / evidence.half))
    if evidence.tf32 is not None:
        found.append(_bound("arithmetic", evidence.tf32, "in TF32, which moves the same bytes,"))
    if evidence.sixteen is not None and evidence.sixteen >= _GAIN:
        found.append(
            f"16 bits are {evidence.sixteen:.2f} times as fast as TF32, by half the bytes and faster products together"
        )
    power = evidence.power
    if power is not None:
        found.append(
            f"the power limit held the clock down in {format_share(power.capped)} of its blocks ({power.watts:.0f} W, "
            f"{power.clock_hertz / 1e6:,.0f} of {power.max_clock_hertz / 1e6:,.0f} MHz)"
        )
        if power.slowdown is not None:
            found.append(
                f"steps of sustained training take up to {format_share(power.slowdown)} longer than timed ones"
            )
    return ("; ".join(found) or "what bounds it is not known: no measurement shows it") + "."


def _dependence_on_batch(share: float) -> str:
    """Return how a step's time depends on the batch, by the share of it that half the batch takes."""
    half = f"half the batch takes {format_share(share)} of the time"
    if share >= _FIXED:
        return f"most of the step does not depend on the batch ({half}): a larger batch is nearly free"
    if share > _SCALES:
        return f"{format_share(2 * share - 1)} of the step does not depend on the batch ({half})"
    if share >= _IMPOSSIBLE:
        return f"its time is proportional to the batch ({half})"
    return f"how its time depends on the batch is not known: too noisy ({half})"


def _bound(what: str, speedup: float, how: str) -> str:
    """Return whether something bounds a loop, by how much faster it is without it."""
    faster = f"{how} it is {speedup:.2f} times as fast"
    if speedup < _GAIN:
        return f"not bound by {what}: {faster}"
    return f"bound by {what} for at least {format_share(1 - 1 / speedup)} of the step: {faster}"
