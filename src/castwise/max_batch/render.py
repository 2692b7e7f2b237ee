"""The largest batches as tables, sentences, Markdown, CSV or JSON."""

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from castwise.analysis import steady_metrics
from castwise.errors import UsageError
from castwise.max_batch.memory_breakdown import TOLERANCE, why_not_halved
from castwise.max_batch.result import MaxBatch, MaxBatchResult
from castwise.max_batch.tables import (
    CURVE,
    PARTS,
    SUMMARY,
    breakdown_table,
    breakdowns_of,
    curve_row,
    curve_table,
    loop_name,
    num_steps,
    published_of,
    ratio_of,
    summary_row,
    summary_table,
)
from castwise.records.schema import Trial
from castwise.registry.precisions import BASELINE, known_precision
from castwise.render.console import print_line, took_words
from castwise.render.fields import FlatRow, find_fields
from castwise.render.notes import measured_on
from castwise.render.table import DataTable, csv_grid, markdown_grid, markdown_text, plain, print_data_table
from castwise.render.units import format_bytes, format_rate, format_ratio

# What a narrow terminal leaves out, the first first.
_DROP_OF_SUMMARY = (
    "fixed_bytes",
    "num_trials",
    "num_steps",
    "sample_bytes",
    "peak_allocated_bytes",
    "knee_throughput",
)
_DROP_OF_CURVE = ("step_seconds", "joules_per_unit", "peak_reserved_bytes")


def headline(max_batches: Sequence[MaxBatch]) -> str:
    """Return what was searched for, and where."""
    spec = max_batches[0].trials[0].spec
    limit = "" if spec.memory_limit_bytes is None else f" within {format_bytes(spec.memory_limit_bytes)}"
    where = measured_on([trial for found in max_batches for trial in found.trials])
    return f"Largest batch of {spec.workload}{limit} on {where}"


def print_result(result: MaxBatchResult, console: Console) -> None:
    """Print what `castwise max-batch` found to a terminal, and what finding it took."""
    print_max_batches(result.max_batches, console)
    print_line(console, f"{took_words(len(result.trials), result.num_recorded, result.seconds)}.", "dim")


def print_max_batches(max_batches: Sequence[MaxBatch], console: Console) -> None:
    """Print the largest batches, the curve below them, and where their memory goes, to a terminal."""
    print_line(console, headline(max_batches), "bold")
    print_data_table(console, summary_table(max_batches), drop_first=_DROP_OF_SUMMARY)
    for line in remarks(max_batches):
        print_line(console, f"  {line}", "yellow")
    for title, table in _more_tables(max_batches):
        print_line(console, f"\n{title}", "bold")
        print_data_table(console, table, drop_first=_DROP_OF_CURVE)
    console.print()
    for line in conclusions(max_batches):
        print_line(console, line)


def markdown_max_batches(max_batches: Sequence[MaxBatch]) -> str:
    """Return the same as Markdown."""
    summary = summary_table(max_batches)
    lines = [markdown_text(headline(max_batches)), "", *markdown_grid(summary.columns, summary.rows), ""]
    lines += [f"- {markdown_text(line)}" for line in remarks(max_batches)]
    for title, table in _more_tables(max_batches):
        lines += ["", f"**{markdown_text(title)}**", "", *markdown_grid(table.columns, table.rows)]
    lines += ["", *(f"- {markdown_text(line)}" for line in conclusions(max_batches))]
    return "\n".join(lines).rstrip() + "\n"


def csv_result(result: MaxBatchResult) -> str:
    """Return a line for each batch that was tried, with plain values."""
    return csv_grid(find_fields((*CURVE, *PARTS)), [curve_row(trial) for trial in result.trials])


def json_result(result: MaxBatchResult) -> str:
    """Return the largest batches, the curves, the parts of memory, the sentences and the whole records as JSON."""
    max_batches = result.max_batches
    summary = find_fields(name for name in SUMMARY if name not in ("batch_ratio", "published"))
    document: dict[str, Any] = {
        "workload": max_batches[0].spec.workload,
        "fits": [plain(summary, summary_row(found)) for found in max_batches],
        "curve": [plain(find_fields((*CURVE, *PARTS)), curve_row(trial)) for trial in result.trials],
        "sentences": conclusions(max_batches),
        "remarks": remarks(max_batches),
        "seconds": result.seconds,
        "num_recorded": result.num_recorded,
        "trials": [json.loads(trial.model_dump_json()) for trial in result.trials],
    }
    return json.dumps(document, indent=2, allow_nan=False)


def _more_tables(max_batches: Sequence[MaxBatch]) -> list[tuple[str, DataTable[FlatRow]]]:
    """Return the tables below the first with their titles, but for empty ones."""
    breakdowns = breakdowns_of(max_batches)
    batch = f", batch {breakdowns[0].trial.spec.batch_size}" if breakdowns else ""
    tables = [
        ("Throughput, memory and energy over the batch size", curve_table(max_batches)),
        (f"Where the memory goes{batch}", breakdown_table(breakdowns)),
    ]
    return [(title, table) for title, table in tables if table.rows]


# Sentences


