"""A suite's result: what was run, and the published figures next to it."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from castwise.analysis.training_metrics import median, split
from castwise.registry.techniques import join
from castwise.show import training_table
from castwise.show.fields import (
    Field,
    FlatRow,
    column,
    estimate_values,
    find_field,
    find_fields,
    in_files,
    short_columns,
    worth_showing,
)
from castwise.show.notes import MORE, first_of, measured_on
from castwise.show.presentation import Grid, Lines, Part, Presentation
from castwise.show.table import DataTable, json_document, json_records, plain, short_table_of
from castwise.show.units import pluralize
from castwise.spec.grouping import grouped
from castwise.suites.result import SuiteResult, notes
from castwise.suites.tuned_vs_published import TunedPair, tuned_notes

# Published figures next to measured ones.
PUBLISHED = (
    column("workload"),
    column("precision", short="precision"),
    column("loss_scale"),
    column("batch_size", short="batch"),
    Field("published_seconds", "published time", "seconds", otherwise="published_outcome", short="published time"),
    Field("measured", "measured run", wraps=True, short="measured run"),
    column("seconds", short="measured time", title="measured time"),
    Field("published_speedup", "published speed-up", "ratio", short="published × fp32"),
    column("speedup", short="measured × fp32", title="measured speed-up"),
    *find_fields(("ratio", "equal_batch_speedup", "published_memory_bytes", "memory_bytes", "memory")),
    Field("published_accuracy", "published accuracy", "share"),
    column("accuracy", title="measured accuracy"),
    Field("accuracy_after", "both after"),
)
# Published loops next to tuned ones.
TUNED = (
    column("workload"),
    column("precision", short="precision"),
    column("batch_size", short="batch"),
    *find_fields(("gpus", "seeds")),
    Field("published_seconds", "published loop", "seconds", short="published loop"),
    Field("tuned_seconds", "tuned loop", "seconds", short="tuned loop"),
    column("speedup", short="times as fast", title="times as fast"),
    *find_fields(("settled_speedup", "published_bytes", "tuned_bytes")),
    column("published_score", short="score, published"),
    column("tuned_score", short="score, tuned"),
    *find_fields(("difference", "loop")),
)
LIMITS = (
    *find_fields(("workload", "precision", "loss_scale", "published")),
    Field("measured", "here"),
    column("reserved_bytes"),
)


def tuned_table(pairs: Sequence[TunedPair]) -> DataTable[FlatRow]:
    flat = [tuned_row(pair) for pair in pairs]
    return DataTable(worth_showing(TUNED, flat), flat)


def tuned_row(pair: TunedPair) -> FlatRow:
    counts = len(pair.published.trials), len(pair.tuned.trials)
    difference = pair.difference
    values: dict[str, Any] = {
        **{name: getattr(pair.spec, name) for name in ("workload", "precision", "batch_size")},
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
        values[f"{name}_seconds"] = median(parts.total for trial in side.trials if (parts := split(trial)))
        values[f"{name}_bytes"] = side.peak_allocated_bytes
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
    def text(batches: tuple[int | None, int | None]) -> str:
        words = zip(batches, ("trains", "does not"), strict=True)
        return ", ".join(f"{batch} {word}" for batch, word in words if batch is not None) or "–"

    texts = {
        "published": lambda row: f"{text(row['published'])} ({row['gpu']})" if row["gpu"] else "–",
        "measured": lambda row: text(row["measured"]),
    }
    return DataTable([replace(field, format=texts.get(field.name, field.format)) for field in LIMITS], limits)


def present(results: Sequence[SuiteResult], *, wide: bool = False, verbose: bool = False) -> Presentation:
    def rows() -> DataTable[FlatRow]:
        found = [
            {"suite": result.suite.name, **training_table.flat_row(run, result.pairs)}
            for result in results
            for run in result.runs
        ]
        return DataTable([find_field("suite"), *in_files(training_table.COLUMNS)], found)

    return Presentation(
        [part for result in results for part in _parts(result, wide=wide, verbose=verbose)],
        rows,
        lambda: json_document(suites=[_document(result) for result in results]),
    )


def _parts(result: SuiteResult, *, wide: bool, verbose: bool) -> list[Part]:
    suite = result.suite
    parts: list[Part] = [
        Lines([f"{suite.name}: {suite.title}"], "bold", is_list=False),
        Lines([f"source: {suite.source}", f"the source's machine: {suite.machine}"]),
        Lines([""], is_list=False),
    ]
    parts += training_table.parts(result.runs, result.pairs, wide=wide) if result.runs else []
    if measured := [trial for trial in result.trials if trial.ranks]:
        place = measured_on(measured, is_brief=not (wide or verbose))
        parts.append(Lines([place], "dim", is_list=False, full=[f"measured on: {measured_on(measured)}"]))

    def indented(lines: Iterable[str], style: str = "yellow") -> Lines:
        return Lines([f"  {line}" for line in (lines if verbose else first_of(list(lines)))], style)

    parts.append(indented(notes(result)))
    for title, grid, below in _comparisons(result, wide=wide):
        parts += [Lines([title], "bold", is_list=False, gap=True), grid, indented(below)]
    about_the_source = {
        "Odd in the source, and kept here": result.suite.oddities,
        "Contradictions in the source": result.suite.contradictions,
    }
    for title, lines in about_the_source.items():
        if lines and verbose:
            parts += [Lines([title], "dim bold", is_list=False, gap=True), indented(lines, "dim")]
        elif lines:
            parts.append(Lines([f"{title}: {pluralize(len(lines), 'note')} {MORE}"], "dim", gap=True))
    return parts


def _comparisons(result: SuiteResult, *, wide: bool) -> list[tuple[str, Grid, Sequence[str]]]:
    """Return the tables below the runs: a title, a table, and lines below it each."""

    def grid(table: DataTable[FlatRow], columns: Sequence[Field]) -> Grid:
        if wide:
            return Grid(table)
        short = short_table_of(
            short_columns(columns), table.rows, ("published_seconds",), wraps=("precision", "measured")
        )
        return Grid(short, setting=("workload", "gpus", "loop"))

    tables: list[tuple[str, Grid, Sequence[str]]] = []
    if result.tuned:
        table = grid(tuned_table(result.tuned), TUNED)
        tables.append(("The published loop, and the tuned one", table, tuned_notes(result.tuned)))
    measured = (row for row in result.published if row["trials"])
    for gpu, rows in grouped(measured, lambda row: row["gpu"]).items():
        shown = worth_showing(PUBLISHED, rows, always=("batch_size", "published_seconds"))
        table = grid(DataTable(shown, rows), PUBLISHED)
        tables.append((f"Published on {gpu}, and measured here", table, ()))
    if result.limits:
        tables.append(("Largest batch that trains", Grid(limits_table(result.limits)), ()))
    return tables


def _document(result: SuiteResult) -> dict[str, Any]:
    run_columns = in_files(training_table.COLUMNS)
    return {
        "suite": result.suite.name,
        "source": result.suite.source,
        "machine": result.suite.machine,
        "runs": [plain(run_columns, training_table.flat_row(run, result.pairs)) for run in result.runs],
        "tuned": [plain(TUNED, tuned_row(pair)) for pair in result.tuned],
        "published": [plain(PUBLISHED, row) for row in result.published],
        "largest_batch": [plain(LIMITS, limit) for limit in result.limits],
        "notes": [*notes(result), *tuned_notes(result.tuned)],
        "oddities": list(result.suite.oddities),
        "contradictions": list(result.suite.contradictions),
        "trials": json_records(result.all_trials),
    }
