"""Whether one precision trains as well as another, from the scores of paired runs: runs with the same seed.

The interval is Student's, of the mean of the paired differences. A precision is as good if the whole interval lies
within the margin (two one-sided tests: Schuirmann, J. Pharmacokinet. Biopharm. 15, 1987). Whoever looks after every run
and stops as soon as there is a verdict is wrong more often than 5 % of the time. So verdicts are given at few numbers
of pairs, and the 5 % are divided equally among them (Bonferroni's inequality holds whatever the looks have in common).
That runs diverge is tested, too (Fisher's exact test): equally many may diverge by chance.
benchmarks/accuracy_errors.py simulates how often verdicts are wrong.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from castwise.analysis.statistics import Difference, paired_difference, student_quantile

AccuracyKind = Literal["as good", "worse", "better", "diverged", "not enough runs"]

# The numbers of pairs after which verdicts are given, and the last number planned.
FIRST_LOOK = 5
_LOOKS = (FIRST_LOOK, 8, 12, 20, 30, 50, 80)
_ERROR = 0.05  # of all looks together
_MOST_PAIRS = 1000  # that a prediction names
_FEWEST = 2  # for a spread


@dataclass(frozen=True)
class AccuracyVerdict:
    kind: AccuracyKind
    difference: Difference | None  # of the means, turned so that above 0 is better; None without two pairs
    num_pairs: int  # in which both runs ended with a score
    num_runs: int  # the candidate's
    num_diverged: int  # of these
    num_others: int  # of the baseline's that diverged
    pairs_needed: int | None = None  # for "not enough runs": how many would do at this mean and spread, if any would

    @property
    def is_decided(self) -> bool:
        """Return whether more runs would change nothing."""
        return self.kind != "not enough runs"

    @property
    def diverges_more(self) -> bool:
        """Return whether more runs diverged than the baseline's, be it by chance."""
        return self.num_diverged > self.num_others


def verdict_after(
    baseline: Sequence[float | None],
    candidate: Sequence[float | None],
    margin: float,
    *,
    larger_is_better: bool,
    num_seeds: int,
) -> AccuracyVerdict:
    """Return the first verdict that was reached at a look; before one, or without, that there are not enough runs.

    Runs that diverged count whenever they did. The arguments are those of `judge`; `num_seeds` is how many pairs are
    planned at the most.
    """
    count = len(candidate)
    looks = looks_of(max(num_seeds, count))

    def judged(number: int) -> AccuracyVerdict:
        return judge(
            baseline[:number], candidate[:number], margin, larger_is_better=larger_is_better, num_looks=len(looks)
        )

    of_all = judged(count)
    if of_all.kind == "diverged":
        return of_all
    final = ("worse",) if of_all.diverges_more else ("worse", "as good", "better")
    for verdict in (judged(look) for look in looks if look < count):
        if verdict.kind in final:
            return verdict
    if of_all.is_decided and count in looks:
        return of_all
    needed = count + 1 if of_all.is_decided else of_all.pairs_needed
    if needed is not None:  # a verdict is given at a look
        needed = next((look for look in looks if look >= needed), needed)
    return replace(of_all, kind="not enough runs", pairs_needed=needed)


def looks_of(num_seeds: int) -> tuple[int, ...]:
    """Return the numbers of pairs after which verdicts are given, if so many seeds are planned at the most."""
    return (*(look for look in _LOOKS if look < num_seeds), num_seeds)


