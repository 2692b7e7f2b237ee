"""Compare a suite's published figures with what was measured of the same configurations."""

from collections.abc import Sequence
from dataclasses import dataclass

from castwise.analysis import training_metrics
from castwise.records.schema import Trial
from castwise.registry.datasets import imitated_data_set
from castwise.registry.precisions import BASELINE, find_precision
from castwise.registry.published import baseline_of, is_figure_of
from castwise.registry.suites import Published, Suite
from castwise.registry.workloads import find_workload
from castwise.spec.trial import TrialSpec


@dataclass(frozen=True)
class PublishedComparison:
    """One published figure and what was measured of the same cell.

    Attributes:
        published: The source's figure.
        published_speedup: Over the source's float32 run, at the batch it had.
        trials: The measured trials of the cell, one a seed; empty where it was not run.
        speedup: Measured, over float32 at the batch of the source's float32 run.
        equal_batch_speedup: Measured, over float32 at the same batch.
        ratio: The measured speed-up over the published one.
        accuracies: Published and measured accuracy after as many epochs; None where either is missing, or where
            the measured one is of random samples or began with random weights.
        num_epochs: Epochs after which those are.
    """

    published: Published
    published_speedup: float | None
    trials: tuple[Trial, ...]
    speedup: float | None
    equal_batch_speedup: float | None
    ratio: float | None
    accuracies: tuple[float, float] | None
    num_epochs: int | None


def compare_with_published(suite: Suite, trials: Sequence[Trial]) -> list[PublishedComparison]:
    """Return a row for each published figure, in the order of the suite."""
    return [_compare(suite, figure, trials) for figure in suite.published]


def published_pairs(suite: Suite, trials: Sequence[Trial]) -> dict[str, float]:
    """Return each trial's speed-up over float32 at the batch the source paired it with, by the trial's key.

    Trials whose pair has one and the same batch are left out: theirs is the ordinary speed-up.
    """
    pairs = {}
    for trial in trials:
        batch = _baseline_batch(suite, trial.spec)
        if trial.spec.precision == BASELINE or batch in (None, trial.spec.batch_size):
            continue
        value = training_metrics.median_speedup(_with_baselines([trial], trials, batch))
        if value is not None:
            pairs[trial.spec.key] = value
    return pairs


def _compare(suite: Suite, figure: Published, trials: Sequence[Trial]) -> PublishedComparison:
    same = tuple(trial for trial in trials if is_figure_of(figure, trial.spec))
    baseline = baseline_of(suite, figure)
    published_speedup = _published_speedup(baseline, figure)
    speedup = equal = None
    if figure.precision != BASELINE:
        batch_size = baseline.batch_size if baseline else figure.batch_size
        speedup = training_metrics.median_speedup(_with_baselines(same, trials, batch_size))
        equal = training_metrics.median_speedup(_with_baselines(same, trials, figure.batch_size))
    ratio = speedup / published_speedup if speedup and published_speedup else None
    num_epochs, accuracies = _accuracies(figure, same)
    return PublishedComparison(
        published=figure,
        published_speedup=published_speedup,
        trials=same,
        speedup=speedup,
        equal_batch_speedup=equal,
        ratio=ratio,
        accuracies=accuracies,
        num_epochs=num_epochs,
    )


def _baseline_batch(suite: Suite, spec: TrialSpec) -> int | None:
    """Return the batch of the float32 run that the source set beside a run like this; None where nobody knows."""
    published = [
        figure.batch_size
        for figure in suite.published
        if (figure.workload, figure.world_size) == (spec.workload, spec.world_size)
        and figure.precision == BASELINE
        and figure.outcome == "ok"
    ]
    if published:
        return max((batch for batch in published if batch <= spec.batch_size), default=None)
    # Without published numbers it is the first that the plan names, unless the precision has that batch too.
    first = next(iter(_planned_batches(suite, spec.workload, BASELINE)), None)
    return None if first in _planned_batches(suite, spec.workload, spec.precision) else first


def _planned_batches(suite: Suite, workload: str, precision: str) -> list[int]:
    return [
        batch
        for cells in suite.cells
        if workload in (find_workload(name).name for name in cells.workloads)
        and precision in (find_precision(name).name for name in cells.precisions)
        for batch in cells.batch_sizes
    ]


def _with_baselines(
    chosen: Sequence[Trial], trials: Sequence[Trial], batch_size: int | None
) -> list[tuple[Trial, Trial]]:
    """Return those of the chosen runs that have a float32 run of this batch, each behind that run."""
    fields = (*training_metrics.PRECISION, "batch_size")
    baselines: dict[tuple[object, ...], Trial] = {}
    for trial in trials:
        if (trial.status, trial.spec.precision, trial.spec.batch_size) == ("ok", BASELINE, batch_size):
            baselines.setdefault(training_metrics.run_comparison_key(trial, *fields), trial)
    paired = ((baselines.get(training_metrics.run_comparison_key(trial, *fields)), trial) for trial in chosen)
    return [(baseline, trial) for baseline, trial in paired if baseline is not None]


def _published_speedup(baseline: Published | None, figure: Published) -> float | None:
    if baseline is None or baseline.seconds is None or figure.seconds is None:
        return None
    return baseline.seconds / figure.seconds


def _accuracies(figure: Published, trials: Sequence[Trial]) -> tuple[int | None, tuple[float, float] | None]:
    """Return published and measured accuracy after as many epochs, and that number.

    Of whole runs both are of the epoch with the lowest validation loss, as the source selects it.
    """
    ended = [trial for trial in trials if _has_comparable_accuracy(trial)]
    num_epochs = max((len(training_metrics.epochs_of(trial)) for trial in ended), default=0)
    ended = [trial for trial in ended if len(training_metrics.epochs_of(trial)) == num_epochs]
    if not ended:
        return None, None
    whole = [trial for trial in ended if training_metrics.is_whole(trial)]
    if whole and figure.accuracy is not None:
        measured = training_metrics.median(
            value for trial in whole if (value := training_metrics.best_accuracy(trial)) is not None
        )
        return num_epochs, None if measured is None else (figure.accuracy, measured)
    cut = any(epoch.shortened for trial in ended for epoch in training_metrics.epochs_of(trial))
    if cut or num_epochs > len(figure.epoch_accuracy):
        return None, None
    last = training_metrics.median(
        value for trial in ended if (value := training_metrics.epochs_of(trial)[-1].accuracy) is not None
    )
    return num_epochs, None if last is None else (figure.epoch_accuracy[num_epochs - 1], last)


def _has_comparable_accuracy(trial: Trial) -> bool:
    epochs = training_metrics.epochs_of(trial)
    if not epochs or epochs[-1].accuracy is None or imitated_data_set(trial.spec.data_set) is not None:
        return False
    return find_workload(trial.spec.workload).pretrained is None or trial.spec.weights is not None
