"""Verdicts on paired scores: against closed forms, by simulated error rates, and the time to a score."""

import itertools
import math
import random

import pytest

from castwise.analysis.equivalence import (
    AccuracyVerdict,
    area_under_curve,
    first_reached,
    judge,
    looks_of,
    verdict_after,
)

MARGIN = 0.003
AFTER = {"larger_is_better": True}


def verdict(differences: list[float | None], margin: float = MARGIN, **more: object) -> AccuracyVerdict:
    baseline = [0.9 + 0.01 * n for n in range(len(differences))]
    candidate = [None if gap is None else score + gap for score, gap in zip(baseline, differences, strict=True)]
    return judge(baseline, candidate, margin, **{"larger_is_better": True, **more})  # type: ignore[arg-type]


def test_the_interval_is_students_over_the_differences() -> None:
    # By hand: mean 0.002, standard deviation 0.001, 5 pairs; the 97.5 % quantile of t with 4 degrees is 2.776445.
    gap = 0.001 / math.sqrt(2 / 4)
    found = verdict([0.002 - gap, 0.002, 0.002, 0.002, 0.002 + gap])
    assert found.difference is not None
    assert found.difference.value == pytest.approx(0.002)
    assert found.difference.high - 0.002 == pytest.approx(2.776445 * 0.001 / math.sqrt(5), rel=1e-5)


@pytest.mark.parametrize(
    ("differences", "kind"),
    [
        ([0.0001, -0.0001, 0.0002, 0.0, -0.0002], "as good"),
        ([0.0] * 5, "as good"),
        ([-0.0021, -0.0019, -0.0020, -0.0022, -0.0018], "as good"),  # below 0 for certain, but within the margin
        ([-0.01, -0.011, -0.009, -0.0105, -0.0095], "worse"),
        ([0.01, 0.011, 0.009, 0.0105, 0.0095], "better"),
        ([0.01, -0.01, 0.02, -0.02, 0.005], "not enough runs"),
        ([0.0001], "not enough runs"),
        ([0.0001, None, 0.0002, 0.0, -0.0002, 0.0001], "not enough runs"),  # one that diverged may be chance
        ([-0.01, None, -0.011, -0.009, -0.0105, -0.0095], "worse"),
        ([0.0001, None, None, None, None], "diverged"),  # by Fisher's exact test: 5 / 210
        ([0.0001, 0.0001, None, None, None], "not enough runs"),  # 21 / 252
    ],
)
def test_kinds(differences: list[float | None], kind: str) -> None:
    assert verdict(differences).kind == kind


def test_a_smaller_perplexity_is_better() -> None:
    baseline = [4.6, 4.61, 4.62, 4.63, 4.64]
    lower = judge(baseline, [score - 0.1 for score in baseline], 0.01, larger_is_better=False)
    higher = judge(baseline, [score + 0.1 for score in baseline], 0.01, larger_is_better=False)
    assert (lower.kind, higher.kind) == ("better", "worse")
    assert lower.difference is not None
    assert lower.difference.value == pytest.approx(0.1)


def test_only_who_diverges_more_often_than_the_baseline_is_told_so() -> None:
    found = judge(scores := [0.9, None, 0.91, 0.92, 0.93, 0.9], scores, MARGIN, larger_is_better=True)
    assert (found.kind, found.num_pairs, found.num_diverged) == ("as good", 5, 1)
    assert judge(scores[:5], scores[:5], MARGIN, larger_is_better=True).kind == "not enough runs", "of 4 pairs"
    found = judge([0.9, None], [None, 0.9], MARGIN, larger_is_better=True)
    assert (found.kind, found.num_diverged, found.difference) == ("not enough runs", 1, None)
    few = judge([0.9, None, 0.9], [None, 0.9, None], MARGIN, larger_is_better=True)
    assert (few.kind, few.diverges_more) == ("not enough runs", True)


