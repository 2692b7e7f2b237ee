"""What bounds a loop, as far as neighbouring loops prove it: the same step as a graph, on half the batch, in TF32.

A steady step has its data on the device, so that input bounds none of them; of a training run the same epochs with
resident data tell. Nothing is concluded from what was not measured.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from castwise.analysis import steady_metrics
from castwise.analysis.speedup import speedup_estimate
from castwise.analysis.statistics import Estimate
from castwise.records.schema import Trial
from castwise.registry.precisions import find_precision
from castwise.registry.techniques import GRAPHS
from castwise.spec.quantities import format_share
from castwise.spec.trial import TrialSpec
from castwise.tune.candidates import TuningResult, loop_name
from castwise.tune.changes import Change

# Below these a gain says nothing of a bound. Source: chosen here.
_GAINS = 1.05
# Half the batch in this share of the time or more: most of a step does not depend on how much there is to compute.
_FIXED = 0.8
_SCALES = 0.55

# A board is at its power limit where this share of the blocks were, and the clock is below this share of its highest.
_CAPPED, _MOSTLY, _AT_ITS_CLOCK = "sw_power_cap", 0.5, 0.98


@dataclass(frozen=True)
class Power:
    """How far a board's power limit set a loop's pace.

    Attributes:
        capped: The share of blocks in which the limit held the clock down.
        clock_hertz: The mean clock of the streaming multiprocessors in the blocks.
        max_clock_hertz: The board's highest.
        watts: Mean power.
        excess: How much longer a step took where steps ran on and on, as a share; None where no process tells.
    """

    capped: float
    clock_hertz: float
    max_clock_hertz: float
    watts: float
    excess: float | None = None


@dataclass(frozen=True)
class Evidence:
    """What was measured beside a loop; None where it was not.

    Attributes:
        loop: The loop.
        graph: Its step time over that of the same step as a CUDA graph.
        resident: Its step time over that of the same step with its data on the device.
        waiting: The share of its epochs' time that the host waited for batches.
        half: Its step time over that on half the batch: 2 where time goes with the work, 1 where it does not.
        tf32: Its step time over that in TF32, which changes the arithmetic of products and no byte of memory.
        sixteen: Step time in TF32 over that in a 16-bit mixed precision: fewer bytes, and faster products.
        power: What the driver said of the board's power limit in its blocks.
    """

    loop: TrialSpec
    graph: Estimate | None
    half: Estimate | None
    tf32: Estimate | None
    sixteen: Estimate | None
    resident: Estimate | None = None
    waiting: float | None = None
    power: Power | None = None


def evidence_of(climbed: TuningResult, loop: TrialSpec) -> Evidence:
    """Return what a climb measured beside one of its loops."""

    def ratio(over: TrialSpec, spec: TrialSpec) -> Estimate | None:
        if over.configuration == spec.configuration:
            return None
        sides = [[t for t in climbed.of(each) if t.status == "ok"] for each in (over, spec)]
        found = speedup_estimate(*sides)
        return None if found is None or _is_in_doubt(found) else found

    def inward(precision: str) -> TrialSpec:
        return Change(precision=precision).on(loop)

    full = find_precision(loop.precision).name == "fp32"
    mixed = [found for name in ("bf16-mixed", "fp16-mixed") if (found := ratio(inward("tf32"), inward(name)))]
    return Evidence(
        loop=loop,
        graph=None if set(GRAPHS) & set(loop.techniques) else ratio(loop, Change(techniques=("cuda-graph",)).on(loop)),
        half=ratio(loop, loop.model_copy(update={"batch_size": max(1, loop.batch_size // 2)})),
        tf32=ratio(loop, inward("tf32")) if full else None,
        resident=ratio(loop, Change(techniques=("resident-data",)).on(loop)),
        waiting=_waiting(climbed, loop),
        power=power_of(climbed.of(loop)),
        sixteen=max(mixed, key=lambda each: each.value) if full and mixed else None,
    )


def _is_in_doubt(ratio: Estimate) -> bool:
    """Return whether an interval holds both what would be a gain and what would be none: then nothing is proven."""
    return ratio.low < 1 and ratio.high >= _GAINS  # neither holds of the NaN that one process has


def sentences_of(climbed: TuningResult) -> list[str]:
    """Return in words what bounded the first loop and what bounds the last, and how that is known."""
    loops = list({loop.configuration: loop for loop in (climbed.start, climbed.winner)}.values())
    return [f"{loop_name(loop)}: {words_of(evidence_of(climbed, loop))}" for loop in loops]


def words_of(evidence: Evidence) -> str:
    """Return in words what evidence says of a loop."""
    found = [*_input(evidence), *_launches(evidence), *_work(evidence), *_arithmetic(evidence), *_power(evidence)]
    if not found:
        return "what bounds it is not known: nothing that would tell was measured beside it."
    return "; ".join(found) + "."


def _input(evidence: Evidence) -> list[str]:
    resident = evidence.resident
    if resident is None:
        return []
    waiting = (
        "" if evidence.waiting is None else f"; the host waits for batches {format_share(evidence.waiting)} of the time"
    )
    if resident.value >= _GAINS:
        return [
            f"bound by its input for {format_share(1 - 1 / resident.value)} of the step at the least: "
            f"with its data on the device it is {resident.value:.2f} times as fast{waiting}"
        ]
    return [f"not bound by its input: with its data on the device it is {resident.value:.2f} times as fast{waiting}"]


def _waiting(climbed: TuningResult, loop: TrialSpec) -> float | None:
    """Return the share of the counted epochs' time in which the host waited for batches; None of steady steps."""
    recipe = loop.recipe
    if recipe is None:
        return None
    ranks = [trial.ranks[0] for trial in climbed.of(loop) if trial.ranks]
    epochs = [epoch for rank in ranks for epoch in rank.epochs[recipe.skip_epochs :]]
    total = sum(epoch.seconds for epoch in epochs)
    return sum(epoch.data_seconds for epoch in epochs) / total if total else None


