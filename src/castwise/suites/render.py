"""A suite's result as terminal tables, Markdown, CSV or JSON: what was run, and the published figures beside it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from castwise.analysis.training_metrics import Run
from castwise.render.provenance import measured_on
from castwise.render.table import (
    BEST,
    IN_CSV,
    Column,
    DataTable,
    csv_grid,
    fitting,
    markdown_grid,
    plain,
    terminal_table,
)
from castwise.render.training_columns import DISPENSABLE as RUNS_ALSO
from castwise.render.training_columns import EXTRA, competing, loss_curve, run_columns, shown
from castwise.suites.compare_published import PublishedComparison
from castwise.suites.published_columns import DISPENSABLE as PUBLISHED_ALSO
from castwise.suites.published_columns import LIMITS, PUBLISHED, shown_published
from castwise.suites.result import SuiteResult, notes
from castwise.suites.tuned_columns import DISPENSABLE as TUNED_ALSO
from castwise.suites.tuned_columns import TUNED, shown_tuned
from castwise.suites.tuned_vs_published import tuned_notes

_TUNED_TITLE = "The published loop, and the tuned one"


def print_suite(result: SuiteResult, console: Console) -> None:
    """Print a suite's tables and what a reader must know of them to a terminal."""
    for index, line in enumerate(headlines(result)):
        _print_line(console, line, "bold" if index == 0 else None)
    console.print()
    if result.runs:
        print_runs(result.runs, result.pairs, console)
    _print_lines(console, notes(result), "yellow")
    if result.tuned:
        console.print(f"\n{_TUNED_TITLE}", style="bold", highlight=False)
        columns, left_out = fitting(shown_tuned(result.tuned), result.tuned, console.width, TUNED_ALSO)
        console.print(terminal_table(columns, result.tuned, width=console.width), crop=False)
        _print_lines(console, [*tuned_notes(result.tuned), *left_out], "yellow")
    for title, rows in _published_by_gpu(result).items():
        console.print(f"\n{escape(title)}", style="bold", highlight=False)
        shown_columns, left_out = fitting(shown_published(rows), rows, console.width, PUBLISHED_ALSO)
        console.print(terminal_table(shown_columns, rows, width=console.width), crop=False)
        _print_lines(console, left_out, "yellow")
    if result.limits:
        console.print("\nLargest batch that trains", style="bold", highlight=False)
        console.print(terminal_table(LIMITS, result.limits, width=console.width), crop=False)
    for title, lines in _kept(result).items():
        console.print(f"\n{title}", style="dim bold", highlight=False)
        _print_lines(console, lines, "dim")


def print_runs(rows: Sequence[Run], pairs: Mapping[str, float], console: Console, elsewhere: str = IN_CSV) -> None:
    """Print a table of runs to a terminal.

    Args:
        rows: The runs.
        pairs: Speed-ups over float32 at the batch the source paired a run with, by the trial's key.
        console: The terminal.
        elsewhere: Where the figures are that a narrow terminal does without.
    """
    every = shown(_with_curve(run_columns(pairs)), rows)
    columns, left_out = fitting(every, rows, console.width, RUNS_ALSO, elsewhere)
    console.print(terminal_table(columns, rows, _style, console.width, competing), crop=False)
    _print_lines(console, left_out, "yellow")
    grid = DataTable(columns, rows, competing)
    if any(grid.best(column) for column in columns):
        _print_line(console, f"{BEST} the best among runs that differ in precision alone", "yellow", indent=2)


def _with_curve(columns: Sequence[Column[Run]]) -> list[Column[Run]]:
    """Return columns with the loss over time in front of the last, which is the status."""
    return [*columns[:-1], loss_curve(), columns[-1]]


def _style(run: Run) -> str | None:
    return None if run.trial.status == "ok" else "dim"


def _print_lines(console: Console, lines: Iterable[str], style: str | None = None) -> None:
    for line in lines:
        _print_line(console, line, style, indent=2)


def _print_line(console: Console, line: str, style: str | None = None, indent: int = 0) -> None:
    """Print a line: wrapped behind its indent on a terminal, and one line to `grep` where it is piped."""
    if console.is_terminal:
        console.print(Padding(Text(line), (0, 0, 0, indent), expand=False), style=style, highlight=False)
    else:
        console.print(" " * indent + escape(line), style=style, highlight=False, soft_wrap=True)


