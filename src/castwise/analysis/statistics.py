"""Figures with intervals: the process is the replicate, and each process gives one value, its pseudomedian.

Blocks of one process agree better than two processes do, so an interval from blocks alone calls equal configurations
different. Here it is Student's over the processes' logarithms (Biometrika 6, 1908), at `level_of`.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from castwise.spec.quantities import TOO_NOISY, format_interval, format_share

VerdictKind = Literal["faster", "slower", "same", "inconclusive", "incomparable"]

# What is called a 95 % interval is Student's at this level: rounds are added until the interval is narrow enough, so
# intervals that happen to look narrow end early. At 95 % fewer of them would contain the true value. Each round beyond
# the fifth is one more chance to end early, so that their level is higher. Source: benchmarks/coverage.py.
LEVEL, _LEVEL_OF_MANY = 0.97, 0.985
FEW_ROUNDS = 5
MIN_PROCESSES = 2
FEWEST_BLOCKS = 4  # for quartiles
MOST_ROUNDS = 12  # of fresh processes, unless a number is asked for
# The standard error at which a process's step time is known well enough, as a share of it.
TOLERANCE = 0.0015
_QUARTILES_OF_NORMAL = 1.349  # the interquartile range of a normal distribution, in standard deviations
_FEWEST_FOR_STD = 3
_PSEUDOMEDIAN_OVER_MEAN = 1.0233  # the standard error of a normal sample's pseudomedian over its mean's: sqrt(pi / 3)


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float  # of the 95 % interval; NaN, as is `high`, if only one process was measured
    high: float
    n: int  # processes

    @property
    def half_width(self) -> float:
        """Return how far the interval reaches from the figure, as a share of it; infinite if there is no interval."""
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.value):
            return math.inf
        return max(self.high / self.value - 1, 1 - self.low / self.value)


@dataclass(frozen=True)
class Verdict:
    kind: VerdictKind
    reason: str  # a sentence
    ratio: Estimate | None  # the speed-up; None if the two cannot be compared


def estimate(values: Sequence[float], *, family: int = 1) -> Estimate | None:
    """Return the geometric mean of positive figures, one for each process, with its interval; None without figures.

    Raises:
        ValueError: A figure is not positive or not finite.
    """
    if not values:
        return None
    if any(not (value > 0 and math.isfinite(value)) for value in values):
        raise ValueError("an estimate is made of positive, finite figures")
    found = _mean([math.log(value) for value in values], level_of(len(values), family))
    return Estimate(math.exp(found.value), math.exp(found.low), math.exp(found.high), len(values))


def level_of(num_rounds: int, family: int = 1) -> float:
    """Return the level of what is called a 95 % interval of as many rounds.

    Of a family of ratios each has its share of the errors (Bonferroni), all on one side: whether it is above 1.
    """
    level = LEVEL if num_rounds <= FEW_ROUNDS else _LEVEL_OF_MANY
    return level if family < 2 else 1 - (1 - level) * 2 / family


def student_quantile(freedom: float, level: float = LEVEL) -> float:
    """Return how many standard errors an interval of this level reaches to either side, at these degrees of freedom."""
    from scipy.special import stdtrit  # takes half a second to import; only figures of several processes need it

    return float(stdtrit(freedom, 0.5 + level / 2))


def paired_ratio(baseline: Sequence[float], candidate: Sequence[float]) -> float | None:
    """Return how many times as long the baseline's steps take, from one session's seconds per step of each block.

    It is the ratio of the two step times that are shown, so that the columns of a table agree. Only blocks that both
    have count: they ran within moments of each other, so that drift (clock, temperature, neighbours) cancels. None if
    there is none.
    """
    num_blocks = min(len(baseline), len(candidate))
    return pseudomedian(baseline[:num_blocks]) / pseudomedian(candidate[:num_blocks]) if num_blocks else None


def independent_ratio(baseline: Sequence[float], candidate: Sequence[float], *, family: int = 1) -> Estimate:
    """Return how many times as long the baseline takes, from seconds of processes that share no session.

    It is the ratio of two geometric means, with Welch's interval; there is none if a side has one process only.
    """
    level = level_of(max(len(baseline), len(candidate)), family)
    found = mean_difference([math.log(value) for value in candidate], [math.log(value) for value in baseline], level)
    n = min(len(baseline), len(candidate))
    return Estimate(math.exp(found.value), math.exp(found.low), math.exp(found.high), n)


@dataclass(frozen=True)
class Difference:
    """By how much the mean of some numbers is above that of others, with its interval."""

    value: float
    low: float  # NaN, as is `high`, if a side has one number only
    high: float


def mean_difference(before: Sequence[float], after: Sequence[float], level: float = LEVEL) -> Difference:
    """Return by how much the mean of independent numbers is above that of others, with Welch's interval.

    Source: B. L. Welch, "The generalization of 'Student's' problem ...", Biometrika 34 (1947).
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
    """Return the mean of the differences within pairs of numbers, with Student's interval.

    What both of a pair share, such as the weights that two runs began with, cancels.
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

    Up to 29 % of the values may be outliers, and it is nearly as precise as the mean. If step times alternate between
    two speeds, the median is one of the two by chance; the pseudomedian lies between them.

    Source: J. L. Hodges and E. L. Lehmann, "Estimates of location based on rank tests", Ann. Math. Stat. 34 (1963).
    """
    return _pseudomedian(tuple(values))


