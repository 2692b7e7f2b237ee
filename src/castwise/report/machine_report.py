"""Compared machines as tables for a terminal, as Markdown and as JSON."""

import json
from collections.abc import Callable
from typing import Any

from rich.console import Console

from castwise.render.console import print_line
from castwise.render.fields import (
    Field,
    FlatRow,
    estimate_values,
    find_field,
    find_fields,
    interval_text,
    rate_text,
    ratio_text,
    worth_showing,
)
from castwise.render.run_report import json_estimate
from castwise.render.table import SCHEMA_VERSION, DataTable, markdown_grid, markdown_text, print_data_table
from castwise.report.machine_comparison import (
    ComparisonRow,
    Incomparable,
    MachineComparison,
    MachineResult,
    headline,
    verdict_counts,
)
from castwise.spec.quantities import truncate_list

_MAX_LABELS = 4  # configurations that a line names
# Shown if published machines, which a source describes in a line, are compared with measured ones.
_ALWAYS_SHOWN = ("device", "published in", "source's machine", "driver", "torch", "measured", "processes")
_MARKS = {"faster": "▲", "slower": "▼", "same": "=", "inconclusive": "?", "incomparable": "–"}
_STYLES = {"faster": "green", "slower": "red", "incomparable": "dim"}
_DROP_FIRST = (("speedup_first", "speedup"), ("throughput_first", "throughput"), "loss_scale")


def flat_row(row: ComparisonRow, result: MachineResult) -> dict[str, Any]:
    """Return the values of a configuration on one machine by field name."""
    return {
        "precision": row.spec.precision,
        "loss_scale": row.spec.loss_scale,
        "batch_size": row.spec.batch_size,
        "machine": result.machine.name,
        "unit": row.unit,
        "throughput_per_second": None if result.throughput is None else result.throughput.value,
        **estimate_values("ratio", result.ratio),
        **estimate_values("speedup", result.speedup),
        "verdict": verdict_text(result),
        "status": result.entry.status,
    }


def result_table(comparison: MachineComparison) -> DataTable[FlatRow]:
    """Return the table of ratios and verdicts: a row for each configuration on each of the other machines."""
    first, second, *others = (machine.name for machine in comparison.machines)
    there = "there" if others else second
    lines: list[FlatRow] = []
    for title, rows in comparison.groups.items():
        for row in rows:
            base = row.result_on(comparison.machines[0])
            lines += [
                {
                    **flat_row(row, result),
                    "workload": title,
                    "throughput_first": _rate_or_status(base),
                    "throughput": _rate_or_status(result),
                    **estimate_values("speedup_first", None if base is None else base.speedup),
                    "style": "red" if result.broke else _STYLES.get(result.verdict.kind),
                }
                for result in row.results
                if result.verdict is not None
            ]
    fields = [
        Field("workload", "workload", wraps=True),
        *find_fields(("precision", "loss_scale", "batch_size")),
        *([Field("machine", "machine")] if others else []),
        Field("throughput_first", first, "rate", _throughput_text("throughput_first")),
        Field("throughput", there, "rate", _throughput_text("throughput")),
        Field("ratio", "ratio", "ratio", interval_text("ratio")),
        find_field("verdict"),
        Field("speedup_first", f"speed-up on {first}", "ratio", interval_text("speedup_first")),
        Field("speedup", f"speed-up {'there' if others else f'on {second}'}", "ratio", interval_text("speedup")),
    ]
    return DataTable(worth_showing(fields, lines, ("precision", "batch_size", "ratio", "verdict")), lines)


def _rate_or_status(result: MachineResult | None) -> float | str | None:
    if result is not None and result.throughput is not None:
        return result.throughput.value
    return None if result is None or result.entry.status == "ok" else result.entry.status


def _throughput_text(name: str) -> Callable[[FlatRow], str]:
    return lambda row: row[name] if isinstance(row[name], str) else rate_text(name)(row)