def markdown_suite(result: SuiteResult) -> str:
    """Return the same as Markdown."""
    first, *rest = headlines(result)
    parts = [[f"**{first}**"], [f"{line}  " for line in rest]]
    if result.runs:
        parts.append(markdown_grid(shown(run_columns(result.pairs), result.runs), result.runs))
    parts.append(_items(notes(result)))
    if result.tuned:
        parts += [[f"**{_TUNED_TITLE}**"], markdown_grid(shown_tuned(result.tuned), result.tuned)]
        parts.append(_items(tuned_notes(result.tuned)))
    for title, rows in _published_by_gpu(result).items():
        parts += [[f"**{title}**"], markdown_grid(shown_published(rows), rows)]
    if result.limits:
        parts += [["**Largest batch that trains**"], markdown_grid(LIMITS, result.limits)]
    for title, lines in _kept(result).items():
        parts += [[f"**{title}**"], _items(lines)]
    return "\n\n".join("\n".join(_flat(line) for line in part) for part in parts if part) + "\n"


def _items(lines: Iterable[str]) -> list[str]:
    return [f"- {line}" for line in lines]


def _flat(line: str) -> str:
    return line.replace("\n", " ")


def csv_suites(results: Sequence[SuiteResult]) -> str:
    """Return one line a run over all suites, plain values, a header line first."""
    rows = [
        {"suite": result.suite.name} | {column.name: column.value(run) for column in _all_columns(result.pairs)}
        for result in results
        for run in result.runs
    ]
    names = ("suite", *(column.name for column in _all_columns({})))
    return csv_grid([_of_name(name) for name in names], rows)


def json_suites(results: Sequence[SuiteResult]) -> str:
    """Return an object with each suite's runs, published figures beside them, largest batches and whole records."""
    return json.dumps({"suites": [_document(result) for result in results]}, indent=2, default=str, allow_nan=False)


def headlines(result: SuiteResult) -> list[str]:
    """Return what the suite is, where it comes from, and where it was run."""
    suite = result.suite
    lines = [f"{suite.name}: {suite.title}", f"source: {suite.source}", f"the source's machine: {suite.machine}"]
    measured = [trial for trial in result.trials if trial.ranks]
    if measured:
        lines.append(f"measured on: {measured_on(measured)}")
    return lines


def _kept(result: SuiteResult) -> dict[str, tuple[str, ...]]:
    """Return what is odd in the source and kept here, and where it contradicts itself, by title."""
    lines = {
        "Odd in the source, and kept here": result.suite.oddities,
        "Where the source contradicts itself": result.suite.contradictions,
    }
    return {title: each for title, each in lines.items() if each}


def _published_by_gpu(result: SuiteResult) -> dict[str, list[PublishedComparison]]:
    """Return the rows of cells that were run, by title: a table for each of the source's GPUs."""
    tables: dict[str, list[PublishedComparison]] = {}
    for row in result.published:
        if row.trials:
            tables.setdefault(f"Published on {row.published.gpu}, and measured here", []).append(row)
    return tables


def _all_columns(pairs: Mapping[str, float]) -> tuple[Column[Run], ...]:
    return (*run_columns(pairs), *EXTRA)


def _of_name(name: str) -> Column[dict[str, Any]]:
    return Column(name, name, lambda row: row[name], lambda row: str(row[name]))


def _document(result: SuiteResult) -> dict[str, Any]:
    columns = _all_columns(result.pairs)
    return {
        "suite": result.suite.name,
        "source": result.suite.source,
        "machine": result.suite.machine,
        "runs": [plain(columns, run) for run in result.runs],
        "tuned": [plain(TUNED, row) for row in result.tuned],
        "published": [plain(PUBLISHED, row) for row in result.published],
        "largest_batch": [plain(LIMITS, row) for row in result.limits],
        "notes": [*notes(result), *tuned_notes(result.tuned)],
        "oddities": list(result.suite.oddities),
        "contradictions": list(result.suite.contradictions),
        "trials": [json.loads(trial.model_dump_json()) for trial in result.all_trials],
    }
