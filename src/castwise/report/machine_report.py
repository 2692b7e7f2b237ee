"""Machines side by side, as tables for a terminal, as Markdown and as JSON."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from castwise.analysis.statistics import Estimate
from castwise.render.console import print_line
from castwise.render.intervals import ratio_text
from castwise.render.table import Column, DataTable, markdown_grid, markdown_text, print_data_table
from castwise.render.units import format_rate
from castwise.report.machine_comparison import (
    ComparisonRow,
    Incomparable,
    MachineComparison,
    MachineResult,
    headline,
    is_without_intervals,
    tally,
)
from castwise.spec.quantities import truncate_list

_MOST_LABELS = 4  # cells that a refusal names
# Of machines that sources describe in a line, beside measured ones.
_ALWAYS_TOLD = ("device", "published in", "source's machine", "driver", "torch", "measured", "processes a cell")
_MARKS = {"faster": "▲", "slower": "▼", "same": "=", "inconclusive": "?", "incomparable": "–"}
# What a narrow terminal does without, the first first.
_DISPENSABLE = (("speedup_first", "speedup"), ("throughput_first", "throughput"), "loss_scale")


@dataclass(frozen=True)
class Figure:
    """A line of the table: one cell on one of the other machines, beside the first.

    Attributes:
        title: The topic.
        line: The cell.
        first: Its place on the first machine.
        place: Its place on the other.
    """

    title: str
    line: ComparisonRow
    first: MachineResult
    place: MachineResult


def figures_of(comparison: MachineComparison) -> list[Figure]:
    """Return a figure for each cell of each machine but the first, in order."""
    return [
        Figure(title, line, line.results[0], place)
        for title, lines in comparison.groups.items()
        for line in lines
        for place in line.results[1:]
        if place.entry is not None
    ]


def figure_grid(comparison: MachineComparison, figures: Sequence[Figure] | None = None) -> DataTable[Figure]:
    """Return the table of ratios and verdicts.

    Args:
        comparison: What it is of.
        figures: Some of its figures; None takes all.
    """
    rows = figures_of(comparison) if figures is None else figures
    several = len(comparison.machines) > 2
    columns = [
        Column("workload", "workload", lambda f: f.title, lambda f: f.title, left=True, wraps=True),
        _words("precision", "precision", lambda f: f.line.spec.precision),
        _words("loss_scale", "loss scale", lambda f: f.line.spec.loss_scale),
        Column("batch_size", "batch", lambda f: f.line.spec.batch_size, lambda f: str(f.line.spec.batch_size)),
        *([_words("machine", "machine", lambda f: f.place.machine.name)] if several else []),
        _rate("throughput_first", comparison.machines[0].name, lambda f: f.first),
        _rate("throughput", "there" if several else comparison.machines[1].name, lambda f: f.place),
        Column("ratio", "ratio", lambda f: _value(f.place.ratio), lambda f: ratio_text(f.place.ratio)),
        _words("verdict", "verdict", lambda f: verdict_text(f.place)),
        _gain("speedup_first", f"speed-up on {comparison.machines[0].name}", lambda f: f.first),
        _gain("speedup", f"speed-up {'there' if several else f'on {comparison.machines[1].name}'}", lambda f: f.place),
    ]
    return DataTable([column for column in columns if _is_worth_it(column, rows)], rows)


def trait_grid(comparison: MachineComparison) -> DataTable[tuple[str, ...]]:
    """Return the table of what differs between the machines; what all share is left out."""
    machines = comparison.machines
    names = dict.fromkeys(name for machine in machines for name in machine.traits)
    rows = [(name, *(machine.traits.get(name, "–") for machine in machines)) for name in names]
    columns = [_words("trait", "of the machine", lambda row: row[0])]
    columns += [_trait(number, machine.name) for number, machine in enumerate(machines, start=1)]
    measured = [number for number, machine in enumerate(machines, start=1) if not machine.is_published]
    # What a source does not say of its machine is no difference, but what its figures are of is worth a line.
    kept = [row for row in rows if len({row[number] for number in measured}) > 1 or row[0] in _ALWAYS_TOLD]
    return DataTable(columns, [row for row in kept if len(set(row[1:])) > 1])


def shared_traits(comparison: MachineComparison) -> str:
    """Return what the machines have in common, in a line; empty where that is nothing."""
    names = dict.fromkeys(name for machine in comparison.machines for name in machine.traits)
    values = {name: {machine.traits.get(name) for machine in comparison.machines} for name in names}
    alike = [f"{name} {next(iter(each))}" for name, each in values.items() if len(each) == 1]
    return f"Alike: {', '.join(alike)}." if alike else ""


def refusal_line(refusal: Incomparable) -> str:
    """Return cells that are compared with nothing, and why, in a line."""
    return f"{refusal.machine.name}: {truncate_list(refusal.labels, most=_MOST_LABELS)}: {refusal.reason}"


def reason_lines(comparison: MachineComparison) -> list[str]:
    """Return why ratios are none or tell nothing, a line a reason."""
    found: dict[tuple[str, str], list[str]] = {}
    told = is_without_intervals(comparison)  # then the tally says so once for all
    for line in comparison.rows:
        for place in line.results:
            verdict = place.verdict
            if verdict is None or (told and verdict.kind == "inconclusive"):
                continue
            if verdict.kind in ("incomparable", "inconclusive"):
                found.setdefault((verdict.kind, verdict.reason), []).append(line.spec.label)
    return [
        f"{truncate_list(list(dict.fromkeys(labels)), most=_MOST_LABELS)}: {kind}: {reason}"
        for (kind, reason), labels in found.items()
    ]


def basis_lines(comparison: MachineComparison) -> list[str]:
    """Return what throughput and speed-up are, where they are not what they are elsewhere."""
    lines = []
    if any(line.is_whole for line in comparison.rows):
        lines.append("Throughput and ratio of whole training runs are by their wall time, validation included.")
    if any(not line.is_whole and line.spec.kind == "training" for line in comparison.rows):
        lines.append("Throughput of runs that were cut short is that of their steps, without validation.")
    changed = [line.spec.workload for line in comparison.rows if len(_codes(line)) > 1]
    lines += [f"The code of {name} is not the same on all machines." for name in dict.fromkeys(changed)]
    other = [line for line in comparison.rows if line.baseline_batch != line.spec.batch_size]
    if other:
        pairs = dict.fromkeys(f"{line.spec.label} over batch {line.baseline_batch}" for line in other)
        lines.append(f"Speed-ups over fp32 at another batch, as the source has them: {', '.join(pairs)}.")
    return lines


def _codes(line: ComparisonRow) -> set[str]:
    """Return what stands for the code of the user's own model, of each machine."""
    specs = (place.entry.spec for place in line.results if place.entry is not None)
    return {spec.user_model.digest for spec in specs if spec.user_model is not None}