def conclusions(max_batches: Sequence[MaxBatch]) -> list[str]:
    """Return what the search found, in sentences."""
    lines = [_trained_and_failed(found) for found in max_batches if found.largest is not None and found.failing]
    for found in max_batches:
        ratio, published = ratio_of(found, max_batches), published_of(found)
        if ratio is not None and published:
            sources = "; ".join(
                f"{each.suite} had {format_ratio(each.ratio)} on a {each.gpu} ({each.baseline} and {each.batch_size})"
                for each in published
            )
            lines.append(f"{loop_name(found.spec)}: {format_ratio(ratio)} fp32's largest batch; {sources}.")
    breakdowns = breakdowns_of(max_batches)
    bases = {each.trial.spec.techniques: each for each in breakdowns if each.trial.spec.precision == BASELINE}
    for each in breakdowns:
        spec, base = each.trial.spec, bases.get(each.trial.spec.techniques)
        if base is not None and base.trial.spec.batch_size == spec.batch_size and _is_narrower(spec.precision):
            lines.append(why_not_halved(base, each, format_bytes))
    return lines


def _is_narrower(precision: str) -> bool:
    """Return whether a precision holds anything in fewer bits than float32; TF32 does not."""
    row = known_precision(precision)
    return row is None or row.param_dtype != "float32" or row.autocast_dtype is not None


def _trained_and_failed(found: MaxBatch) -> str:
    largest, failing, knee = found.largest, found.failing, found.knee
    assert largest is not None
    assert failing is not None
    line = (
        f"{loop_name(found.spec)}: batch {largest.spec.batch_size:,} trained {num_steps(largest)} steps in a fresh "
        f"process, batch {failing.spec.batch_size:,} "
        f"{'ran out of memory' if failing.status == 'oom' else failing.status}."
    )
    if knee is None or knee is largest:
        return line
    rate = f"{format_rate(steady_metrics.throughput(knee))} {steady_metrics.unit_of(knee)}/s"
    line += f" Batch {knee.spec.batch_size:,} is the smallest within 2 % of the best throughput measured ({rate})"
    held, most = steady_metrics.peak_allocated_bytes(knee), steady_metrics.peak_allocated_bytes(largest)
    return line + (f", in {100 * held / most:.0f} % of the memory." if held and most else ".")


def remarks(max_batches: Sequence[MaxBatch]) -> list[str]:
    """Return what a reader must know of the figures, a line each."""
    lines: list[str] = []
    for found in max_batches:
        if found.largest is None:
            lines += _why_none(found)
        elif found.problem is not None:
            lines.append(_failure(found.problem))
        elif found.failing is None:
            lines.append(f"{loop_name(found.spec)}: the search ended before any batch ran out of memory")
    num_foreign = max((found.num_foreign for found in max_batches), default=0)
    if num_foreign:
        others = "another process" if num_foreign == 1 else f"up to {num_foreign} other processes"
        lines.append(
            f"{others} computed on the GPU while steps were timed, which distorts throughput, energy and knees"
        )
    diverged = [each for each in max_batches if each.largest is not None and each.largest.status == "diverged"]
    if diverged:
        names = ", ".join(loop_name(found.spec) for found in diverged)
        lines.append(f"the loss of {names} was NaN at the largest batch; memory use is the same")
    lines += _missing_parts(max_batches)
    lines += [
        f"{each.trial.spec.label}: the parts of memory add up to {100 * each.error:+.1f} % more than the measured peak"
        for each in breakdowns_of(max_batches)
        if abs(each.error) > TOLERANCE
    ]
    if any(found.spec.device_type == "cpu" for found in max_batches):
        lines.append("memory on a CPU is the growth of the process, an upper bound of what tensors hold")
    return lines


def _missing_parts(max_batches: Sequence[MaxBatch]) -> list[str]:
    lines: dict[str, None] = {}
    for found in max_batches:
        parts = found.largest.ranks[0].memory_parts if found.largest is not None and found.largest.ranks else None
        if parts is not None and parts.missing:
            lines[f"{loop_name(found.spec)}: where its memory goes is not known: {parts.missing}"] = None
    return list(lines)


def raise_if_nothing_fits(max_batches: Sequence[MaxBatch]) -> None:
    """Raise an error if memory is too small for the smallest batch of every loop.

    Raises:
        UsageError: It is; the message says what the smallest batches need.
    """
    if max_batches and all(found.largest is None and found.failing is not None for found in max_batches):
        lines = [line for found in max_batches for line in _why_none(found)]
        raise UsageError(f"{'; '.join(lines)}.")


def _why_none(found: MaxBatch) -> list[str]:
    """Return why no batch fits, a line each: what the smallest one needs, or how it ended."""
    lines = []
    smallest = next((trial for trial in found.trials if trial.status == "oom"), None)
    if smallest is not None:
        lines.append(f"batch {smallest.spec.batch_size} does not fit in {loop_name(found.spec)}: {_needs(smallest)}")
    if found.problem is not None:
        lines.append(_failure(found.problem))
    return lines


def _failure(trial: Trial) -> str:
    return f"{trial.spec.label}: {trial.status}: {trial.message}"


def _needs(trial: Trial) -> str:
    shortfall = trial.shortfall
    if shortfall is None:
        limit = trial.spec.memory_limit_bytes or trial.environment.gpu_memory_bytes
        return f"it ran out of {format_bytes(limit)}" if limit else trial.message
    # A CPU's process has run a step when it is found too large; a GPU's ends at the tensor that does not fit.
    least = "" if trial.spec.device_type == "cpu" else "at least "
    return f"needs {least}{format_bytes(shortfall.needed_bytes)}, {format_bytes(shortfall.free_bytes)} free"
