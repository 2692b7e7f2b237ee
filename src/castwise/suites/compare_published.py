"""Compare a suite's published figures with what was measured of the same configurations."""

from collections import Counter
from collections.abc import Sequence

from castwise.analysis.steady_metrics import largest, peak_allocated_bytes, peak_reserved_bytes
from castwise.analysis.training_metrics import (
    best_accuracy,
    driver_used_bytes,
    epochs_of,
    is_whole,
    length_in_words,
    median,
    median_speedup,
    run_comparison_key,
    split,
)
from castwise.records.schema import Trial
from castwise.registry.datasets import imitated_data_set
from castwise.registry.precisions import BASELINE, find_precision
from castwise.registry.published import baseline_of, is_figure_of
from castwise.registry.suites import Published, Suite
from castwise.registry.workloads import find_workload
from castwise.show.fields import FlatRow
from castwise.spec.trial import TrialSpec

_PEAKS = {"allocated": peak_allocated_bytes, "reserved": peak_reserved_bytes, "driver": driver_used_bytes}


def compare_with_published(suite: Suite, trials: Sequence[Trial]) -> list[FlatRow]:
    """Return each published figure and what was measured of the same configuration, in the order of the suite.

    The rows also have the source's `gpu` and the measured `trials`, one per seed. `speedup` is over float32
    at the batch of the source's float32 run, `equal_batch_speedup` over float32 at the same batch.
    """
    rows = []
    for figure in suite.published:
        measured = tuple(trial for trial in trials if is_figure_of(figure, trial.spec))
        baseline = baseline_of(suite, figure)
        published_speedup = speedup = equal_batch_speedup = None
        if baseline is not None and baseline.seconds is not None and figure.seconds is not None:
            published_speedup = baseline.seconds / figure.seconds
        if figure.precision != BASELINE:
            batch_size = baseline.batch_size if baseline else figure.batch_size
            speedup = median_speedup(_with_baselines(measured, trials, batch_size))
            equal_batch_speedup = median_speedup(_with_baselines(measured, trials, figure.batch_size))
        published_accuracy, accuracy, num_epochs = _accuracies(figure, measured) or (figure.accuracy, None, 0)
        whole = [trial for trial in measured if is_whole(trial)]  # times of runs cut short say nothing
        row: FlatRow = {
            "gpu": figure.gpu,
            "trials": measured,
            "workload": figure.workload,
            "precision": figure.precision,
            "loss_scale": figure.loss_scale,
            "batch_size": figure.batch_size,
            "published_seconds": figure.seconds,
            "published_outcome": figure.outcome,
            "measured": _lengths(measured),
            "seconds": median(parts.total for trial in whole if (parts := split(trial)) is not None),
            "published_speedup": published_speedup,
            "speedup": speedup,
            "ratio": speedup / published_speedup if speedup and published_speedup else None,
            "equal_batch_speedup": equal_batch_speedup,
            "published_memory_bytes": figure.memory_bytes,
            "memory_bytes": largest(map(_PEAKS[figure.memory], measured)) if figure.memory_bytes else None,
            "memory": figure.memory if figure.memory_bytes else None,
            "published_accuracy": published_accuracy,
            "accuracy": accuracy,
            "accuracy_after": f"epoch {num_epochs}" if num_epochs and not whole else None,
        }
        rows.append(row)
    return rows


def _lengths(trials: Sequence[Trial]) -> str | None:
    """Return how long runs were: `whole`, or `whole, 2 seeds; oom, 1 seed`."""
    lengths: Counter[str] = Counter()
    for trial in trials:
        length = "whole" if is_whole(trial) else length_in_words(trial) or "–"
        if not is_whole(trial) and trial.status != "ok":
            length = f"{trial.status} after {length}" if trial.ranks else trial.status
        lengths[length] += 1
    if len(trials) < 2:
        return next(iter(lengths), None)
    return "; ".join(f"{length}, {count} seed{'s' if count > 1 else ''}" for length, count in lengths.items())


