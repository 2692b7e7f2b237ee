"""What paired training runs show: scores, verdicts, and the time to the baseline's score."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from castwise.analysis.equivalence import AccuracyVerdict, area_under_curve, first_reached, verdict_after
from castwise.analysis.statistics import Estimate, estimate
from castwise.analysis.training_metrics import epochs_of
from castwise.records.schema import Epoch, Trial
from castwise.registry.precisions import BASELINE, precision_sort_key
from castwise.spec.trial import TrialSpec

Curve = Sequence[tuple[float, float]]  # steps done, and the score there


@dataclass(frozen=True)
class Metric:
    """What a run is judged by, after each epoch."""

    name: str  # "accuracy", or "perplexity"
    larger_is_better: bool

    def score(self, epoch: Epoch) -> float | None:
        """Return an epoch's accuracy, or the logarithm of its perplexity; None if it was not validated."""
        return epoch.accuracy if self.larger_is_better else epoch.validation_loss

    def margin(self, share: float) -> float:
        """Return a margin in the score's unit: a share of the accuracy's scale, or of the perplexity itself."""
        return share if self.larger_is_better else math.log1p(share)

    def shown(self, score: float) -> float:
        """Return a score as it is shown: an accuracy, or a perplexity."""
        return score if self.larger_is_better else math.exp(score)

    def shown_difference(self, difference: float) -> float:
        """Return a difference of scores as it is shown: in shares of accuracy, or of the perplexity."""
        return difference if self.larger_is_better else math.expm1(difference)


ACCURACY = Metric("accuracy", larger_is_better=True)
PERPLEXITY = Metric("perplexity", larger_is_better=False)


@dataclass(frozen=True)
class Runs:
    """The runs of one precision, by seed, compared with the baseline's."""

    trials: tuple[Trial, ...]  # seeds 0, 1, …
    baseline: tuple[Trial, ...]  # with the same seeds, at least
    metric: Metric
    margin: float  # in the score's unit
    num_seeds: int  # planned at the most

    @property
    def spec(self) -> TrialSpec:
        """Return what was trained; its seed does not matter."""
        return self.trials[0].spec

    @property
    def is_baseline(self) -> bool:
        """Return whether these are the baseline's own runs."""
        return self.trials[0].spec.key == self.baseline[0].spec.key

    @property
    def failed(self) -> Trial | None:
        """Return a run that gives no score although it did not diverge: it crashed, or was out of memory."""
        return next((trial for trial in self.trials if trial.status not in ("ok", "diverged")), None)

    @cached_property
    def scores(self) -> list[float | None]:
        """Return each run's score after its last epoch; None if it diverged."""
        return [_final(trial, self.metric) for trial in self.trials]

    @cached_property
    def verdict(self) -> AccuracyVerdict | None:
        """Return the verdict; None for the baseline, and if a run failed."""
        if self.is_baseline or self.failed is not None:
            return None
        theirs = [_final(trial, self.metric) for trial in self.baseline[: len(self.trials)]]
        return verdict_after(
            theirs,
            self.scores,
            self.margin,
            larger_is_better=self.metric.larger_is_better,
            num_seeds=self.num_seeds,
        )

    @property
    def mean(self) -> float | None:
        """Return the mean score of the runs that have one."""
        known = [score for score in self.scores if score is not None]
        return statistics.fmean(known) if known else None

    @property
    def spread(self) -> float | None:
        """Return the standard deviation of the scores between seeds; None of fewer than two."""
        known = [score for score in self.scores if score is not None]
        return statistics.stdev(known) if len(known) > 1 else None

    @property
    def mean_area(self) -> float | None:
        """Return the mean over the runs of the area under the validation curve: the mean score while training."""
        areas = [area for trial in self.trials if (area := area_under_curve(curve_of(trial, self.metric))) is not None]
        return statistics.fmean(areas) if areas else None

    @cached_property
    def speedup(self) -> Estimate | None:
        """Return how many times as fast as the baseline a step is, over the pairs of runs."""
        return self._ratio(seconds_per_step)

    @cached_property
    def step_efficiency(self) -> Estimate | None:
        """Return the baseline's steps to the target ÷ these runs'; None if a run of a pair does not reach it."""
        return self._ratio(self._steps_to_target)

    @cached_property
    def gain(self) -> Estimate | None:
        """Return how many times as fast as the baseline's these runs reach the target: speed-up × step efficiency."""

        def seconds(trial: Trial) -> float | None:
            steps, each = self._steps_to_target(trial), seconds_per_step(trial)
            return None if steps is None or each is None else steps * each

        return self._ratio(seconds)

    @property
    def num_reached(self) -> int:
        """Return how many runs reach the target."""
        return sum(self._steps_to_target(trial) is not None for trial in self.trials)

    @property
    def target(self) -> float | None:
        """Return the score to reach: the median of the baseline's last ones, less the margin.

        Without the margin, half of the baseline's own runs would end before they reach it.
        """
        known = [score for trial in self.baseline if (score := _final(trial, self.metric)) is not None]
        if not known:
            return None
        return statistics.median(known) - (self.margin if self.metric.larger_is_better else -self.margin)

    def _steps_to_target(self, trial: Trial) -> float | None:
        if self.target is None or trial.status != "ok":
            return None
        curve = curve_of(trial, self.metric)
        return first_reached(curve, self.target, larger_is_better=self.metric.larger_is_better)

    def _ratio(self, value_of: Callable[[Trial], float | None]) -> Estimate | None:
        """Return the baseline's value over these runs', over the pairs; None without pairs, or if one has no value."""
        pairs = [
            (value_of(other), value_of(own))
            for other, own in zip(self.baseline, self.trials, strict=False)
            if (other.status, own.status) == ("ok", "ok")
        ]
        ratios = [theirs / own for theirs, own in pairs if theirs and own]
        return estimate(ratios) if ratios and len(ratios) == len(pairs) and not self.is_baseline else None


