"""The published loop and the tuned one of the same configuration: how much faster, in how much memory, how accurate."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from castwise.analysis.result_table import Row, over_seeds
from castwise.analysis.statistics import Difference, Estimate, estimate, mean_difference, paired_difference
from castwise.analysis.training_metrics import (
    epoch_seconds,
    epochs_of,
    is_whole,
    perplexity,
    run_comparison_key,
    start_share,
)
from castwise.analysis.warnings import NOISE
from castwise.spec.quantities import format_share, truncate_list
from castwise.spec.trial import TrialSpec

_LEVEL = 0.95


@dataclass(frozen=True)
class TunedPair:
    """Runs in the source's loop and in another, by seed, that differ in nothing else."""

    published: Row
    tuned: Row

    @property
    def spec(self) -> TrialSpec:
        return self.tuned.trial.spec

    @property
    def speedup(self) -> Estimate | None:
        """Return how many times as fast the tuned loop trains, seed by seed; None if no seed has both."""
        return self.tuned.over(self.published)

    @property
    def settled_speedup(self) -> Estimate | None:
        """Return how many times as fast the tuned loop's epochs after the first are, seed by seed."""
        published = {trial.spec.seed: epoch_seconds(trial) for trial in self.published.trials}
        sides = [(published.get(trial.spec.seed), epoch_seconds(trial)) for trial in self.tuned.trials]
        return estimate([before / after for before, after in sides if before and after])

    @property
    def start_shares(self) -> tuple[float, float]:
        """Return the share of the first step in the times that the speed-up compares, by side; the median run's."""
        whole = all(map(is_whole, (*self.published.trials, *self.tuned.trials)))
        before, after = (
            statistics.median(start_share(trial, of_throughput=not whole) for trial in side.trials)
            for side in (self.published, self.tuned)
        )
        return before, after

    @property
    def is_language_model(self) -> bool:
        """Return whether runs are scored by perplexity, and not by accuracy."""
        ends = [epochs_of(trial)[-1:] for trial in (*self.published.trials, *self.tuned.trials)]
        return any(perplexity(epoch) is not None for epochs in ends for epoch in epochs)

    def scores(self, side: Row) -> list[float]:
        """Return the accuracy, or the perplexity, after the last epoch of each run of a side that has one."""
        ends = [epoch for trial in side.trials for epoch in epochs_of(trial)[-1:]]
        found = [perplexity(epoch) if self.is_language_model else epoch.accuracy for epoch in ends]
        return [score for score in found if score is not None and math.isfinite(score)]

    @property
    def difference(self) -> Difference | None:
        """Return by how much the tuned loop's score is higher, with its 95 % interval; None without scores.

        If both sides have runs of the same seeds, which begin with the same weights, they are compared seed by seed.
        """
        before, after = self.scores(self.published), self.scores(self.tuned)
        if not before or not after:
            return None
        seeds = [[trial.spec.seed for trial in side.trials] for side in (self.published, self.tuned)]
        is_paired = seeds[0] == seeds[1] and len(before) == len(after) == len(seeds[0])
        return (paired_difference if is_paired else mean_difference)(before, after, _LEVEL)


def tuned_pairs(runs: Sequence[Row]) -> list[TunedPair]:
    """Return the configurations that ended well in the published loop and in another, in the order of first runs."""
    loops: dict[tuple[object, ...], dict[tuple[str, ...], list[Row]]] = {}
    for run in runs:
        if run.trial.status == "ok":
            of_configuration = loops.setdefault(run_comparison_key(run.trial, "techniques", "seed"), {})
            of_configuration.setdefault(run.trial.spec.techniques, []).append(run)

    def by_seed(runs: Sequence[Row]) -> Row:
        return over_seeds(sorted(runs, key=lambda run: run.trial.spec.seed))

    return [
        TunedPair(by_seed(of_configuration[()]), by_seed(tuned))
        for of_configuration in loops.values()
        if () in of_configuration
        for techniques, tuned in of_configuration.items()
        if techniques
    ]


def tuned_notes(pairs: Sequence[TunedPair]) -> list[str]:
    """Return what a reader of the two loops' times must know, a line each."""
    shares = [
        f"{format_share(before)} and {format_share(after)} in {pair.published.trial.spec.label}"
        for pair in pairs
        for before, after in [pair.start_shares]
        if pair.speedup is not None and max(before, after) > NOISE
    ]
    if not shares:
        return []
    return [
        "times as fast counts the first step, in which libraries are loaded and code is compiled; its shares of the "
        f"published loop's time and the tuned one's are {truncate_list(shares)}: a longer run has only one such step"
    ]
