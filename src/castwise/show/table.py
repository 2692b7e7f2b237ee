"""Columns and rows as a terminal table, Markdown, CSV or JSON."""

import csv
import io
import json
import math
import re
import textwrap
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from castwise.records.schema import Trial
from castwise.show.console import print_line
from castwise.show.fields import Field, FlatRow, distinct_precision_text, short_ratio_text, worth_showing
from castwise.show.units import format_bytes, format_rate
from castwise.spec.grouping import grouped
from castwise.spec.quantities import TOO_NOISY

R = TypeVar("R", bound=FlatRow)

_GAP = 2  # between columns
_SHORTEST_HEADING = 10  # a heading above narrower cells is not wrapped to fewer characters
_MOST_LAID_OUT = 1000  # rich takes 6 s to lay out 10,000 rows


@dataclass(frozen=True)
class DataTable(Generic[R]):
    columns: Sequence[Field]
    rows: Sequence[R]
    # What rows share whose values compete for being the best; None for a row that does not compete.
    group: Callable[[R], Hashable] = lambda _: None

    def best(self, column: Field) -> set[int]:
        """Return the numbers of the rows that have the best value of their group; none if all of a group are equal."""
        if column.best is None:
            return set()
        groups: dict[Hashable, list[tuple[float, int]]] = {}
        for number, row in enumerate(self.rows):
            group, value = self.group(row), column.value(row)
            is_number = isinstance(value, int | float) and math.isfinite(value)
            if group is not None and is_number and TOO_NOISY not in column.text(row):
                groups.setdefault(group, []).append((value, number))
        found = set[int]()
        for values in groups.values():
            best = (max if column.best == "highest" else min)(value for value, _ in values)
            winners = {number for value, number in values if value == best}
            found |= winners if len(winners) < len(values) else set()
        return found


def short_table_of(
    columns: Sequence[Field],
    rows: Sequence[R],
    always: Iterable[str] = (),
    *,
    formats: Mapping[str, Callable[[FlatRow], str] | None] | None = None,
    wraps: Sequence[str] = ("precision",),
) -> DataTable[R]:
    """Return a table with the columns that decide: ratios without a sign, and memory and rates as a figure alone.

    The heading of a rate is its unit if all rows have one. `formats` says how to write other columns, and `wraps` which
    of them a narrow terminal may break between words.
    """
    known: dict[str, Callable[[FlatRow], str] | None] = {
        "precision": distinct_precision_text(rows),
        "peak_allocated_bytes": lambda row: format_bytes(row["peak_allocated_bytes"]),
    }
    ratios = (each.name for each in columns if each.name.endswith(("speedup", "batch_ratio")))
    known |= {name: short_ratio_text(name) for name in ratios}
    titles: dict[str, str] = {}
    units = {row.get("unit") for row in rows} - {None}
    if len(units) == 1:
        titles["throughput_per_second"] = f"{units.pop()}/s"
        known["throughput_per_second"] = lambda row: format_rate(row["throughput_per_second"])
    known |= formats or {}
    fields = [
        replace(
            each,
            title=titles.get(each.name, each.title),
            format=known.get(each.name) or each.format,
            varies=False,
            wraps=each.name in wraps,
        )
        for each in columns
    ]
    return DataTable(worth_showing(fields, rows, always), rows)


def competing_by(*names: str) -> Callable[[FlatRow], Hashable]:
    """Return a table's `group`: rows that ended well compete if these fields are equal."""
    return lambda row: tuple(row[name] for name in names) if row["status"] == "ok" else None


def print_data_table(  # noqa: PLR0913  how a table looks, by keyword
    console: Console,
    table: DataTable[R],
    *,
    drop_first: Sequence[str | tuple[str, ...]],
    style: Callable[[R], str | None],
    cell_style: Callable[[R, Field], str],
    section: Callable[[R], str],
    elsewhere: str,
) -> None:
    """Print a table (`presentation.Grid` says how it looks), and below it a line on the columns left out.

    Rows of one section come together below its line. If columns do not fit, cells break between words, and if not even
    the words fit, each row becomes a list of its figures. More than a thousand rows are one line each, whatever the
    width.
    """
    sections = grouped(table.rows, section)
    rows = [row for own in sections.values() for row in own]
    columns = [_text_column(rows, column) for column in table.columns]
    if len(sections) > 1:
        indented = [f"  {cell}" for cell in columns[0].cells]
        longest_word = columns[0].longest_word + 2
        columns[0] = replace(columns[0], cells=indented, width=columns[0].width + 2, longest_word=longest_word)
    if len(rows) > _MOST_LAID_OUT:
        _print_lines(console, columns)
        return
    kept = _kept(columns, drop_first, console.width)
    if len(sections) > 1 and _fits(kept, console.width):
        console.print(_laid_out(kept, [], console.width), crop=False)
    number = 0
    for heading, own in sections.items():
        if heading:
            print_line(console, heading, "bold")
        texts = []
        for row in own:
            cells = [Text(each.cells[number], cell_style(row, each.source)) for each in kept]
            texts.append((cells, style(row)))
            number += 1
        console.print(_laid_out(kept, texts, console.width, shows_header=len(sections) == 1), crop=False)
    if left_out := ", ".join(column.source.title for column in columns if column not in kept):
        print_line(console, f"  left out, the terminal is too narrow: {left_out} ({elsewhere})", "yellow")


@dataclass(frozen=True)
class _TextColumn:
    source: Field
    heading: str  # its title, wrapped to the width of the cells
    cells: Sequence[str]
    width: int  # the least at which no figure is broken
    longest_word: int  # the least at which no word is broken


