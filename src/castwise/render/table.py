"""Columns and rows as a terminal table, Markdown or CSV; what stands in them is others' business."""

import csv
import io
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from rich.console import Console, ConsoleOptions
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table

R = TypeVar("R")

BEST = "*"  # behind the best value of a column
IN_CSV = "--format csv has all"  # where the figures are that a narrow terminal does without
_GAP = 2  # between columns
# Of more rows rich takes seconds to lay out what nobody reads, and `grep` does: 6 s of 10,000.
_MOST_LAID_OUT = 1000


@dataclass(frozen=True)
class Column(Generic[R]):
    """A figure of a row, as a value and as text.

    Attributes:
        name: Its name in CSV and JSON, units as a suffix.
        title: Its heading.
        value: The plain value, None where there is none.
        text: The value as people read it.
        left: Whether its text is flush left.
        wraps: Whether its text may take several lines where the terminal is narrow.
        best: Which of its values is the best; None where there is no such thing.
    """

    name: str
    title: str
    value: Callable[[R], Any]
    text: Callable[[R], str]
    left: bool = False
    wraps: bool = False
    best: Literal["highest", "lowest"] | None = None


@dataclass(frozen=True)
class DataTable(Generic[R]):
    """A table: columns, and the rows that they take their figures from.

    Attributes:
        columns: The columns.
        rows: The rows.
        group: What rows share whose values compete for being the best; None for a row that does not compete.
    """

    columns: Sequence[Column[R]]
    rows: Sequence[R]
    group: Callable[[R], Hashable] = lambda _: None

    def best(self, column: Column[R]) -> set[int]:
        """Return the rows that have the best value of their group in a column, by their numbers.

        Where all of a group are equal, none is the best.
        """
        if column.best is None:
            return set()
        groups: dict[Hashable, list[tuple[float, int]]] = {}
        for number, row in enumerate(self.rows):
            group, value = self.group(row), column.value(row)
            if group is not None and isinstance(value, int | float) and math.isfinite(value):
                groups.setdefault(group, []).append((value, number))
        found = set[int]()
        for values in groups.values():
            best = (max if column.best == "highest" else min)(value for value, _ in values)
            winners = {number for value, number in values if value == best}
            found |= winners if len(winners) < len(values) else set()
        return found


def terminal_table(
    columns: Sequence[Column[R]],
    rows: Sequence[R],
    style: Callable[[R], str | None] = lambda _: None,
    width: int | None = None,
    group: Callable[[R], Hashable] = lambda _: None,
) -> "Table | _Lines":
    """Return a table for a terminal; long headings take two lines.

    Where not even its words fit beside each other, each row becomes a list of its figures. Of thousands of rows each is
    one line, whatever the terminal's width, without colours.

    Args:
        columns: The columns.
        rows: The rows.
        style: The style of a row, None for the plain one.
        width: The terminal's; where the table fits into it, only columns that wrap give way. None leaves it to rich.
        group: What rows share whose best values are marked; None for a row that does not compete.
    """
    grid = DataTable(columns, rows, group)
    best = [grid.best(column) for column in columns]
    if len(rows) > _MOST_LAID_OUT:
        return _Lines(tuple(_lines(grid, best)))
    table = Table(box=None, pad_edge=False)
    rigid = width is not None and _total(columns, rows) <= width
    widths: Sequence[int | None] = [None] * len(columns)
    if width is not None and not rigid:
        least = [_longest_word(column, rows) for column in columns]
        if sum(least) + _GAP * (len(columns) - 1) > width:
            return _listed(grid, best, style)
        widths = _spread(least, [_width(column, rows) for column in columns], width - _GAP * (len(columns) - 1))
    for column, own in zip(columns, widths, strict=True):
        fits = len(column.title) <= _width(column, rows)
        title = column.title if fits else "\n".join(_halves(column.title)).strip()
        no_wrap = rigid and not column.wraps
        justify: Literal["left", "right"] = "left" if column.left else "right"
        table.add_column(escape(title), justify=justify, overflow="fold", no_wrap=no_wrap, width=own)
    for number, row in enumerate(rows):
        cells = zip(columns, best, strict=True)
        table.add_row(*(_marked(column.text(row), number, places) for column, places in cells), style=style(row))
    return table


