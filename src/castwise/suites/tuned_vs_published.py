"""The published loop and the tuned one of the same cell: how much faster, in how much memory, and as accurate?"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from castwise.analysis.statistics import Difference, Estimate, estimate, mean_difference, paired_difference
from castwise.analysis.steady_metrics import largest
from castwise.analysis.training_metrics import Run, epoch_seconds, is_whole, run_comparison_key, speedup, start_share
from castwise.analysis.training_metrics import median as median_of
from castwise.analysis.warnings import NOISE
from castwise.records.schema import Trial
from castwise.spec.quantities import format_share, truncate_list
from castwise.spec.trial import TrialSpec

_LEVEL = 0.95


@dataclass(frozen=True)
class TunedPair:
    """Runs that differ in their loop alone, and in their seeds.

    Attributes:
        published: In the source's loop, by seed.
        tuned: In the other, by seed.
    """

    published: tuple[Run, ...]
    tuned: tuple[Run, ...]

    @property
    def spec(self) -> TrialSpec:
        """Return the tuned loop's spec, that of the first seed."""
        return self.tuned[0].trial.spec

    @property
    def speedup(self) -> Estimate | None:
        """Return how many times as fast the tuned loop trains, seed by seed; None where that cannot be said."""
        return _by_seed(self, speedup)

    @property
    def settled_speedup(self) -> Estimate | None:
        """Return how many times as fast the tuned loop's epochs are once all is compiled, seed by seed."""
        return _by_seed(self, _epochs_ratio)

    @property
    def start_shares(self) -> tuple[float, float]:
        """Return the share of the first step in the times that the speed-up compares, by side; the median run's."""
        whole = all(is_whole(run.trial) for run in (*self.published, *self.tuned))
        before, after = (
            statistics.median(start_share(run.trial, of_throughput=not whole) for run in side)
            for side in (self.published, self.tuned)
        )
        return before, after

    @property
    def is_language_model(self) -> bool:
        """Return whether runs are judged by perplexity, and not by accuracy."""
        return any(run.perplexity is not None for run in (*self.published, *self.tuned))

    def scores(self, side: Sequence[Run]) -> list[float]:
        """Return the accuracy, or the perplexity, after the last epoch of each run of a side that has one."""
        found = [run.perplexity if self.is_language_model else run.accuracy for run in side]
        return [score for score in found if score is not None and math.isfinite(score)]

    @property
    def difference(self) -> Difference | None:
        """Return by how much the tuned loop's score is higher, with its 95 % interval; None without scores.

        Where both sides have runs of the same seeds, which begin with the same weights, it is taken seed by seed.
        """
        before, after = self.scores(self.published), self.scores(self.tuned)
        if not before or not after:
            return None
        is_paired = _seeds(self.published) == _seeds(self.tuned) and len(before) == len(after) == len(self.tuned)
        return (paired_difference if is_paired else mean_difference)(before, after, _LEVEL)


def tuned_pairs(runs: Sequence[Run]) -> list[TunedPair]:
    """Return the cells that ended well in the published loop and in another, in the order of their first runs."""
    published: dict[tuple[object, ...], list[Run]] = {}
    others: dict[tuple[object, ...], dict[tuple[str, ...], list[Run]]] = {}
    for run in (run for run in runs if run.trial.status == "ok"):
        cell, loop = run_comparison_key(run.trial, "techniques", "seed"), run.trial.spec.techniques
        published.setdefault(cell, []).extend([] if loop else [run])
        if loop:
            others.setdefault(cell, {}).setdefault(loop, []).append(run)
    return [
        TunedPair(_in_order(own), _in_order(tuned))
        for cell, own in published.items()
        if own
        for tuned in others.get(cell, {}).values()
    ]


def _in_order(runs: Sequence[Run]) -> tuple[Run, ...]:
    return tuple(sorted(runs, key=lambda run: run.trial.spec.seed))


def _seeds(side: Sequence[Run]) -> list[int]:
    return [run.trial.spec.seed for run in side]


def _by_seed(pair: TunedPair, ratio: Callable[[Trial | None, Trial], float | None]) -> Estimate | None:
    """Return a ratio of the two loops, of which every seed that both have gives one value."""
    plain = {run.trial.spec.seed: run.trial for run in pair.published}
    ratios = [ratio(plain.get(run.trial.spec.seed), run.trial) for run in pair.tuned]
    return estimate([ratio for ratio in ratios if ratio])


def _epochs_ratio(baseline: Trial | None, trial: Trial) -> float | None:
    before, after = None if baseline is None else epoch_seconds(baseline), epoch_seconds(trial)
    return before / after if before and after else None


def tuned_notes(pairs: Sequence[TunedPair]) -> list[str]:
    """Return what a reader of the two loops' times must know, a line each."""
    told = [
        f"{format_share(before)} and {format_share(after)} in {pair.published[0].trial.spec.label}"
        for pair in pairs
        for before, after in [pair.start_shares]
        if pair.speedup is not None and max(before, after) > NOISE  # less is lost in it
    ]
    if not told:
        return []
    return [
        "times as fast counts the first step, in which libraries are loaded and code is compiled; of the published "
        f"loop's time and the tuned one's it is {truncate_list(told)}: a longer run has but one, too"
    ]


def median_seconds(side: Sequence[Run]) -> float | None:
    """Return the median time of runs, validation included; None where none tells."""
    return median_of(run.split.total for run in side if run.split is not None)


def largest_bytes(side: Sequence[Run]) -> int | None:
    """Return the most that tensors of any of some runs held."""
    return largest(run.peak_allocated_bytes for run in side)
