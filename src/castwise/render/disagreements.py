"""Two figures of one table that seem to contradict each other: why they differ, and nothing where they agree."""

from collections.abc import Sequence

from castwise.analysis.result_table import Row
from castwise.analysis.statistics import has_interval
from castwise.analysis.steady_metrics import spread
from castwise.analysis.warnings import NOISE
from castwise.render.units import format_ratio
from castwise.spec.quantities import format_share, truncate_list


def disagreements(rows: Sequence[Row]) -> list[str]:
    """Return what a reader would stumble over who reckons one column of a table from another."""
    return [*_speedups(rows), *_spreads(rows)]


def _speedups(rows: Sequence[Row]) -> list[str]:
    """Return why a speed-up by turns is not the ratio of the throughputs, where that lies outside its interval."""
    told = [
        f"{ratio} for {row.trial.spec.label} (speed-up {shown})"
        for row in rows
        if _is_outside(row) and (ratio := format_ratio(row.unpaired_speedup)) != (shown := format_ratio(row.speedup))
    ]
    if not told:
        return []
    return [
        "speed-up compares turns taken moments apart; throughput is that of all turns, whatever drifted between them: "
        f"its ratio is {truncate_list(told)}"
    ]


def _is_outside(row: Row) -> bool:
    found, other = row.speedup_estimate, row.unpaired_speedup
    return found is not None and has_interval(found) and other is not None and not found.low <= other <= found.high


def _spreads(rows: Sequence[Row]) -> list[str]:
    """Return why a warning has another spread than the column."""
    if any(len(row.trials) > 1 and _has_noisier_process(row) for row in rows):
        return ["the column spread is the median over a cell's processes; the warning tells of the noisiest of them"]
    return []


def _has_noisier_process(row: Row) -> bool:
    most = max(spread(trial) or 0.0 for trial in row.trials)
    return most > NOISE and format_share(most) != format_share(row.spread or 0.0)
