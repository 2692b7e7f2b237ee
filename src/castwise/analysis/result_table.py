"""Set the cells of a job beside their baseline."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from castwise.analysis import steady_metrics
from castwise.analysis.speedup import (
    GPUS,
    as_on_one_gpu,
    baselines_among,
    comparison_key,
    rate_estimate,
    speedup_estimate,
    step_estimate,
)
from castwise.analysis.statistics import Estimate, Verdict, estimate, verdict_of
from castwise.records.schema import Trial
from castwise.registry.precisions import BASELINE

MARGIN = 0.01  # how far from 1 a speed-up still is "the same"
_MOST_LOOKED_AT = 50  # float32 cells, for the one that differs least


@dataclass(frozen=True)
class Row:
    """One cell's figures over all its processes, and what they are relative to the baseline.

    Attributes:
        trial: The cell's first trial, or the one that failed.
        trials: All its trials, one a process.
        throughput: Units per second.
        throughput_estimate: The same with its interval.
        spread: The blocks' interquartile range over their median, within a process; the median over processes.
        step_seconds: Seconds per step: the pseudomedian over blocks, the geometric mean over processes.
        speedup: Baseline step time over this one's; above 1 is faster. None without a baseline.
        speedup_estimate: The same with its interval.
        unpaired_speedup: Baseline step time over this one's, each over all turns of its processes, whatever drifted
            between them: the ratio of the throughputs. None without a baseline.
        verdict: Whether it is faster, slower or the same as the baseline; None for the baseline itself, and where
            nothing was measured.
        loop_speedup: The same cell's step time in the plain loop over this one's: what the techniques bought. None in
            the plain loop, and where that is not among the trials.
        scaling_efficiency: Throughput over world size times the throughput of the same cell on one GPU; 1 is ideal.
            None on one GPU, and where that cell is not among the trials.
        peak_allocated_bytes: Peak of what tensors held.
        peak_reserved_bytes: Peak of what the allocator held.
        memory_ratio: Peak allocated over the baseline's.
        memory_estimate: The same with its interval.
        final_loss: The last timed step's loss.
        final_step: The number of that step, warm-up counted.
        skipped_steps: Steps after warm-up that loss scaling skipped.
    """

    trial: Trial
    trials: tuple[Trial, ...]
    throughput: float | None
    throughput_estimate: Estimate | None
    spread: float | None
    step_seconds: float | None
    speedup: float | None
    speedup_estimate: Estimate | None
    unpaired_speedup: float | None
    verdict: Verdict | None
    loop_speedup: float | None
    scaling_efficiency: float | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    memory_ratio: float | None
    memory_estimate: Estimate | None
    final_loss: float | None
    final_step: int | None
    skipped_steps: int


def group_of(trial: Trial) -> tuple[object, ...]:
    """Return what trials must share for a speed-up between them to mean something: all but precision and scale."""
    return (trial.environment.fingerprint, trial.spec.comparison)


def compare(trials: Sequence[Trial], margin: float = MARGIN) -> list[Row]:
    """Return a row for each cell, in the order of their first trials, relative to the fp32 cell of its group.

    A baseline that did not end `ok` gives no ratios.

    Args:
        trials: The trials of one job or of several.
        margin: How far from 1 a speed-up still is "the same".
    """
    cells: dict[tuple[object, ...], list[Trial]] = {}
    groups: dict[tuple[object, ...], list[Trial]] = {}
    group_by_cell: dict[tuple[object, ...], list[Trial]] = {}
    alone: dict[tuple[str, str], list[Trial]] = {}
    plain: dict[tuple[str, str], list[Trial]] = {}
    # Of ten thousand trials in one loop on one GPU nobody asks what they share but for those.
    is_spread = any(trial.spec.world_size > 1 for trial in trials)
    has_loops = any(trial.spec.techniques for trial in trials)
    for trial in trials:
        cell, group = (trial.environment.fingerprint, trial.spec.configuration), groups.setdefault(group_of(trial), [])
        cells.setdefault(cell, []).append(trial)
        group_by_cell[cell] = group
        group.append(trial)
        if is_spread and trial.spec.world_size == 1 and trial.status == "ok":
            alone.setdefault(comparison_key(trial, *GPUS), []).append(trial)
        if has_loops and not trial.spec.techniques and trial.status == "ok":
            plain.setdefault(comparison_key(trial, "techniques"), []).append(trial)
    elsewhere = _Elsewhere(groups.values())
    return [
        replace(
            _row(own, group_by_cell[cell], elsewhere, margin),
            loop_speedup=_loop_speedup(own, plain),
            scaling_efficiency=_scaling_efficiency(own, alone),
        )
        for cell, own in cells.items()
    ]


def _row(cell: list[Trial], group: list[Trial], elsewhere: "_Elsewhere", margin: float) -> Row:
    shown = next((trial for trial in cell if trial.status not in ("ok", "diverged")), cell[0])
    loss = steady_metrics.final_loss(shown)
    step = step_estimate(cell)
    rate = rate_estimate(cell, step)
    baselines = baselines_among(group)
    speedup = _speedup(cell, step, baselines)
    baseline_step = step_estimate(baselines)
    memory = estimate(_memory_ratios(cell, baselines))
    spreads = [value for trial in cell if (value := steady_metrics.spread(trial)) is not None]
    return Row(
        trial=shown,
        trials=tuple(cell),
        throughput=rate.value if rate else None,
        throughput_estimate=rate,
        spread=statistics.median(spreads) if spreads else None,
        step_seconds=step.value if step else None,
        speedup=speedup.value if speedup else None,
        speedup_estimate=speedup,
        unpaired_speedup=baseline_step.value / step.value if baseline_step and step else None,
        verdict=None if step is None else _verdict(cell[0], speedup, elsewhere, margin),
        loop_speedup=None,
        scaling_efficiency=None,
        peak_allocated_bytes=steady_metrics.largest(steady_metrics.peak_allocated_bytes(trial) for trial in cell),
        peak_reserved_bytes=steady_metrics.largest(steady_metrics.peak_reserved_bytes(trial) for trial in cell),
        memory_ratio=memory.value if memory else None,
        memory_estimate=memory,
        final_loss=loss[0] if loss else None,
        final_step=loss[1] if loss else None,
        skipped_steps=sum(steady_metrics.skipped_steps(trial) for trial in cell),
    )


def _speedup(cell: list[Trial], step: Estimate | None, baselines: list[Trial]) -> Estimate | None:
    if baselines and (cell[0] is baselines[0] or cell[0].spec.configuration == baselines[0].spec.configuration):
        return Estimate(1.0, 1.0, 1.0, step.n) if step else None
    return speedup_estimate(baselines, cell)


def _memory_ratios(cell: list[Trial], baselines: list[Trial]) -> list[float]:
    """Return peak over baseline's peak, of the processes of the same round."""
    by_repeat = {trial.spec.repeat: steady_metrics.peak_allocated_bytes(trial) for trial in baselines}
    first = next((peak for peak in by_repeat.values() if peak), None)
    pairs = ((steady_metrics.peak_allocated_bytes(trial), by_repeat.get(trial.spec.repeat) or first) for trial in cell)
    return [own / base for own, base in pairs if own and base]