def note_lines(comparison: MachineComparison) -> list[str]:
    """Return what was left out of the machines."""
    return [f"{machine.name}: {note}" for machine in comparison.machines for note in machine.notes]


def failure_lines(comparison: MachineComparison) -> list[str]:
    """Return the cells that are slower, or do not end well any more, a line each."""
    lines = []
    for line, place in comparison.slower:
        status = place.entry.status if place.entry is not None else ""
        what = f"{status}, and ended well before" if place.broke else f"slower: {ratio_text(place.ratio)}"
        lines.append(f"{line.spec.label} on {place.machine.name}: {what}")
    return lines


def print_comparison(comparison: MachineComparison, console: Console) -> None:
    """Print the comparison to a terminal."""
    print_line(console, headline(comparison), "bold")
    print_line(console, tally(comparison))
    grid = figure_grid(comparison)
    if grid.rows:
        console.print()
        print_data_table(console, grid, drop_first=_DISPENSABLE, style=_style, elsewhere="--format json has all")
    for line in [*basis_lines(comparison), *reason_lines(comparison)]:
        print_line(console, f"  {line}", "yellow")
    traits = trait_grid(comparison)
    if traits.rows:
        print_line(console, "\nWhat differs", "bold")
        print_data_table(console, traits)
    for title, lines in _lists(comparison):
        print_line(console, f"\n{title}", "bold")
        for line in lines:
            print_line(console, f"  {line}")


def markdown_comparison(comparison: MachineComparison) -> str:
    """Return the comparison as GitHub's Markdown: what it comes to, the table, and the rest folded."""
    grid, traits = figure_grid(comparison), trait_grid(comparison)
    parts = [f"**{markdown_text(headline(comparison))}** {markdown_text(tally(comparison))}"]
    failures = failure_lines(comparison)
    if failures:
        parts.append("\n".join(f"- ▼ {markdown_text(line)}" for line in failures))
    if grid.rows:
        parts.append("\n".join(markdown_grid(grid.columns, grid.rows)))
    said = [*basis_lines(comparison), *reason_lines(comparison)]
    if said:
        parts.append("\n".join(f"- {markdown_text(line)}" for line in said))
    if traits.rows:
        parts.append(_folded("What differs", "\n".join(markdown_grid(traits.columns, traits.rows))))
    for title, lines in _lists(comparison):
        parts.append(_folded(title, "\n".join(f"- {markdown_text(line)}" for line in lines)))
    return "\n\n".join(parts) + "\n"


