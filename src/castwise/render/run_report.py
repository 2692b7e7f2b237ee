"""A job's rows as a terminal table, Markdown, CSV or JSON."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape

from castwise.analysis.advice import Advice
from castwise.analysis.energy import Prices
from castwise.analysis.result_table import Row
from castwise.analysis.steady_metrics import step_times
from castwise.analysis.warnings import warnings_of_all
from castwise.render.console import print_line
from castwise.render.costs import cost_lines, costs
from castwise.render.snippets import snippet_lines
from castwise.render.sparkline import sparkline
from castwise.render.steady_columns import COLUMNS, EXTRA_COLUMNS, competing, headline, remarks, shown_columns
from castwise.render.table import (
    BEST,
    IN_CSV,
    Column,
    DataTable,
    csv_grid,
    fitting,
    markdown_grid,
    markdown_text,
    plain,
    terminal_table,
)
from castwise.spec.quantities import format_share

_PIPED_WIDTH = 250
_VISIBLE = 0.01  # a block that far beside the median is worth a curve
_FEWEST_BLOCKS = 4
# The columns that a narrow terminal does without, the first first.
_DISPENSABLE = (
    "blocks",
    "power_watts",
    "peak_reserved_bytes",
    "spread",
    "step_seconds",
    "data_set",
    "joules_per_unit",
    "final_loss",
    "verdict",
)


def print_table(
    rows: Sequence[Row],
    advice: Sequence[Advice],
    console: Console,
    prices: Prices | None = None,
    elsewhere: str = IN_CSV,
) -> None:
    """Print the table, its remarks, what epochs cost at these prices, and the advice to a terminal.

    Args:
        rows: The rows.
        advice: What to take.
        console: The terminal.
        prices: What energy costs; None leaves that out.
        elsewhere: Where the figures are that a narrow terminal does without.
    """
    print_line(console, headline(rows), "bold")
    *figures, status = shown_columns(rows)
    columns, left_out = fitting([*figures, *_curves(rows), status], rows, console.width, _DISPENSABLE, elsewhere)
    taken = {item.key for item in advice}

    def style(row: Row) -> str | None:
        if row.trial.status != "ok":
            return "dim"
        return "bold green" if row.trial.spec.key in taken else None

    console.print(terminal_table(columns, rows, style, console.width, competing), crop=False)
    grid = DataTable(columns, rows, competing)
    best = [f"{BEST} the best at its batch size"] if any(grid.best(column) for column in columns) else []
    for line in [*remarks(rows), *cost_lines(rows, prices), *left_out, *best]:
        print_line(console, f"  {line}", "yellow")
    printed = {""}
    for item in advice:
        console.print()
        print_line(console, item.sentence, "bold")
        if item.code not in printed:
            printed.add(item.code)
            # Never wrapped: what is copied from the terminal has to run.
            console.print(escape(_indented(item.code)), highlight=False, soft_wrap=True)
            for line in snippet_lines(item):
                console.print(escape(_indented(line)), highlight=False, soft_wrap=True)


def _curves(rows: Sequence[Row]) -> list[Column[Row]]:
    """Return a column of each cell's block times as a small curve, where blocks differ by what can be seen.

    All curves have one scale, so that a quiet cell looks quiet beside a noisy one: from the largest distance below the
    median to the same above it.
    """
    beside = {id(row): _beside_the_median(row) for row in rows}
    reach = max((abs(value) for values in beside.values() for value in values), default=0.0)
    if reach < _VISIBLE:
        return []

    def text(row: Row) -> str:
        return sparkline(beside[id(row)], -reach, reach) or "–"

    return [Column("blocks", f"blocks, ±{format_share(reach)}", text, text, left=True)]


def _beside_the_median(row: Row) -> list[float]:
    times = step_times(row.trial)
    if len(times) < _FEWEST_BLOCKS:
        return []
    middle = statistics.median(times)
    return [value / middle - 1 for value in times]


def to_markdown(rows: Sequence[Row], advice: Sequence[Advice], prices: Prices | None = None) -> str:
    """Return the table, its remarks, what epochs cost at these prices, and the advice as Markdown."""
    lines = [markdown_table(rows).rstrip("\n"), *(f"- {markdown_text(line)}" for line in cost_lines(rows, prices))]
    for item in advice:
        lines += ["", markdown_text(item.sentence)]
        if item.code:
            lines += ["", "```python", "\n".join([item.code, *snippet_lines(item)]), "```"]
    return "\n".join(lines).rstrip() + "\n"


def markdown_table(rows: Sequence[Row]) -> str:
    """Return the headline, the table and its remarks as Markdown."""
    columns = shown_columns(rows)
    remarked = (f"- {markdown_text(line)}" for line in remarks(rows))
    lines = [markdown_text(headline(rows)), "", *markdown_grid(columns, rows), "", *remarked]
    return "\n".join(lines).rstrip() + "\n"


def to_csv(rows: Sequence[Row]) -> str:
    """Return one line a trial, plain values, a header line first."""
    return csv_grid((*COLUMNS, *EXTRA_COLUMNS), rows)


def to_json(rows: Sequence[Row], advice: Sequence[Advice], prices: Prices | None = None) -> str:
    """Return an object with the rows' figures and warnings, the advice and the whole records; costs where asked for."""
    columns = (*COLUMNS, *EXTRA_COLUMNS)
    document: dict[str, Any] = {
        "rows": [
            plain(columns, row) | _estimates(row) | {"warnings": [asdict(each) for each in warnings_of_all(row.trials)]}
            for row in rows
        ],
        "advice": [
            {
                "workload": item.workload,
                "precision": item.precision,
                "sentence": item.sentence,
                "code": item.code,
                "frameworks": {snippet.framework: snippet.code or None for snippet in item.snippets},
            }
            for item in advice
        ],
        "trials": [json.loads(trial.model_dump_json()) for row in rows for trial in row.trials],
    }
    if prices:
        document["costs"] = costs(rows, prices)
    return json.dumps(document, indent=2, default=str, allow_nan=False)


def _estimates(row: Row) -> dict[str, Any]:
    """Return a row's figures with their intervals, None where there is no figure, and its verdict."""
    figures = {
        "throughput_per_second": row.throughput_estimate,
        "speedup": row.speedup_estimate,
        "memory_ratio": row.memory_estimate,
    }
    estimates = {
        name: None if found is None else {key: _or_none(value) for key, value in asdict(found).items()}
        for name, found in figures.items()
    }
    verdict = None if row.verdict is None else {"kind": row.verdict.kind, "reason": row.verdict.reason}
    return {"estimates": estimates, "verdict": verdict}


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def result_console(width: int | None = None) -> Console:
    """Return a console on stdout: as wide as the terminal, or wide enough for every column where it is piped."""
    console = Console(width=width, highlight=False, emoji=False)
    return console if console.is_terminal or width else Console(width=_PIPED_WIDTH, highlight=False, emoji=False)


def _indented(code: str) -> str:
    return "\n".join(f"    {line}" for line in code.splitlines())
