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
from castwise.registry.precisions import AS_WRITTEN, BASELINE, BESIDE_FP8, DEFAULT, precision_row

MARGIN = 0.01  # how far from 1 a speed-up still is "the same"
_CONTRADICTION = 0.05  # of a throughput and a speed-up, as a share; chosen here: readers see it in a table
_MOST_BASELINES = 50  # among which the most similar one is looked for
_MACHINE_FIELDS = (
    "device_name",
    "driver",
    "torch",
    "torchvision",
    "cuda",
    "cudnn",
    "castwise",
    "host",
    "cpu",
    "gpu_uuid",
    "num_threads",
)


@dataclass(frozen=True)
class Row:
    """One configuration's figures over all its processes, and their ratios to the baseline's."""

    trial: Trial  # the first, or the one that failed
    trials: tuple[Trial, ...]  # one for each process
    step_seconds: float | None  # the pseudomedian over blocks, the geometric mean over processes; see `adjusted_to`
    spread: float | None  # the blocks' interquartile range over their median, in the median process
    throughput_estimate: Estimate | None  # units per second
    # The precision that it is compared with, if the ratio of their own throughputs contradicts the speed-up: one was in
    # rounds without the other, in which the machine had another pace. Step time and throughput are then that one's by
    # the speed-up, of the moments that they share: means adjusted for blocks, as in an incomplete block design.
    # Source: Cochran and Cox, Experimental Designs, 1957, chapter 9. Empty if they agree.
    adjusted_to: str
    speedup_estimate: Estimate | None  # fp32's step time over this one's; above 1 is faster
    default_estimate: Estimate | None  # the same over PyTorch's default, if that was measured
    written_estimate: Estimate | None  # the same over the user's script as written
    bf16_estimate: Estimate | None  # the same over bf16-mixed, for FP8
    memory_estimate: Estimate | None  # peak allocated over the baseline's
    unpaired_speedup: float | None  # the ratio of the throughputs, each over all blocks, drift included
    # On the speed-up over the script as written, else over PyTorch's default, else over fp32; None for that one, and if
    # nothing was measured.
    verdict: Verdict | None
    loop_speedup: float | None  # over the same configuration without techniques, if that is among the trials
    # Throughput over world size times the throughput of the same configuration on one GPU, if that is among the
    # trials; 1 is ideal.
    scaling_efficiency: float | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    final_loss: float | None  # of the last timed step
    final_step: int | None  # its number, warm-up included
    skipped_steps: int  # after warm-up, by loss scaling

    def __repr__(self) -> str:
        """Return the row in a line."""
        figures: list[str] = [self.trial.status]
        figures += [] if self.throughput is None else [f"{self.throughput:.4g} {steady_metrics.unit_of(self.trial)}/s"]
        figures += [] if self.speedup is None else [f"{self.speedup:.2f}× fp32"]
        return f"Row({self.trial.spec.label}: {', '.join(figures)})"

    @property
    def precision(self) -> str:
        """Return the precision's name."""
        return self.trial.spec.precision

    @property
    def batch_size(self) -> int:
        """Return the samples of a step, per GPU."""
        return self.trial.spec.batch_size

    @property
    def techniques(self) -> tuple[str, ...]:
        """Return the techniques of its loop; none is the plain loop."""
        return self.trial.spec.techniques

    @property
    def throughput(self) -> float | None:
        """Return units per second."""
        return _value(self.throughput_estimate)

    @property
    def speedup(self) -> float | None:
        """Return fp32's step time over this one's; above 1 is faster. None without fp32."""
        return _value(self.speedup_estimate)

    @property
    def default_speedup(self) -> float | None:
        """Return the step time of PyTorch's default over this one's. None if that was not measured."""
        return _value(self.default_estimate)

    @property
    def written_speedup(self) -> float | None:
        """Return the step time of the script as written over this one's. None of other workloads."""
        return _value(self.written_estimate)

    @property
    def bf16_speedup(self) -> float | None:
        """Return the step time of bf16-mixed over this one's, of FP8. None for others, and if it was not measured."""
        return _value(self.bf16_estimate)

    @property
    def memory_ratio(self) -> float | None:
        """Return peak allocated over the baseline's."""
        return _value(self.memory_estimate)


def _value(found: Estimate | None) -> float | None:
    return None if found is None else found.value


def group_of(trial: Trial) -> tuple[str, str]:
    """Return what trials must share for a speed-up between them to mean something: all but precision and scale."""
    return (trial.environment.fingerprint, trial.spec.comparison)


