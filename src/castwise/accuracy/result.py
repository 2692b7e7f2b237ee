"""What paired training runs show: scores, verdicts, and the time to the baseline's score."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from castwise.accuracy.options import SEEDS
from castwise.analysis.equivalence import FIRST_LOOK, AccuracyVerdict, area_under_curve, first_reached, verdict_after
from castwise.analysis.statistics import Estimate, estimate
from castwise.analysis.training_metrics import epochs_of
from castwise.records.schema import Epoch, Trial
from castwise.registry.precisions import BASELINE, precision_sort_key
from castwise.registry.techniques import TECHNIQUES, narrowing, precision_name
from castwise.spec.recipe import Recipe
from castwise.spec.trial import TrialSpec
from castwise.spec.typed import TypedLine

Pair = tuple[Trial, Trial]  # the baseline's run, and the run with the same seed
_MOST = 700.0  # whose exponential is a float
_FEWEST_PAIRS = 3  # of which one can be left out, and there still is a mean


@dataclass(frozen=True)
class Metric:
    """What a run is judged by, after each epoch."""

    name: Literal["accuracy", "perplexity", "score"]  # the last of a user's own model
    larger_is_better: bool
    baseline: float = 1.0  # the size of the baseline's score, of which the margin of a user's score is a share
    is_near_zero: bool = False  # whether that size is the spread between seeds, which is larger than the mean

    def score(self, epoch: Epoch) -> float | None:
        """Return an epoch's accuracy, the logarithm of its perplexity, or its score; None if it was not validated."""
        if self.name == "perplexity":
            return epoch.validation_loss
        return epoch.accuracy if self.name == "accuracy" else epoch.score

    @property
    def usual_margin(self) -> float:
        """Return the margin unless another is asked for, as a share: 0.3 points of accuracy, 1 % of others."""
        return 0.003 if self.name == "accuracy" else 0.01

    def margin(self, share: float) -> float:
        """Return a margin in the score's unit: points of accuracy, or a share of a perplexity or of another score."""
        return math.log1p(share) if self.name == "perplexity" else share * self.baseline

    def shown(self, score: float) -> float:
        """Return a score as it is shown: an accuracy, a perplexity, or a user's own score."""
        return math.exp(min(score, _MOST)) if self.name == "perplexity" else score

    def shown_difference(self, difference: float) -> float:
        """Return a difference as it is shown: of an accuracy, or as a share of the baseline's score."""
        if self.name == "perplexity":  # the difference, above 0 if better, is log(baseline's ÷ own)
            return -math.expm1(min(-difference, _MOST))
        return difference / self.baseline


@dataclass(frozen=True)
class Runs:
    """The runs of one precision and its narrow techniques, by seed, compared with the baseline's."""

    trials: tuple[Trial, ...]  # seeds 0, 1, …, no more than the baseline's
    baseline: tuple[Trial, ...]
    metric: Metric
    margin_share: float
    num_seeds: int  # planned at the most

    @property
    def spec(self) -> TrialSpec:
        """Return what was trained; its seed does not matter."""
        return self.trials[0].spec

    @property
    def name(self) -> str:
        return precision_name(self.spec)

    @property
    def recipe(self) -> Recipe:
        assert self.spec.recipe is not None
        return self.spec.recipe

    @property
    def is_less_accurate(self) -> bool:
        """Return whether they train worse than the baseline's, diverge more often, or all diverged as none of its."""
        if self.verdict is None:
            return False
        has_lost_all = self.mean is None and all(_final(trial, self.metric) is not None for trial in self.baseline)
        return has_lost_all or self.verdict.kind in ("worse", "diverged")

    @property
    def margin(self) -> float:
        """Return the margin in the score's unit."""
        return self.metric.margin(self.margin_share)

    @property
    def is_baseline(self) -> bool:
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
        ratios = [
            theirs / own
            for pair in self._pairs
            if (theirs := seconds_per_step(pair[0])) is not None and (own := seconds_per_step(pair[1])) is not None
        ]
        return estimate(ratios) if ratios else None

    @cached_property
    def step_efficiency(self) -> Estimate | None:
        """Return the baseline's steps to the target score ÷ these runs'; None if they do not reach it."""
        return self._over_pairs(self._steps_ratio)

    @cached_property
    def gain(self) -> Estimate | None:
        """Return how many times as fast as the baseline these runs reach the target score.

        It is speed-up × step efficiency. The target is the baseline's mean score after its last epoch, less the
        margin: the mean of the validation curves passes it, whatever the spread between seeds.
        """

        def ratio(pairs: Sequence[Pair]) -> float | None:
            steps = self._steps_ratio(pairs)
            means = [[seconds_per_step(trial) or math.nan for trial in side] for side in zip(*pairs, strict=True)]
            theirs, own = (statistics.geometric_mean(side) for side in means)
            return None if steps is None or not math.isfinite(theirs / own) else steps * theirs / own

        return self._over_pairs(ratio)

    @property
    def _pairs(self) -> list[Pair]:
        """Return the baseline's run and the run with the same seed, if both ended well."""
        if self.is_baseline:
            return []
        return [
            pair
            for pair in zip(self.baseline, self.trials, strict=False)
            if all(_final(trial, self.metric) is not None for trial in pair)
        ]

    def _steps_ratio(self, pairs: Sequence[Pair]) -> float | None:
        """Return the steps in which the baseline's mean curve reaches the target ÷ those of these runs."""
        theirs, own = (
            _mean_curve([curve_of(trial, self.metric) for trial in side]) for side in zip(*pairs, strict=True)
        )
        if not theirs or not own:
            return None
        better = self.metric.larger_is_better
        target = theirs[-1][1] - (self.margin if better else -self.margin)
        steps = [first_reached(curve, target, larger_is_better=better) for curve in (theirs, own)]
        return steps[0] / steps[1] if steps[0] and steps[1] else None

    def _over_pairs(self, ratio_of: Callable[[Sequence[Pair]], float | None]) -> Estimate | None:
        """Return a ratio over all pairs, with the interval of its jackknife; None if there is none.

        Source: J. W. Tukey, "Bias and confidence in not-quite large samples", Ann. Math. Stat. 29 (1958).
        """
        pairs = self._pairs
        whole = ratio_of(pairs) if pairs else None
        if whole is None or len(pairs) < _FEWEST_PAIRS:
            return None if whole is None else Estimate(whole, math.nan, math.nan, len(pairs))
        without = [ratio_of([*pairs[:n], *pairs[n + 1 :]]) for n in range(len(pairs))]
        known = [each for each in without if each is not None]
        if len(known) < len(pairs):
            return Estimate(whole, math.nan, math.nan, len(pairs))
        count = len(pairs)
        return estimate([math.exp(count * math.log(whole) - (count - 1) * math.log(each)) for each in known])


