"""The largest batches as tables, Markdown, CSV or JSON: what was verified, the curve below, and where memory goes."""

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from castwise.max_batch.columns import CURVE, SUMMARY, breakdown_columns, breakdowns_of, curve_of, shown_summary
from castwise.max_batch.result import MaxBatch, MaxBatchResult
from castwise.max_batch.sentences import conclusions, remarks
from castwise.records.schema import Trial
from castwise.render.console import print_line, took_words
from castwise.render.notes import measured_on
from castwise.render.table import Column, DataTable, csv_grid, markdown_grid, markdown_text, plain, print_data_table
from castwise.render.units import format_bytes

# What a narrow terminal does without, the first first.
_SUMMARY_ALSO = ("fixed_bytes", "num_trials", "num_steps", "sample_bytes", "peak_allocated_bytes", "knee_throughput")
_CURVE_ALSO = ("driver_bytes", "step_seconds", "joules_per_unit", "peak_reserved_bytes")


def headline(fits: Sequence[MaxBatch]) -> str:
    """Return what was fitted, where."""
    spec = fits[0].trials[0].spec
    limit = "" if spec.memory_limit_bytes is None else f" within {format_bytes(spec.memory_limit_bytes)}"
    where = measured_on([trial for fit in fits for trial in fit.trials])
    return f"Largest batch of {spec.workload}{limit} on {where}"


def print_result(fitted: MaxBatchResult, console: Console) -> None:
    """Print what `castwise max-batch` found to a terminal, and what finding it took."""
    print_max_batches(fitted.fits, console)
    print_line(console, f"{took_words(len(fitted.trials), fitted.num_recorded, fitted.seconds)}.", "dim")


def print_max_batches(fits: Sequence[MaxBatch], console: Console) -> None:
    """Print the largest batches, the curve below them, and where their memory goes, to a terminal."""

    def table(columns: Sequence[Column[Any]], rows: Sequence[Any], also: Sequence[str]) -> None:
        print_data_table(console, DataTable(columns, rows), drop_first=also)

    print_line(console, headline(fits), "bold")
    table(shown_summary(fits), fits, _SUMMARY_ALSO)
    for line in remarks(fits):
        print_line(console, f"  {line}", "yellow")
    for title, columns, rows in _further(fits):
        print_line(console, f"\n{title}", "bold")
        table(columns, rows, _CURVE_ALSO)
    console.print()
    for line in conclusions(fits):
        print_line(console, line)


def markdown_max_batches(fits: Sequence[MaxBatch]) -> str:
    """Return the same as Markdown."""
    lines = [markdown_text(headline(fits)), "", *markdown_grid(shown_summary(fits), fits), ""]
    lines += [f"- {markdown_text(line)}" for line in remarks(fits)]
    for title, columns, rows in _further(fits):
        lines += ["", f"**{markdown_text(title)}**", "", *markdown_grid(columns, rows)]
    lines += ["", *(f"- {markdown_text(line)}" for line in conclusions(fits))]
    return "\n".join(lines).rstrip() + "\n"


def csv_result(fitted: MaxBatchResult) -> str:
    """Return a line a batch that was tried, plain values."""
    return csv_grid((*CURVE, *PART_COLUMNS), [trial for fit in fitted.fits for trial in fit.trials])


def json_result(fitted: MaxBatchResult) -> str:
    """Return the largest batches, the curves, the parts of memory, the sentences and the whole records as JSON."""
    fits = fitted.fits
    document: dict[str, Any] = {
        "workload": fits[0].spec.workload,
        "fits": [plain(SUMMARY, fit) for fit in fits],
        "curve": [plain((*CURVE, *PART_COLUMNS), trial) for fit in fits for trial in fit.trials],
        "sentences": conclusions(fits),
        "remarks": remarks(fits),
        "seconds": fitted.seconds,
        "num_recorded": fitted.num_recorded,
        "trials": [json.loads(trial.model_dump_json()) for trial in fitted.trials],
    }
    return json.dumps(document, indent=2, allow_nan=False)


def _further(fits: Sequence[MaxBatch]) -> list[tuple[str, Sequence[Column[Any]], Sequence[Any]]]:
    """Return the tables below the first: a title, columns and rows each; those without rows are left out."""
    accounts = breakdowns_of(fits)
    batch = f", batch {accounts[0].trial.spec.batch_size}" if accounts else ""
    tables: list[tuple[str, Sequence[Column[Any]], Sequence[Any]]] = [
        ("Throughput, memory and energy over the batch size", curve_columns(fits), curve_of(fits)),
        (f"Where the memory goes{batch}", breakdown_columns(accounts), accounts),
    ]
    return [each for each in tables if each[2]]


def curve_columns(fits: Sequence[MaxBatch]) -> list[Column[Any]]:
    """Return the curve's columns that have anything to say of these."""
    rows = curve_of(fits)
    return [column for column in CURVE if any(column.value(row) not in (None, "") for row in rows)]


def _part(name: str) -> Column[Trial]:
    def value(trial: Trial) -> int | None:
        parts = trial.ranks[0].memory_parts if trial.ranks else None
        return None if parts is None or parts.missing else getattr(parts, name)

    return Column(name, name, value, lambda trial: format_bytes(value(trial)))


PART_COLUMNS = tuple(
    _part(f"{name}_bytes")
    for name in (
        "weights",
        "masters",
        "gradients",
        "optimizer",
        "batches",
        "saved",
        "weight_casts",
        "temporaries",
        "workspace",
        "outside",
    )
)
