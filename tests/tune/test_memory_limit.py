"""Which smaller batch is tried next, by what the others held."""

import math

import pytest

from castwise.tune.memory_limit import BatchPoint, next_batch

FIXED, OF_SAMPLE = 100.0, 1.0


def held(batch_size: int, *, fixed: float = FIXED, step: float = 10.0) -> BatchPoint:
    """Return a loop on a line of memory, and one of time: a step takes `step` whatever its batch."""
    return BatchPoint(batch_size, fixed + OF_SAMPLE * batch_size, batch_size / (step + batch_size))


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ((256, 128), 300, 192),  # 98 % of it leave 194
        ((256, 128), 235, None),  # two more promise nothing
        ((256, 128), 208, 96),
        ((256, 128), 160, 56),  # below both
        ((256, 128), 115, 12),  # a multiple of 8 would cost a third of it
        ((256, 128), 101, 1),
        ((256, 128), 50, 1),  # not even one is predicted; only the trial tells
        ((256, 128, 1), 50, None),  # not even one fits
        ((256, 128, 192), 300, None),  # what is left between promises nothing
        ((256,), 178, 112),  # from one alone: nine tenths of its share
        ((256, 128), 400, None),  # nothing is too large
        ((1,), 50, None),
        ((2,), 101.5, 1),
    ],
)
def test_the_largest_batch_that_fits_is_tried(sizes: tuple[int, ...], limit: float, expected: int | None) -> None:
    assert next_batch([held(size) for size in sizes], limit) == expected


def test_every_search_ends_with_neighbours_or_with_one_that_is_as_good() -> None:
    for limit in range(90, 360, 7):
        tried = [held(256), held(128)]
        while (size := next_batch(tried, limit)) is not None:
            assert 1 <= size < 256
            assert size not in {each.batch_size for each in tried}
            tried.append(held(size))
        assert len(tried) <= 4
        assert (min(each.held_bytes for each in tried) <= limit) == (limit >= FIXED + OF_SAMPLE)


def test_a_batch_that_is_little_faster_is_not_worth_a_trial() -> None:
    """Where a step takes no time of its own, a larger batch has no more units a second."""
    assert next_batch([held(256, step=0.0), held(128, step=0.0)], 300) is None
    assert next_batch([held(256, step=100.0), held(128, step=100.0)], 300) == 192
    nearly = [held(256, step=8.0), held(128, step=8.0)]  # 2 % faster
    assert next_batch(nearly, 300) == 192
    assert next_batch(nearly, 300, compiles=True) is None


def test_one_that_failed_is_no_point_of_the_line_and_bounds_the_search() -> None:
    failed = BatchPoint(192, math.inf, None)
    assert next_batch([held(256), held(128), failed], 300) == 184
    assert next_batch([BatchPoint(256, math.inf, None)], 300) is None, "of what is not known nothing follows"
    assert next_batch([held(64), BatchPoint(128, math.inf, None)], 300) == 96, "half way"


def test_where_the_allocators_segments_hide_the_line_the_batch_is_halved() -> None:
    flat = [BatchPoint(size, 400.0, 1.0) for size in (256, 128)]
    assert next_batch(flat, 300) == 64
