"""A suite's result as terminal tables, Markdown, CSV or JSON: what was run, and the published figures beside it."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console

from castwise.render import training_table
from castwise.render.console import print_line
from castwise.render.fields import find_fields
from castwise.render.notes import measured_on
from castwise.render.table import DataTable, csv_grid, json_values, markdown_grid, plain, print_data_table
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
    first, *rest = headlines(result)
    print_line(console, first, "bold")
    for line in rest:
        print_line(console, line)
    console.print()
    if result.runs:
        training_table.print_runs(result.runs, result.pairs, console)
    _print_lines(console, notes(result), "yellow")
    if result.tuned:
        print_line(console, f"\n{_TUNED_TITLE}", "bold")
        print_data_table(console, DataTable(shown_tuned(result.tuned), result.tuned), drop_first=TUNED_ALSO)
        _print_lines(console, tuned_notes(result.tuned), "yellow")
    for title, rows in _published_by_gpu(result).items():
        print_line(console, f"\n{title}", "bold")
        print_data_table(console, DataTable(shown_published(rows), rows), drop_first=PUBLISHED_ALSO)
    if result.limits:
        print_line(console, "\nLargest batch that trains", "bold")
        print_data_table(console, DataTable(LIMITS, result.limits))
    for title, lines in _kept(result).items():
        print_line(console, f"\n{title}", "dim bold")
        _print_lines(console, lines, "dim")


def _print_lines(console: Console, lines: Iterable[str], style: str | None = None) -> None:
    for line in lines:
        print_line(console, f"  {line}", style)


def markdown_suite(result: SuiteResult) -> str:
    """Return the same as Markdown."""
    first, *rest = headlines(result)
    parts = [[f"**{first}**"], [f"{line}  " for line in rest]]
    if result.runs:
        runs = training_table.data_table(result.runs, result.pairs)
        parts.append(markdown_grid(runs.columns, runs.rows))
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
        {"suite": result.suite.name, **training_table.flat_row(run, result.pairs)}
        for result in results
        for run in result.runs
    ]
    return csv_grid(find_fields(("suite", *training_table.IN_FILES)), rows)


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


def _document(result: SuiteResult) -> dict[str, Any]:
    rows = [training_table.flat_row(run, result.pairs) for run in result.runs]
    return {
        "suite": result.suite.name,
        "source": result.suite.source,
        "machine": result.suite.machine,
        "runs": [json_values({name: row[name] for name in training_table.IN_FILES}) for row in rows],
        "tuned": [plain(TUNED, row) for row in result.tuned],
        "published": [plain(PUBLISHED, row) for row in result.published],
        "largest_batch": [plain(LIMITS, row) for row in result.limits],
        "notes": [*notes(result), *tuned_notes(result.tuned)],
        "oddities": list(result.suite.oddities),
        "contradictions": list(result.suite.contradictions),
        "trials": [json.loads(trial.model_dump_json()) for trial in result.all_trials],
    }
