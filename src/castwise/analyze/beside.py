"""Set a suite's published figures beside what was measured, cell by cell."""

from collections.abc import Sequence
from dataclasses import dataclass

from castwise.analyze import runs
from castwise.analyze.reasons import Pair, explain
from castwise.loss_scales import parse_loss_scale
from castwise.precisions import BASELINE, find_precision
from castwise.record import Trial
from castwise.suite import Published, Suite
from castwise.workloads import find_workload


@dataclass(frozen=True)
class Beside:
    """One published figure and what was measured of the same cell.

    Attributes:
        published: The source's figure.
        published_speedup: Over the source's float32 run, at the batch it had.
        trials: The measured trials of the cell, one a seed; empty where it was not run.
        speedup: Measured, over float32 at the batch of the source's float32 run.
        equal_batch_speedup: Measured, over float32 at the same batch.
        ratio: The measured speed-up over the published one.
        accuracies: Published and measured accuracy after as many epochs; None where either is missing.
        num_epochs: Epochs after which those are.
        reason: Why the two speed-ups differ, in a sentence, as far as measurements tell.
    """

    published: Published
    published_speedup: float | None
    trials: tuple[Trial, ...]
    speedup: float | None
    equal_batch_speedup: float | None
    ratio: float | None
    accuracies: tuple[float, float] | None
    num_epochs: int | None
    reason: str


def set_beside(suite: Suite, trials: Sequence[Trial]) -> list[Beside]:
    """Return a row for each published figure, in the order of the suite."""
    return [_beside(suite, figure, trials) for figure in suite.published]


def published_pairs(suite: Suite, trials: Sequence[Trial]) -> dict[str, float]:
    """Return each trial's speed-up over float32 at the batch the source paired it with, by the trial's key.

    Trials whose pair has one and the same batch are left out: theirs is the ordinary speed-up.
    """
    pairs = {}
    for trial in trials:
        spec = trial.spec
        batch = _baseline_batch(suite, spec.workload, spec.batch_size)
        if spec.precision == BASELINE or batch in (None, spec.batch_size):
            continue
        baseline = next((other for other in trials if _is_baseline(other, trial, batch)), None)
        value = runs.speedup(baseline, trial)
        if value is not None:
            pairs[spec.key] = value
    return pairs


def _beside(suite: Suite, figure: Published, trials: Sequence[Trial]) -> Beside:
    same = tuple(trial for trial in trials if _matches(figure, trial))
    baseline = _published_baseline(suite, figure)
    published_speedup = _published_speedup(baseline, figure)
    if figure.precision == BASELINE:
        speedup = equal = None
        baselines: list[Trial] = []
    else:
        batch = baseline.batch_size if baseline else _baseline_batch(suite, figure.workload, figure.batch_size)
        baselines = [t for trial in same for t in trials if _is_baseline(t, trial, batch)]
        equals = [t for trial in same for t in trials if _is_baseline(t, trial, figure.batch_size)]
        speedup, equal = runs.median_speedup(baselines, same), runs.median_speedup(equals, same)
    ratio = speedup / published_speedup if speedup and published_speedup else None
    pair = Pair(
        published_gpu=figure.gpu,
        published_device=suite.gpus.get(figure.gpu, figure.gpu),
        published_outcome=figure.outcome,
        published_speedup=published_speedup,
        speedup=speedup,
        equal_batch_speedup=equal,
        trial=same[0] if same else None,
        baseline=baselines[0] if baselines else None,
    )
    num_epochs, accuracies = _accuracies(figure, same)
    return Beside(
        published=figure,
        published_speedup=published_speedup,
        trials=same,
        speedup=speedup,
        equal_batch_speedup=equal,
        ratio=ratio,
        accuracies=accuracies,
        num_epochs=num_epochs,
        reason=explain(pair),
    )


def _matches(figure: Published, trial: Trial) -> bool:
    spec = trial.spec
    return (
        find_workload(figure.workload).name == spec.workload
        and find_precision(figure.precision).name == spec.precision
        and figure.batch_size == spec.batch_size
        and figure.world_size == spec.world_size
        and (figure.loss_scale is None or parse_loss_scale(figure.loss_scale) == spec.loss_scale)
    )


def _published_baseline(suite: Suite, figure: Published) -> Published | None:
    """Return the source's float32 run for a figure: at its batch, or else at the largest below that ended well."""
    if figure.precision == BASELINE:
        return None
    candidates = [
        other
        for other in suite.published
        if (other.gpu, other.workload, other.world_size) == (figure.gpu, figure.workload, figure.world_size)
        and other.precision == BASELINE
        and other.outcome == "ok"
        and other.batch_size <= figure.batch_size
    ]
    return max(candidates, key=lambda other: other.batch_size, default=None)


def _baseline_batch(suite: Suite, workload: str, batch_size: int) -> int | None:
    """Return the batch of the float32 run that the source set beside a run of this batch."""
    published = [f.batch_size for f in suite.published if (f.workload, f.precision) == (workload, BASELINE)]
    fitting = [f for f in published if f <= batch_size]
    if fitting:
        return max(fitting)
    # Without published numbers it is the first that the plan names.
    for cells in suite.cells:
        if workload in cells.workloads and BASELINE in (find_precision(name).name for name in cells.precisions):
            return cells.batch_sizes[0]
    return None


def _is_baseline(candidate: Trial, trial: Trial, batch_size: int | None) -> bool:
    ignored = {"precision", "loss_scale", "batch_size", "recipe"}
    return (
        candidate.status == "ok"
        and candidate.spec.precision == BASELINE
        and candidate.spec.batch_size == batch_size
        and candidate.environment.fingerprint == trial.environment.fingerprint
        and candidate.spec.model_dump(exclude=ignored) == trial.spec.model_dump(exclude=ignored)
    )


def _published_speedup(baseline: Published | None, figure: Published) -> float | None:
    if baseline is None or baseline.seconds is None or figure.seconds is None:
        return None
    return baseline.seconds / figure.seconds


def _accuracies(figure: Published, trials: Sequence[Trial]) -> tuple[int | None, tuple[float, float] | None]:
    """Return published and measured accuracy after as many epochs, and that number.

    Of whole runs both are of the epoch with the lowest validation loss, as the source selects it.
    """
    ended = [trial for trial in trials if runs.epochs_of(trial) and runs.epochs_of(trial)[-1].accuracy is not None]
    if not ended:
        return None, None
    num_epochs = len(runs.epochs_of(ended[0]))
    if runs.is_whole(ended[0]) and figure.accuracy is not None:
        measured = runs.median(value for trial in ended if (value := runs.best_accuracy(trial)) is not None)
        return num_epochs, None if measured is None else (figure.accuracy, measured)
    cut = any(epoch.shortened for epoch in runs.epochs_of(ended[0]))
    if cut or num_epochs > len(figure.epoch_accuracy):
        return None, None
    last = runs.median(value for trial in ended if (value := runs.epochs_of(trial)[-1].accuracy) is not None)
    return num_epochs, None if last is None else (figure.epoch_accuracy[num_epochs - 1], last)
