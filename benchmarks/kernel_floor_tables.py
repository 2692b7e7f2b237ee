"""What a step's products, timed alone, and the bytes of all else come to. Pure: from `kernel_floor.py`'s record."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from goal_summary import OURS, side_of, what_of
from goal_tables import goal_seconds, step_seconds, steps_from
from kernel_products import PARTS
from stored import place_of

from castwise.render.units import format_percent, format_rate, format_seconds

TRAFFIC = "its bytes"  # what a product takes where its bytes alone count, at the bandwidth of a copy
_MOST_SHOWN = 10
_MOST_IN_DOCUMENTS = 3

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Floor:
    """What a step takes at the least with the library's own kernels.

    Attributes:
        parts: Seconds of the products of each part of the step, by its name.
        rest: Seconds of all that is no product.
    """

    parts: Mapping[str, float]
    rest: float

    @property
    def seconds(self) -> float:
        """Return those of the whole step."""
        return sum(self.parts.values()) + self.rest


def floor_of(row: Row, bytes_per_second: float) -> Floor:
    """Return the floor of a row.

    Args:
        row: Its record.
        bytes_per_second: Of a copy, reads and writes together.
    """
    parts = {
        part: sum(_seconds_of(product) for product in row["products"] if product["part"] == part) for part in PARTS
    }
    return Floor(parts, row["rest_bytes"] / bytes_per_second)


def lines_of(row: Row, bytes_per_second: float, measured: Row | None) -> list[str]:
    """Return a row's floor in a line, and one for each of its slowest products.

    Args:
        row: Its record.
        bytes_per_second: Of a copy.
        measured: The row's last record among the speed goals; None where it has none.
    """
    floor = floor_of(row, bytes_per_second)
    said = ", ".join(f"{part} {format_seconds(seconds)}" for part, seconds in floor.parts.items())
    rest = f"{row['rest_bytes'] / 1e9:.3g} GB at {bytes_per_second / 1e12:.2f} TB/s"
    goal, ours = (format_seconds(seconds) for seconds in _steps(row, measured if row["is_whole"] else None))
    line = (
        f"{row['name']:13} {said}, the rest {format_seconds(floor.rest)} ({rest}): {format_seconds(floor.seconds)}; "
        f"the goal's step {goal}, castwise's {ours}"
    )
    if not row["is_whole"]:
        line += "; smallest sizes, which tell nothing of it"
    untimed = _untimed(row)
    lines = [line]
    if untimed:
        lines.append(f"    {untimed} of {len(row['products'])} products not timed, and counted by their bytes")
    for product in _slowest(row, _MOST_SHOWN):
        lines.append(f"    {product['part']:15} {_of_product(product)}")
    return lines


def kernel_floor_table(document: Mapping[str, Any], measured: Mapping[str, Row]) -> str:
    """Return the floor of each row beside the goal's step and castwise's, and its slowest products below.

    Args:
        document: The record.
        measured: The last record of each row among the speed goals, by its name.
    """
    place, bandwidth = place_of(document["environment"], document["date"]), document["bytes_per_second"]
    cached = "" if document["rotated_bytes"] else "; tensors in the cache where they fit"
    rows = [row for row in document["rows"] if row["is_whole"]]
    lines = [
        f"{place}; copies {bandwidth / 1e12:.2f} TB/s{cached}",
        "",
        *steps_from(rows, measured),
        f"| what | format | {' | '.join(PARTS)} | the rest | floor | the goal's step | within the goal "
        "| castwise's step | floor over castwise's |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|---:|---:|",
    ]
    for row in rows:
        floor = floor_of(row, bandwidth)
        goal, ours = _steps(row, measured.get(row["name"]))
        cells = (
            what_of(row),
            row["format"],
            *(format_seconds(floor.parts[part]) for part in PARTS),
            format_seconds(floor.rest),
            format_seconds(floor.seconds),
            format_seconds(goal),
            "–" if goal is None else "yes" if floor.seconds <= goal else "no",
            format_seconds(ours),
            format_percent(floor.seconds / ours if ours else None),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(_account(row) for row in rows)]) + "\n"


def _account(row: Row) -> str:
    """Return how many products a row has, and its slowest, in a line."""
    num_timed = len(row["products"]) - _untimed(row)
    shown = "; ".join(f"{each['part']} of {_of_product(each)}" for each in _slowest(row, _MOST_IN_DOCUMENTS))
    return f"- {row['name']}: {num_timed} of {len(row['products'])} products timed; the slowest: {shown}"


def _of_product(product: Row) -> str:
    way, seconds = _fastest(product)
    rate = f"{format_rate(product['flops'] / seconds / 1e12)} TFLOP/s"
    times = f"{product['count']} × {format_seconds(seconds)} = {format_seconds(_seconds_of(product))}"
    return f"{product['label']}: {times}, {rate}, {way}"


def _fastest(product: Row) -> tuple[str, float]:
    """Return the way that took the least, and its seconds."""
    way = min(product["seconds"], key=product["seconds"].__getitem__)
    return way, product["seconds"][way]


def _seconds_of(product: Row) -> float:
    """Return the seconds of all that are like a product, each in the fastest way."""
    return float(product["count"] * _fastest(product)[1])


def _slowest(row: Row, number: int) -> Sequence[Row]:
    return sorted(row["products"], key=_seconds_of, reverse=True)[:number]


def _untimed(row: Row) -> int:
    return sum(set(product["seconds"]) == {TRAFFIC} for product in row["products"])


def _steps(row: Row, measured: Row | None) -> tuple[float | None, float | None]:
    """Return the seconds of the goal's step, and of castwise's where it was measured."""
    return goal_seconds(row), None if measured is None else step_seconds(measured, side_of(measured, OURS))
