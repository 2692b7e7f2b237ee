"""One row for each configuration among some trials, with its ratios to the float32 baseline."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
_MOST_BASELINES = 50  # among which the most similar one is looked for
_MACHINE_FIELDS = ("device_name", "driver", "torch", "torchvision", "cuda", "cudnn", "castwise", "host", "num_threads")


@dataclass(frozen=True)
class Row:
    """One configuration's figures over all its processes, and their ratios to the baseline's.

    Attributes:
        trial: The configuration's first trial, or the one that failed.
        trials: All its trials, one for each process.
        throughput: Units per second.
        throughput_estimate: The same with its interval.
        spread: The blocks' interquartile range over their median, within a process; the median over processes.
        step_seconds: Seconds per step: the pseudomedian over blocks, the geometric mean over processes.
        speedup: Baseline step time over this one's; above 1 is faster. None without a baseline.
        speedup_estimate: The same with its interval.
        unpaired_speedup: Baseline step time over this one's, each over all blocks of its processes, drift included: the
            ratio of the throughputs. None without a baseline.
        verdict: Whether it is faster, slower or the same as the baseline; None for the baseline itself, and if nothing
            was measured.
        loop_speedup: Step time of the same configuration without techniques over this one's. None without techniques,
            and if that is not among the trials.
        scaling_efficiency: Throughput over world size times the throughput of the same configuration on one GPU; 1 is
            ideal. None on one GPU, and if that is not among the trials.
        peak_allocated_bytes: Peak of what tensors held.
        peak_reserved_bytes: Peak of what the allocator held.
        memory_ratio: Peak allocated over the baseline's.
        memory_estimate: The same with its interval.
        final_loss: The last timed step's loss.
        final_step: The number of that step, warm-up included.
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


def group_of(trial: Trial) -> tuple[str, str]:
    """Return what trials must share for a speed-up between them to mean something: all but precision and scale."""
    return (trial.environment.fingerprint, trial.spec.comparison)


def compare(trials: Sequence[Trial], margin: float = MARGIN) -> list[Row]:
    """Return a row for each configuration, in the order of their first trials, relative to fp32 in the same group.

    A baseline that did not end `ok` gives no ratios. A speed-up within the margin around 1 is "the same".
    """
    configurations: dict[tuple[str, str], list[Trial]] = {}
    groups: dict[tuple[str, str], list[Trial]] = {}
    on_one_gpu: dict[tuple[str, str], list[Trial]] = {}
    without_techniques: dict[tuple[str, str], list[Trial]] = {}
    # Comparison keys are costly for ten thousand trials: they are computed only if something is compared by them.
    uses_several_gpus = any(trial.spec.world_size > 1 for trial in trials)
    uses_techniques = any(trial.spec.techniques for trial in trials)
    for trial in trials:
        configurations.setdefault((trial.environment.fingerprint, trial.spec.configuration), []).append(trial)
        groups.setdefault(group_of(trial), []).append(trial)
        if uses_several_gpus and trial.spec.world_size == 1 and trial.status == "ok":
            on_one_gpu.setdefault(comparison_key(trial, *GPUS), []).append(trial)
        if uses_techniques and not trial.spec.techniques and trial.status == "ok":
            without_techniques.setdefault(comparison_key(trial, "techniques"), []).append(trial)
    baselines = {key: baselines_among(group) for key, group in groups.items()}
    rows = []
    for own in configurations.values():
        first = own[0]
        loop_speedup = scaling_efficiency = None
        if first.spec.techniques:
            plain = speedup_estimate(without_techniques.get(comparison_key(first, "techniques"), []), own)
            loop_speedup = plain.value if plain is not None else None
        if first.spec.world_size > 1:
            single = on_one_gpu.get(comparison_key(as_on_one_gpu(first), *GPUS), [])
            rate, single_rate = (rate_estimate(each, step_estimate(each)) for each in (own, single))
            if rate is not None and single_rate is not None:
                scaling_efficiency = rate.value / (single_rate.value * first.spec.world_size)
        group_baselines = baselines[group_of(first)]
        step, baseline_step = step_estimate(own), step_estimate(group_baselines)
        rate = rate_estimate(own, step)
        speedup = _speedup(own, step, group_baselines)
        verdict = None
        if step is not None and first.spec.precision != BASELINE:
            verdict = verdict_of(speedup, margin) if speedup is not None else _incomparable(first, baselines.values())
        memory = estimate(_memory_ratios(own, group_baselines))
        shown = next((trial for trial in own if trial.status not in ("ok", "diverged")), first)
        loss, loss_step = steady_metrics.final_loss(shown) or (None, None)
        spreads = [spread for trial in own if (spread := steady_metrics.spread(trial)) is not None]
        row = Row(
            trial=shown,
            trials=tuple(own),
            throughput=rate.value if rate else None,
            throughput_estimate=rate,
            spread=statistics.median(spreads) if spreads else None,
            step_seconds=step.value if step else None,
            speedup=speedup.value if speedup else None,
            speedup_estimate=speedup,
            unpaired_speedup=baseline_step.value / step.value if baseline_step and step else None,
            verdict=verdict,
            loop_speedup=loop_speedup,
            scaling_efficiency=scaling_efficiency,
            peak_allocated_bytes=steady_metrics.largest(map(steady_metrics.peak_allocated_bytes, own)),
            peak_reserved_bytes=steady_metrics.largest(map(steady_metrics.peak_reserved_bytes, own)),
            memory_ratio=memory.value if memory else None,
            memory_estimate=memory,
            final_loss=loss,
            final_step=loss_step,
            skipped_steps=sum(map(steady_metrics.skipped_steps, own)),
        )
        rows.append(row)
    return rows


