"""Figures with intervals: the process is the replicate, and what one process says of itself is one value.

Blocks of one process agree better than two processes of the same cell do: where tensors happen to lie, which algorithm
a library picked (docs/method.md has by how much on an H200). An interval from blocks alone calls equal cells
different. Here every process gives one number, its pseudomedian, and the interval is Student's over the processes'
logarithms. It carries both terms, and needs no model of how blocks depend on each other.

Source: Student, "The probable error of a mean", Biometrika 6 (1908); the choice of the level: `LEVEL`.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from castwise.spec.quantities import format_share

VerdictKind = Literal["faster", "slower", "same", "inconclusive", "incomparable"]

# What is called a 95 % interval is Student's at this level: where rounds are added until the interval is narrow
# enough, the ones that happen to look narrow end early, and at 95 % only 92.7 to 95 % of them hold the truth.
# Source: benchmarks/coverage.py, which simulates it.
LEVEL = 0.965
MIN_PROCESSES = 2
FEWEST_BLOCKS = 4  # whose quartiles tell anything
# The standard error at which a process's step time is known well enough, as a share of it.
TOLERANCE = 0.0015
_QUARTILES_OF_NORMAL = 1.349  # the interquartile range of a normal distribution, in standard deviations
_FEWEST_TOLD_APART = 3
_PSEUDOMEDIAN_OVER_MEAN = 1.0233  # the standard error of a normal sample's pseudomedian over its mean's: sqrt(pi / 3)


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % interval.

    Attributes:
        value: The figure.
        low: The lower end; NaN where one process alone was measured.
        high: The upper end; the same.
        n: Processes it rests on.
    """

    value: float
    low: float
    high: float
    n: int

    @property
    def half_width(self) -> float:
        """Return how far the interval reaches from the figure, as a share of it; infinite where there is none."""
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.value):
            return math.inf
        return max(self.high / self.value - 1, 1 - self.low / self.value)


@dataclass(frozen=True)
class Verdict:
    """What a ratio of speeds says.

    Attributes:
        kind: faster, slower, same (within the margin, proven), inconclusive, or incomparable.
        reason: Why, in a sentence.
        ratio: The speed-up; None where the two cannot be compared.
    """

    kind: VerdictKind
    reason: str
    ratio: Estimate | None


def estimate(values: Sequence[float]) -> Estimate | None:
    """Return the geometric mean of positive figures, one a process, with its interval; None of none.

    Raises:
        ValueError: A figure is not positive or not finite.
    """
    if not values:
        return None
    if any(not (value > 0 and math.isfinite(value)) for value in values):
        raise ValueError("an estimate is made of positive, finite figures")
    found = _mean([math.log(value) for value in values], LEVEL)
    return Estimate(math.exp(found.value), math.exp(found.low), math.exp(found.high), len(values))


def student_quantile(freedom: float, level: float = LEVEL) -> float:
    """Return how many standard errors an interval reaches to either side, at these degrees of freedom.

    Args:
        freedom: Degrees of freedom.
        level: The share of intervals that is to hold the truth; the default serves those under the stop rule.
    """
    from scipy.special import stdtrit  # half a second, that only figures of several processes are worth

    return float(stdtrit(freedom, 0.5 + level / 2))


def paired_ratio(baseline: Sequence[float], candidate: Sequence[float]) -> float | None:
    """Return how many times as long the baseline's steps take, from the turns of one sitting.

    In a turn both ran within moments of each other, so that what drifts (clock, temperature, neighbours) falls
    on both alike and leaves the ratio; the pseudomedian over turns leaves out what hit one of them by chance.

    Args:
        baseline: Seconds a step of each turn.
        candidate: The same of the other cell; where one ended early, the turns both have count.

    Returns:
        The ratio; None where they share no turn.
    """
    ratios = [before / after for before, after in zip(baseline, candidate, strict=False)]
    return pseudomedian(ratios) if ratios else None


def independent_ratio(baseline: Sequence[float], candidate: Sequence[float]) -> Estimate:
    """Return how many times as long the baseline takes, from processes that never sat together, with Welch's interval.

    It is the ratio of two geometric means. Where a side is one process alone there is no interval.

    Args:
        baseline: Positive seconds, one a process; at least one.
        candidate: The same of the other side.
    """
    before, after = ([math.log(value) for value in side] for side in (candidate, baseline))
    found, n = mean_difference(before, after), min(len(before), len(after))
    return Estimate(math.exp(found.value), math.exp(found.low), math.exp(found.high), n)


@dataclass(frozen=True)
class Difference:
    """By how much the mean of some numbers is above that of others, with its interval.

    Attributes:
        value: The difference.
        low: The lower end; NaN where a side is one number alone.
        high: The upper end; the same.
    """

    value: float
    low: float
    high: float


def mean_difference(before: Sequence[float], after: Sequence[float], level: float = LEVEL) -> Difference:
    """Return by how much the mean of independent numbers is above that of others, with Welch's interval.

    Source: B. L. Welch, "The generalization of 'Student's' problem ...", Biometrika 34 (1947).

    Args:
        before: The others; at least one.
        after: At least one.
        level: The share of intervals that is to hold the truth; see `student_quantile`.
    """
    value = statistics.fmean(after) - statistics.fmean(before)
    if min(len(before), len(after)) < MIN_PROCESSES:
        return Difference(value, math.nan, math.nan)
    terms = [statistics.variance(side) / len(side) for side in (before, after)]
    error = sum(terms)
    if error == 0:
        return Difference(value, value, value)
    sizes = (len(before), len(after))
    freedom = error**2 / sum(term**2 / (size - 1) for term, size in zip(terms, sizes, strict=True))
    reach = student_quantile(freedom, level) * math.sqrt(error)
    return Difference(value, value - reach, value + reach)


