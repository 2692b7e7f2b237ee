"""The published loop compared with the tuned one of the same cell."""

import math

import pytest
from fake_engine import fake_epoch, fake_run, fake_training, recipe_of
from scipy.stats import ttest_ind, ttest_rel

from castwise.analysis.result_table import rows_of_runs
from castwise.records.schema import Trial
from castwise.suites.render import tuned_table
from castwise.suites.tuned_vs_published import tuned_notes, tuned_pairs

_RECIPE = {"epochs": 2, "validate_each_epoch": True}
_LOOP = ("channels-last", "compile")


def run(seed: int, accuracy: float, gain: float = 1.0, loop: tuple[str, ...] = (), workload: str = "resnet50") -> Trial:
    spec = fake_training("bf16-mixed", _RECIPE, seed=seed, techniques=loop, workload=workload)
    epochs = [fake_epoch(spec, number, gain=gain) for number in range(recipe_of(spec).num_epochs)]
    judged = epochs[-1].accuracy is not None
    epochs[-1] = epochs[-1].model_copy(update={"accuracy": accuracy if judged else None})
    return fake_run(spec, *epochs)


def texts(trials: list[Trial]) -> dict[str, str]:
    (pair,) = tuned_pairs(rows_of_runs(trials))
    table = tuned_table([pair])
    return {column.name: column.text(table.rows[0]) for column in table.columns}


def test_runs_of_three_seeds_are_compared_with_intervals() -> None:
    before, after = (0.85, 0.86, 0.87), (0.85, 0.87, 0.88)
    trials = [run(seed, accuracy) for seed, accuracy in enumerate(before)]
    trials += [run(seed, accuracy, gain=4.0, loop=_LOOP) for seed, accuracy in enumerate(after)]
    (pair,) = tuned_pairs(rows_of_runs(trials))
    assert pair.speedup is not None
    assert pair.speedup.n == 3
    assert 1.5 < pair.speedup.value < 4.0, "the first step and validation are no faster"
    found = pair.difference
    assert found is not None
    assert found.value == pytest.approx(0.02 / 3)
    interval = ttest_rel(after, before).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    shown = texts(trials)
    assert shown["seeds"] == "3 each"
    assert shown["published_score"] == "86.00 ± 1.00 %"
    assert shown["tuned_score"] == "86.67 ± 1.53 %"
    assert shown["difference"].startswith("+0.67 [-")
    assert shown["loop"] == "channels-last+compile"


def test_only_runs_of_the_same_seeds_are_compared_seed_by_seed() -> None:
    before, after = (0.72, 0.77, 0.71), (0.721, 0.769, 0.7105)
    published = [run(seed, accuracy) for seed, accuracy in enumerate(before)]
    alike, unlike = (
        tuned_pairs(rows_of_runs([*published, *(run(first + seed, each, 4.0, _LOOP) for seed, each in order)]))[
            0
        ].difference
        for first, order in ((0, reversed(list(enumerate(after)))), (1, enumerate(after)))
    )
    assert alike is not None
    assert unlike is not None
    assert (alike.low, alike.high) == pytest.approx(ttest_rel(after, before).confidence_interval(0.95))
    welch = ttest_ind(after, before, equal_var=False).confidence_interval(0.95)
    assert (unlike.low, unlike.high) == pytest.approx((welch.low, welch.high))
    assert unlike.value == pytest.approx(alike.value)


def test_the_settled_speedup_leaves_out_the_first_epoch() -> None:
    plain = [run(seed, 0.85) for seed in range(2)]
    other = [with_first_step(run(seed, 0.85, 4.0, _LOOP), share) for seed, share in enumerate((3.0, 0.1))]
    (pair,) = tuned_pairs(rows_of_runs([*plain, *other]))
    assert pair.speedup is not None
    assert pair.settled_speedup is not None
    assert pair.speedup.low < 1 < pair.speedup.high, "the first run alone compiled"
    epochs = [
        [epoch.seconds + epoch.validation_seconds for epoch in each.ranks[0].epochs] for each in (plain[0], other[0])
    ]
    assert pair.settled_speedup.value == pytest.approx(epochs[0][1] / epochs[1][1])
    assert pair.settled_speedup.low > 1


def test_one_run_a_side_has_a_difference_and_no_interval() -> None:
    assert texts([run(0, 0.85), run(1, 0.85), run(0, 0.86, loop=_LOOP)])["seeds"] == "2 published, 1 tuned"
    shown = texts([run(0, 0.85), run(0, 0.86, gain=2.0, loop=_LOOP)])
    assert (shown["seeds"], shown["difference"]) == ("1 each", "+1.00")
    assert "[" not in shown["speedup"]
    (pair,) = tuned_pairs(rows_of_runs([run(0, 0.85), run(0, 0.86, gain=2.0, loop=_LOOP)]))
    assert pair.difference is not None
    assert math.isnan(pair.difference.low)


def test_a_long_first_step_of_a_short_run_is_noted() -> None:
    plain, other = run(0, 0.85), run(0, 0.86, 2.0, _LOOP)
    short, long = ([with_first_step(plain, 0.02), with_first_step(other, share)] for share in (0.3, 0.04))
    assert tuned_pairs(rows_of_runs(short))[0].start_shares == (pytest.approx(0.02), pytest.approx(0.3))
    (note,) = tuned_notes(tuned_pairs(rows_of_runs(short)))
    assert f"2 % and 30 % in {plain.spec.label}" in note
    assert tuned_notes(tuned_pairs(rows_of_runs(long))) == []
    assert tuned_notes([]) == []


def with_first_step(trial: Trial, share: float) -> Trial:
    """Return a whole run whose first step takes a share of its time."""
    rank = trial.ranks[0]
    first, *others = rank.epochs
    total = sum(epoch.seconds + epoch.validation_seconds for epoch in rank.epochs)
    seconds = max(first.seconds, share * total)
    first = first.model_copy(update={"first_step_seconds": share * total, "seconds": seconds})
    return trial.model_copy(update={"ranks": (rank.model_copy(update={"epochs": (first, *others)}),)})


def test_a_language_model_is_judged_by_perplexity() -> None:
    shown = texts([run(0, 0.0, workload="lstm-lm"), run(0, 0.0, gain=2.0, loop=_LOOP, workload="lstm-lm")])
    assert "%" not in shown["published_score"]
    assert float(shown["published_score"]) == pytest.approx(math.exp(4.5), abs=0.05)


def test_configurations_without_both_loops_are_left_out() -> None:
    other = run(0, 0.86, loop=_LOOP)
    assert tuned_pairs(rows_of_runs([run(0, 0.85)])) == []
    assert tuned_pairs(rows_of_runs([other])) == []
    assert tuned_pairs(rows_of_runs([run(0, 0.85), other.model_copy(update={"status": "diverged"})])) == []
