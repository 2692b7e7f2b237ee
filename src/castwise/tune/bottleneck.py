"""What bounds a loop, by measurements of the same step as a CUDA graph, on half the batch, and in TF32.

The data of a steady step lies on the device, so that input never bounds it; epochs are compared with resident data.
"""

import statistics

from castwise.analysis import steady_metrics
from castwise.analysis.causes import diagnose, power_limit_of
from castwise.analysis.result_table import compare
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


def what_bounds(measured: Measurements, loop: TrialSpec) -> str:
    """Return in words what bounds a loop, and how that is known."""

    def speedup(base: TrialSpec, other: TrialSpec | None) -> float | None:
        if other is None or key_of(base) == key_of(other):
            return None
        sides = [[trial for trial in measured.of(each) if trial.status == "ok"] for each in (base, other)]
        ratio = speedup_estimate(*sides)
        # An interval that holds both a gain and none proves nothing. The interval of one process is NaN.
        is_in_doubt = ratio is not None and ratio.low < 1 and ratio.high >= _GAIN
        return None if ratio is None or is_in_doubt else ratio.value

    found: list[str] = []
    trials = measured.of(loop)
    resident, graph = (Change(techniques=(probe_technique(each),)).on(loop) for each in ("data", "launches"))
    if (faster := speedup(loop, resident)) is not None:
        found.append(_bound("input", faster, "with its data on the device"))
        if waits := [share for trial in trials if (share := data_share(trial)) is not None]:
            found.append(f"the host waits for batches {format_share(statistics.median(waits))} of the time")
    if (waits_of_script := steady_metrics.data_share(trials)) is not None:
        found.append(f"the script waits for its loader {format_share(waits_of_script)} of the time")
    if captures_graph(loop.techniques):
        found.append("launches do not bound it: the step is a CUDA graph")
    elif (faster := speedup(loop, graph)) is not None:
        found.append(_bound("launches", faster, "as one CUDA graph"))
    else:
        idle = [each.idle_share for each in diagnose(compare(trials)) if each.idle_share is not None]
        found += [f"the GPU is idle {format_share(share)} of the step" for share in idle[:1]]
    if (faster := speedup(loop, half_batch(loop))) is not None:
        found.append(_dependence_on_batch(1 / faster))
    if find_precision(loop.precision).name == "fp32":
        # TF32 changes the arithmetic of products; 16 bits also move fewer bytes.
        tf32, *mixed = (Change(precision=name).on(loop) for name in ("tf32", "bf16-mixed", "fp16-mixed"))
        if (faster := speedup(loop, tf32)) is not None:
            found.append(_bound("arithmetic", faster, "in TF32, which moves the same bytes,"))
        sixteen = max(filter(None, (speedup(tf32, each) for each in mixed)), default=0.0)
        if sixteen >= _GAIN:
            found.append(
                f"16 bits are {sixteen:.2f} times as fast as TF32, by half the bytes and faster products together"
            )
    power = power_limit_of(trials)
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
