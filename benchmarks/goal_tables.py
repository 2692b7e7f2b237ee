"""What the turns of the speed goals come to, from the records that `goals.py` writes."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stored import by_place, markdown, place_of

from castwise.render.units import format_rate, format_seconds

HAND, OURS = "hand", "castwise"
_AT_LEAST = ("rate", "efficiency")  # measures whose goal is a lower bound

# A row or a turn of it, as a record has them.
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Side:
    """The turns of one side's fastest loop."""

    loop: str
    value: float  # the goal's figure, in SI units
    seconds: tuple[float, ...]  # of each turn
    start_seconds: float | None  # of the middle turn


def side_of(row: Row, side: str) -> Side | None:
    """Return what a side's turns come to; None if none of them measured anything."""
    turns = sorted(
        (turn for turn in row["turns"] if turn["side"] == side and turn.get("seconds")),
        key=lambda turn: turn["seconds"],
    )
    own = [turn for turn in turns if turn["loop"] == turns[0]["loop"]]
    if not own:
        return None
    middle = own[(len(own) - 1) // 2]
    value = statistics.median(_value_of(row, turn) for turn in own)
    return Side(middle["loop"], value, tuple(turn["seconds"] for turn in own), middle.get("start_seconds"))


def _value_of(row: Row, turn: Row) -> float:
    if row["measure"] == "rate":
        return float(row["units_per_step"] / turn["seconds"])
    if row["measure"] == "efficiency":
        return float(turn["alone_seconds"] / turn["seconds"])
    return float(row["times"] * turn["seconds"])


def format_value(row: Row, value: float) -> str:
    """Return a figure of a row's goal with its unit: "8,123 images/s"."""
    if row["measure"] == "rate":
        return f"{format_rate(value)} {row['unit']}/s"
    return f"{100 * value:.1f} %" if row["measure"] == "efficiency" else format_seconds(value)


def cells_of(row: Row) -> list[str]:
    """Return a row's cells of the table."""
    what = f"{row['workload']}, batch {row['batch_size']}"
    if row["world_size"] > 1:
        what += f" each, {row['world_size']} GPUs"
    if row["measure"] == "steps":
        what += f", {row['times']} steps"
    if row["measure"] == "run":
        what += f", {row['times']} epochs on {row['data_set']}"

    hand, ours = side_of(row, HAND), side_of(row, OURS)
    figures = ["–" if side is None else format_value(row, side.value) for side in (hand, ours)]
    ratio, reached, start = "–", "–", "–"
    if hand is not None and ours is not None:
        ratio = f"{statistics.median(hand.seconds) / statistics.median(ours.seconds):.2f}"
        low, high = min(hand.seconds) / max(ours.seconds), max(hand.seconds) / min(ours.seconds)
        if low != high:
            ratio += f" ({low:.2f} to {high:.2f})"
    is_lower_bound = row["measure"] in _AT_LEAST
    if ours is not None:
        is_reached = ours.value >= row["goal"] if is_lower_bound else ours.value <= row["goal"]
        reached = "yes" if is_reached else "no"
        start = format_seconds(ours.start_seconds)
    goal = f"{'≥' if is_lower_bound else '≤'} {format_value(row, row['goal'])}"
    return [what, *figures, ratio, goal, reached, start]


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


def goals_table(rows: Sequence[Row]) -> str:
    """Return the best loops by hand and of castwise's, with their goals, and a line per row that names the loops."""
    places = [part for where, _ in by_place(rows) for part in (where, "")]
    heading = "what | by hand | castwise | ratio | goal | reached | start, castwise"
    table = markdown(heading, "lrrrrlr", [cells_of(row) for row in rows])
    lines = []
    for row in rows:
        sides = {name: side_of(row, name) for name in (HAND, OURS)}
        loops = "; ".join(f"{name}: {side.loop}" for name, side in sides.items() if side is not None)
        lines.append(f"- {row['name']}: {loops}")
    return "\n".join([*places, *table, "", *lines]) + "\n"
