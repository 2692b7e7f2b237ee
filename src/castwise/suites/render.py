"""A suite's result as terminal tables, Markdown, CSV or JSON: what was run, and the published figures next to it."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from castwise.analysis.steady_metrics import largest
from castwise.analysis.training_metrics import median
from castwise.registry.techniques import join
from castwise.show import training_table
from castwise.show.console import print_line
from castwise.show.fields import (
    FlatRow,
    estimate_values,
    find_field,
    find_fields,
    worth_showing,
)
from castwise.show.notes import MORE, first_of, measured_on
from castwise.show.table import (
    DataTable,
    csv_grid,
    json_document,
    json_text,
    json_values,
    markdown_grid,
    print_data_table,
    short_table_of,
)
from castwise.show.units import pluralize
from castwise.suites.result import SuiteResult, notes
from castwise.suites.tuned_vs_published import TunedPair, tuned_notes

PUBLISHED = (
    "workload",
    "precision",
    "loss_scale",
    "batch_size",
    "published_seconds",
    "measured",
    "seconds",
    "published_speedup",
    "speedup",
    "ratio",
    "equal_batch_speedup",
    "published_memory_bytes",
    "memory_bytes",
    "memory",
    "published_accuracy",
    "accuracy",
    "accuracy_after",
)
TUNED = (
    "workload",
    "precision",
    "batch_size",
    "gpus",
    "seeds",
    "published_seconds",
    "tuned_seconds",
    "speedup",
    "settled_speedup",
    "published_bytes",
    "tuned_bytes",
    "published_score",
    "tuned_score",
    "difference",
    "loop",
)
LIMITS = ("workload", "precision", "loss_scale", "published", "measured", "reserved_bytes")

_PUBLISHED_TITLES = {"seconds": "measured time", "speedup": "measured speed-up", "accuracy": "measured accuracy"}
_TUNED_TITLES = {"published_seconds": "published loop", "speedup": "times as fast"}
# The columns that fit into 80 characters, of published figures and of tuned loops.
_SHORT_PUBLISHED = {
    "precision": "precision",
    "batch_size": "batch",
    "published_seconds": "published time",
    "measured": "measured run",
    "seconds": "measured time",
    "published_speedup": "published × fp32",
    "speedup": "measured × fp32",
}
_SHORT_TUNED = {
    "precision": "precision",
    "batch_size": "batch",
    "published_seconds": "published loop",
    "tuned_seconds": "tuned loop",
    "speedup": "times as fast",
    "published_score": "score, published",
    "tuned_score": "score, tuned",
}


def _short(table: DataTable[FlatRow], titles: Mapping[str, str]) -> DataTable[FlatRow]:
    """Return a table with the columns that decide."""
    return short_table_of(titles, table.rows, ("published_seconds",), wraps=("precision", "measured"))


def tuned_table(pairs: Sequence[TunedPair]) -> DataTable[FlatRow]:
    """Return the table of published loops next to tuned ones."""
    flat = [tuned_row(pair) for pair in pairs]
    fields = [find_field(name, _TUNED_TITLES.get(name, "")) for name in TUNED]
    return DataTable(worth_showing(fields, flat), flat)


def tuned_row(pair: TunedPair) -> FlatRow:
    """Return the values of the published loop and the tuned one."""
    counts = len(pair.published), len(pair.tuned)
    difference = pair.difference
    values: dict[str, Any] = {
        "workload": pair.spec.workload,
        "precision": pair.spec.precision,
        "batch_size": pair.spec.batch_size,
        "gpus": training_table.gpus_text(pair.spec),
        "seeds": min(counts),
        "seeds_text": f"{counts[0]} each" if counts[0] == counts[1] else f"{counts[0]} published, {counts[1]} tuned",
        **estimate_values("speedup", pair.speedup),
        **estimate_values("settled_speedup", pair.settled_speedup),
        "difference": None if difference is None else difference.value,
        "loop": join(pair.spec.techniques),
    }
    for name, side in (("published", pair.published), ("tuned", pair.tuned)):
        scores = pair.scores(side)
        values[f"{name}_seconds"] = median(run.split.total for run in side if run.split is not None)
        values[f"{name}_bytes"] = largest(run.peak_allocated_bytes for run in side)
        values[f"{name}_score"] = statistics.fmean(scores) if scores else None
        if scores:
            spread = f" ± {_score(pair, statistics.stdev(scores))}" if len(scores) > 1 else ""
            unit = "" if pair.is_language_model else " %"
            values[f"{name}_score_text"] = f"{_score(pair, statistics.fmean(scores))}{spread}{unit}"
    if difference is not None:
        interval = ""
        if math.isfinite(difference.low):
            interval = f" [{_score(pair, difference.low, '+')}, {_score(pair, difference.high, '+')}]"
        values["difference_text"] = f"{_score(pair, difference.value, '+')}{interval}"
    return values


def _score(pair: TunedPair, value: float, sign: str = "") -> str:
    return f"{value:{sign}.1f}" if pair.is_language_model else f"{100 * value:{sign}.2f}"


def limits_table(limits: Sequence[FlatRow]) -> DataTable[FlatRow]:
    """Return the table of the largest batches."""

    def text(batches: tuple[int | None, int | None]) -> str:
        words = zip(batches, ("trains", "does not"), strict=True)
        return ", ".join(f"{batch} {word}" for batch, word in words if batch is not None) or "–"

    texts = {
        "published": lambda row: f"{text(row['published'])} ({row['gpu']})" if row["gpu"] else "–",
        "measured": lambda row: text(row["measured"]),
    }
    fields = [find_field(name, "here" if name == "measured" else "") for name in LIMITS]
    return DataTable([replace(field, format=texts.get(field.name, field.format)) for field in fields], limits)


def print_suite(result: SuiteResult, console: Console, *, wide: bool = False, verbose: bool = False) -> None:
    """Print a suite's tables and notes to a terminal.

    Args:
        result: What was run.
        console: The terminal.
        wide: Print all columns.
        verbose: Print all notes, and what is odd in the source.
    """
    first, *rest = headlines(result)
    print_line(console, first, "bold")
    for line in rest:
        print_line(console, line)
    console.print()
    if result.runs:
        training_table.print_runs(result.runs, result.pairs, console, wide=wide)
    measured = [trial for trial in result.trials if trial.ranks]
    if measured:
        print_line(console, measured_on(measured, is_brief=not (wide or verbose)), "dim")

    def shown(lines: Iterable[str]) -> Sequence[str]:
        return list(lines) if verbose else first_of(list(lines))

    _print_lines(console, shown(notes(result)), "yellow")
    for title, table, below in _comparisons(result):
        print_line(console, f"\n{title}", "bold")
        titles = _SHORT_TUNED if "tuned_seconds" in {column.name for column in table.columns} else _SHORT_PUBLISHED
        if wide or "published_seconds" not in {column.name for column in table.columns}:
            print_data_table(console, table)
        else:
            setting = training_table.setting_text(table.rows, ("workload", "gpus", "loop"))
            print_data_table(console, _short(table, titles), section=setting)
        _print_lines(console, shown(below), "yellow")
    for title, lines in _about_the_source(result).items():
        if verbose:
            print_line(console, f"\n{title}", "dim bold")
            _print_lines(console, lines, "dim")
        else:
            print_line(console, f"\n{title}: {pluralize(len(lines), 'note')} {MORE}", "dim")


def _print_lines(console: Console, lines: Iterable[str], style: str) -> None:
    for line in lines:
        print_line(console, f"  {line}", style)


def _comparisons(result: SuiteResult) -> list[tuple[str, DataTable[FlatRow], list[str]]]:
    """Return the tables below the runs: a title, a table, and lines below it each."""
    tables = []
    if result.tuned:
        tables.append(("The published loop, and the tuned one", tuned_table(result.tuned), tuned_notes(result.tuned)))
    by_gpu: dict[str, list[FlatRow]] = {}
    for row in result.published:
        if row["trials"]:
            by_gpu.setdefault(row["gpu"], []).append(row)
    for gpu, rows in by_gpu.items():
        fields = [find_field(name, _PUBLISHED_TITLES.get(name, "")) for name in PUBLISHED]
        shown = worth_showing(fields, rows, always=("batch_size", "published_seconds"))
        tables.append((f"Published on {gpu}, and measured here", DataTable(shown, rows), []))
    if result.limits:
        tables.append(("Largest batch that trains", limits_table(result.limits), []))
    return tables


def _about_the_source(result: SuiteResult) -> dict[str, tuple[str, ...]]:
    lines = {
        "Odd in the source, and kept here": result.suite.oddities,
        "Contradictions in the source": result.suite.contradictions,
    }
    return {title: each for title, each in lines.items() if each}


def markdown_suite(result: SuiteResult) -> str:
    """Return the same as Markdown."""
    first, *rest = headlines(result)
    measured = [trial for trial in result.trials if trial.ranks]
    rest += [f"measured on: {measured_on(measured)}"] if measured else []
    parts = [[f"**{first}**"], [f"{line}  " for line in rest]]
    if result.runs:
        runs = training_table.data_table(result.runs, result.pairs)
        parts.append(markdown_grid(runs.columns, runs.rows))
    parts.append(_items(notes(result)))
    for title, table, below in _comparisons(result):
        parts += [[f"**{title}**"], markdown_grid(table.columns, table.rows), _items(below)]
    for title, lines in _about_the_source(result).items():
        parts += [[f"**{title}**"], _items(lines)]
    return "\n\n".join("\n".join(line.replace("\n", " ") for line in part) for part in parts if part) + "\n"


def _items(lines: Iterable[str]) -> list[str]:
    return [f"- {line}" for line in lines]


def csv_suites(results: Sequence[SuiteResult]) -> str:
    """Return one line a run over all suites, plain values, a header line first."""
    rows = [
        {"suite": result.suite.name, **training_table.flat_row(run, result.pairs)}
        for result in results
        for run in result.runs
    ]
    return csv_grid(find_fields(("suite", *training_table.IN_FILES)), rows)


def json_suites(results: Sequence[SuiteResult]) -> str:
    """Return an object with each suite's runs, published figures, largest batches and whole records."""
    return json_text(json_document(suites=[_document(result) for result in results]))


def headlines(result: SuiteResult) -> list[str]:
    """Return what the suite is, and where it comes from."""
    suite = result.suite
    return [f"{suite.name}: {suite.title}", f"source: {suite.source}", f"the source's machine: {suite.machine}"]


def _document(result: SuiteResult) -> dict[str, Any]:
    def selected(names: Sequence[str], row: FlatRow) -> dict[str, Any]:
        return json_values({name: row[name] for name in names})

    runs = [training_table.flat_row(run, result.pairs) for run in result.runs]
    return {
        "suite": result.suite.name,
        "source": result.suite.source,
        "machine": result.suite.machine,
        "runs": [selected(training_table.IN_FILES, run) for run in runs],
        "tuned": [selected(TUNED, tuned_row(pair)) for pair in result.tuned],
        "published": [selected(PUBLISHED, row) for row in result.published],
        "largest_batch": [selected(LIMITS, limit) for limit in result.limits],
        "notes": [*notes(result), *tuned_notes(result.tuned)],
        "oddities": list(result.suite.oddities),
        "contradictions": list(result.suite.contradictions),
        "trials": [json.loads(trial.model_dump_json()) for trial in result.all_trials],
    }
