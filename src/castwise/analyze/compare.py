"""Set the trials of a job beside their baseline."""

from collections.abc import Sequence
from dataclasses import dataclass

from castwise.analyze import metrics
from castwise.precisions import BASELINE
from castwise.record import Trial


@dataclass(frozen=True)
class Row:
    """One trial's figures, and what they are relative to the baseline.

    Attributes:
        trial: The trial.
        throughput: Units per second.
        spread: The blocks' interquartile range over their median.
        step_seconds: Median seconds per step.
        speedup: Baseline step time over this one's; above 1 is faster. None without a baseline.
        scaling_efficiency: Throughput over world size times the throughput of the same cell on one GPU; 1 is ideal.
            None on one GPU, and where that cell is not among the trials.
        peak_allocated_bytes: Peak of what tensors held.
        peak_reserved_bytes: Peak of what the allocator held.
        memory_ratio: Peak allocated over the baseline's.
        final_loss: The last timed step's loss.
        final_step: The number of that step, warm-up counted.
        skipped_steps: Timed steps that loss scaling skipped.
    """

    trial: Trial
    throughput: float | None
    spread: float | None
    step_seconds: float | None
    speedup: float | None
    scaling_efficiency: float | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    memory_ratio: float | None
    final_loss: float | None
    final_step: int | None
    skipped_steps: int


def group_of(trial: Trial) -> tuple[object, ...]:
    """Return what trials must share for a speed-up between them to mean something: all but precision and scale."""
    return _group_but(trial, {"precision", "loss_scale", "repeat"})


def _group_but(trial: Trial, fields: set[str]) -> tuple[object, ...]:
    spec = trial.spec.model_dump(exclude=fields)
    return (trial.environment.fingerprint, *(repr(value) for value in spec.values()))


def _cell_of(trial: Trial) -> tuple[object, ...]:
    """Return what trials must share for a scaling efficiency to mean something: all but how many GPUs, and how.

    The batch size is a GPU's, so this is weak scaling.
    """
    return _group_but(trial, {"world_size", "parallelism", "repeat"})


def compare(trials: Sequence[Trial]) -> list[Row]:
    """Return a row for each trial, in order, relative to the first fp32 trial of its group.

    A baseline that did not end `ok` gives no ratios.
    """
    baselines: dict[tuple[object, ...], Trial] = {}
    alone: dict[tuple[object, ...], Trial] = {}
    for trial in trials:
        if trial.spec.precision == BASELINE and trial.status == "ok":
            baselines.setdefault(group_of(trial), trial)
        if trial.spec.world_size == 1 and trial.status == "ok":
            alone.setdefault(_cell_of(trial), trial)
    return [_row(trial, baselines.get(group_of(trial)), alone.get(_cell_of(trial))) for trial in trials]


def _row(trial: Trial, baseline: Trial | None, alone: Trial | None) -> Row:
    loss = metrics.final_loss(trial)
    seconds, peak = metrics.step_seconds(trial), metrics.peak_allocated_bytes(trial)
    return Row(
        trial=trial,
        throughput=metrics.throughput(trial),
        spread=metrics.spread(trial),
        step_seconds=seconds,
        speedup=_ratio(metrics.step_seconds(baseline), seconds) if baseline else None,
        scaling_efficiency=_scaling_efficiency(trial, alone),
        peak_allocated_bytes=peak,
        peak_reserved_bytes=metrics.peak_reserved_bytes(trial),
        memory_ratio=_ratio(peak, metrics.peak_allocated_bytes(baseline)) if baseline else None,
        final_loss=loss[0] if loss else None,
        final_step=loss[1] if loss else None,
        skipped_steps=metrics.skipped_steps(trial),
    )


def _scaling_efficiency(trial: Trial, alone: Trial | None) -> float | None:
    if alone is None or trial.spec.world_size == 1:
        return None
    gain = _ratio(metrics.throughput(trial), metrics.throughput(alone))
    return None if gain is None else gain / trial.spec.world_size


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None