def _speedup(trials: list[Trial], step: Estimate | None, baselines: list[Trial]) -> Estimate | None:
    if baselines and trials[0].spec.configuration == baselines[0].spec.configuration:
        return Estimate(1.0, 1.0, 1.0, step.n) if step else None
    return speedup_estimate(baselines, trials)


def _memory_ratios(trials: list[Trial], baselines: list[Trial]) -> list[float]:
    """Return peak over the baseline's peak in the same round, or in its first."""
    by_repeat = {trial.spec.repeat: steady_metrics.peak_allocated_bytes(trial) for trial in baselines}
    first = next((peak for peak in by_repeat.values() if peak), None)
    ratios = []
    for trial in trials:
        peak = steady_metrics.peak_allocated_bytes(trial)
        baseline_peak = by_repeat.get(trial.spec.repeat) or first
        if peak and baseline_peak:
            ratios.append(peak / baseline_peak)
    return ratios


def _incomparable(trial: Trial, baselines: Iterable[list[Trial]]) -> Verdict | None:
    """Return in which fields the most similar float32 configuration differs; None if there is no float32 at all."""
    firsts = [group[0] for group in baselines if group]
    # Among thousands the most similar is likely of the same workload, and a few of those suffice.
    firsts = [each for each in firsts if each.spec.workload == trial.spec.workload] or firsts
    found = [_differences(trial, each) for each in firsts[:_MOST_BASELINES]]
    if not found:
        return None
    fewest = min(found, key=len)
    return Verdict("incomparable", f"float32 was measured with another {', another '.join(fewest)}", None)


def _differences(trial: Trial, other: Trial) -> list[str]:
    """Return the fields in which two trials differ and must not for a ratio of theirs to mean something."""
    spec, theirs = trial.spec.without_timeout, other.spec.without_timeout
    names = [name for name in type(spec).model_fields if name not in ("precision", "loss_scale", "repeat")]
    found = [name for name in names if getattr(spec, name) != getattr(theirs, name)]
    if trial.environment.fingerprint != other.environment.fingerprint:
        machine, other_machine = trial.environment, other.environment
        found += [name for name in _MACHINE_FIELDS if getattr(machine, name) != getattr(other_machine, name)]
    return [name.replace("_", " ") for name in found]
