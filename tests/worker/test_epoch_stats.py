"""One pass over the data, watched."""

import math
from collections.abc import Iterator

import pytest
import torch

from castwise.worker import epoch_stats
from castwise.worker.epoch_stats import Heartbeat, Pass, TimedIterator, why_diverged


class Clock:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(epoch_stats, "time", made)
    return made


def test_timed_iterator(clock: Clock) -> None:
    def batches() -> Iterator[tuple[torch.Tensor, ...]]:
        for _ in range(3):
            clock.now += 2.0
            yield ()
        clock.now += 0.5  # to find out that there are no more

    waiting = TimedIterator(batches())
    for _ in waiting:
        clock.now += 10.0
    assert waiting.seconds == 6.5


def test_a_loader_that_fails_is_timed_too(clock: Clock) -> None:
    def broken() -> Iterator[tuple[torch.Tensor, ...]]:
        clock.now += 3.0
        raise OSError("no such file")
        yield ()

    waiting = TimedIterator(broken())
    with pytest.raises(OSError, match="no such file"):
        next(waiting)
    assert waiting.seconds == 3.0


def test_progress_about_once_a_second(clock: Clock) -> None:
    told: list[float] = []
    signs = Heartbeat(told.append, 10)
    for step in range(1, 11):
        clock.now += 0.6
        signs.done(step)
    assert told == [0.2, 0.4, 0.6, 0.8, 1.0]


def test_a_share_is_never_more_than_all_and_nobody_need_listen(clock: Clock) -> None:
    told: list[float] = []
    for total in (0, 1):
        signs = Heartbeat(told.append, total)
        clock.now += 2.0
        signs.done(5)
    assert told == [1.0, 1.0]
    silent = Heartbeat(None, 1)
    clock.now += 2.0
    silent.done(1)


def seen(losses: list[float], *, every: bool) -> Pass:
    pass_ = Pass(every, len(losses))
    for index, loss in enumerate(losses):
        pass_.add_step(index, torch.tensor(loss), 4)
    return pass_


@pytest.mark.parametrize("every", [False, True])
def test_losses_are_kept_evenly_and_the_last_always(every: bool) -> None:
    few = seen([3.0, 2.0, 1.0], every=every)
    assert (few.num_steps, few.num_samples) == (3, 12)
    assert few.losses() == ((0, 3.0), (1, 2.0), (2, 1.0))
    many = seen([float(step) for step in range(1005)], every=every).losses()
    assert [index for index, _ in many] == [*range(0, 1005, 10), 1004]
    assert all(index == loss for index, loss in many)


@pytest.mark.parametrize(
    ("losses", "hopeless"),
    [
        ([math.nan] * 19, False),
        ([math.nan] * 20, True),
        ([math.inf] * 20, True),
        ([math.nan] * 19 + [1.0] + [math.nan] * 19, False),
        ([1.0] * 100 + [math.nan] * 20, True),
    ],
)
def test_diverged_after_many_non_finite_losses(losses: list[float], hopeless: bool) -> None:
    assert seen(losses, every=True).has_diverged == hopeless
    assert not seen(losses, every=False).has_diverged, "nobody has read them"


def test_why_diverged() -> None:
    assert why_diverged(((0, 1.0), (9, 2.0)), 10) is None
    assert why_diverged(((0, math.nan), (9, 2.0)), 10) is None, "it recovered"
    words = "the loss was nan at step 10 of the epoch (seen first at step 6)"
    assert why_diverged(((0, 1.0), (5, math.inf), (9, math.nan)), 10) == words
