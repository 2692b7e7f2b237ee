"""The gaps that torch's caching allocator leaves, against what can be counted by hand."""

import itertools
import random

import pytest

from castwise.trial.allocator import Event, StepEvents

MIB = 2**20


def events(*kept: int) -> list[Event]:
    """Return a tensor that comes and goes, and others, in MiB, that stay where it was; then it comes again."""
    first, *others = kept
    stay = [(number, size * MIB) for number, size in enumerate(others, start=2)]
    return [(1, first * MIB), (-1, 0), *stay, (99, first * MIB)]


def of(steps: list[Event], workspace: int = 1) -> StepEvents:
    """Return steps whose tensors are as large as many times the batch."""
    return StepEvents({1: steps, 2: [(number, 2 * size) for number, size in steps]}, workspace)


def test_what_stays_in_a_gap_keeps_it_from_what_was_there_before() -> None:
    steps = of(events(100, 10))
    assert steps.peak_bytes(1) == 110 * MIB + 1
    assert not steps.fits(1, 200 * MIB), "90 of 100 MiB are free, and 100 are asked for"
    assert steps.fits(1, 202 * MIB)  # 100, 100 more, and 2 of the workspace


def test_small_tensors_have_segments_of_their_own() -> None:
    steps = StepEvents({1: [(1, 100), (2, 100)], 2: [(1, 100), (2, 200)]}, 100)
    assert not steps.fits(1, 2 * MIB - 1)
    assert steps.fits(1, 2 * MIB)
    medium = StepEvents({1: [(1, 2 * MIB)], 2: [(1, 2 * MIB)]}, 100)
    assert not medium.fits(1, 21 * MIB), "20 MiB are asked for, and 2 MiB for the workspace"
    assert medium.fits(1, 22 * MIB)


def test_segments_that_nothing_uses_go_back_before_memory_runs_out() -> None:
    turns = [(number, size) for each in range(1, 5) for number, size in ((each, each * 30 * MIB), (-each, 0))]
    steps = StepEvents({1: turns, 2: turns}, 100)
    assert steps.fits(1, 122 * MIB)  # each is larger than the one before, whose segment is given back
    assert not steps.fits(1, 120 * MIB)


@pytest.mark.parametrize("room", [500, 1000, 5000])
def test_the_largest_batch_fits_and_the_next_does_not(room: int) -> None:
    steps = of(events(100, 10, 5, 40))
    largest = steps.largest(room * MIB)
    assert largest is not None
    assert steps.fits(largest, room * MIB)
    assert not steps.fits(largest + 1, room * MIB)
    assert steps.largest(50 * MIB) == 0
    assert of([(1, 0)]).largest(50 * MIB) is None, "nothing grows"


def test_a_batch_that_fits_by_chance_above_one_that_does_not_is_not_the_largest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = of(events(100, 10))
    for lucky in (range(205, 231), range(250, 260), range(0)):  # a power of two is among the second
        monkeypatch.setattr(steps, "fits", lambda size, _, lucky=lucky: size <= 196 or size in lucky)
        assert steps.largest(1) == 196


def test_neighbours_that_are_free_are_one_block_whatever_the_order() -> None:
    parts = [(number, 10 * MIB) for number in range(2, 8)]
    for order in itertools.islice(itertools.permutations(range(2, 8)), 0, 720, 37):
        steps = of([(1, 60 * MIB), (-1, 0), *parts, *((-number, 0) for number in order), (9, 60 * MIB)])
        assert steps.fits(1, 62 * MIB)


def test_no_tensor_overlaps_another_however_many_come_and_go() -> None:
    draw = random.Random(0)
    alive, steps = list[int](), list[Event]()
    for number in range(1, 800):
        if alive and draw.random() < 0.5:
            steps.append((-alive.pop(draw.randrange(len(alive))), 0))
        else:
            alive.append(number)
            steps.append((number, draw.choice((600, 5000, 3 * MIB, 17 * MIB, 60 * MIB))))
    whole = StepEvents({1: steps, 2: steps}, 100)
    assert not whole.fits(1, whole.peak_bytes(1) - 1)
    assert whole.fits(1, 10 * whole.peak_bytes(1))


def test_steps_of_other_operations_at_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="differ"):
        StepEvents({1: [(1, 8), (2, 8)], 2: [(1, 8), (-1, 0)]}, 0)
    with pytest.raises(ValueError, match=r"longer|shorter"):
        StepEvents({1: [(1, 8)], 2: [(1, 8), (-1, 0)]}, 0)