@dataclass(frozen=True)
class AccuracyResult:
    """What came of `castwise accuracy`."""

    runs: tuple[Runs, ...]  # the baseline's first
    seconds: float = 0.0  # wall time
    num_recorded: int = 0  # runs that were on record before, and are not in the wall time
    budget_ended: bool = False
    typed: TypedLine | None = None  # what the user typed, from which commands that are advised are built

    @property
    def trials(self) -> tuple[Trial, ...]:
        return tuple(trial for each in self.runs for trial in each.trials)

    @property
    def baseline(self) -> Runs:
        return self.runs[0]

    @property
    def metric(self) -> Metric:
        return self.baseline.metric


def runs_of(
    trials: Iterable[Trial], baseline: str | None, margin: float | None, num_seeds: int = 0
) -> tuple[Runs, ...]:
    """Return the runs of each precision over their seeds 0, 1, …, those of the baseline first; empty without those.

    Args:
        trials: Training runs that differ in precision, narrow techniques, loss scale and seed alone.
        baseline: A precision; None takes fp32, or without it the first one. Of its runs those with the fewest narrow
            techniques are the baseline's.
        margin: As a share; None takes the usual one.
        num_seeds: How many seeds are planned at the most; the usual number, or that of the records, if that is larger:
            so a command and all that reads its records give the same verdict.
    """
    by_seed: dict[tuple[str, tuple[str, ...], str], dict[int, Trial]] = {}
    for trial in trials:
        spec = trial.spec
        key = (spec.precision, narrowing(spec.techniques), spec.loss_scale)
        by_seed.setdefault(key, {})[spec.seed] = trial
    found = {key: _in_a_row(seeds) for key, seeds in by_seed.items() if 0 in seeds}
    names = [name for name, *_ in found]
    first = baseline or (BASELINE if BASELINE in names else next(iter(names), ""))
    if first not in names:
        return ()
    order = list(found)
    places = [row.name for row in TECHNIQUES]
    order.sort(key=lambda key: (key[0] != first, precision_sort_key(key[0]), [*map(places.index, key[1])], key[2]))
    every = [found[key] for key in order]
    theirs = every[0]
    metric = metric_of(theirs)
    planned = max(SEEDS, num_seeds, *(seed + 1 for seeds in by_seed.values() for seed in seeds))
    share = metric.usual_margin if margin is None else margin
    # A command that was stopped may have trained a seed in other precisions alone.
    return tuple(Runs(own[: len(theirs)], theirs, metric, share, planned) for own in every)


def metric_of(trials: Sequence[Trial]) -> Metric:
    """Return what the baseline's runs are judged by: the first of them, so that more leave the margin as it is."""
    trials = trials[:FIRST_LOOK]
    ends = [epochs[-1] for trial in trials if trial.status == "ok" and (epochs := epochs_of(trial))]
    scores = [epoch.score for epoch in ends if epoch.score is not None]
    if scores:
        facts = trials[0].facts
        is_higher = facts is not None and bool(facts.higher_is_better)
        mean, spread = abs(statistics.fmean(scores)), statistics.pstdev(scores)
        return Metric("score", is_higher, max(mean, spread) or 1.0, is_near_zero=spread > mean)
    if any(epoch.accuracy is not None for epoch in ends):
        return Metric("accuracy", larger_is_better=True)
    is_own = bool(trials) and trials[0].spec.user_model is not None  # none of whose runs has a score
    return Metric("score" if is_own else "perplexity", larger_is_better=False)


def curve_of(trial: Trial, metric: Metric) -> list[tuple[float, float]]:
    """Return a run's score after each epoch, with the steps done until then."""
    found, steps = [], 0
    for epoch in epochs_of(trial):
        steps += epoch.num_steps
        score = metric.score(epoch)
        if score is not None:
            found.append((float(steps), score))
    return found


def _mean_curve(curves: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Return the mean score of runs after each epoch; as many epochs as all of them have."""
    return [(points[0][0], statistics.fmean(score for _, score in points)) for points in zip(*curves, strict=False)]


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