def judge(
    baseline: Sequence[float | None],
    candidate: Sequence[float | None],
    margin: float,
    *,
    larger_is_better: bool,
    num_looks: int = 1,
) -> AccuracyVerdict:
    """Return the verdict on paired runs.

    Args:
        baseline: The score of each run in the baseline, a finite number; None if it diverged.
        candidate: The score of the run with the same seed in another precision; None if it diverged.
        margin: The largest difference of scores that does not matter, above 0.
        larger_is_better: Whether a larger score is better, as an accuracy is.
        num_looks: How often a verdict is given at the most, this one included: `looks_of`.

    Raises:
        ValueError: The margin is not above 0, or the numbers of runs differ.
    """
    if not margin > 0:
        raise ValueError(f"a margin must be above 0, and {margin:g} is not")
    sign = 1.0 if larger_is_better else -1.0
    runs = list(zip(baseline, candidate, strict=True))
    pairs = [(sign * other, sign * own) for other, own in runs if other is not None and own is not None]
    num_diverged, num_others = (sum(score is None for score in scores) for scores in (candidate, baseline))
    error = _ERROR / num_looks
    has_diverged = _chance_of(num_diverged, num_others, len(runs)) <= error
    kind: AccuracyKind = "diverged" if has_diverged else "not enough runs"
    found, needed = None, None
    if len(pairs) >= _FEWEST:
        found = paired_difference([other for other, _ in pairs], [own for _, own in pairs], 1 - error)
        # The spread of fewer pairs says little: two that differ by the same have an interval of no width.
        of_pairs = _kind_of(found, margin) if len(pairs) >= FIRST_LOOK else "not enough runs"
        # What diverged more often, be it by chance, is not as good for the runs that are left.
        if not has_diverged and (num_diverged <= num_others or of_pairs == "worse"):
            kind = of_pairs
        if kind == of_pairs == "not enough runs":
            needed = _pairs_needed([own - other for other, own in pairs], margin, num_looks)
    return AccuracyVerdict(kind, found, len(pairs), len(candidate), num_diverged, num_others, needed)


def _chance_of(num_diverged: int, num_others: int, num_runs: int) -> float:
    """Return the chance that at least so many of all that diverged are the candidate's, if both diverge equally often.

    Source: R. A. Fisher, "The Design of Experiments" (1935), chapter 2.
    """
    total = num_diverged + num_others
    ways = [math.comb(num_runs, own) * math.comb(num_runs, total - own) for own in range(num_diverged, total + 1)]
    return sum(ways) / math.comb(2 * num_runs, total)


def _kind_of(found: Difference, margin: float) -> AccuracyKind:
    if -margin < found.low and found.high < margin:
        return "as good"
    if found.high < 0:
        return "worse"
    return "better" if found.low > 0 else "not enough runs"


def _pairs_needed(values: Sequence[float], margin: float, num_looks: int) -> int | None:
    """Return how many pairs decide if mean and spread stay what they are; more pairs may need more looks."""
    mean, spread = statistics.fmean(values), statistics.stdev(values)
    for n in range(max(len(values) + 1, FIRST_LOOK), _MOST_PAIRS + 1):
        level = 1 - _ERROR / max(num_looks, len(looks_of(n)))
        reach = student_quantile(n - 1, level) * spread / math.sqrt(n)
        if _kind_of(Difference(mean, mean - reach, mean + reach), margin) != "not enough runs":
            return n
    return None


def area_under_curve(scores: Sequence[tuple[float, float]]) -> float | None:
    """Return the mean score over a run, by the trapezoidal rule, from how far it was and the score there, in order."""
    if not scores or not all(math.isfinite(score) for _, score in scores):
        return None
    length = scores[-1][0] - scores[0][0]
    if length <= 0:
        return scores[-1][1]
    areas = ((x2 - x1) * (y1 + y2) / 2 for (x1, y1), (x2, y2) in itertools.pairwise(scores))
    return sum(areas) / length


def first_reached(scores: Sequence[tuple[float, float]], target: float, *, larger_is_better: bool) -> float | None:
    """Return how far a run was when its score first reached a target, interpolated linearly; None if it never did.

    Each of the scores comes with how far the run was, in epochs, steps or seconds, in order.
    """
    sign = 1.0 if larger_is_better else -1.0
    before: tuple[float, float] | None = None
    for position, score in scores:
        gap = sign * (target - score)
        if gap <= 0:
            if before is None or before[1] <= gap:
                return position
            share = before[1] / (before[1] - gap)
            return before[0] + share * (position - before[0])
        if math.isfinite(gap):
            before = (position, gap)
    return None
