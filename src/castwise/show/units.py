"""Figures as people read them; records stay in SI units."""

import math
import re
import statistics
import textwrap
from collections.abc import Sequence

from castwise.spec.quantities import format_bytes as format_bytes  # noqa: PLC0414  all that reports write is found here

_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(%|°C|[kKMGTmµnd]?i?[BJWs]|[kMG]Hz|kWh|min|h)(?!\w)|\w+/\w)")
_NO_BREAK = "\0"  # a space that no line is broken at; no text has one of its own


def format_seconds(value: float | None) -> str:
    """Return seconds in the unit that gives a figure from 1 to 1000: `23.1 ms`; "–" for None."""
    if value is None:
        return "–"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= scale:
            return f"{_digits(value / scale)} {unit}"
    return f"{_digits(value / 1e-9)} ns" if value else "0 s"


def format_rate(value: float | None) -> str:
    """Return a rate with thousands separators, four significant digits below 1000; "–" for None."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 1000 else _digits(value)


def format_ratio(value: float | None) -> str:
    """Return a ratio: `3.25×`; "–" for None."""
    return "–" if value is None else f"{value:.2f}×"


def format_number(value: float | None) -> str:
    """Return a plain figure with six significant digits: `0.123457`; "–" for None."""
    return "–" if value is None else f"{value:.6g}"


def format_energy(joules: float | None, unit: str) -> str:
    """Return the energy of one of what throughput counts: `0.123 J/image` for `images`; "–" for None."""
    return "–" if joules is None else f"{joules:.3g} J/{unit.removesuffix('s')}"


def format_percent(value: float | None) -> str:
    """Return a share in per cent: `88.3 %`; "–" for None."""
    return "–" if value is None else f"{100 * value:.1f} %"


def format_duration(seconds: float) -> str:
    """Return a duration for progress and headlines: `42 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _digits(value: float) -> str:
    return f"{value:.1f}" if value >= 100 else f"{value:#.3g}".rstrip(".")


def keep_units(text: str, space: str = "\u00a0") -> str:
    """Return a text with another space between each number and its unit: `1 %`, `5 min`, `700 W`, `90 images/s`."""
    return _BEFORE_UNIT.sub(space, text)


def wrap(text: str, width: int) -> str:
    """Return lines that break between words, behind their indent, but not before a unit.

    Nor do they break within a command to copy that fits in a line.
    """

    def kept(command: re.Match[str]) -> str:
        return command[0].replace(" ", _NO_BREAK) if len(command[0]) <= width else command[0]

    wrapper = textwrap.TextWrapper(max(width, 1), break_long_words=False, break_on_hyphens=False)
    lines = []
    for line in re.sub("`[^`\n]*`", kept, keep_units(text, _NO_BREAK)).split("\n"):
        words = line.lstrip(" ")
        wrapper.initial_indent = wrapper.subsequent_indent = line[: len(line) - len(words)]
        lines += wrapper.wrap(words) or [""]
    return "\n".join(lines).replace(_NO_BREAK, " ")


_LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], low: float, high: float) -> str:
    """Return values as a curve of block characters from `low` to `high`; values beyond them are cut off.

    More values than ten characters are averaged with their neighbours; values that are not finite leave a gap.
    """
    count = min(10, len(values))
    curve = ""
    for n in range(count):
        part = values[len(values) * n // count : len(values) * (n + 1) // count]
        finite = [value for value in part if math.isfinite(value)]
        share = 0.0 if high <= low or not finite else (statistics.fmean(finite) - low) / (high - low)
        if finite and math.isfinite(share):  # a damaged record's values can be too far apart for a float
            curve += _LEVELS[round(min(max(share, 0.0), 1.0) * (len(_LEVELS) - 1))]
        else:
            curve += " "
    return curve


def pluralize(number: int, what: str) -> str:
    """Return a number of things in words: "1 trial", "10,000 trials"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
