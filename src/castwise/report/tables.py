"""A job's rows as a terminal table, Markdown, CSV or JSON."""

import csv
import io
import json
import math
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from castwise.analyze.compare import Row
from castwise.analyze.recommend import Advice
from castwise.report.columns import COLUMNS, EXTRA_COLUMNS, Column, headline, remarks, shown_columns

_PIPED_WIDTH = 250
_GAP = 2  # between columns
# The columns that a narrow terminal does without, the first first.
_DISPENSABLE = ("peak_reserved_bytes", "spread", "step_seconds", "data_set", "final_loss")


def print_table(rows: Sequence[Row], advice: Sequence[Advice], console: Console) -> None:
    """Print the table, its remarks and the advice to a terminal."""
    console.print(escape(headline(rows)), style="bold", highlight=False, soft_wrap=not console.is_terminal)
    table = Table(box=None, pad_edge=False)
    columns, left_out = _fitting(rows, console.width)
    for column in columns:
        fits = len(column.title) <= _width(column, rows)
        title = column.title if fits else "\n".join(_halves(column.title))
        table.add_column(title, justify="left" if column.left else "right", overflow="fold")
    taken = {item.key for item in advice}
    for row in rows:
        style = "bold green" if row.trial.spec.key in taken else None
        style = style if row.trial.status == "ok" else "dim"
        table.add_row(*(escape(column.text(row)) for column in columns), style=style)
    console.print(table)
    for line in [*remarks(rows), *left_out]:
        console.print(f"  {escape(line)}", style="yellow", highlight=False, soft_wrap=not console.is_terminal)
    printed = {""}
    for item in advice:
        console.print()
        console.print(escape(item.sentence), style="bold", highlight=False, soft_wrap=not console.is_terminal)
        if item.code not in printed:
            printed.add(item.code)
            # Never wrapped: what is copied from the terminal has to run.
            console.print(escape(_indented(item.code)), highlight=False, soft_wrap=True)


def _fitting(rows: Sequence[Row], width: int) -> tuple[list[Column], list[str]]:
    """Return the columns that fit into a width side by side, and a line on those left out, if any."""
    columns, left_out = shown_columns(rows), list[str]()
    for name in _DISPENSABLE:
        if sum(_width(column, rows) + _GAP for column in columns) - _GAP <= width:
            break
        left_out += [column.title for column in columns if column.name == name]
        columns = [column for column in columns if column.name != name]
    if not left_out:
        return columns, []
    return columns, [f"left out, the terminal is too narrow: {', '.join(left_out)} (--format csv has all)"]


def _width(column: Column, rows: Sequence[Row]) -> int:
    """Return how wide a column is with its title in two lines and its cells in one."""
    return max(len(text) for text in (*_halves(column.title), *(column.text(row) for row in rows)))


def _halves(title: str) -> tuple[str, str]:
    """Return a title in two lines as short as can be, broken between words."""
    words = title.split()
    breaks = ((" ".join(words[:n]), " ".join(words[n:])) for n in range(1, len(words) + 1))
    return min(breaks, key=lambda halves: max(len(half) for half in halves))


def to_markdown(rows: Sequence[Row], advice: Sequence[Advice]) -> str:
    """Return the table, its remarks and the advice as Markdown."""
    lines = [markdown_table(rows).rstrip("\n")]
    for item in advice:
        lines += ["", item.sentence]
        if item.code:
            lines += ["", "```python", item.code, "```"]
    return "\n".join(lines).rstrip() + "\n"


def markdown_table(rows: Sequence[Row]) -> str:
    """Return the headline, the table and its remarks as Markdown."""
    columns = shown_columns(rows)
    lines = [headline(rows), ""]
    lines.append("| " + " | ".join(column.title for column in columns) + " |")
    lines.append("|" + "|".join("---" if column.left else "---:" for column in columns) + "|")
    lines += ["| " + " | ".join(_cell(column.text(row)) for column in columns) + " |" for row in rows]
    lines += ["", *(f"- {line}" for line in remarks(rows))]
    return "\n".join(lines).rstrip() + "\n"


def to_csv(rows: Sequence[Row]) -> str:
    """Return one line a trial, plain values, a header line first."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = (*COLUMNS, *EXTRA_COLUMNS)
    writer.writerow(column.name for column in columns)
    writer.writerows([column.value(row) for column in columns] for row in rows)
    return out.getvalue()


def to_json(rows: Sequence[Row], advice: Sequence[Advice]) -> str:
    """Return an object with the rows' figures, the advice and the whole records."""
    columns = (*COLUMNS, *EXTRA_COLUMNS)
    document = {
        "rows": [{column.name: _finite(column.value(row)) for column in columns} for row in rows],
        "advice": [
            {
                "workload": item.workload,
                "precision": item.precision,
                "sentence": item.sentence,
                "code": item.code,
            }
            for item in advice
        ],
        "trials": [json.loads(row.trial.model_dump_json()) for row in rows],
    }
    return json.dumps(document, indent=2, default=str, allow_nan=False)


def result_console(width: int | None = None) -> Console:
    """Return a console on stdout: as wide as the terminal, or wide enough for every column where it is piped."""
    console = Console(width=width, highlight=False, emoji=False)
    return console if console.is_terminal or width else Console(width=_PIPED_WIDTH, highlight=False, emoji=False)


def _finite(value: object) -> object:
    # JSON has no NaN; a string says which of the three it was.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _indented(code: str) -> str:
    return "\n".join(f"    {line}" for line in code.splitlines())
