"""The tables of the speed goals, from the records under benchmarks/records/goals/ and records/least_time/."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from goal_summary import HAND, OURS, Side, format_value, is_reached, ratio_of, side_of, what_of
from stored import NOT_MEASURED, by_place, place_of

from castwise.render.units import format_percent, format_rate, format_seconds


def measured_rows(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the last record of each row, by its name; with it where and when it was measured."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stem):
        document = json.loads(path.read_text())
        where = place_of(document["environment"], path.name[:10])
        for row in document["rows"]:
            if row["is_whole"] and row["turns"]:
                found[row["name"]] = row | {"where": where, "ceilings": document["ceilings"]}
    return found


def _ratio(ratio: tuple[float, float, float] | None) -> str:
    if ratio is None:
        return "–"
    value, low, high = ratio
    return f"{value:.2f}" if low == high else f"{value:.2f} ({low:.2f} to {high:.2f})"


def goals_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the best loops by hand and of castwise's beside each other and their goals."""
    if not rows:
        return NOT_MEASURED
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


def least_time_table(document: Mapping[str, Any], measured: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the least time of each row's step beside that of the goal, and of what was measured."""
    lines = [
        f"{document['device']}, by its datasheet; where a row was measured, of the format that it was measured in",
        "",
        *steps_from(document["rows"], measured),
        "| what | format | operations | bytes | by arithmetic | by memory | operation by operation "
        "| the goal's step | castwise's step | bound over castwise's |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for counted in document["rows"]:
        found = measured.get(counted["name"])
        row = found if found is not None and "datasheet" in found["bounds"] else counted
        bounds = row["bounds"]
        times = bounds["datasheet"]
        step = step_seconds(row, side_of(row, OURS))
        bound = max(times["arithmetic"], times["memory"])
        cells = (
            what_of(row),
            bounds["format"],
            f"{format_rate(bounds['flops'] / 1e9)} GFLOP",
            f"{bounds['bytes'] / 1e9:.3g} GB",
            format_seconds(times["arithmetic"]),
            format_seconds(times["memory"]),
            format_seconds(times["by_operation"]),
            format_seconds(goal_seconds(row)),
            format_seconds(step),
            format_percent(bound / step if step else None),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def step_seconds(row: Mapping[str, Any], side: Side | None) -> float | None:
    """Return the seconds of a step that a side was measured to take; None where it was not."""
    if side is None or side.turn.seconds is None:
        return None
    return side.turn.seconds / (row["steps_per_epoch"] or 1)


def goal_seconds(row: Mapping[str, Any]) -> float | None:
    """Return the seconds a step that reach a row's goal; None where it is about no time."""
    if row["measure"] == "efficiency":
        return None
    if row["measure"] == "rate":
        return float(row["units_per_step"] / row["goal"])
    return float(row["goal"] / row["times"] / (row["steps_per_epoch"] or 1))


def steps_from(rows: Sequence[Mapping[str, Any]], measured: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return where castwise's steps that stand beside rows of other records were measured, in lines above their table.

    Args:
        rows: The other records.
        measured: The last record of each row among the speed goals, by its name.
    """
    found = [measured[row["name"]] for row in rows if row["name"] in measured]
    told = [row for row in found if step_seconds(row, side_of(row, OURS)) is not None]
    return [part for where, _ in by_place(told) for part in (f"castwise's step: {where}", "")]


def _places(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each place and time of measurement, with the ceilings measured there."""
    return [part for where, own in by_place(rows) for part in (f"{where}{_ceilings(own[0]['ceilings'])}", "")]


def _ceilings(ceilings: Mapping[str, float] | None) -> str:
    if ceilings is None:
        return ""
    rates = ", ".join(f"{name} {rate / 1e12:,.0f}" for name, rate in ceilings.items() if name != "bytes_per_second")
    copy = ceilings["bytes_per_second"] / 1e12
    return f"; products of 8192³ reach {rates} TFLOP/s there, copies {copy:.2f} TB/s"


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
