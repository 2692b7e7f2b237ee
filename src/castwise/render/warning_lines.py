"""Warnings in words: one line a kind, for all the trials it befell."""

from collections.abc import Sequence

from castwise.analysis.result_table import Row
from castwise.analysis.warnings import TrialWarning, warnings_of_all

_MOST_SEEN = 6  # of a line: with more of it nobody reads any; JSON has it all


def warning_lines(rows: Sequence[Row]) -> list[str]:
    """Return a line for each warning with what was seen in which trial, its likely cause and what to try."""
    found: dict[tuple[str, str, str], list[tuple[str, TrialWarning]]] = {}
    for row in rows:
        for each in warnings_of_all(row.trials):
            found.setdefault((each.name, each.cause, each.advice), []).append((row.trial.spec.label, each))
    return [
        f"{name}: {_seen(befallen, len(rows))}; likely cause: {cause}; to try: {advice}"
        for (name, cause, advice), befallen in found.items()
    ]


def _seen(befallen: Sequence[tuple[str, TrialWarning]], num_rows: int) -> str:
    if len(befallen) == num_rows > 1 and len({each.seen for _, each in befallen}) == 1:
        return f"all trials ({befallen[0][1].seen})"
    told = ", ".join(f"{label} ({each.seen})" for label, each in befallen[:_MOST_SEEN])
    others = dict.fromkeys(label for label, _ in befallen[_MOST_SEEN:])
    return f"{told}, and as well {', '.join(others)}" if others else told
