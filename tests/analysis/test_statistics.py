"""Intervals and verdicts, by hand and by simulation."""

import math
import random
import statistics

import pytest

from castwise.analysis.statistics import (
    Estimate,
    estimate,
    independent_ratio,
    level_of,
    mean_difference,
    noise_of,
    paired_ratio,
    pseudomedian,
    required_blocks,
    student_quantile,
    verdict_of,
)


def test_estimate_is_the_geometric_mean_with_students_interval() -> None:
    found = estimate([1.0, 2.0, 4.0])
    assert found is not None
    assert found.value == pytest.approx(2.0)
    # By hand: logarithms -ln 2, 0, ln 2 round ln 2; standard deviation ln 2; t(2 degrees, 98.5 %) = 5.6428.
    assert math.log(found.high / found.value) == pytest.approx(5.6428 * math.log(2) / math.sqrt(3), rel=1e-4)
    assert found.low * found.high == pytest.approx(found.value**2)
    assert found.n == 3
    assert found.half_width == pytest.approx(found.high / found.value - 1)


def test_more_looks_have_a_higher_level() -> None:
    assert level_of(3) == level_of(5) < level_of(6) == level_of(12)
    levels = [level_of(5), level_of(6)]
    for count, level in zip((5, 6), levels, strict=True):
        found = estimate([math.exp(value) for value in range(count)])
        assert found is not None
        error = statistics.stdev(range(count)) / math.sqrt(count)
        assert math.log(found.high / found.value) == pytest.approx(student_quantile(count - 1, level) * error)


def test_one_of_a_family_has_a_higher_level() -> None:
    for rounds in (3, 12):
        errors = [1 - level_of(rounds, family) for family in (1, 2, 4, 8)]
        # The whole error of one ratio is on the one side that counts in a family.
        assert errors == pytest.approx([errors[0], errors[0], errors[0] / 2, errors[0] / 4])
    for sides in (([1.0, 1.1, 1.2],), ([1.0, 1.1, 1.2], [1.0, 1.1, 1.3])):
        function = estimate if len(sides) == 1 else independent_ratio
        alone, one_of_eight = function(*sides), function(*sides, family=8)
        assert alone is not None
        assert one_of_eight is not None
        assert (one_of_eight.value, one_of_eight.n) == (alone.value, alone.n)
        assert one_of_eight.low < alone.low < alone.high < one_of_eight.high


def test_one_process_has_no_interval() -> None:
    found = estimate([0.5])
    assert found is not None
    assert (found.value, found.n) == (0.5, 1)
    assert math.isnan(found.low)
    assert found.half_width == math.inf
    assert verdict_of(found).kind == "inconclusive"
    assert "1 process" in verdict_of(found).reason
    assert estimate([]) is None


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_figures_that_cannot_be_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="positive, finite"):
        estimate([1.0, value])


def test_blocks_are_paired() -> None:
    drifting = [1.0, 2.0, 4.0, 8.0]
    assert paired_ratio(drifting, [second / 3 for second in drifting]) == pytest.approx(3)
    assert paired_ratio([1.0, 1.0, 1.0, 50.0], [0.5, 0.5, 0.5]) == 2, "blocks that one side lacks are left out"
    assert paired_ratio([1.0, 1.0, 50.0], [0.5] * 3) == 2, "so is a disturbed block"
    assert paired_ratio([], [1.0]) is None


def test_pseudomedian() -> None:
    """The median of one that flips between two speeds is one of the two, by chance."""
    assert pseudomedian([1.0, 1.0, 1.0, 2.0, 2.0, 2.0]) == 1.5
    assert pseudomedian([1.0] * 7 + [2.0] * 5) == 1.5, "not the speed that happened to come up more often"
    assert pseudomedian([1.0, 1.0, 1.0, 1e9]) == 1
    assert pseudomedian([1.0, 1e9, 1.0]) == 1
    assert pseudomedian([3.0]) == 3


@pytest.mark.parametrize(
    ("low", "high", "kind"),
    [
        (1.01, 1.5, "faster"),
        (1.001, 1.009, "same"),
        (1.005, 1.02, "faster"),
        (0.98, 0.999, "slower"),
        (0.98, 1.005, "inconclusive"),
        (0.9, 1.1, "inconclusive"),
    ],
)
def test_verdicts(low: float, high: float, kind: str) -> None:
    verdict = verdict_of(Estimate(math.sqrt(low * high), low, high, 3))
    assert verdict.kind == kind
    assert f"{low:.4f}" in verdict.reason


def test_the_margin_is_the_user_s() -> None:
    ratio = Estimate(1.02, 1.015, 1.025, 5)
    assert verdict_of(ratio).kind == "faster"
    assert verdict_of(ratio, margin=0.03).kind == "same"


def test_required_blocks_give_the_tolerance() -> None:
    rng, noise, tolerance = random.Random(1), 0.02, 0.005
    count = round(required_blocks(noise, tolerance))
    middles = [pseudomedian([1 + noise * rng.gauss(0, 1) for _ in range(count)]) for _ in range(400)]
    assert statistics.stdev(middles) == pytest.approx(tolerance, rel=0.15)


def test_noise_is_that_of_the_shortest_blocks() -> None:
    rng = random.Random(2)
    short = [1 + 0.01 * rng.gauss(0, 1) for _ in range(400)]
    long = [statistics.fmean(1 + 0.01 * rng.gauss(0, 1) for _ in range(4)) for _ in range(400)]
    assert noise_of(short) == pytest.approx(0.01, rel=0.2)
    assert noise_of(long) == pytest.approx(0.005, rel=0.2)
    assert noise_of(short + long, [1.0] * 400 + [4.0] * 400) == pytest.approx(0.01, rel=0.2)


def test_coverage_of_intervals() -> None:
    # benchmarks/coverage.py simulates it with drift, autocorrelation, outliers and the stop rule.
    rng, draws = random.Random(7), 1000
    held = 0
    for _ in range(draws):
        found = estimate([math.exp(rng.gauss(0, 0.01)) for _ in range(4)])
        assert found is not None
        held += found.low <= 1 <= found.high
    assert 0.93 <= held / draws <= 0.985


def test_mean_difference_without_variance() -> None:
    exact = mean_difference([0.5, 0.5], [0.6, 0.6])
    assert exact.low == exact.value == exact.high
    assert math.isnan(mean_difference([0.5], [0.6, 0.7]).low)
