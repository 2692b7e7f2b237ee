"""Figures with their intervals, as people and other programs read them."""

import math
from typing import Literal

from castwise.analysis.statistics import Estimate, has_interval
from castwise.render.units import format_ratio

End = Literal["low", "high"]
ENDS: tuple[End, ...] = ("low", "high")


def ratio_text(found: Estimate | None) -> str:
    """Return a ratio with its interval, where it has one that says something: `1.90× [1.88, 1.92]`; "–" for None."""
    if found is None or not has_interval(found):
        return format_ratio(found.value if found is not None else None)
    return f"{format_ratio(found.value)} [{found.low:.2f}, {found.high:.2f}]"


def end_of(found: Estimate | None, end: End) -> float | None:
    """Return one end of a figure's interval; None without an interval."""
    value = None if found is None else float(getattr(found, end))
    return value if value is not None and math.isfinite(value) else None