def paired_difference(before: Sequence[float], after: Sequence[float], level: float = LEVEL) -> Difference:
    """Return by how much numbers are above those they belong to, in the mean, with Student's interval.

    What both of a pair share, such as the weights that two runs began with, is in neither the figure nor the interval.

    Args:
        before: The others; at least one.
        after: As many, in the same order.
        level: The share of intervals that is to hold the truth; see `student_quantile`.
    """
    return _mean([own - other for other, own in zip(before, after, strict=True)], level)


def _mean(values: Sequence[float], level: float) -> Difference:
    """Return the mean of some numbers, by how much it is above 0, with Student's interval."""
    value, count = statistics.fmean(values), len(values)
    if count < MIN_PROCESSES:
        return Difference(value, math.nan, math.nan)
    reach = student_quantile(count - 1, level) * statistics.stdev(values) / math.sqrt(count)
    return Difference(value, value - reach, value + reach)


def pseudomedian(values: Sequence[float]) -> float:
    """Return the median of the means of all pairs, each value paired with itself too; of three or fewer, the median.

    Up to 29 % of four and more values may be anything, as up to half may for the median, and it is nearly as sharp as
    the mean. Where step times flip between two speeds, as those of a loop do that waits for its device once a step, the
    median is one of the two, by chance; this lies between them, as the mean does.

    Source: J. L. Hodges and E. L. Lehmann, "Estimates of location based on rank tests", Ann. Math. Stat. 34 (1963).

    Args:
        values: At least one.
    """
    return _pseudomedian(tuple(values))


@lru_cache(maxsize=2**15)  # the same blocks stand in several columns, and twenty of them have 210 pairs
def _pseudomedian(values: tuple[float, ...]) -> float:
    if len(values) < FEWEST_BLOCKS:
        return statistics.median(values)
    ordered = sorted(values)
    # In this order the sums are a few rising runs, which sort in a fraction of the time; halving comes last, as it
    # is exact.
    sums = [first + second for place, first in enumerate(ordered) for second in ordered[place:]]
    sums.sort()
    middle, is_odd = divmod(len(sums), 2)
    return sums[middle] / 2 if is_odd else (sums[middle - 1] / 2 + sums[middle] / 2) / 2


def noise_of(seconds: Sequence[float], lengths: Sequence[float] = ()) -> float:
    """Return the standard deviation of a process's blocks as a share of their median, as their quartiles tell it.

    0 where they are too few to tell.

    Args:
        seconds: Seconds a step of each block.
        lengths: How many times as long as the shortest each block is; its noise counts as that of so many. None given:
            all are alike.
    """
    if len(seconds) < FEWEST_BLOCKS:
        return 0.0
    middle = statistics.median(seconds)
    if lengths:
        seconds = [middle + (each - middle) * math.sqrt(length) for each, length in zip(seconds, lengths, strict=True)]
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / _QUARTILES_OF_NORMAL / middle


def between_process_std(seconds: Sequence[float]) -> float:
    """Return the standard deviation of the step times of a cell's processes, as a share of them; 0 of fewer than three.

    What the machine drifted by from one process to the next is in it.

    Args:
        seconds: Positive seconds a step, one a process.
    """
    if len(seconds) < _FEWEST_TOLD_APART:
        return 0.0
    return statistics.stdev(math.log(each) for each in seconds)


def required_blocks(noise: float, tolerance: float = TOLERANCE) -> float:
    """Return how many blocks of this noise have a pseudomedian that is known well enough.

    Well enough is a standard error far below what two processes differ by anyway: further blocks would be time that
    another process tells more in.

    Args:
        noise: The `noise_of` a process of the cell.
        tolerance: The standard error, as a share of the step time.
    """
    return (_PSEUDOMEDIAN_OVER_MEAN * noise / tolerance) ** 2


def verdict_of(ratio: Estimate, margin: float = 0.01) -> Verdict:
    """Return the verdict on a speed-up.

    "Same" is a finding, that the whole interval lies within the margin, and not the lack of one.

    Args:
        ratio: The speed-up with its interval.
        margin: How far from 1 still is the same.
    """
    if math.isinf(ratio.half_width):
        return Verdict("inconclusive", f"{_processes(ratio.n)} a cell: no interval", ratio)
    interval = f"the 95 % interval {ratio.low:.4f} to {ratio.high:.4f}"
    if 1 - margin <= ratio.low and ratio.high <= 1 + margin:
        return Verdict("same", f"{interval} lies within ±{format_share(margin)} of 1", ratio)
    if ratio.low > 1:
        return Verdict("faster", f"{interval} lies above 1", ratio)
    if ratio.high < 1:
        return Verdict("slower", f"{interval} lies below 1", ratio)
    return Verdict("inconclusive", f"{interval} holds 1 and reaches beyond ±{format_share(margin)}", ratio)


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def has_interval(found: Estimate | None) -> bool:
    """Return whether a figure has an interval that says something."""
    return found is not None and math.isfinite(found.low) and math.isfinite(found.high) and found.low != found.high