@lru_cache(maxsize=2**15)  # several columns need the same blocks, and twenty blocks have 210 pairs
def _pseudomedian(values: tuple[float, ...]) -> float:
    if len(values) < FEWEST_BLOCKS:
        return statistics.median(values)
    ordered = sorted(values)
    # In this order the sums are a few rising runs, which sort fast. Halving is exact, so it comes last.
    sums = [first + second for index, first in enumerate(ordered) for second in ordered[index:]]
    sums.sort()
    middle, is_odd = divmod(len(sums), 2)
    return sums[middle] / 2 if is_odd else (sums[middle - 1] / 2 + sums[middle] / 2) / 2


def noise_of(seconds: Sequence[float], lengths: Sequence[float] = ()) -> float:
    """Return the standard deviation of a process's blocks (seconds per step) as a share of their median.

    It is computed from their quartiles, and 0 if there are too few. If `lengths` are given, a block that is n times as
    long as the shortest counts with the noise of n blocks.
    """
    if len(seconds) < FEWEST_BLOCKS:
        return 0.0
    middle = statistics.median(seconds)
    if lengths:
        seconds = [middle + (each - middle) * math.sqrt(length) for each, length in zip(seconds, lengths, strict=True)]
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / _QUARTILES_OF_NORMAL / middle


def between_process_std(seconds: Sequence[float]) -> float:
    """Return the standard deviation of the step times of a configuration's processes, as a share of them.

    It includes the machine's drift from one process to the next. 0 with fewer than three processes.
    """
    if len(seconds) < _FEWEST_FOR_STD:
        return 0.0
    return statistics.stdev(math.log(each) for each in seconds)


def required_blocks(noise: float, tolerance: float = TOLERANCE) -> float:
    """Return how many blocks of this noise give a pseudomedian with this standard error, as a share of the step time.

    The default is far below the difference between two processes; from there on another process is worth more.
    """
    return (_PSEUDOMEDIAN_OVER_MEAN * noise / tolerance) ** 2


def verdict_of(ratio: Estimate, margin: float = 0.01) -> Verdict:
    """Return the verdict on a speed-up.

    "Same" is a finding: the whole interval lies within the margin around 1.
    """
    if math.isinf(ratio.half_width):
        processes = "1 process" if ratio.n == 1 else f"{ratio.n} processes"
        return Verdict("inconclusive", f"{processes} a configuration: no interval", ratio)
    ends = format_interval(ratio.value, ratio.low, ratio.high, "{:.4f}".format)
    interval = "the wide 95 % interval" if ends == TOO_NOISY else f"the 95 % interval {ends}"
    if 1 - margin <= ratio.low and ratio.high <= 1 + margin:
        return Verdict("same", f"{interval} lies within ±{format_share(margin)} of 1", ratio)
    if ratio.low > 1:
        return Verdict("faster", f"{interval} lies above 1", ratio)
    if ratio.high < 1:
        return Verdict("slower", f"{interval} lies below 1", ratio)
    return Verdict("inconclusive", f"{interval} contains 1 and reaches beyond ±{format_share(margin)}", ratio)


def has_interval(found: Estimate | None) -> bool:
    """Return whether a figure has an interval of some width."""
    return found is not None and math.isfinite(found.low) and math.isfinite(found.high) and found.low != found.high
