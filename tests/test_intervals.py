"""Figures with their intervals, as tables and files have them."""

import math

import pytest

from castwise.analysis.statistics import Estimate
from castwise.render.intervals import end_of, ratio_text

ALONE = Estimate(1.9, math.nan, math.nan, 1)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (None, "–"),
        (Estimate(1.9, 1.876, 1.924, 3), "1.90× [1.88, 1.92]"),
        (ALONE, "1.90×"),
        (Estimate(1.9, 0.0, math.inf, 2), "1.90×"),
        (Estimate(1.0, 1.0, 1.0, 3), "1.00×"),
    ],
    ids=["none", "an interval", "one process", "an infinite interval", "an interval of no width"],
)
def test_a_ratio_has_its_interval_where_that_says_something(found: Estimate | None, text: str) -> None:
    assert ratio_text(found) == text


def test_files_have_every_end_that_is_a_number() -> None:
    found = Estimate(1.9, 1.8, 2.0, 3)
    assert (end_of(found, "low"), end_of(found, "high")) == (1.8, 2.0)
    assert end_of(Estimate(1.0, 1.0, 1.0, 3), "low") == 1.0
    assert end_of(ALONE, "low") is None
    assert end_of(None, "high") is None
