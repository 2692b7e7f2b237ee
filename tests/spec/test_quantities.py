import pytest

from castwise.errors import UsageError
from castwise.spec.quantities import format_share, parse_duration, parse_memory, parse_share, truncate_list


@pytest.mark.parametrize(
    ("text", "seconds"), [("60", 60), ("60s", 60), (" 1.5 min ", 90), ("2m", 120), ("1h", 3600), ("1e2s", 100)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration("--budget", text) == seconds


@pytest.mark.parametrize(("text", "share"), [("1%", 0.01), ("0.01", 0.01), ("2.5 %", 0.025), ("50%", 0.5)])
def test_shares(text: str, share: float) -> None:
    assert parse_share("--within", text) == pytest.approx(share)


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


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "1 year", "abc", "1..2s", "5%", "--", "1e999"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--budget takes a duration above 0") as caught:
        parse_duration("--budget", text)
    assert f"'{text}'" in str(caught.value)


@pytest.mark.parametrize("text", ["", "0", "0%", "-1%", "nan", "100%", "1", "2", "1s", "%", "abc"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--within takes a share"):
        parse_share("--within", text)


@pytest.mark.parametrize(
    ("text", "size"), [("8GiB", 2**33), ("500MB", 5e8), ("1024", 1024), ("1 kib", 1024), ("2e3b", 2000)]
)
def test_memory(text: str, size: float) -> None:
    assert parse_memory("--memory", text) == pytest.approx(size)


@pytest.mark.parametrize("text", ["", "0", "-1GiB", "8 gigs", "nanGB", "infB", "GiB"])
def test_what_is_no_memory_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--memory takes an amount of memory above 0"):
        parse_memory("--memory", text)


def test_a_few_of_many_are_named() -> None:
    assert truncate_list(["a"]) == "a"
    assert truncate_list(list("abcdef")) == "a, b, c, d, e, f"
    assert truncate_list(list("abcdefgh")) == "a, b, c, d, e, f and 2 more"
    assert truncate_list(list("abcde"), most=3) == "a, b, c and 2 more"
    assert truncate_list(list("abc"), most=2, separator="; ") == "a; b and 1 more"