def compare(trials: Sequence[Trial], margin: float = MARGIN) -> list[Row]:
    """Return a row for each configuration, in the order of their first trials.

    Each is compared with fp32 and with PyTorch's default in the same group, if they ended `ok`; FP8 with bf16-mixed,
    too, and a script with itself as written. A speed-up within the margin around 1 is "the same".
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
    references_of = {
        key: {name: baselines_among(group, name) for name in (AS_WRITTEN, DEFAULT, BASELINE)}
        for key, group in groups.items()
    }
    have_fp8 = {key for key, group in groups.items() if any(_is_fp8(trial) for trial in group)}
    beside_fp8 = {key: baselines_among(groups[key], BESIDE_FP8) for key in have_fp8}
    rows = []
    for own in configurations.values():
        first = own[0]
        loop_speedup = scaling_efficiency = None
        if first.spec.techniques:
            loop_speedup = speedup_estimate(without_techniques.get(comparison_key(first, "techniques"), []), own)
        step = step_estimate(own)
        references = dict(references_of[group_of(first)])
        baseline_step = step_estimate(references[BASELINE])
        is_beside_fp8 = _is_fp8(first) or first.spec.precision == BESIDE_FP8
        references[BESIDE_FP8] = beside_fp8.get(group_of(first), []) if is_beside_fp8 else []
        over = {name: _speedup(each, own) for name, each in references.items()}
        reference = next((name for name, each in references.items() if each), BASELINE)
        decisive = over[reference]
        adjusted_to = ""
        base = step_estimate(references[reference])
        if step and base and decisive and abs(base.value / step.value / decisive.value - 1) > _CONTRADICTION:
            adjusted_to = reference
            low, high = base.low / decisive.high, base.high / decisive.low
            step = Estimate(base.value / decisive.value, low, high, decisive.n)
        rate = rate_estimate(own, step)
        if first.spec.world_size > 1:
            single = on_one_gpu.get(comparison_key(as_on_one_gpu(first), *GPUS), [])
            single_rate = rate_estimate(single, step_estimate(single))
            if rate is not None and single_rate is not None:
                scaling_efficiency = rate.value / (single_rate.value * first.spec.world_size)
        verdict = None
        if step is not None and first.spec.precision != reference:
            baselines = (each[BASELINE] for each in references_of.values())  # read if there is no ratio
            verdict = verdict_of(decisive, margin) if decisive is not None else _incomparable(first, baselines)
        spreads = [spread for trial in own if (spread := steady_metrics.spread(trial)) is not None]
        shown = next((trial for trial in own if trial.status not in ("ok", "diverged")), first)
        loss, loss_step = steady_metrics.final_loss(shown) or (None, None)
        row = Row(
            trial=shown,
            trials=tuple(own),
            step_seconds=_value(step),
            spread=statistics.median(spreads) if spreads else None,
            throughput_estimate=rate,
            adjusted_to=adjusted_to,
            speedup_estimate=over[BASELINE],
            default_estimate=over[DEFAULT],
            written_estimate=over[AS_WRITTEN],
            bf16_estimate=over[BESIDE_FP8],
            memory_estimate=estimate(_memory_ratios(own, references[BASELINE])),
            unpaired_speedup=baseline_step.value / step.value if baseline_step and step else None,
            verdict=verdict,
            loop_speedup=_value(loop_speedup),
            scaling_efficiency=scaling_efficiency,
            peak_allocated_bytes=steady_metrics.largest(map(steady_metrics.peak_allocated_bytes, own)),
            peak_reserved_bytes=steady_metrics.largest(map(steady_metrics.peak_reserved_bytes, own)),
            final_loss=loss,
            final_step=loss_step,
            skipped_steps=sum(map(steady_metrics.skipped_steps, own)),
        )
        rows.append(row)
    return rows


def _is_fp8(trial: Trial) -> bool:
    return bool(precision_row(trial.spec.precision).float8_recipe)


def _speedup(baselines: list[Trial], trials: list[Trial]) -> Estimate | None:
    """Return the speed-up over a configuration, exactly 1 over itself."""
    if baselines and trials[0].spec.configuration == baselines[0].spec.configuration:
        step = step_estimate(trials)
        return Estimate(1.0, 1.0, 1.0, step.n) if step else None
    return speedup_estimate(baselines, trials)


def _memory_ratios(trials: list[Trial], baselines: list[Trial]) -> list[float]:
    """Return peak over the baseline's peak in the same round, or in its first."""
    by_repeat = {trial.spec.repeat: steady_metrics.peak_allocated_bytes(trial) for trial in baselines}
    first = next((peak for peak in by_repeat.values() if peak), None)
    pairs = [(steady_metrics.peak_allocated_bytes(each), by_repeat.get(each.spec.repeat) or first) for each in trials]
    return [peak / baseline_peak for peak, baseline_peak in pairs if peak and baseline_peak]


def _incomparable(trial: Trial, baselines: Iterable[list[Trial]]) -> Verdict | None:
    """Return in which fields the most similar float32 configuration differs; None if there is no float32 at all."""
    firsts = [group[0] for group in baselines if group]
    # Among thousands the most similar is likely of the same workload, and a few of those suffice.
    firsts = [each for each in firsts if each.spec.workload == trial.spec.workload] or firsts
    found = [_differences(trial, each) for each in firsts[:_MOST_BASELINES]]
    if not found:
        return None
    words = ("other techniques" if name == "techniques" else f"another {name}" for name in min(found, key=len))
    return Verdict("incomparable", f"float32 was measured with {', '.join(words)}", None)


def _differences(trial: Trial, other: Trial) -> list[str]:
    """Return the fields in which two trials differ and must not for a ratio of theirs to mean something."""
    spec, theirs = trial.spec.without_extras, other.spec.without_extras
    names = [name for name in type(spec).model_fields if name not in ("precision", "loss_scale", "repeat")]
    found = [name for name in names if getattr(spec, name) != getattr(theirs, name)]
    if trial.environment.fingerprint != other.environment.fingerprint:
        machine, other_machine = trial.environment, other.environment
        found += [name for name in _MACHINE_FIELDS if getattr(machine, name) != getattr(other_machine, name)]
    return [name.replace("gpu_uuid", "GPU").replace("_", " ") for name in found]