def test_the_number_that_would_do_decides_at_the_same_spread() -> None:
    steps = [0.004, -0.004, 0.003, -0.003, 0.001]
    found = verdict(steps)
    assert found.pairs_needed is not None
    more = list(itertools.islice(itertools.cycle(steps), found.pairs_needed + 4))
    assert verdict(more).kind == "as good"
    assert verdict(more[: found.pairs_needed // 2]).kind == "not enough runs"


@pytest.mark.parametrize("count", [5, 10])
def test_as_many_seeds_as_are_advised_decide_although_they_need_more_looks(count: int) -> None:
    steps = [0.004, -0.004, 0.003, -0.003, 0.001]
    more = list(itertools.islice(itertools.cycle(steps), 200))
    needed = verdict(more[:count], num_looks=len(looks_of(count))).pairs_needed
    assert needed is not None
    enough = more[: 5 * math.ceil(needed / 5)]  # whose spread is the same
    found = verdict_after([0.9] * len(enough), [0.9 + gap for gap in enough], MARGIN, **AFTER, num_seeds=len(enough))
    assert found.kind == "as good"


def test_between_two_looks_there_is_no_verdict() -> None:
    gaps = [0.0035, -0.0035, 0.003, -0.003, 0.0] + 60 * [0.0]
    kinds = {
        count: verdict_after([0.9] * count, [0.9 + gap for gap in gaps[:count]], MARGIN, **AFTER, num_seeds=50)
        for count in (5, 6, 10, 12)
    }
    assert [found.kind for found in kinds.values()] == [*["not enough runs"] * 3, "as good"]
    assert [found.pairs_needed for found in kinds.values()] == [20, 12, 12, None], "where the next verdict is given"


def test_more_looks_make_each_interval_wider() -> None:
    one, five = (verdict([0.001, -0.001, 0.002], num_looks=looks).difference for looks in (1, 5))
    assert one is not None
    assert five is not None
    assert five.high > one.high
    assert looks_of(12) == (5, 8, 12)
    assert looks_of(3) == (3,)


def test_a_verdict_stays_as_it_was_when_it_was_reached() -> None:
    baseline = [0.9] * 8
    candidate = [0.9001, 0.8999, 0.9, 0.9001, 0.8999, 0.5, 0.5, 0.5]  # what came later does not count
    found = verdict_after(baseline, candidate, MARGIN, larger_is_better=True, num_seeds=8)
    assert (found.kind, found.num_pairs) == ("as good", 5)
    found = verdict_after(baseline, [*candidate[:7], None], MARGIN, **AFTER, num_seeds=8)
    assert (found.kind, found.num_diverged) == ("not enough runs", 1), "unless a run diverged"
    found = verdict_after([0.9] * 15, [*candidate[:5], *[None] * 10], MARGIN, **AFTER, num_seeds=15)
    assert found.kind == "diverged"


def test_equally_many_that_diverge_are_rarely_called_more() -> None:
    draw = random.Random(0)
    found = []
    for _ in range(400):
        baseline, candidate = ([None if draw.random() < 0.1 else 0.9 for _ in range(12)] for _ in range(2))
        found.append(verdict_after(baseline, candidate, MARGIN, **AFTER, num_seeds=12).kind)
    assert found.count("diverged") <= 0.05 * len(found)
    often = [None, None, 0.9] * 4
    assert verdict_after([0.9] * 12, often, MARGIN, **AFTER, num_seeds=12).kind == "diverged"


@pytest.mark.parametrize(
    ("shift", "wrong"), [(0.0, ("worse", "better")), (MARGIN, ("as good",)), (-MARGIN, ("as good",))]
)
def test_wrong_verdicts_are_rare_although_one_looks_again_and_again(shift: float, wrong: tuple[str, ...]) -> None:
    draw = random.Random(0)
    repeats, num_wrong = 400, 0
    for _ in range(repeats):
        baseline = [draw.gauss(0.9, 0.002) for _ in range(20)]
        candidate = [score + shift + draw.gauss(0, 0.0015) for score in baseline]
        found = verdict_after(baseline, candidate, MARGIN, larger_is_better=True, num_seeds=20)
        num_wrong += found.kind in wrong
    assert num_wrong <= 0.06 * repeats  # 5 % at the most are promised; 2.5 % lie beyond either end


def test_a_margin_must_be_above_zero() -> None:
    with pytest.raises(ValueError, match="above 0"):
        verdict([0.1, 0.2], margin=0.0)


def test_the_area_is_the_mean_score_while_training() -> None:
    assert area_under_curve([(0, 0.0), (10, 1.0), (20, 1.0)]) == pytest.approx(0.75)
    assert area_under_curve([(5, 0.7)]) == 0.7
    assert area_under_curve([]) is None
    assert area_under_curve([(1, math.nan), (2, 0.5)]) is None


def test_a_score_is_reached_between_two_validations() -> None:
    curve = [(10.0, 0.5), (20.0, 0.7), (30.0, 0.6), (40.0, 0.9)]
    assert first_reached(curve, 0.6, larger_is_better=True) == pytest.approx(15)
    assert first_reached(curve, 0.8, larger_is_better=True) == pytest.approx(30 + 10 * 2 / 3)
    assert first_reached(curve, 0.4, larger_is_better=True) == 10
    assert first_reached(curve, 0.95, larger_is_better=True) is None
    losses = [(10.0, 5.0), (20.0, 4.0)]
    assert first_reached(losses, 4.5, larger_is_better=False) == pytest.approx(15)