@dataclass(frozen=True)
class AccuracyResult:
    """What came of `castwise accuracy`."""

    runs: tuple[Runs, ...]  # the baseline's first
    margin: float  # as a share, as it was asked for
    seconds: float = 0.0  # wall time
    num_recorded: int = 0  # runs that were on record before, and are not in the wall time
    budget_ended: bool = False

    @property
    def trials(self) -> tuple[Trial, ...]:
        """Return the records."""
        return tuple(trial for each in self.runs for trial in each.trials)

    @property
    def baseline(self) -> Runs:
        """Return the baseline's runs."""
        return self.runs[0]

    @property
    def metric(self) -> Metric:
        """Return what runs are judged by."""
        return self.baseline.metric


def runs_of(trials: Iterable[Trial], baseline: str | None, margin: float, num_seeds: int) -> tuple[Runs, ...]:
    """Return the runs of each precision over their seeds 0, 1, …, those of the baseline first; empty without those.

    Args:
        trials: Training runs that differ in precision, loss scale and seed alone.
        baseline: A precision; None takes fp32, or without it the first one.
        margin: As a share.
        num_seeds: How many seeds are planned at the most.
    """
    by_seed: dict[tuple[str, str], dict[int, Trial]] = {}
    for trial in trials:
        by_seed.setdefault((trial.spec.precision, trial.spec.loss_scale), {})[trial.spec.seed] = trial
    found = {key: _in_a_row(seeds) for key, seeds in by_seed.items() if 0 in seeds}
    names = [name for name, _ in found]
    first = baseline or (BASELINE if BASELINE in names else next(iter(names), ""))
    if first not in names:
        return ()
    every = sorted(found.items(), key=lambda item: (item[0][0] != first, precision_sort_key(item[0][0]), item[0][1]))
    theirs = every[0][1]
    metric = metric_of(theirs)
    return tuple(Runs(own, theirs, metric, metric.margin(margin), num_seeds) for _, own in every)


def metric_of(trials: Sequence[Trial]) -> Metric:
    """Return what runs are judged by: accuracy if they have one, else perplexity."""
    has_accuracy = any(epoch.accuracy is not None for trial in trials for epoch in epochs_of(trial))
    return ACCURACY if has_accuracy else PERPLEXITY


def curve_of(trial: Trial, metric: Metric) -> list[tuple[float, float]]:
    """Return a run's score after each epoch, with the steps done until then."""
    found, steps = [], 0
    for epoch in epochs_of(trial):
        steps += epoch.num_steps
        score = metric.score(epoch)
        if score is not None:
            found.append((float(steps), score))
    return found


def seconds_per_step(trial: Trial) -> float | None:
    """Return the mean seconds of a run's steps without the first, which compiles and loads libraries.

    Waiting for data is included, validation is not.
    """
    epochs = epochs_of(trial)
    steps = sum(epoch.num_steps for epoch in epochs)
    first = sum(epoch.first_step_seconds or 0.0 for epoch in epochs)
    seconds = sum(epoch.seconds for epoch in epochs) - first
    return seconds / (steps - 1) if steps > 1 and seconds > 0 else None


def _final(trial: Trial, metric: Metric) -> float | None:
    curve = curve_of(trial, metric)
    return curve[-1][1] if trial.status == "ok" and curve and math.isfinite(curve[-1][1]) else None


def _in_a_row(seeds: dict[int, Trial]) -> tuple[Trial, ...]:
    """Return the trials of seeds 0, 1, … up to the first that is missing."""
    found: list[Trial] = []
    while len(found) in seeds:
        found.append(seeds[len(found)])
    return tuple(found)