def trait_table(comparison: MachineComparison) -> DataTable[FlatRow]:
    """Return the table of what differs between the machines."""
    machines = comparison.machines
    measured = [machine.traits for machine in machines if not machine.is_published]
    rows: list[FlatRow] = []
    for name in dict.fromkeys(name for machine in machines for name in machine.traits):
        values = [machine.traits.get(name, "–") for machine in machines]
        # What a source does not say of its machine is no difference.
        differs = len({traits.get(name) for traits in measured}) > 1 or name in _ALWAYS_SHOWN
        if differs and len(set(values)) > 1:
            rows.append({"trait": name} | {f"machine_{number}": value for number, value in enumerate(values, start=1)})
    fields = [Field(f"machine_{number}", machine.name, wraps=True) for number, machine in enumerate(machines, start=1)]
    return DataTable([Field("trait", "of the machine"), *fields], rows)


def shared_traits(comparison: MachineComparison) -> str:
    """Return what the machines have in common, in a line; empty if that is nothing."""
    first, *others = (machine.traits for machine in comparison.machines)
    shared = [f"{name} {value}" for name, value in first.items() if all(each.get(name) == value for each in others)]
    return f"The same on all machines: {', '.join(shared)}." if shared else ""


def incomparable_line(found: Incomparable) -> str:
    """Return what could not be compared, and why, in a line."""
    return f"{found.machine.name}: {truncate_list(found.labels, most=_MAX_LABELS)}: {found.reason}"


def remark_lines(comparison: MachineComparison) -> list[str]:
    """Return what a reader of the table must know of machines, throughput, speed-ups and missing verdicts."""
    rows, lines = comparison.rows, [note.text for note in comparison.machine_notes]
    if any(row.is_whole for row in rows):
        lines.append("Throughput and ratio of whole training runs are by their wall time, validation included.")
    if any(not row.is_whole and row.spec.kind == "training" for row in rows):
        lines.append("Throughput of runs that were cut short is that of their steps, without validation.")
    changed = dict[str, None]()  # workloads of user models whose files differ between machines
    for row in rows:
        models = [result.entry.spec.user_model for result in row.results]
        if len({model.digest for model in models if model is not None}) > 1:
            changed[row.spec.workload] = None
    lines += [f"The code of {name} is not the same on all machines." for name in changed]
    other = [row for row in rows if row.baseline_batch != row.spec.batch_size]
    if other:
        pairs = dict.fromkeys(f"{row.spec.label} over batch {row.baseline_batch}" for row in other)
        lines.append(f"Speed-ups over fp32 at another batch, as the source has them: {', '.join(pairs)}.")
    # The counts of verdicts already say that no ratio has an interval.
    kinds = ("incomparable",) if comparison.is_without_intervals else ("incomparable", "inconclusive")
    reasons: dict[str, dict[str, None]] = {}
    for row in rows:
        for result in row.results:
            if result.verdict is not None and result.verdict.kind in kinds:
                reason = f"{result.verdict.kind}: {result.verdict.reason}"
                reasons.setdefault(reason, {})[row.spec.label] = None
    return lines + [f"{truncate_list(list(labels), most=_MAX_LABELS)}: {why}" for why, labels in reasons.items()]


def note_lines(comparison: MachineComparison) -> list[str]:
    """Return what was left out of the machines."""
    return [f"{machine.name}: {note}" for machine in comparison.machines for note in machine.notes]


def slower_lines(comparison: MachineComparison) -> list[str]:
    """Return the configurations that are slower, or do not end well any more, a line each."""
    lines = []
    for row, result in comparison.slower:
        slower = f"slower: {ratio_text(result.ratio)}"
        what = f"{result.entry.status}, and ended well before" if result.broke else slower
        lines.append(f"{row.spec.label} on {result.machine.name}: {what}")
    return lines


