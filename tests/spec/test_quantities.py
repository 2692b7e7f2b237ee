import re
from collections.abc import Callable

import pytest

from castwise.errors import UsageError
from castwise.spec.quantities import format_share, parse_duration, parse_memory, parse_share, truncate_list


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_duration, "60", 60),
        (parse_duration, "60s", 60),
        (parse_duration, " 1.5 min ", 90),
        (parse_duration, "2m", 120),
        (parse_duration, "1h", 3600),
        (parse_duration, "1h30m", 5400),
        (parse_duration, "1h 2min 3s", 3723),
        (parse_duration, "1e2s", 100),
        (parse_share, "0.01", 0.01),
        (parse_share, "2.5 %", 0.025),
        (parse_memory, "8GiB", 2**33),
        (parse_memory, "500MB", 5e8),
        (parse_memory, "2G", 2**31),
        (parse_memory, "1073741824", 2**30),
        (parse_memory, "1024 kib", 2**20),
    ],
)
def test_amounts(parse: Callable[[str, str], float], text: str, value: float) -> None:
    assert parse("--option", text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0, "0 %"),
        (0.00046, "0.046 %"),
        (0.084, "8.4 %"),
        (0.994, "99 %"),
        (0.996, "100 %"),
        (75, "7,500 %"),
        (-3.3, "-330 %"),
    ],
)
def test_shares_are_written_without_exponents(share: float, text: str) -> None:
    assert format_share(share) == text


@pytest.mark.parametrize(
    ("parse", "texts"),
    [
        (parse_duration, ["", "0", "-1", "nan", "inf", "1 year", "abc", "1..2s", "5%", "1e999", "1h30", "30m1h"]),
        (parse_share, ["", "0%", "-1%", "nan", "100%", "2", "1s", "%", "abc"]),
        (parse_memory, ["", "0", "-1GiB", "8 gigs", "nanGB", "infB", "GiB", "2", "8 kib"]),
    ],
)
def test_what_is_no_amount_is_refused(parse: Callable[[str, str], float], texts: list[str]) -> None:
    for text in texts:
        with pytest.raises(UsageError, match=rf"^--option takes .*, not '{re.escape(text)}'\.$"):
            parse("--option", text)


def test_a_few_of_many_are_named() -> None:
    assert truncate_list(["a"]) == "a"
    assert truncate_list(list("abcdef")) == "a, b, c, d, e, f"
    assert truncate_list(list("abcdefgh")) == "a, b, c, d, e, f and 2 more"
    assert truncate_list(list("abcde"), most=3) == "a, b, c and 2 more"
    assert truncate_list(list("abc"), most=2, separator="; ") == "a; b and 1 more"