def json_comparison(comparison: MachineComparison) -> str:
    """Return the comparison as JSON: figures with intervals, verdicts, what differs and what is refused."""
    document = {
        "headline": headline(comparison),
        "margin": comparison.margin,
        "machines": [
            {"name": each.name, "published": each.is_published, "traits": each.traits, "notes": list(each.notes)}
            for each in comparison.machines
        ],
        "cells": [_cell(title, line) for title, lines in comparison.groups.items() for line in lines],
        "slower": failure_lines(comparison),
        "refused": [
            {"machine": each.machine.name, "reason": each.reason, "cells": list(each.labels)}
            for each in comparison.incomparable
        ],
    }
    return json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def verdict_text(place: MachineResult) -> str:
    """Return a verdict with its mark."""
    if place.verdict is None:
        return "–"
    status = place.entry.status if place.entry is not None else "ok"
    word = status if place.verdict.kind == "incomparable" and status != "ok" else place.verdict.kind
    return f"{_MARKS[place.verdict.kind]} {word}"


def rate_text(place: MachineResult, unit: str) -> str:
    """Return a place's throughput, or how it ended where it has none."""
    if place.throughput is None:
        return "–" if place.entry is None or place.entry.status == "ok" else place.entry.status
    return f"{format_rate(place.throughput.value)} {unit}/s"


def _lists(comparison: MachineComparison) -> Iterator[tuple[str, list[str]]]:
    if comparison.incomparable:
        yield "Compared with nothing", [refusal_line(each) for each in comparison.incomparable]
    notes = note_lines(comparison)
    if notes:
        yield "Left out", notes


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{content}\n\n</details>"


def _cell(title: str, line: ComparisonRow) -> dict[str, Any]:
    spec = line.spec
    return {
        "topic": title,
        "workload": spec.workload,
        "precision": spec.precision,
        "loss_scale": spec.loss_scale,
        "batch_size": spec.batch_size,
        "world_size": spec.world_size,
        "parallelism": spec.parallelism,
        "kind": spec.kind,
        "unit": line.unit,
        "speedup_over_batch": line.baseline_batch,
        "of_whole_runs": line.is_whole,
        "places": [_place(place) for place in line.results if place.entry is not None],
    }


def _place(place: MachineResult) -> dict[str, Any]:
    assert place.entry is not None, "only places with a cell are listed"
    return {
        "machine": place.machine.name,
        "status": place.entry.status,
        "throughput_per_second": _estimate(place.throughput),
        "ratio": _estimate(place.ratio),
        "verdict": None if place.verdict is None else place.verdict.kind,
        "why": None if place.verdict is None else place.verdict.reason,
        "speedup": _estimate(place.speedup),
    }


def _estimate(found: Estimate | None) -> dict[str, float | None] | None:
    if found is None:
        return None
    return {name: value if math.isfinite(value) else None for name, value in asdict(found).items()}


def _style(figure: Figure) -> str | None:
    if figure.place.broke:
        return "red"
    kind = figure.place.verdict.kind if figure.place.verdict is not None else ""
    return {"faster": "green", "slower": "red", "incomparable": "dim"}.get(kind)


def _is_worth_it(column: Column[Figure], rows: Sequence[Figure]) -> bool:
    texts = {column.text(row) for row in rows}
    if column.name == "loss_scale":
        return not texts <= {"none", "dynamic"}
    return column.name not in ("throughput", "throughput_first", "speedup", "speedup_first") or texts != {"–"}


def _words(name: str, title: str, text: Any) -> Column[Any]:
    return Column(name, title, text, text, left=True)


def _trait(number: int, title: str) -> Column[tuple[str, ...]]:
    return Column(f"machine_{number}", title, lambda row: row[number], lambda row: row[number], left=True, wraps=True)


def _rate(name: str, title: str, place: Any) -> Column[Figure]:
    return Column(name, title, lambda f: _value(place(f).throughput), lambda f: rate_text(place(f), f.line.unit))


def _gain(name: str, title: str, place: Any) -> Column[Figure]:
    return Column(name, title, lambda f: _value(place(f).speedup), lambda f: ratio_text(place(f).speedup))


def _value(found: Estimate | None) -> float | None:
    return None if found is None else found.value
