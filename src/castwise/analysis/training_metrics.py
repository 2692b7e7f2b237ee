"""Figures of training runs, computed from their raw epochs."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from castwise.analysis import steady_metrics
from castwise.analysis.speedup import comparison_key
from castwise.records.schema import Epoch, Trial

# The fields of a spec that a comparison of precisions is about.
PRECISION = ("precision", "loss_scale")
# What of a recipe changes weights and not times: fastai's float32 run of ResNet-18 has other learning rates than its
# float16 run. A run that ends after fewer whole epochs has the throughput of the longer one.
NO_TIME: dict[str, Any] = {
    "stop_after": True,
    "validate_at_end": True,
    "group_rates": True,
    "first_cycle_rates": True,
    "optimizer": {"arguments": {"lr": True}},
}


@dataclass(frozen=True)
class Split:
    """How the wall time of a run's counted epochs divides, in seconds."""

    start: float  # the first step, which loads libraries, searches algorithms and compiles
    data: float  # waiting for batches; 0 if the record does not separate it from waiting for the device
    train: float  # the other steps, batches brought to the device included
    validation: float

    @property
    def total(self) -> float:
        return self.start + self.data + self.train + self.validation


def run_comparison_key(trial: Trial, *fields: str) -> tuple[str, str]:
    """Return what runs share whose times can be compared: all but these fields of a spec, learning rates and epochs."""
    return comparison_key(trial, *fields, recipe=NO_TIME)


def epochs_of(trial: Trial) -> tuple[Epoch, ...]:
    """Return the epochs of a run: the first process's, since processes of one step wait for each other."""
    return trial.ranks[0].epochs if trial.ranks else ()


def split(trial: Trial) -> Split | None:
    """Return how the time of a run's counted epochs divides, None if no epoch ended."""
    epochs = _counted(epochs_of(trial), trial)
    if not epochs:
        return None
    start = sum(epoch.first_step_seconds or 0.0 for epoch in epochs)
    data = sum(epoch.data_seconds for epoch in epochs) if _separates_waits(trial, epochs) else 0.0
    train = sum(epoch.seconds for epoch in epochs) - start - data
    return Split(start, data, train, sum(epoch.validation_seconds for epoch in epochs))


def data_share(trial: Trial) -> float | None:
    """Return the share of waiting for batches in the training time without the first step; None if not known."""
    parts = split(trial)
    if parts is None or parts.data + parts.train <= 0 or not _separates_waits(trial, epochs_of(trial)):
        return None
    return parts.data / (parts.data + parts.train)


def _separates_waits(trial: Trial, epochs: Iterable[Epoch]) -> bool:
    """Return whether a run's record separates waiting for data from waiting for the device.

    Older records count a batch's copy to the device as waiting for data, and the copy waits for the steps in flight;
    none are in flight if the loss is read after each step.
    """
    reads_loss = trial.spec.recipe is not None and trial.spec.recipe.read_loss_every_step
    return reads_loss or all(epoch.placing_seconds is not None for epoch in epochs)


def throughput(trial: Trial) -> float | None:
    """Return units per second of all processes together: samples over elapsed time, never a mean of rates."""
    if trial.facts is None or not epochs_of(trial) or trial.spec.recipe is None:
        return None
    epochs = _counted(epochs_of(trial), trial)
    of_ranks = [epoch for rank in trial.ranks for epoch in _counted(rank.epochs, trial)]
    samples = sum(epoch.counted_samples for epoch in of_ranks)
    seconds = sum(epoch.counted_seconds for epoch in epochs)
    if not samples:  # cut short before the first batch that counts: then all do
        samples = sum(epoch.num_samples for epoch in of_ranks)
        seconds = sum(epoch.seconds for epoch in epochs)
    return samples * trial.facts.units_per_sample / seconds if seconds > 0 and samples else None


def _counted(epochs: tuple[Epoch, ...], trial: Trial) -> tuple[Epoch, ...]:
    """Return the epochs that the recipe counts, or all of them if the run did not get as far as the first of those."""
    skipped = trial.spec.recipe.skip_epochs if trial.spec.recipe is not None else 0
    return epochs[skipped:] or epochs


