"""Curves of block characters."""

import math

from castwise.render.sparkline import sparkline


def test_lowest_and_highest_are_at_the_ends() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 0, 7) == "▁▂▃▄▅▆▇█"


def test_many_values_are_means_of_neighbours_and_every_value_counts() -> None:
    assert sparkline([0.0] * 50 + [7.0] * 50, 0, 7) == "▁▁▁▁▁█████"
    assert len(sparkline(list(range(1001)), 0, 1000)) == 10
    assert sparkline([0] * 19 + [7], 0, 7)[-1] == "▅"


def test_what_lies_outside_is_at_the_edge_and_what_is_no_number_is_a_gap() -> None:
    assert sparkline([-5, 99, math.nan, 0], 0, 7) == "▁█ ▁"
    assert sparkline([3, 3, 3], 3, 3) == "▁▁▁"
    assert sparkline([], 0, 1) == ""


def test_ends_that_no_float_lies_between_are_a_gap() -> None:
    assert sparkline([1e308, 1.0], -math.inf, math.inf) == "  "
