"""The result: a row for each configuration among some trials, with its ratios to what it is compared with."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from castwise.analysis import steady_metrics, training_metrics
from castwise.analysis.speedup import (
    baselines_among,
    comparison_key,
    key_on_one_gpu,
    rate_estimate,
    speedup_estimate,
    step_estimate,
)
from castwise.analysis.statistics import Estimate, Verdict, estimate, verdict_of
from castwise.analysis.training_metrics import NO_TIME, PRECISION, run_comparison_key
from castwise.records.schema import Trial
from castwise.registry.precisions import AS_WRITTEN, BASELINE, BESIDE_FP8, DEFAULT, precision_row
from castwise.spec.grouping import grouped

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


@dataclass(frozen=True, eq=False)
class Row:
    """A result: one configuration's figures over all its processes, or a training run's, and their ratios.

    Its first trial has its `spec` and the `environment` of its machine; figures of a run's epochs are those of
    `castwise.analysis.training_metrics`.
    """

    trial: Trial  # the first, or the one that failed
    trials: tuple[Trial, ...]  # one for each process, or for each seed
    step_seconds: float | None = None  # the pseudomedian over blocks, the mean over processes; see `adjusted_to`
    spread: float | None = None  # the blocks' interquartile range over their median, in the median process
    throughput_estimate: Estimate | None = None  # units per second, of a run with its waits for data
    # The precision that it is compared with, if the ratio of their own throughputs contradicts the speed-up: one was in
    # rounds without the other, in which the machine had another pace. Step time and throughput are then that one's by
    # the speed-up, of the moments that they share: means adjusted for blocks, as in an incomplete block design.
    # Source: Cochran and Cox, Experimental Designs, 1957, chapter 9. Empty if they agree.
    adjusted_to: str = ""
    speedup_estimate: Estimate | None = None  # fp32's step time over this one's, of runs the wall time; > 1 is faster
    default_estimate: Estimate | None = None  # the same over PyTorch's default, if that was measured
    written_estimate: Estimate | None = None  # the same over the user's script as written
    bf16_estimate: Estimate | None = None  # the same over bf16-mixed, for FP8
    memory_estimate: Estimate | None = None  # peak allocated over the baseline's
    unpaired_speedup: float | None = None  # the ratio of the throughputs, each over all blocks, drift included
    # On the speed-up over the script as written, else over PyTorch's default, else over fp32; None for that one, for
    # runs, and if nothing was measured.
    verdict: Verdict | None = None
    loop_speedup: float | None = None  # over the same configuration without techniques, if that is among the trials
    # Throughput over world size times the throughput of the same configuration on one GPU, if that is among the
    # trials; 1 is ideal.
    scaling_efficiency: float | None = None
    scaling_estimate: Estimate | None = None  # the same with its interval
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    final_loss: float | None = None  # of the last timed step
    final_step: int | None = None  # its number, warm-up included
    skipped_steps: int = 0  # after warm-up, by loss scaling

    def __repr__(self) -> str:
        figures: list[str] = [self.trial.status]
        figures += [] if self.throughput is None else [f"{self.throughput:.4g} {steady_metrics.unit_of(self.trial)}/s"]
        figures += [] if self.speedup is None else [f"{self.speedup:.2f}× fp32"]
        return f"Row({self.trial.spec.label}: {', '.join(figures)})"

    @property
    def precision(self) -> str:
        return self.trial.spec.precision

    @property
    def batch_size(self) -> int:
        return self.trial.spec.batch_size

    @property
    def techniques(self) -> tuple[str, ...]:
        return self.trial.spec.techniques

    @property
    def throughput(self) -> float | None:
        return _value(self.throughput_estimate)

    @property
    def speedup(self) -> float | None:
        return _value(self.speedup_estimate)

    @property
    def default_speedup(self) -> float | None:
        return _value(self.default_estimate)

    @property
    def written_speedup(self) -> float | None:
        return _value(self.written_estimate)

    @property
    def bf16_speedup(self) -> float | None:
        return _value(self.bf16_estimate)

    @property
    def memory_ratio(self) -> float | None:
        return _value(self.memory_estimate)

    @property
    def driver_used_bytes(self) -> int | None:
        return steady_metrics.largest(map(training_metrics.driver_used_bytes, self.trials))

    def over(self, other: "Row", *, family: int = 1) -> Estimate | None:
        """Return how many times as fast it is as another row, whatever their loops; of runs seed by seed."""
        if other is self:
            return Estimate(1.0, 1.0, 1.0, len(self.trials))
        if self.trial.spec.kind == "steady":
            return speedup_estimate(other.trials, self.trials, family=family)
        baselines = {trial.spec.seed: trial for trial in other.trials}
        ratios = (training_metrics.speedup(baselines.get(trial.spec.seed), trial) for trial in self.trials)
        return estimate([ratio for ratio in ratios if ratio], family=family)


def _value(found: Estimate | None) -> float | None:
    return None if found is None else found.value


def group_of(trial: Trial) -> tuple[str, str]:
    """Return what trials must share for a speed-up between them to mean something: all but precision and scale."""
    return (trial.environment.fingerprint, trial.spec.comparison)


def rows_of_steps(trials: Sequence[Trial], margin: float = MARGIN) -> list[Row]:
    """Return a row for each configuration, in the order of their first trials.

    Each is compared with fp32 and with PyTorch's default in the same group, if they ended `ok`; FP8 with bf16-mixed,
    too, and a script with itself as written. A speed-up within the margin around 1 is "the same".
    """
    configurations = grouped(trials, lambda trial: (trial.environment.fingerprint, trial.spec.configuration))
    references_of = {key: _references(group) for key, group in grouped(trials, group_of).items()}
    # Keys are costly for ten thousand trials: they are computed only if something is compared by them.
    single = [trial for trial in trials if trial.spec.num_gpus == 1 and trial.status == "ok"]
    on_one_gpu = grouped(single if any(trial.spec.num_gpus > 1 for trial in trials) else (), key_on_one_gpu)
    plain = [trial for trial in trials if not trial.spec.techniques and trial.status == "ok"]
    in_plain_loop = _by_key(plain if any(trial.spec.techniques for trial in trials) else (), "techniques")
    rows = []
    for own in configurations.values():
        spec, loop_speedup, efficiency, scaling = own[0].spec, None, None, None
        baselines = (references[BASELINE] for references in references_of.values())
        row = _row(own, references_of[group_of(own[0])], baselines, margin)
        if spec.techniques:
            loop_speedup = speedup_estimate(in_plain_loop.get(comparison_key(own[0], "techniques"), []), own)
        if spec.num_gpus > 1 and row.throughput is not None:
            alone = on_one_gpu.get(key_on_one_gpu(own[0]), [])
            rate = rate_estimate(alone, step_estimate(alone))
            efficiency = None if rate is None else row.throughput / (rate.value * spec.num_gpus)
            if efficiency is not None and (ratio := speedup_estimate(alone, own)) is not None:  # of times of a step
                over = efficiency / ratio.value
                scaling = Estimate(efficiency, over * ratio.low, over * ratio.high, ratio.n)
        row = replace(row, loop_speedup=_value(loop_speedup), scaling_efficiency=efficiency)
        rows.append(replace(row, scaling_estimate=scaling))
    return rows


def _row(own: list[Trial], references: dict[str, list[Trial]], baselines: Iterable[list[Trial]], margin: float) -> Row:
    """Return a configuration's row; `baselines` are those of all groups, read if it has none of its own."""
    first, step = own[0], step_estimate(own)
    if not _is_beside_fp8(first):
        references = references | {BESIDE_FP8: []}
    baseline_step = step_estimate(references[BASELINE])
    reference = next((name for name, each in references.items() if each), BASELINE)
    over = {name: _speedup(each, own) for name, each in references.items()}
    step, is_adjusted = _adjusted(step, step_estimate(references[reference]), over[reference])
    verdict = None
    if step is not None and first.spec.precision != reference:
        decisive = over[reference]
        verdict = verdict_of(decisive, margin) if decisive is not None else _incomparable(first, baselines)
    spreads = [spread for trial in own if (spread := steady_metrics.spread(trial)) is not None]
    shown = next((trial for trial in own if trial.status not in ("ok", "diverged")), first)
    loss, loss_step = steady_metrics.final_loss(shown) or (None, None)
    return Row(
        trial=shown,
        trials=tuple(own),
        step_seconds=_value(step),
        spread=statistics.median(spreads) if spreads else None,
        throughput_estimate=rate_estimate(references[reference] if is_adjusted else own, step),
        adjusted_to=reference if is_adjusted else "",
        speedup_estimate=over[BASELINE],
        default_estimate=over[DEFAULT],
        written_estimate=over[AS_WRITTEN],
        bf16_estimate=over[BESIDE_FP8],
        memory_estimate=estimate(_memory_ratios(own, references[BASELINE])),
        unpaired_speedup=baseline_step.value / step.value if baseline_step and step else None,
        verdict=verdict,
        peak_allocated_bytes=steady_metrics.largest(map(steady_metrics.peak_allocated_bytes, own)),
        peak_reserved_bytes=steady_metrics.largest(map(steady_metrics.peak_reserved_bytes, own)),
        final_loss=loss,
        final_step=loss_step,
        skipped_steps=sum(map(steady_metrics.skipped_steps, own)),
    )