def is_whole(trial: Trial) -> bool:
    """Return whether a run ended well and did all epochs and steps that its source's did."""
    recipe, epochs = trial.spec.recipe, epochs_of(trial)
    all_done = recipe is not None and len(epochs) == recipe.epochs and not any(epoch.shortened for epoch in epochs)
    return trial.status == "ok" and all_done


def epoch_seconds(trial: Trial) -> float | None:
    """Return the median seconds of the epochs after the first, which compiles; validation included.

    None if there is no second one, or one was cut short.
    """
    epochs = epochs_of(trial)
    if any(epoch.shortened for epoch in epochs):
        return None
    return median(epoch.seconds + epoch.validation_seconds for epoch in epochs[1:])


def start_share(trial: Trial, *, of_throughput: bool) -> float:
    """Return the share of a run's first step in its time, validation included, or in what its throughput counts."""
    parts = split(trial)
    if parts is None:
        return 0.0
    if not of_throughput:
        return parts.start / parts.total if parts.total else 0.0
    epochs, recipe = _counted(epochs_of(trial), trial), trial.spec.recipe
    if recipe is not None and recipe.skip_batches and any(epoch.counted_samples for epoch in epochs):
        return 0.0  # the first step is among the skipped batches
    seconds = sum(epoch.seconds for epoch in epochs)
    return parts.start / seconds if seconds else 0.0


def length_in_words(trial: Trial) -> str:
    """Return how long a run was compared with its source's: "1 of 10 epochs, cut to 30 steps"; empty if it is none."""
    recipe, epochs = trial.spec.recipe, epochs_of(trial)
    if recipe is None:
        return ""
    done = f"{len(epochs)}" if len(epochs) == recipe.epochs else f"{len(epochs)} of {recipe.epochs}"
    words = f"{done} epoch{'s' if recipe.epochs > 1 else ''}"
    cut = next((epoch.num_steps for epoch in epochs if epoch.shortened), None)
    return words if cut is None else f"{words}, cut to {cut} step{'s' if cut > 1 else ''}"


def speedup(baseline: Trial | None, trial: Trial) -> float | None:
    """Return how many times as fast a run trains as its baseline, None if it is not known.

    Of whole runs it is the ratio of their wall times, validation included, as in the sources; if one of them was cut
    short, that of their throughputs.
    """
    if baseline is None or not epochs_of(trial):
        return None
    theirs, own = split(baseline), split(trial)
    if is_whole(baseline) and is_whole(trial) and theirs is not None and own is not None:
        return theirs.total / own.total
    return throughput_ratio(baseline, trial)


def throughput_ratio(baseline: Trial | None, trial: Trial) -> float | None:
    """Return a run's throughput over its baseline's, None if it is not known."""
    slow, fast = None if baseline is None else throughput(baseline), throughput(trial)
    return fast / slow if slow and fast else None


def median_speedup(pairs: Iterable[tuple[Trial, Trial]]) -> float | None:
    """Return the median speed-up over repetitions, each a baseline and a run; None if there is none."""
    return median(value for pair in pairs if (value := speedup(*pair)) is not None)


def median(values: Iterable[float]) -> float | None:
    listed = list(values)
    return statistics.median(listed) if listed else None


def best_accuracy(trial: Trial) -> float | None:
    """Return the accuracy after the epoch of the lowest validation loss; None without validation."""
    judged = [
        (epoch.validation_loss, epoch.accuracy)
        for epoch in epochs_of(trial)
        if epoch.accuracy is not None and epoch.validation_loss is not None and math.isfinite(epoch.validation_loss)
    ]
    return min(judged, key=lambda pair: pair[0])[1] if judged else None


def perplexity(epoch: Epoch) -> float | None:
    """Return a language model's perplexity after an epoch: the exponential of its mean validation loss per word."""
    if epoch.validation_loss is None or epoch.accuracy is not None:
        return None
    try:
        return math.exp(epoch.validation_loss)
    except OverflowError:
        return math.inf


def driver_used_bytes(trial: Trial) -> int | None:
    """Return the most memory in use on any of the devices at the end, as the driver reports it."""
    return steady_metrics.largest(rank.driver_used_bytes for rank in trial.ranks)
