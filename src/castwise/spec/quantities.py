"""Durations, shares, memory and lists as users write them, and shares and memory as they read them."""

import math
import re
from collections.abc import Callable, Mapping, Sequence

from castwise.errors import UsageError

TOO_NOISY = "too noisy"  # in the place of an interval that is too wide to say anything
_MOST_REACH = 3.0  # times the figure, or a share of 1 / this of it. Source: chosen here

_MOST_PARTS = 6  # of a sentence: with more of them nobody reads any
_MOST_DIGITS = 18  # Python refuses to read numbers of thousands of digits

_SHARES = {"": 1.0, "%": 0.01}
_SECONDS = {"": 1.0, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_BYTES = {"": 1.0, "b": 1.0, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "kb": 1e3, "mb": 1e6, "gb": 1e9}
_BYTES |= {"k": 2.0**10, "m": 2.0**20, "g": 2.0**30}  # as docker and ulimit mean them
_NUMBER = re.compile(r"\s*([0-9.eE+-]+|nan|inf)\s*([a-z%]*)\s*", re.IGNORECASE)
_SEVERAL_UNITS = re.compile(r"(\d+\s*h)?\s*(\d+\s*m(?:in)?)?\s*(\d+\s*s(?:ec)?)?", re.IGNORECASE)


def parse_duration(option: str, text: str | float) -> float:
    """Return the seconds of `90`, `90s`, `2min`, `1h` or `1h30min`; a number is seconds."""
    parts = _SEVERAL_UNITS.fullmatch(str(text).strip())
    several = [part for part in parts.groups() if part] if parts is not None else []
    seconds = sum(_parse_amount(part, _SECONDS) for part in several or [text])
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"{option} takes a duration above 0, such as 60s or 5min, not '{text}'.")
    return seconds


def parse_share(option: str, text: str | float) -> float:
    """Return the share that `1%` or `0.01` is."""
    share = _parse_amount(text, _SHARES)
    if not 0 < share < 1:
        raise UsageError(f"{option} takes a share between 0 and 100 %, such as 1% or 0.01, not '{text}'.")
    return share


def format_share(share: float) -> str:
    """Return a share in per cent with two significant digits, and with no exponent: `0.046 %`, `8.4 %`, `240 %`."""
    percent = 100 * share
    return f"{percent:,.0f} %" if abs(percent) >= 99.5 else f"{percent:.2g} %"  # from 99.5 on `.2g` has an exponent


def format_interval(
    value: float, low: float | None, high: float | None, form: Callable[[float], str] = "{:.2f}".format
) -> str:
    """Return a figure's interval: `[1.88, 1.92]`; empty if there is none; in words if it is too wide to say anything.

    An interval that reaches beyond a third of the figure, or three times it, is not shown as numbers.
    """
    if low is None or high is None or math.isnan(low) or math.isnan(high) or math.isclose(low, high, rel_tol=1e-6):
        return ""
    if low * _MOST_REACH < value or high > value * _MOST_REACH:
        return TOO_NOISY
    return f"[{form(low)}, {form(high)}]"


def with_interval(figure: str, interval: str) -> str:
    """Return a figure with its interval: `1.90× [1.88, 1.92]`, `1.90× (too noisy)` or `1.90×`."""
    return f"{figure} ({interval})" if interval == TOO_NOISY else f"{figure} {interval}".rstrip()


def parse_memory(option: str, text: str | float) -> float:
    """Return the bytes of `8GiB`, `8G`, which is the same, `500MB` or `8589934592`."""
    size = _parse_amount(text, _BYTES)
    if not (math.isfinite(size) and size >= _BYTES["mib"]):  # `2` is meant as 2 GiB
        raise UsageError(f"{option} takes an amount of memory of 1 MiB or more, such as 8GiB or 500MB, not '{text}'.")
    return size


def format_bytes(value: float | None) -> str:
    """Return bytes with a binary prefix, three significant digits: `1.24 GiB`; "–" for None."""
    if value is None:
        return "–"
    prefix, larger = "B", ["TiB", "GiB", "MiB", "KiB"]
    while abs(value) >= 1024 and larger:
        value, prefix = value / 1024, larger.pop()
    return f"{value:.0f} {prefix}" if prefix == "B" or abs(value) >= 99.95 else f"{value:#.3g} {prefix}"


def truncate_list(parts: Sequence[str], most: int = _MOST_PARTS, separator: str = ", ") -> str:
    """Return parts of a sentence in a list, the first of many: `a, b`, `a, b, c, d, e, f and 3 more`."""
    more = len(parts) - most
    return separator.join(parts[:most]) + (f" and {more} more" if more > 0 else "")


def _parse_amount(text: object, units: Mapping[str, float]) -> float:
    """Return a number times its unit; NaN if the text is not that."""
    match = _NUMBER.fullmatch(str(text))
    try:
        return math.nan if match is None else float(match[1]) * units[match[2].lower()]
    except (ValueError, KeyError):
        return math.nan


def parse_list(option: str, given: object) -> tuple[str, ...]:
    """Return the parts of a text between commas, of several such texts, or numbers as texts."""
    several = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    text = ",".join(map(str, several))
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    if not parts:
        raise UsageError(f"{option} is empty: '{text}'. Name at least one, or leave it out.")
    return parts


def parse_numbers(option: str, given: object) -> tuple[int, ...]:
    """Return the whole numbers of a list, as `parse_list` reads it."""
    parts = parse_list(option, given)
    for part in parts:
        if not _is_count(part):
            raise UsageError(f"{option} takes whole numbers from 1, comma-separated, not '{part}'.")
    return tuple(int(part) for part in parts)


def parse_count(option: str, given: object) -> int:
    """Return a whole number from 1."""
    text = str(given).strip()
    if not _is_count(text):
        raise UsageError(f"{option} takes a whole number from 1, not '{text}'.")
    return int(text)


def _is_count(text: str) -> bool:
    return text.isdecimal() and len(text) <= _MOST_DIGITS and int(text) >= 1
