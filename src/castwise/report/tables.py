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
from castwise.report.columns import COLUMNS, EXTRA_COLUMNS, headline, remarks, shown_columns

FORMATS = ("table", "json", "markdown", "csv")
_PIPED_WIDTH = 160


def print_table(rows: Sequence[Row], advice: Sequence[Advice], console: Console) -> None:
    """Print the table, its remarks and the advice to a terminal."""
    table = Table(title=escape(headline(rows)), title_justify="left", title_style="bold", box=None, pad_edge=False)
    columns = shown_columns(rows)
    for column in columns:
        table.add_column(column.title, justify="left" if column.left else "right", overflow="fold")
    best = max((row.speedup for row in rows if row.speedup is not None and row.trial.status == "ok"), default=None)
    for row in rows:
        style = "bold green" if best is not None and row.speedup == best else None
        style = style if row.trial.status == "ok" else "dim"
        table.add_row(*(escape(column.text(row)) for column in columns), style=style)
    console.print(table)
    for line in remarks(rows):
        console.print(f"  {escape(line)}", style="yellow", highlight=False)
    for item in advice:
        console.print()
        console.print(escape(item.sentence), style="bold", highlight=False)
        if item.code:
            console.print(escape(_indented(item.code)), highlight=False)


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
    console = Console(width=width, highlight=False)
    return console if console.is_terminal or width else Console(width=_PIPED_WIDTH, highlight=False)


def _finite(value: object) -> object:
    # JSON has no NaN; a string says which of the three it was.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _indented(code: str) -> str:
    return "\n".join(f"    {line}" for line in code.splitlines())