def _text_column(rows: Sequence[R], column: Field) -> _TextColumn:
    cells = [column.text(row) for row in rows]
    longest_cell = max(map(len, cells), default=0)
    longest_word = max((len(word) for cell in (column.title, *cells) for word in cell.split()), default=0)
    width = max(longest_word, (longest_cell + 1) // 2) if column.wraps else longest_cell
    heading = textwrap.wrap(column.title, max(width, _SHORTEST_HEADING), break_long_words=False)
    width = max([width, *map(len, heading)])
    return _TextColumn(column, "\n".join(heading), cells, width, longest_word)


def _kept(
    columns: Sequence[_TextColumn], drop_first: Sequence[str | tuple[str, ...]], width: int
) -> Sequence[_TextColumn]:
    """Return the columns without the first to drop, as many of them as do not fit."""
    for group in drop_first:
        if _total(column.width for column in columns) <= width:
            break
        names = (group,) if isinstance(group, str) else group
        columns = [column for column in columns if column.source.name not in names]
    return columns


def _total(widths: Iterable[int]) -> int:
    listed = list(widths)
    return sum(listed) + _GAP * (len(listed) - 1)


def _fits(columns: Sequence[_TextColumn], width: int) -> bool:
    """Return whether a table of these columns breaks no word."""
    return _total(column.longest_word for column in columns) <= width


def _laid_out(
    columns: Sequence[_TextColumn],
    rows: Sequence[tuple[Sequence[Text], str | None]],
    width: int,
    *,
    shows_header: bool = True,
) -> RenderableType:
    """Return rows of cells with a style each as a table; all tables of these columns have the same widths."""
    if not _fits(columns, width):
        return _as_lists(columns, rows)
    fits = _total(column.width for column in columns) <= width
    widths = _distributed(columns, [column.width if fits else column.longest_word for column in columns], width)
    table = Table(box=None, pad_edge=False, show_header=shows_header)
    for column, own in zip(columns, widths, strict=True):
        table.add_column(
            Text(column.heading),
            justify="left" if column.source.left else "right",
            overflow="fold",
            no_wrap=fits and not column.source.wraps,
            width=own,
        )
    for cells, style in rows:
        table.add_row(*cells, style=style)
    return table


def _distributed(columns: Sequence[_TextColumn], least: Sequence[int], width: int) -> list[int]:
    """Return widths within a width, from the least ones on: those that lack most for their cells are widened."""
    widths = list(least)
    for _ in range(width - _total(widths)):
        lacking = [max(map(len, c.cells), default=0) - own for c, own in zip(columns, widths, strict=True)]
        widths[lacking.index(max(lacking))] += max(lacking) > 0
    return widths


def _as_lists(columns: Sequence[_TextColumn], rows: Sequence[tuple[Sequence[Text], str | None]]) -> Table:
    """Return a table with a line a figure, row after row."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for number, (cells, style) in enumerate(rows):
        if number:
            table.add_row()
        for column, cell in zip(columns, cells, strict=True):
            table.add_row(Text(column.source.title), Text(cell.plain.rstrip(), cell.style), style=style)
    return table


def _print_lines(console: Console, columns: Sequence[_TextColumn]) -> None:
    padded = []
    for column in columns:
        cells = [column.source.title, *column.cells]
        width = max(map(len, cells))
        padded.append([cell.ljust(width) if column.source.left else cell.rjust(width) for cell in cells])
    lines = (Text((" " * _GAP).join(cells).rstrip()) for cells in zip(*padded, strict=True))
    console.print(Text("\n").join(lines), highlight=False, soft_wrap=True)


def markdown_grid(columns: Sequence[Field], rows: Sequence[FlatRow]) -> list[str]:
    lines = ["| " + " | ".join(_cell(column.title) for column in columns) + " |"]
    lines.append("|" + "|".join("---" if column.left else "---:" for column in columns) + "|")
    return lines + ["| " + " | ".join(_cell(column.text(row)) for column in columns) + " |" for row in rows]


def markdown_text(text: str) -> str:
    """Return text as one line of Markdown that shows it unchanged, HTML included."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("\r", " ").replace("\n", " ")


def _cell(text: str) -> str:
    return markdown_text(text).replace("|", "\\|")


SCHEMA_VERSION = 1  # of `--format json`; it rises if a key goes or changes its meaning


def json_document(**values: Any) -> dict[str, Any]:
    """Return the document of a command's `--format json`, with its version."""
    return {"schema_version": SCHEMA_VERSION, **values}


def json_text(document: Mapping[str, Any]) -> str:
    """Return a document as text; ValueError if there is a NaN in it, which JSON does not have."""
    return json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False)


def json_records(trials: Iterable[Trial]) -> list[dict[str, Any]]:
    """Return whole records for a document."""
    return [json.loads(trial.model_dump_json()) for trial in trials]


def csv_grid(columns: Sequence[Field], rows: Sequence[FlatRow]) -> str:
    """Return a header line and a line a row, plain values."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(column.name for column in columns)
    writer.writerows([_no_formula(column.value(row)) for column in columns] for row in rows)
    return out.getvalue()


def _no_formula(value: Any) -> Any:
    """Return a value that spreadsheets take for what it is: a text that begins like a formula gets an apostrophe.

    Source: OWASP, CSV injection.
    """
    is_formula = isinstance(value, str) and re.match(r"[=@\t\r]|[+-](?![\d.]+(e[+-]?\d+)?$|inf$)", value)
    return f"'{value}" if is_formula else value


def plain(columns: Sequence[Field], row: FlatRow) -> dict[str, Any]:
    return json_values({column.name: column.value(row) for column in columns})


def json_values(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by name for JSON: it has no NaN and no infinity, so a string names them."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