def rows_of_runs(trials: Sequence[Trial]) -> list[Row]:
    """Return a row for each training run, in order, compared with fp32's run of the same loop, data and seed."""
    baselines: dict[tuple[str, str], Trial] = {}
    singles: dict[tuple[str, str], Trial] = {}
    for trial in trials:
        if trial.status == "ok" and trial.spec.precision == BASELINE:
            baselines.setdefault(run_comparison_key(trial, *PRECISION), trial)
        if trial.status == "ok" and trial.spec.world_size == 1:
            singles.setdefault(key_on_one_gpu(trial, recipe=NO_TIME), trial)
    rows = []
    for trial in trials:
        baseline = baselines.get(run_comparison_key(trial, *PRECISION))
        single = singles.get(key_on_one_gpu(trial, recipe=NO_TIME))
        rate, efficiency = training_metrics.throughput(trial), None
        if single is not None and trial.spec.world_size > 1 and rate and (alone := training_metrics.throughput(single)):
            efficiency = rate / (alone * trial.spec.world_size)
        row = Row(
            trial=trial,
            trials=(trial,),
            throughput_estimate=_of_one(rate),
            speedup_estimate=_of_one(training_metrics.speedup(baseline, trial)),
            unpaired_speedup=training_metrics.throughput_ratio(baseline, trial),
            scaling_efficiency=efficiency,
            peak_allocated_bytes=steady_metrics.peak_allocated_bytes(trial),
            peak_reserved_bytes=steady_metrics.peak_reserved_bytes(trial),
            skipped_steps=sum(epoch.skipped_steps for epoch in training_metrics.epochs_of(trial)),
        )
        rows.append(row)
    return rows


