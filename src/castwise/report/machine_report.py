"""Compared machines as tables and sentences."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from castwise.report.machine_comparison import THIS_CARD, ComparisonRow, MachineComparison, MachineResult
from castwise.show.fields import (
    Field,
    FlatRow,
    estimate_values,
    find_fields,
    interval_text,
    precise_ratio,
    precise_ratio_text,
    ratio_text,
    worth_showing,
)
from castwise.show.presentation import Fold, Grid, Lines, Part, Presentation, paragraph
from castwise.show.run_report import json_estimate
from castwise.show.table import DataTable, json_document
from castwise.show.units import pluralize
from castwise.spec.quantities import truncate_list

_MAX_LABELS = 4  # configurations that a line names
_MARKS = {"faster": "▲", "slower": "▼", "same": "=", "inconclusive": "?", "incomparable": "–"}
COSTS = "Energy and price"  # the heading of the cost table
_FAILED = "✕"  # before the figure of a run that did not end well
_STYLES = {"faster": "green", "slower": "red", "incomparable": "dim"}
_DROP_FIRST = (("speedup_first", "speedup"), "unit", ("throughput_first", "throughput"))
_DROP_COSTS_FIRST = (
    *(("units_per_energy_price_first", "units_per_energy_price"), "unit"),
    *(("units_per_price_first", "units_per_price"), "batch_size"),
)


def title_of(comparison: MachineComparison) -> str:
    """Return which machines are compared with which: `H200 over T4 (published)`."""
    first, *others = comparison.machines
    compared = [machine for machine in others if comparison.means_of(machine).speed] or others
    return f"{' and '.join(machine.name for machine in compared)} over {first.name}"


def headline(comparison: MachineComparison) -> str:
    """Return the answer: what to take on each machine, or of several workloads how fast the best of each machine is."""
    lines = best_lines(comparison)
    if len(lines) == 1:
        return lines[0]
    first, *others = comparison.machines
    best = {machine.name: [ratio for *_, ratio in comparison.best_of(machine).values()] for machine in others}
    words = [f"{name} is {_span(ratios)} as fast as {first.name}" for name, ratios in best.items() if ratios]
    return f"{'; '.join(words)}, best against best" if words else title_of(comparison)


def best_lines(comparison: MachineComparison) -> list[str]:
    """Return what to take on two machines for a workload, and how fast the other one then is, a line for each."""
    lines = []
    for machine in comparison.machines[1:]:
        for title, (here, there, ratio) in comparison.best_of(machine).items():
            has_batches = here.spec.batch_size != there.spec.batch_size
            loops = [f"{e.spec.precision}{f' (batch {e.spec.batch_size})' * has_batches}" for e in (here, there)]
            take = f"{loops[0]} on {here.machine}, {loops[1]} on {there.machine}, which"
            take = f"{loops[0]} on both, {there.machine}" if loops[0] == loops[1] else take
            lines.append(f"{title}: take {take} is {precise_ratio(ratio)} as fast")
    return lines


def _span(values: Sequence[float]) -> str:
    """Return the least and the greatest of some ratios: `2.6× to 10.8×`."""
    return " to ".join(dict.fromkeys(map(precise_ratio, (min(values), max(values)))))


def detail_lines(comparison: MachineComparison) -> list[str]:
    """Return what stands below the answer: of several workloads one each, and geometric means of each machine."""
    first, *others = comparison.machines
    best = best_lines(comparison)
    lines = best if len(best) > 1 else []
    for machine in others:
        means, per_hour = comparison.means_of(machine), comparison.prices.per_hour
        if means.speed is not None:
            ratios = [own.ratio.value for row in comparison.rows if (own := row.result_on(machine)) and own.ratio]
            over = f"geometric mean {precise_ratio(means.speed)} over {pluralize(means.num_speeds, 'configuration')}"
            once = ", one run each" * comparison.is_without_intervals
            lines.append(f"Speed, {machine.name} over {first.name}: {_span(ratios)}, {over}{once}.")
        if means.energy is not None:
            over = f"geometric mean over {pluralize(means.num_energies, 'configuration')}"
            ratio = precise_ratio(means.energy)
            lines.append(f"GPU energy for the same work, {machine.name} over {first.name}: {ratio}, {over}.")
        if means.work_per_price is not None:
            prices = f"{per_hour[machine.name]:g} and {per_hour[first.name]:g} an hour"
            ratio = precise_ratio(means.work_per_price)
            lines.append(f"Work for the same money, {machine.name} over {first.name}, at {prices}: {ratio}.")
    return lines


def verdict_counts(comparison: MachineComparison) -> str:
    counts = Counter(
        result.words.removesuffix(THIS_CARD) if result.verdict.kind != "incomparable" else "not comparable"
        for _, result in comparison.results
        if result.verdict is not None
    )
    order = (*_MARKS, "one run each", "one run on a side", "not comparable")
    words = ", ".join(f"{counts[kind]} {kind}" for kind in order if counts[kind])
    if counts["one run each"] + counts["one run on a side"]:
        words += "; one run gives no interval: `castwise run --within 1%` measures several"
    return f"Verdicts: {words}."


def flat_row(row: ComparisonRow, result: MachineResult) -> dict[str, Any]:
    return {
        **{name: getattr(row.spec, name) for name in ("precision", "loss_scale", "batch_size")},
        "machine": result.machine,
        "unit": row.unit,
        "throughput_per_second": None if result.throughput is None else result.throughput.value,
        **estimate_values("ratio", result.ratio),
        **estimate_values("speedup", result.speedup),
        **estimate_values("joules_per_unit", result.joules),
        **estimate_values("energy_ratio", result.energy_ratio),
        "units_per_price": result.units_per_price,
        "units_per_energy_price": result.units_per_energy_price,
        "verdict": verdict_text(result),
        "status": result.status,
    }


def result_table(comparison: MachineComparison) -> DataTable[FlatRow]:
    """Return the table of ratios and verdicts: a row for each configuration on each of the other machines."""
    lines = _flat_rows(comparison)
    first, there = _names(comparison, lines)
    on = "" if there == "there" else "on "
    fields = [
        *_row_fields(lines),
        _marked(Field("throughput_first", first, "rate")),
        _marked(Field("throughput", there, "rate")),
        Field("unit", "unit", format=lambda row: f"{row['unit']}/s"),
        Field("ratio", "ratio", "ratio", precise_ratio_text("ratio")),
        Field("verdict", "verdict"),
        _marked(Field("speedup_first", f"speed-up on {first}", "ratio", interval_text("speedup_first"))),
        _marked(Field("speedup", f"speed-up {on}{there}", "ratio", interval_text("speedup"))),
    ]
    return DataTable(worth_showing(fields, lines, ("precision", "batch_size", "ratio", "verdict")), lines)


def cost_table(comparison: MachineComparison) -> DataTable[FlatRow]:
    """Return the table of energy per unit of throughput and of work per money; without rows if nothing is known."""
    names = ("joules_per_unit", "units_per_price", "units_per_energy_price")
    compared = (line for line in _flat_rows(comparison) if line["ratio"])  # the rest is of different work, or failed
    lines = [line for line in compared if any(line[name] or line[f"{name}_first"] for name in names)]
    first, there = _names(comparison, lines)

    def figure(name: str, title: str) -> Field:
        def text(row: FlatRow) -> str:
            value = row[name]
            if name.startswith("joules"):
                return f"{value:#.3g} J"
            return f"{value / 1e6:,.2f} M" if value >= 1e6 else f"{value:,.0f}"

        return Field(name, title, "number", text)

    fields = _row_fields(lines)
    for name, what in zip(names, ("energy", "work per money", "work per money of energy"), strict=True):
        fields += [figure(f"{name}_first", f"{what}, {first}"), figure(name, f"{what}, {there}")]
        if name == "joules_per_unit":
            fields += [Field("energy_ratio", "energy ratio", "ratio", precise_ratio_text("energy_ratio"))]
    fields += [Field("unit", "unit")]
    return DataTable(worth_showing(fields, lines, ("precision", "batch_size")), lines)


def _names(comparison: MachineComparison, lines: list[FlatRow]) -> tuple[str, str]:
    """Return the headings of the first machine, and of the other one or ones."""
    others = dict.fromkeys(line["machine"] for line in lines)
    return comparison.machines[0].name, next(iter(others)) if len(others) == 1 else "there"


def _row_fields(lines: list[FlatRow]) -> list[Field]:
    """Return the fields that say which configuration a line is of, and on which machine if there are several."""
    names = ("workload", "precision", "batch_size", "loss_scale")
    configurations = {tuple(line[name] for name in names) for line in lines}
    has_scales = len(configurations) > len({each[:-1] for each in configurations})  # else it is the precision's own
    return [
        Field("workload", "workload", wraps=True),
        *find_fields(("precision", "loss_scale", "batch_size") if has_scales else ("precision", "batch_size")),
        *([Field("machine", "machine", wraps=True)] if len({line["machine"] for line in lines}) > 1 else []),
    ]


def _flat_rows(comparison: MachineComparison) -> list[FlatRow]:
    """Return a row for each configuration on each of the other machines; what ends on "_first" is the first's."""

    def rate_or_status(result: MachineResult | None) -> float | str | None:
        if result is not None and result.throughput is not None:
            return result.throughput.value
        return None if result is None or result.status == "ok" else result.status

    found: list[FlatRow] = []
    for title, rows in comparison.groups.items():
        for row in rows:
            base = row.result_on(comparison.machines[0])
            of_first = dict.fromkeys(flat_row(row, row.results[0])) if base is None else flat_row(row, base)
            found += [
                {
                    **{f"{name}_first": value for name, value in of_first.items()},
                    **estimate_values("speedup_first", None if base is None else base.speedup),
                    **flat_row(row, result),
                    "workload": title,
                    "throughput_first": rate_or_status(base),
                    "throughput": rate_or_status(result),
                    "style": "red" if result.broke else _STYLES.get(result.verdict.kind),
                }
                for result in row.results
                if result.verdict is not None
            ]
    return found


