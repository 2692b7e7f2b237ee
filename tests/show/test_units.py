import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from castwise.show.units import (
    format_bytes,
    format_duration,
    format_energy,
    format_number,
    format_rate,
    format_ratio,
    format_seconds,
    sparkline,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (17.25 * 2**30, "17.2 GiB"),
        (141 * 2**30, "141 GiB"),
        (999.7 * 2**20, "1000 MiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_bytes(value: float | None, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (1.0, "1.00 s"),
        (0.1234, "123.4 ms"),
        (0.00123, "1.23 ms"),
        (45.6e-6, "45.6 µs"),
        (7e-9, "7.00 ns"),
        (0.0, "0 s"),
    ],
)
def test_seconds(value: float | None, text: str) -> None:
    assert format_seconds(value) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_rate(None), "–"),
        (format_rate(1234567.8), "1,234,568"),
        (format_rate(123.45), "123.5"),
        (format_rate(0.5), "0.500"),
        (format_ratio(None), "–"),
        (format_ratio(3.254), "3.25×"),
        (format_number(None), "–"),
        (format_number(12345678.0), "1.23457e+07"),
        (format_energy(None, "images"), "–"),
        (format_energy(0.12345, "images"), "0.123 J/image"),
        (format_duration(59.4), "59 s"),
        (format_duration(59.6), "1 min 00 s"),
        (format_duration(3599.6), "1 h 00 min"),
        (format_duration(7500), "2 h 05 min"),
    ],
)
def test_texts(text: str, expected: str) -> None:
    assert text == expected


@given(st.floats(min_value=1e-9, max_value=1e6))
def test_seconds_keep_three_digits(value: float) -> None:
    number, unit = format_seconds(value).split()
    assert float(number) * {"s": 1, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}[unit] == pytest.approx(value, rel=6e-3)


def test_sparkline_has_one_level_a_value_or_the_mean_of_neighbours() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 0, 7) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0] * 50 + [7.0] * 50, 0, 7) == "▁▁▁▁▁█████"
    assert len(sparkline(list(range(1001)), 0, 1000)) == 10
    assert sparkline([0] * 19 + [7], 0, 7)[-1] == "▅"


def test_sparkline_clips_and_leaves_gaps() -> None:
    assert sparkline([-5, 99, math.nan, 0], 0, 7) == "▁█ ▁"
    assert sparkline([3, 3, 3], 3, 3) == "▁▁▁"
    assert sparkline([], 0, 1) == ""
    assert sparkline([1e308, 1.0], -math.inf, math.inf) == "  "