def over_seeds(runs: Sequence[Row]) -> Row:
    """Return runs that differ in their seed as one: that of the first seed that ended well, with the means of all."""
    ended = [run for run in runs if run.trial.status == "ok"]
    if len(ended) < 2:
        return (ended or runs)[0]
    return replace(
        ended[0],
        trials=tuple(run.trial for run in ended),
        throughput_estimate=estimate([run.throughput for run in ended if run.throughput is not None]),
        speedup_estimate=estimate([run.speedup for run in ended if run.speedup is not None]),
        peak_allocated_bytes=steady_metrics.largest(run.peak_allocated_bytes for run in ended),
        peak_reserved_bytes=steady_metrics.largest(run.peak_reserved_bytes for run in ended),
    )


def _of_one(value: float | None) -> Estimate | None:
    """Return a figure of one run, which has no interval."""
    return None if value is None else Estimate(value, math.nan, math.nan, 1)


def _by_key(trials: Iterable[Trial], *without: str) -> dict[tuple[str, str], list[Trial]]:
    return grouped(trials, lambda trial: comparison_key(trial, *without))


def _adjusted(step: Estimate | None, base: Estimate | None, speedup: Estimate | None) -> tuple[Estimate | None, bool]:
    """Return a step time, and whether it is the reference's by the speed-up, which its own contradicts."""
    if not step or not base or not speedup:
        return step, False
    if abs(base.value / step.value / speedup.value - 1) <= _CONTRADICTION:
        return step, False
    low, high = base.low / speedup.high, base.high / speedup.low
    return Estimate(base.value / speedup.value, low, high, speedup.n), True


def _references(group: Sequence[Trial]) -> dict[str, list[Trial]]:
    """Return what a group is compared with, by precision: the first that was measured is what a verdict is on."""
    found = {name: baselines_among(group, name) for name in (AS_WRITTEN, DEFAULT, BASELINE)}
    has_fp8 = any(trial.spec.precision != BESIDE_FP8 and _is_beside_fp8(trial) for trial in group)
    return found | {BESIDE_FP8: baselines_among(group, BESIDE_FP8) if has_fp8 else []}


def _is_beside_fp8(trial: Trial) -> bool:
    return trial.spec.precision == BESIDE_FP8 or bool(precision_row(trial.spec.precision).float8_recipe)


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
    peaks = ((steady_metrics.peak_allocated_bytes(trial), by_repeat.get(trial.spec.repeat)) for trial in trials)
    return [peak / base for peak, own_base in peaks if peak and (base := own_base or first)]


def _incomparable(trial: Trial, baselines: Iterable[list[Trial]]) -> Verdict | None:
    """Return in which fields the most similar float32 configuration differs; None if there is no float32 at all."""
    firsts = [group[0] for group in baselines if group]
    # Among thousands the most similar is likely of the same workload, and a few of those suffice.
    firsts = [first for first in firsts if first.spec.workload == trial.spec.workload] or firsts
    found = [_differences(trial, baseline) for baseline in firsts[:_MOST_BASELINES]]
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
