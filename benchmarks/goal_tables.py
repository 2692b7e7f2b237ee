"""The tables of the speed goals, from the records under benchmarks/records/goals/."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from goal_summary import HAND, OURS, Side, format_value, is_reached, ratio_of, side_of, what_of
from stored import by_place, place_of

from castwise.render.units import format_seconds


def measured_rows(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the last record of each row, by its name; with it where and when it was measured."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stem):
        document = json.loads(path.read_text())
        where = place_of(document["environment"], path.name[:10])
        for row in document["rows"]:
            if row["is_whole"] and row["turns"]:
                found[row["name"]] = row | {"where": where}
    return found


def _ratio(ratio: tuple[float, float, float] | None) -> str:
    if ratio is None:
        return "–"
    value, low, high = ratio
    return f"{value:.2f}" if low == high else f"{value:.2f} ({low:.2f} to {high:.2f})"


def goals_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the best loops by hand and of castwise's beside each other and their goals."""
    lines = [*_places(rows), "| what | by hand | castwise | ratio | goal | reached | start, castwise |"]
    lines.append("|---|---:|---:|---:|---:|---|---:|")
    for row in rows:
        hand, ours = side_of(row, HAND), side_of(row, OURS)
        ratio = ratio_of(hand, ours)
        sign = "≥" if row["measure"] in ("rate", "efficiency") else "≤"
        cells = (
            what_of(row),
            _figure(row, hand),
            _figure(row, ours),
            _ratio(ratio),
            f"{sign} {format_value(row, row['goal'])}",
            "–" if ours is None else "yes" if is_reached(row, ours.value) else "no",
            "–" if ours is None else format_seconds(ours.turn.start_seconds),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_loops(rows)]) + "\n"


def _places(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each place and time of measurement."""
    return [part for where, _ in by_place(rows) for part in (where, "")]


def _figure(row: Mapping[str, Any], side: Side | None) -> str:
    return "–" if side is None else format_value(row, side.value)


def _loops(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the loops behind the figures, a line a row."""
    lines = []
    for row in rows:
        sides = {name: side_of(row, name) for name in (HAND, OURS)}
        loops = "; ".join(f"{name}: {side.turn.loop}" for name, side in sides.items() if side is not None)
        lines.append(f"- {row['name']}: {loops}")
    return lines