def _marked(field: Field) -> Field:
    """Return a field that shows a status in the place of a figure, and a mark if the run did not end well."""
    status = "status_first" if field.name.endswith("_first") else "status"

    def text(row: FlatRow) -> str:
        if isinstance(row[field.name], str):
            return str(row[field.name])
        return f"{'' if row[status] == 'ok' else f'{_FAILED} '}{field.text(row)}"

    return replace(field, format=text)


def trait_table(comparison: MachineComparison) -> DataTable[FlatRow]:
    """Return the table of what differs between the machines."""
    machines = comparison.machines
    measured = [machine.traits for machine in machines if not machine.is_published]
    # Shown if published machines, which a source describes in a line, are compared with measured ones.
    always = ("device", "published in", "source's machine", "driver", "torch", "measured", "processes")
    rows: list[FlatRow] = []
    for name in dict.fromkeys(name for machine in machines for name in machine.traits):
        values = [machine.traits.get(name, "–") for machine in machines]
        # What a source does not say of its machine is no difference.
        differs = len({traits.get(name) for traits in measured}) > 1 or name in always
        if differs and len(set(values)) > 1:
            rows.append({"trait": name} | {f"machine_{number}": value for number, value in enumerate(values, start=1)})
    fields = [Field(f"machine_{number}", machine.name, wraps=True) for number, machine in enumerate(machines, start=1)]
    return DataTable([Field("trait", "property"), *fields], rows)


