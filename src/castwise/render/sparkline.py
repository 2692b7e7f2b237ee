"""Small curves of block characters, for the cells of a terminal's table."""

import math
import statistics
from collections.abc import Sequence

_LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], low: float, high: float, width: int = 10) -> str:
    """Return values as a curve of characters; means of neighbours where they are more than it is wide.

    Args:
        values: The values, in order; what is not finite is a gap.
        low: What the lowest character stands for; values below it have that one too.
        high: What the highest stands for.
        width: Characters at the most.
    """
    count = min(width, len(values))
    parts = [values[len(values) * n // count : len(values) * (n + 1) // count] for n in range(count)]
    return "".join(_level([value for value in part if math.isfinite(value)], low, high) for part in parts)


def _level(values: Sequence[float], low: float, high: float) -> str:
    share = 0.0 if high <= low or not values else (statistics.fmean(values) - low) / (high - low)
    if not values or not math.isfinite(share):  # also where a damaged record's values are too far apart for a float
        return " "
    return _LEVELS[round(min(max(share, 0.0), 1.0) * (len(_LEVELS) - 1))]