@dataclass(frozen=True)
class _Lines:
    """Lines that a terminal is given as they are."""

    lines: tuple[str, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        yield from (Segment(f"{line}\n") for line in self.lines)


def _lines(grid: DataTable[R], best: Sequence[set[int]]) -> Iterator[str]:
    """Yield a line for the headings, and one a row."""
    columns = []
    for column, places in zip(grid.columns, best, strict=True):
        stars = [BEST if number in places else " " * bool(places) for number in range(len(grid.rows))]
        cells = [column.title, *(column.text(row) + star for row, star in zip(grid.rows, stars, strict=True))]
        width = max(map(len, cells))
        columns.append([cell.ljust(width) if column.left else cell.rjust(width) for cell in cells])
    for line in zip(*columns, strict=True):
        yield (" " * _GAP).join(line).rstrip()


def _listed(grid: DataTable[R], best: Sequence[set[int]], style: Callable[[R], str | None]) -> Table:
    """Return a table with a line a figure, row after row."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for number, row in enumerate(grid.rows):
        for column, places in zip(grid.columns, best, strict=True):
            star = BEST if number in places else ""
            table.add_row(escape(column.title), f"{escape(column.text(row))}{star}", style=style(row))
        if number + 1 < len(grid.rows):
            table.add_row()
    return table


def _spread(least: Sequence[int], wanted: Sequence[int], width: int) -> list[int]:
    """Return widths of columns that fill a width: where the most is wanting, more is given."""
    widths = list(least)
    for _ in range(width - sum(least)):
        wanting = [want - own for want, own in zip(wanted, widths, strict=True)]
        widths[wanting.index(max(wanting))] += max(wanting) > 0
    return widths


def _longest_word(column: Column[R], rows: Sequence[R]) -> int:
    """Return how wide a column is whose title and cells break between all words."""
    star = 0 if column.best is None else len(BEST)
    words = (word for row in rows for word in column.text(row).split())
    return max([*map(len, column.title.split()), *(len(word) + star for word in words)], default=0)


def _marked(text: str, number: int, best: set[int]) -> str:
    """Return a cell; the best of a column has a star, and the others the room for one."""
    if not best:
        return escape(text)
    return f"[bold]{escape(text)}{BEST}[/bold]" if number in best else f"{escape(text)}{' ' * len(BEST)}"


def fitting(
    columns: Sequence[Column[R]],
    rows: Sequence[R],
    width: int,
    dispensable: Sequence[str | tuple[str, ...]],
    elsewhere: str = IN_CSV,
) -> tuple[list[Column[R]], list[str]]:
    """Return the columns that fit into a width side by side, and a line on those left out, if any.

    Args:
        columns: The columns.
        rows: The rows.
        width: Characters.
        dispensable: Names of columns that a narrow terminal does without, the first first; those in a tuple
            mean nothing without each other.
        elsewhere: Where those are that are left out, for the line.
    """
    kept, left_out = list(columns), list[str]()
    for group in dispensable if len(rows) <= _MOST_LAID_OUT else ():
        if _total(kept, rows) <= width:
            break
        names = (group,) if isinstance(group, str) else group
        left_out += [column.title for column in kept if column.name in names]
        kept = [column for column in kept if column.name not in names]
    if not left_out:
        return kept, []
    return kept, [f"left out, the terminal is too narrow: {', '.join(left_out)} ({elsewhere})"]


def markdown_grid(columns: Sequence[Column[R]], rows: Sequence[R]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = ["| " + " | ".join(_cell(column.title) for column in columns) + " |"]
    lines.append("|" + "|".join("---" if column.left else "---:" for column in columns) + "|")
    return lines + ["| " + " | ".join(_cell(column.text(row)) for column in columns) + " |" for row in rows]


def csv_grid(columns: Sequence[Column[R]], rows: Sequence[R]) -> str:
    """Return a header line and a line a row, plain values."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(column.name for column in columns)
    writer.writerows([column.value(row) for column in columns] for row in rows)
    return out.getvalue()


def plain(columns: Sequence[Column[R]], row: R) -> dict[str, Any]:
    """Return a row's values by name, for JSON: which has no NaN, so that a string says which of the three it was."""
    values = {column.name: column.value(row) for column in columns}
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def _total(columns: Sequence[Column[R]], rows: Sequence[R]) -> int:
    """Return how wide a table is with columns as narrow as they can be read."""
    return sum(_width(column, rows) + _GAP for column in columns) - _GAP


def _width(column: Column[R], rows: Sequence[R]) -> int:
    """Return how wide a column is with its title in two lines, and its cells in one, or in two where it wraps."""
    texts = (column.text(row) for row in rows)
    cells = (half for text in texts for half in _halves(text)) if column.wraps else texts
    star = 0 if column.best is None else len(BEST)
    return max(len(text) for text in (*_halves(column.title), *(f"{cell}{star * ' '}" for cell in cells)))


def _halves(title: str) -> tuple[str, str]:
    """Return a title in two lines as short as can be, broken between words."""
    words = title.split() or [""]
    breaks = ((" ".join(words[:n]), " ".join(words[n:])) for n in range(1, len(words) + 1))
    return min(breaks, key=lambda halves: max(len(half) for half in halves))


def markdown_text(text: str) -> str:
    """Return text that Markdown prints on one line as it stands, without any HTML in it taken for such."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("\r", " ").replace("\n", " ")


def _cell(text: str) -> str:
    return markdown_text(text).replace("|", "\\|")