def shared_traits(comparison: MachineComparison) -> str:
    """Return what the machines have in common, in a line; empty if that is nothing."""
    first, *others = (machine.traits for machine in comparison.machines)
    shared = [f"{name} {value}" for name, value in first.items() if all(each.get(name) == value for each in others)]
    return f"The same on all machines: {', '.join(shared)}." if shared else ""


def refused_lines(comparison: MachineComparison) -> list[str]:
    found = comparison.incomparable
    return [f"{each.machine.name}: {truncate_list(each.labels, most=_MAX_LABELS)}: {each.reason}" for each in found]


def remark_lines(comparison: MachineComparison) -> list[str]:
    """Return what a reader of the table must know of machines, throughput, speed-ups and missing verdicts."""
    rows, lines = comparison.rows, [note.text for note in comparison.machine_notes]
    if any(row.is_whole for row in rows):
        lines.append("Throughput and ratio of whole training runs are by their wall time, validation included.")
    if any(result.status != "ok" and result.throughput for _, result in comparison.results):
        lines.append(f"{_FAILED}: this run did not end well, so that its speed is no result.")
    if any(not row.is_whole and row.spec.kind == "training" for row in rows):
        lines.append("Throughput of runs that were cut short is that of their steps, without validation.")
    codes = [(row, {getattr(each.spec.user_model, "digest", "") for each in row.results}) for row in rows]
    changed = (row.spec.workload for row, digests in codes if len(digests) > 1)
    lines += [f"The code of {name} is not the same on all machines." for name in dict.fromkeys(changed)]
    other = (row for row in rows if row.baseline_batch != row.spec.batch_size)
    if pairs := dict.fromkeys(f"{row.spec.label} over batch {row.baseline_batch}" for row in other):
        lines.append(f"Speed-ups over fp32 at another batch, as the source has them: {', '.join(pairs)}.")
    return lines + _incomparable_lines(comparison)


def _incomparable_lines(comparison: MachineComparison) -> list[str]:
    reasons: dict[str, dict[str, None]] = {}
    for row, result in comparison.results:
        if result.verdict is not None and result.verdict.kind == "incomparable":
            reasons.setdefault(result.verdict.reason, {})[row.spec.label] = None
    return [f"{truncate_list(list(each), most=_MAX_LABELS)}: not comparable: {why}" for why, each in reasons.items()]


