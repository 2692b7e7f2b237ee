"""The search for the largest batch, against made-up memories."""

import pytest
from fake_engine import fake_spec, fake_trial

from castwise.plan import TrialSpec
from castwise.record import RankSamples, Trial
from castwise.sweep.limits import find_limit

GIB = 2**30


def limit_of(trials: list[Trial]) -> tuple[int | None, int | None]:
    """Return the largest batch that trained and the smallest that did not fit."""
    fits = [trial.spec.batch_size for trial in trials if trial.status == "ok"]
    fails = [trial.spec.batch_size for trial in trials if trial.status == "oom"]
    return max(fits, default=None), min(fails, default=None)


def search(
    fixed: float, per_sample: float, *, memory: int = 80 * GIB, multiple: int = 128, slack: float = 0.0
) -> list[Trial]:
    """Search a made-up device; `slack` is the share of the peak that the fresh process needs beyond its peak."""

    def measure(spec: TrialSpec) -> Trial:
        peak = fixed + per_sample * spec.batch_size
        if peak * (1 + slack) > memory:
            return fake_trial(spec, step_seconds=(), status="oom", message="no memory (fake)")
        trial = fake_trial(spec)
        return trial.model_copy(update={"ranks": (RankSamples(peak_reserved_bytes=int(peak)),)})

    return find_limit(measure, fake_spec(), multiple, memory)


@pytest.mark.parametrize("per_sample", [1e6, 45.78e6, 23e6, 4e8])
@pytest.mark.parametrize("slack", [0.0, 0.05, 0.3])
def test_it_ends_with_neighbours_and_few_trials(per_sample: float, slack: float) -> None:
    trials = search(1.5 * GIB, per_sample, slack=slack)
    fits, fails = limit_of(trials)
    assert fits is not None
    assert fails == fits + 128
    assert (1.5 * GIB + per_sample * fits) * (1 + slack) <= 80 * GIB < (1.5 * GIB + per_sample * fails) * (1 + slack)
    assert len(trials) <= (6 if slack < 0.1 and per_sample > 1e7 else 18)
    sizes = [trial.spec.batch_size for trial in trials]
    assert len(set(sizes)) == len(sizes), "no size is tried twice"


def test_where_the_smallest_does_not_fit_there_is_no_limit() -> None:
    assert limit_of(search(100 * GIB, 1e6)) == (None, 128)


def test_a_crash_ends_the_search() -> None:
    trials = find_limit(lambda spec: fake_trial(spec, status="crashed"), fake_spec(), 8, GIB)
    assert [trial.status for trial in trials] == ["crashed"]


def test_memory_that_never_ends_does_not_search_for_ever() -> None:
    assert len(find_limit(fake_trial, fake_spec(), 8, GIB)) <= 20