def published_pairs(suite: Suite, trials: Sequence[Trial]) -> dict[str, float]:
    """Return each trial's speed-up over float32 at the batch the source paired it with, by the trial's key.

    Trials whose pair has the same batch are left out: theirs is the ordinary speed-up.
    """
    pairs = {}
    for trial in trials:
        batch = _baseline_batch(suite, trial.spec)
        if trial.spec.precision == BASELINE or batch in (None, trial.spec.batch_size):
            continue
        value = median_speedup(_with_baselines([trial], trials, batch))
        if value is not None:
            pairs[trial.spec.key] = value
    return pairs


def _baseline_batch(suite: Suite, spec: TrialSpec) -> int | None:
    """Return the batch of the float32 run that the source compares a run like this with; None if nobody knows."""
    published = [
        figure.batch_size
        for figure in suite.published
        if (figure.workload, figure.world_size) == (spec.workload, spec.world_size)
        and figure.precision == BASELINE
        and figure.outcome == "ok"
    ]
    if published:
        return max((batch for batch in published if batch <= spec.batch_size), default=None)

    def planned(precision: str) -> list[int]:
        return [
            batch
            for cells in suite.cells
            if spec.workload in (find_workload(name).name for name in cells.workloads)
            and precision in (find_precision(name).name for name in cells.precisions)
            for batch in cells.batch_sizes
        ]

    # Without published figures it is the first batch that the plan names, unless the precision has that batch too.
    first = next(iter(planned(BASELINE)), None)
    return None if first in planned(spec.precision) else first


def _with_baselines(
    chosen: Sequence[Trial], trials: Sequence[Trial], batch_size: int | None
) -> list[tuple[Trial, Trial]]:
    """Return pairs of a float32 run of this batch and a chosen run; runs without such a float32 run are left out."""

    def key(trial: Trial) -> tuple[object, ...]:
        return run_comparison_key(trial, "precision", "loss_scale", "batch_size")

    baselines: dict[tuple[object, ...], Trial] = {}
    for trial in trials:
        if (trial.status, trial.spec.precision, trial.spec.batch_size) == ("ok", BASELINE, batch_size):
            baselines.setdefault(key(trial), trial)
    return [(baselines[key(trial)], trial) for trial in chosen if key(trial) in baselines]


def _accuracies(figure: Published, trials: Sequence[Trial]) -> tuple[float, float, int] | None:
    """Return published and measured accuracy after as many epochs, and that number.

    For whole runs both are those of the epoch with the lowest validation loss, as the source selects it. Runs on random
    samples, and from random weights in place of pretrained ones, have none.
    """
    comparable = [trial for trial in trials if _has_comparable_accuracy(trial)]
    num_epochs = max((len(epochs_of(trial)) for trial in comparable), default=0)
    comparable = [trial for trial in comparable if len(epochs_of(trial)) == num_epochs]
    whole = [trial for trial in comparable if is_whole(trial)]
    if whole and figure.accuracy is not None:
        published, accuracies = figure.accuracy, [best_accuracy(trial) for trial in whole]
    else:
        cut_short = any(epoch.shortened for trial in comparable for epoch in epochs_of(trial))
        if not comparable or cut_short or num_epochs > len(figure.epoch_accuracy):
            return None
        published = figure.epoch_accuracy[num_epochs - 1]
        accuracies = [epochs_of(trial)[-1].accuracy for trial in comparable]
    measured = median(value for value in accuracies if value is not None)
    return None if measured is None else (published, measured, num_epochs)


def _has_comparable_accuracy(trial: Trial) -> bool:
    epochs = epochs_of(trial)
    if not epochs or epochs[-1].accuracy is None or imitated_data_set(trial.spec.data_set) is not None:
        return False
    return find_workload(trial.spec.workload).pretrained is None or trial.spec.weights is not None
