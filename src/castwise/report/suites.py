"""A suite's result as terminal tables, Markdown, CSV or JSON: what was run, and the published figures beside it."""

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from castwise.analyze.beside import Beside
from castwise.analyze.runs import Run
from castwise.analyze.suite_result import SuiteResult, notes
from castwise.report.beside_columns import BESIDE, LIMITS, reasons, shown_beside
from castwise.report.columns import software_of
from castwise.report.grid import Column, csv_grid, fitting, markdown_grid, plain, terminal_table
from castwise.report.run_columns import DISPENSABLE, EXTRA, run_columns, shown

_SUITE = Column[tuple[str, Run]]


def print_suite(result: SuiteResult, console: Console) -> None:
    """Print a suite's tables and what a reader must know of them to a terminal."""
    wrap = console.is_terminal
    for index, line in enumerate(headlines(result)):
        console.print(escape(line), style="bold" if index == 0 else None, highlight=False, soft_wrap=not wrap)
    console.print()
    columns, left_out = fitting(shown(run_columns(result.pairs), result.runs), result.runs, console.width, DISPENSABLE)
    console.print(terminal_table(columns, result.runs, lambda run: None if run.trial.status == "ok" else "dim"))
    for line in [*notes(result), *left_out]:
        console.print(f"  {escape(line)}", style="yellow", highlight=False, soft_wrap=not wrap)
    for title, rows in _beside_by_gpu(result).items():
        console.print(f"\n{escape(title)}", style="bold", highlight=False)
        console.print(terminal_table(shown_beside(rows), rows))
        for line in reasons(rows):
            console.print(f"  {escape(line)}", highlight=False, soft_wrap=not wrap)
    if result.limits:
        console.print("\nLargest batch that trains", style="bold", highlight=False)
        console.print(terminal_table(LIMITS, result.limits))
    console.print()
    for line in kept(result):
        console.print(f"  {escape(line)}", style="dim", highlight=False, soft_wrap=not wrap)


def markdown_suite(result: SuiteResult) -> str:
    """Return the same as Markdown."""
    first, *rest = headlines(result)
    lines = [f"**{first}**", "", *(f"{line}  " for line in rest), ""]
    lines += markdown_grid(shown(run_columns(result.pairs), result.runs), result.runs)
    lines += ["", *(f"- {line}" for line in notes(result)), ""]
    for title, rows in _beside_by_gpu(result).items():
        lines += [f"**{title}**", "", *markdown_grid(shown_beside(rows), rows), ""]
        lines += [*(f"- {line}" for line in reasons(rows)), ""]
    if result.limits:
        lines += ["**Largest batch that trains**", "", *markdown_grid(LIMITS, result.limits), ""]
    lines += [f"- {line}" for line in kept(result)]
    return "\n".join(lines).rstrip() + "\n"


def csv_suites(results: Sequence[SuiteResult]) -> str:
    """Return one line a run over all suites, plain values, a header line first."""
    rows = [(result.suite.name, run) for result in results for run in result.runs]
    pairs = {key: value for result in results for key, value in result.pairs.items()}
    name: _SUITE = Column("suite", "suite", lambda row: row[0], lambda row: row[0], left=True)
    return csv_grid((name, *(_of_run(column) for column in (*run_columns(pairs), *EXTRA))), rows)


def json_suites(results: Sequence[SuiteResult]) -> str:
    """Return an object with each suite's runs, published figures beside them, largest batches and whole records."""
    return json.dumps({"suites": [_document(result) for result in results]}, indent=2, default=str, allow_nan=False)


def headlines(result: SuiteResult) -> list[str]:
    """Return what the suite is, where it comes from, and where it was run."""
    suite = result.suite
    lines = [f"{suite.name}: {suite.title}", f"source: {suite.source}", f"the source's machine: {suite.machine}"]
    measured = next((trial for trial in result.trials if trial.ranks), None)
    if measured is not None:
        lines.append(f"measured on {measured.environment.device_name} ({software_of(measured)})")
    return lines


def kept(result: SuiteResult) -> list[str]:
    """Return what is odd in the source and kept here, and where it contradicts itself, a line each."""
    return [f"kept from the source: {line}" for line in result.suite.oddities] + [
        f"the source contradicts itself: {line}" for line in result.suite.contradictions
    ]


def _beside_by_gpu(result: SuiteResult) -> dict[str, list[Beside]]:
    """Return the rows by title: a table for each of the source's GPUs of which a cell was run."""
    tables: dict[str, list[Beside]] = {}
    for row in result.beside:
        tables.setdefault(f"Published on {row.published.gpu}, and measured here", []).append(row)
    return {title: rows for title, rows in tables.items() if any(row.trials for row in rows)}


def _of_run(column: Column[Run]) -> _SUITE:
    return Column(column.name, column.title, lambda row: column.value(row[1]), lambda row: column.text(row[1]))


def _document(result: SuiteResult) -> dict[str, Any]:
    columns = (*run_columns(result.pairs), *EXTRA)
    return {
        "suite": result.suite.name,
        "source": result.suite.source,
        "runs": [plain(columns, run) for run in result.runs],
        "published": [plain(BESIDE, row) for row in result.beside],
        "largest_batch": [plain(LIMITS, row) for row in result.limits],
        "notes": list(notes(result)),
        "kept": kept(result),
        "trials": [json.loads(trial.model_dump_json()) for trial in result.all_trials],
    }