def _verdict(trial: Trial, speedup: Estimate | None, elsewhere: "_Elsewhere", margin: float) -> Verdict | None:
    if trial.spec.precision == BASELINE:
        return None
    return verdict_of(speedup, margin) if speedup else elsewhere.incomparable(trial)


class _Elsewhere:
    """The float32 trials of all groups, for cells whose own group has none to compare with.

    Args:
        groups: The trials of each group.
    """

    def __init__(self, groups: Iterable[list[Trial]]) -> None:
        firsts = (
            next((t for t in group if t.spec.precision == BASELINE and t.status == "ok"), None) for group in groups
        )
        self._baselines = [(trial, trial.spec.without_timeout.model_dump()) for trial in firsts if trial is not None]

    def incomparable(self, trial: Trial) -> Verdict | None:
        """Return why there is float32 to be seen and none to compare with, None where there is none at all."""
        spec = trial.spec.without_timeout.model_dump()
        # Among thousands the nearest is likely of the same workload, and a few of those tell enough.
        near = [each for each in self._baselines if each[1]["workload"] == spec["workload"]] or self._baselines
        found = [_differences(trial, spec, *each) for each in near[:_MOST_LOOKED_AT]]
        if not found:
            return None
        fewest = min(found, key=len)
        return Verdict("incomparable", f"float32 was measured with another {', another '.join(fewest)}", None)


def _differences(trial: Trial, spec: dict[str, Any], other: Trial, theirs: dict[str, Any]) -> list[str]:
    """Return the fields in which two trials must not differ for a ratio of theirs to mean something, and do."""
    found = [name for name in spec if name not in ("precision", "loss_scale", "repeat") and spec[name] != theirs[name]]
    machine, other_machine = trial.environment, other.environment
    if machine.fingerprint != other_machine.fingerprint:
        found += [name for name in _MACHINE if getattr(machine, name) != getattr(other_machine, name)]
    return [f"{name.replace('_', ' ')}" for name in found]


_MACHINE = ("device_name", "driver", "torch", "torchvision", "cuda", "cudnn", "castwise", "host", "num_threads")


def _loop_speedup(cell: list[Trial], plain: Mapping[tuple[str, str], list[Trial]]) -> float | None:
    if not cell[0].spec.techniques:
        return None
    found = speedup_estimate(plain.get(comparison_key(cell[0], "techniques"), []), cell)
    return found.value if found else None


def _scaling_efficiency(cell: list[Trial], alone: Mapping[tuple[str, str], list[Trial]]) -> float | None:
    if cell[0].spec.world_size == 1:
        return None
    single = alone.get(comparison_key(as_on_one_gpu(cell[0]), *GPUS), [])
    rates = [rate_estimate(trials, step_estimate(trials)) for trials in (cell, single)]
    if rates[0] is None or rates[1] is None:
        return None
    return rates[0].value / (rates[1].value * cell[0].spec.world_size)