def _launches(evidence: Evidence) -> list[str]:
    graph, loop = evidence.graph, evidence.loop
    if graph is None:
        return ["its launches are one already"] if set(GRAPHS) & set(loop.techniques) else []
    if graph.value >= _GAINS:
        return [
            f"bound by launches for {format_share(1 - 1 / graph.value)} of the step at the least: "
            f"as one CUDA graph it is {graph.value:.2f} times as fast"
        ]
    return [f"not bound by launches: as one CUDA graph it is {graph.value:.2f} times as fast"]


def _work(evidence: Evidence) -> list[str]:
    half = evidence.half
    if half is None:
        return []
    share = 1 / half.value
    said = f"half the batch takes {format_share(share)} of the time"
    if share >= _FIXED:
        return [f"most of the step is there whatever the batch ({said}): a larger batch is nearly free"]
    if share <= _SCALES:
        return [f"its time goes with the work ({said})"]
    return [f"{format_share(2 * share - 1)} of the step is there whatever the batch ({said})"]


def _arithmetic(evidence: Evidence) -> list[str]:
    """Return what TF32 proves, which computes products faster and moves the same bytes."""
    said: list[str] = []
    if evidence.tf32 is not None and evidence.tf32.value >= _GAINS:
        said.append(
            f"bound by arithmetic for {format_share(1 - 1 / evidence.tf32.value)} of the step at the least: "
            f"TF32, which moves the same bytes, is {evidence.tf32.value:.2f} times as fast"
        )
    elif evidence.tf32 is not None:
        said.append(f"not bound by the arithmetic of products: TF32 is {evidence.tf32.value:.2f} times as fast")
    if evidence.sixteen is not None and evidence.sixteen.value >= _GAINS:
        said.append(
            f"16 bits are {evidence.sixteen.value:.2f} times as fast again, by half the bytes and faster products "
            "together: which of the two, these measurements do not tell"
        )
    return said


def power_of(trials: Sequence[Trial]) -> Power | None:
    """Return what the readings of a loop's blocks say of the power limit; None where they say nothing."""
    most = next((t.gpu_facts.max_sm_clock_hertz for t in trials if t.gpu_facts is not None), None)
    readings = [each for trial in trials for each in trial.readings]
    known = [each for each in readings if each.throttle_reasons is not None and each.sm_clock_hertz is not None]
    watts = [power for each in readings if (power := each.gpu_power_watts) is not None]
    if most is None or not known or not watts:
        return None
    capped = sum(_CAPPED in (each.throttle_reasons or ()) for each in known) / len(known)
    clock = statistics.fmean(each.sm_clock_hertz or 0.0 for each in known)
    excesses = [excess for trial in trials if (excess := steady_metrics.sustained_slowdown(trial)) is not None]
    return Power(capped, clock, most, statistics.fmean(watts), max(excesses, default=None))


def _power(evidence: Evidence) -> list[str]:
    power = evidence.power
    if power is None or power.capped < _MOSTLY or power.clock_hertz > _AT_ITS_CLOCK * power.max_clock_hertz:
        return []
    return [
        f"held by the board's power limit in {format_share(power.capped)} of its blocks "
        f"({power.watts:.0f} W, {power.clock_hertz / 1e6:,.0f} of {power.max_clock_hertz / 1e6:,.0f} MHz): "
        f"what takes fewer joules is faster{_at_a_stretch(power)}"
    ]


def _at_a_stretch(power: Power) -> str:
    if power.excess is None:
        return ""
    return f"; steps that run on and on take up to {format_share(power.excess)} longer than the timed blocks"