def note_lines(comparison: MachineComparison) -> list[str]:
    """Return what was left out of the machines."""
    return [f"{machine.name}: {note}" for machine in comparison.machines for note in machine.notes]


def slower_lines(comparison: MachineComparison) -> list[str]:
    """Return the configurations that are proven slower, or do not end well any more, a line each."""
    lines = []
    for row, result in comparison.results:
        if not result.broke and (result.verdict is None or result.verdict.kind != "slower"):
            continue
        where = f" on {result.machine}" if len(comparison.machines) > 2 else ""
        what = f"{result.status}, and ended well before" if result.broke else ratio_text(result.ratio)
        lines.append(f"{row.spec.label}{where}: {what}")
    return lines


def present(comparison: MachineComparison) -> Presentation:
    """Return the result, the table of ratios, and below it costs, what differs and what could not be compared."""

    def grid(table: DataTable[FlatRow], drop_first: Sequence[str | tuple[str, ...]] = _DROP_COSTS_FIRST) -> Grid:
        return Grid(table, lambda line: line.get("style"), drop_first=drop_first, elsewhere="--format json has all")

    below: list[Part] = []
    for title, table in ((COSTS, cost_table(comparison)), ("What differs", trait_table(comparison))):
        plain = replace(table, rows=[{**row, "style": None} for row in table.rows])
        below += [Fold(title, [grid(plain)])] if table.rows else []
    for title, lines in (("Not compared", refused_lines(comparison)), ("Left out", note_lines(comparison))):
        below += [Fold(title, [Lines([f"  {line}" for line in lines])])] if lines else []
    parts: list[Part] = [
        paragraph(headline(comparison)),
        Lines(detail_lines(comparison)),
        paragraph(verdict_counts(comparison), ""),
        Lines([""]),
        grid(result_table(comparison), _DROP_FIRST),
        Lines([f"  {_MARKS['slower']} {line}" for line in slower_lines(comparison)], "red"),
        Lines([f"  {line}" for line in remark_lines(comparison)], "yellow"),
    ]
    return Presentation([*parts, *below], document=lambda: document(comparison))


def document(comparison: MachineComparison) -> dict[str, Any]:
    """Return what `--format json` prints: figures with intervals, verdicts, and what could not be compared."""
    names = ("workload", "precision", "loss_scale", "batch_size", "world_size", "parallelism", "kind")
    return json_document(
        headline=headline(comparison),
        margin=comparison.margin,
        geometric_means=[
            {
                "machine": means.machine.name,
                "ratio": means.speed,
                "cells": means.num_speeds,
                "energy_ratio": means.energy,
                "energy_cells": means.num_energies,
                "work_per_price_ratio": means.work_per_price,
                "best_ratio": means.best,
            }
            for means in map(comparison.means_of, comparison.machines[1:])
        ],
        prices={"per_hour": dict(comparison.prices.per_hour), "per_kwh": comparison.prices.per_kwh},
        machines=[
            {"name": each.name, "published": each.is_published, "traits": each.traits, "notes": list(each.notes)}
            for each in comparison.machines
        ],
        cells=[
            {
                "topic": title,
                **{name: getattr(row.spec, name) for name in names},
                "unit": row.unit,
                "speedup_over_batch": row.baseline_batch,
                "of_whole_runs": row.is_whole,
                "places": [_json_result(result) for result in row.results],
            }
            for title, rows in comparison.groups.items()
            for row in rows
        ],
        slower=slower_lines(comparison),
        machine_notes=list(map(asdict, comparison.machine_notes)),
        refused=[
            {"machine": each.machine.name, "reason": each.reason, "cells": list(each.labels)}
            for each in comparison.incomparable
        ],
    )


def _json_result(result: MachineResult) -> dict[str, Any]:
    return {
        "machine": result.machine,
        "status": result.status,
        "throughput_per_second": json_estimate(result.throughput),
        "ratio": json_estimate(result.ratio),
        "verdict": result.verdict and result.verdict.kind,
        "verdict_text": result.words or None,
        "why": result.verdict and result.verdict.reason,
        "speedup": json_estimate(result.speedup),
        "joules_per_unit": json_estimate(result.joules),
        "energy_ratio": json_estimate(result.energy_ratio),
        "units_per_price": result.units_per_price,
        "units_per_energy_price": result.units_per_energy_price,
    }


def verdict_text(result: MachineResult) -> str:
    """Return a verdict in words, with a mark if it is one: `▲ faster`, `one run each`."""
    if result.verdict is None:
        return "–"
    if result.words.startswith("one run"):
        return result.words
    return f"{'▼' if result.broke else _MARKS[result.verdict.kind]} {result.words}"