def print_comparison(comparison: MachineComparison, console: Console) -> None:
    """Print the comparison to a terminal."""
    print_line(console, headline(comparison), "bold")
    print_line(console, verdict_counts(comparison))
    table, traits = result_table(comparison), trait_table(comparison)
    if table.rows:
        console.print()
        print_data_table(
            console, table, drop_first=_DROP_FIRST, style=lambda line: line["style"], elsewhere="--format json has all"
        )
    for line in remark_lines(comparison):
        print_line(console, f"  {line}", "yellow")
    if traits.rows:
        print_line(console, "\nWhat differs", "bold")
        print_data_table(console, traits)
    for title, lines in _lists(comparison):
        print_line(console, f"\n{title}", "bold")
        for line in lines:
            print_line(console, f"  {line}")


def markdown_comparison(comparison: MachineComparison) -> str:
    """Return the comparison as GitHub's Markdown: the result, the table, and the rest folded."""
    table, traits = result_table(comparison), trait_table(comparison)
    parts = [
        f"**{markdown_text(headline(comparison))}** {markdown_text(verdict_counts(comparison))}",
        "\n".join(f"- ▼ {markdown_text(line)}" for line in slower_lines(comparison)),
        "\n".join(markdown_grid(table.columns, table.rows)) if table.rows else "",
        _bullets(remark_lines(comparison)),
        _folded("What differs", "\n".join(markdown_grid(traits.columns, traits.rows))) if traits.rows else "",
        *(_folded(title, _bullets(lines)) for title, lines in _lists(comparison)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def json_comparison(comparison: MachineComparison) -> str:
    """Return the comparison as JSON: figures with intervals, verdicts, what differs and what could not be compared."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "headline": headline(comparison),
        "margin": comparison.margin,
        "machines": [
            {"name": each.name, "published": each.is_published, "traits": each.traits, "notes": list(each.notes)}
            for each in comparison.machines
        ],
        "cells": [_json_row(title, row) for title, rows in comparison.groups.items() for row in rows],
        "slower": slower_lines(comparison),
        "machine_notes": [{"text": note.text, "is_warning": note.is_warning} for note in comparison.machine_notes],
        "refused": [
            {"machine": each.machine.name, "reason": each.reason, "cells": list(each.labels)}
            for each in comparison.incomparable
        ],
    }
    return json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def _json_row(title: str, row: ComparisonRow) -> dict[str, Any]:
    spec = row.spec
    names = ("workload", "precision", "loss_scale", "batch_size", "world_size", "parallelism", "kind")
    return {
        "topic": title,
        **{name: getattr(spec, name) for name in names},
        "unit": row.unit,
        "speedup_over_batch": row.baseline_batch,
        "of_whole_runs": row.is_whole,
        "places": [
            {
                "machine": result.machine.name,
                "status": result.entry.status,
                "throughput_per_second": json_estimate(result.throughput),
                "ratio": json_estimate(result.ratio),
                "verdict": result.verdict and result.verdict.kind,
                "why": result.verdict and result.verdict.reason,
                "speedup": json_estimate(result.speedup),
            }
            for result in row.results
        ],
    }


def verdict_text(result: MachineResult) -> str:
    """Return a verdict with its mark; the status if that is why there is none."""
    if result.verdict is None:
        return "–"
    status = result.entry.status
    word = status if result.verdict.kind == "incomparable" and status != "ok" else result.verdict.kind
    return f"{_MARKS[result.verdict.kind]} {word}"


def _lists(comparison: MachineComparison) -> list[tuple[str, list[str]]]:
    refused = [incomparable_line(each) for each in comparison.incomparable]
    lists = [("Not compared", refused), ("Left out", note_lines(comparison))]
    return [(title, lines) for title, lines in lists if lines]


def _bullets(lines: list[str]) -> str:
    return "\n".join(f"- {markdown_text(line)}" for line in lines)


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{content}\n\n</details>"
