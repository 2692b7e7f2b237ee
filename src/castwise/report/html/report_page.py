"""The report: answers, charts, tables, method, environment and warnings of a collection of records."""

from collections.abc import Iterator, Sequence
from typing import Any

from castwise.analysis import steady_metrics
from castwise.analysis.causes import try_line
from castwise.analysis.code_snippets import framework_lines, framework_snippets
from castwise.analysis.result_table import Row
from castwise.analysis.speedup import was_timed
from castwise.analysis.warnings import TrialWarning, warnings_of
from castwise.max_batch import render as max_batch_render
from castwise.records.store import free_name, slug
from castwise.registry.precisions import precision_row, precision_sort_key
from castwise.registry.suites import is_search
from castwise.report.charts.chart import GroupSubject
from castwise.report.charts.registry import charts_of
from castwise.report.charts.svg import Axis, Dot, Drawing, draw_dot, markers, nice_ticks, path, text
from castwise.report.charts.throughput import highest
from castwise.report.collection import REFERENCES, Collection, ComparisonGroup, FileOf, machine_traits, throughput_of
from castwise.report.conclusions import WORDS, Answer, answer_table, answers_of, headline, loop_of, ranked, simplest_of
from castwise.report.html.page_frame import PageData, Source, assemble
from castwise.report.machine_names import names_by_fingerprint
from castwise.show import run_report, training_table, why_report
from castwise.show.fields import Field, FlatRow, find_fields, trial_values, worth_showing
from castwise.show.notes import remarks
from castwise.show.table import DataTable
from castwise.show.theme import FAINT, INK, SOFT, look_of
from castwise.show.units import format_rate, format_ratio
from castwise.spec.quantities import format_share, truncate_list

_MOST_CODES = 6  # of a section
_IN_TITLE = ("workload", "setting", "take")  # of one answer, or in the line below its chips
_SPAN, _MARGIN = 402, 9  # pixels of the axis that all answers share, and left and right of it
_QUESTION = (
    *("workload", "kind", "data_set", "precision", "loss_scale", "batch_size"),
    *("gpus", "techniques", "seed", "repeat"),
)
_RESULT = ("throughput_per_second", "step_seconds", "peak_allocated_bytes", "status")


def render(collection: Collection, source: Source, title: str | None = None) -> str:
    """Return the report as HTML; without a title the answers in a line are its title."""
    data = PageData()
    answers = answers_of(collection)
    said = headline(collection, answers)
    versions = dict.fromkeys(f"torch {m.torch}, castwise {m.castwise}" for m in collection.machines.values())
    sections = []
    anchors = dict[int, str]()
    first = [answer.group for answer in ranked(answers)]
    for group in sorted(collection.groups, key=lambda each: first.index(each) if each in first else len(first)):
        # Title and batch sizes stay the same as records are added, and so do links.
        batches = sorted({config.trial.spec.batch_size for config in group.configurations})
        name = f"{slug(group.title)[:60]}-b{'-'.join(map(str, dict.fromkeys((batches[0], batches[-1]))))}"
        anchor = free_name(name, anchors.values(), "-")
        anchors[id(group)] = anchor
        own = [each for each in answers if each.group is group]
        sections.append(_section(anchor, group, own, collection, source, data))
    trials, same = _trial_table(collection, source.file_of)
    is_single = len(sections) == len(answers) == 1
    context = {
        "summary": f"{collection.summary} · {truncate_list(list(versions), most=2)}",
        "sentence": said if title else "",
        "single": is_single,
        "chips": _chips(answers) if is_single else [],
        "answers": None if is_single else _answer_rows(answers, anchors),
        "some_cut": any(each.advice.cut for each in answers),
        "sections": sections,
        "trials": data.add_table("trials", trials, choices=("workload", "precision", "status", "kind")),
        "same": same,
        "warnings": _warnings(collection),
        "machine_notes": collection.machine_notes_of(collection.configurations),
        "machines": data.add_table("machines", _machine_table(collection)),
        "notes": collection.notes,
        "folded": len(sections) > 8,
    }
    return assemble("page.html.j2", title or said, context, data, source)


def _section(
    anchor: str, group: ComparisonGroup, answers: list[Answer], collection: Collection, source: Source, data: PageData
) -> dict[str, Any]:
    table: DataTable[Any]
    more: list[tuple[str, str, DataTable[Any]]] = []
    if group.is_training:
        table = training_table.data_table(group.configurations)
        lines = training_table.failure_lines(group.configurations)
    elif group.is_max_batch:
        found = group.max_batches
        table = max_batch_render.summary_table(found)
        lines = [*max_batch_render.conclusions(found), *max_batch_render.remarks(found)]
        if breakdowns := max_batch_render.breakdowns_of(found):
            more.append(("parts", "Where the memory goes", max_batch_render.breakdown_table(breakdowns)))
    else:
        table = _steady_table(group, {each.advice.key for each in answers if each.advice.decision == "take"})
        lines = remarks(group.configurations)
    if (numerics := why_report.numerics_table(list(group.profiled.values()))) is not None:
        more.append(("numerics", why_report.NUMERICS_TITLE, numerics))
    if (beside := why_report.gpus_table(list(group.profiled.values()))) is not None:
        columns = [*find_fields(("gpus", "parallelism")), *beside.columns]
        more.append(("beside", why_report.GPUS_TITLE, DataTable(columns, beside.rows)))
    subject = GroupSubject(group, source.file_of)
    charts = [
        data.add_chart(f"{anchor}-{name}", chart, subject.context)
        for name, chart in charts_of(subject, answers).items()
    ]
    return {
        "anchor": anchor,
        "title": group.title,
        "description": group.description,
        "gist": "; ".join(loop_of(answer) or WORDS[answer.advice.decision] for answer in answers[:3]),
        "answers": ranked(answers),
        "is_taken": any(each.advice.decision == "take" for each in answers),
        "charts": charts,
        "codes": _codes(answers),
        "why": _why(group),
        "table": data.add_table(f"{anchor}-results", table),
        "more_tables": [(title, data.add_table(f"{anchor}-{name}", own)) for name, title, own in more],
        "remarks": [*(note.text for note in collection.machine_notes_of(group.configurations)), *lines],
    }


def _codes(answers: Sequence[Answer]) -> list[tuple[str, str]]:
    """Return lines to copy, each with a heading: of what is taken, and of the simplest that is faster.

    Of what is undecided it is the command that decides.
    """
    found: dict[str, str] = {}  # headings by their lines: answers for several batch sizes mostly share them
    for answer in answers:
        advice = answer.advice
        if advice.command:
            found.setdefault(advice.command, f"What decides it, {answer.setting}")
        if not advice.code:
            continue
        lines = [*advice.code.splitlines(), *framework_lines(advice.snippets)]
        found.setdefault("\n".join(lines), f"Which lines: {loop_of(answer)}")
        if (simple := simplest_of(advice)) is not None:
            row, gain = simple
            precision, spec = precision_row(row.precision), row.trial.spec
            snippets = framework_snippets(precision, spec.device_type, row.trial.facts)
            lines = [precision.code.format(device=spec.device_type), *framework_lines(snippets)]
            found.setdefault("\n".join(lines), f"Simpler: {row.precision}, {format_ratio(gain)} with autocast alone")
    return [(title, lines) for lines, title in list(found.items())[:_MOST_CODES]]


def _chips(answers: list[Answer]) -> list[tuple[str, str]]:
    """Return what the table of answers says of the first of them, and of its accuracy and limit, with headings."""
    table, advice = answer_table(answers), answers[0].advice
    said = {column.title: column.text(table.rows[0]) for column in table.columns if column.name not in _IN_TITLE}
    said |= {"how sure": said["how sure"] if advice.cut else advice.how_sure, "accuracy": advice.accuracy}
    said |= {"why": ""} if advice.decision == "undecided" else {}  # which the title says
    return [(title, words) for title, words in (said | {"limited by": advice.limit}).items() if words not in ("", "–")]


def _why(group: ComparisonGroup) -> dict[str, Any]:
    """Return the causes of each profiled configuration, a line for each, and what is said of all of them."""
    profiled = group.profiled
    found = list(profiled.values())
    shown, causes = highest(list(profiled))[:12], []
    for config in shown:
        own, lines = profiled[config], list[str]()
        for cause in own.causes[:2]:
            saves = "" if cause.share is None else f": at most {format_share(cause.share)} of the step"
            then = f"Then {cause.evidence}. " if lines else ""
            lines.append(f"{then}Try {try_line(cause, config.trial.spec.techniques)} ({cause.name}{saves}).")
        first = own.causes[0].evidence if own.causes else f"no cause found, {own.bound}"
        causes.append((f"{group.label(config)}: {first}.", lines))
    return {
        "causes": [*causes, *((f"{group.label(config)}: {why}.", ()) for config, why in _unexplained(group))],
        "num_more": len(profiled) - len(shown),
        "remarks": [line.replace("`", "") for line in (*why_report.remarks(found), *why_report.numerics_lines(found))],
    }


def _unexplained(group: ComparisonGroup) -> Iterator[tuple[Row, str]]:
    """Yield the configurations that failed, or whose steps could not be profiled, each with the reason."""
    for config in group.configurations:
        missing = next((trial.profile.missing for trial in config.trials if trial.profile is not None), "")
        if not was_timed(config.trial):
            yield config, f"{config.trial.status}: {config.trial.message}".removesuffix(".")
        elif missing and config not in group.profiled:
            yield config, f"no cause known, {missing}".removesuffix(".")


def _steady_table(group: ComparisonGroup, taken: set[str | None]) -> DataTable[FlatRow]:
    """Return the table of steady results, with the ratios that the terminal shows, and a ring at what to take."""
    table, short = run_report.data_table(group.configurations), run_report.short_table(group.configurations)
    speedups = ("written_speedup", "default_speedup", "speedup")
    names = [f"{name}{end}" for name in speedups for end in ("", "_low", "_high")]
    ratios = {row["key"]: {name: row[name] for name in ("verdict", *names)} for row in short.rows}
    rows: list[FlatRow] = [{**row, **ratios[row["key"]]} for row in table.rows]
    ours = {field.name: field for field in short.columns}
    left_out = {"loop_speedup"} | (set(speedups) - ours.keys())
    shown = {field.name: ours.get(field.name, field) for field in table.columns if field.name not in left_out}
    columns = [shown.get(field.name, field) for field in table.columns if field.name in shown]
    columns = [field for field in columns if field.name != "precision"]
    precision = Field("precision", "precision", format=lambda r: r["precision"] + (" ◯" if r["key"] in taken else ""))
    return DataTable([precision, *columns], rows, table.group)


def _answer_rows(answers: Sequence[Answer], anchors: dict[int, str]) -> dict[str, Any] | None:
    """Return the table of answers, with all precisions of each on one axis, and its legend; None if nothing is said."""
    if all(answer.advice.decision == "nothing" for answer in answers):
        return None
    ordered, table = ranked(answers), answer_table(answers)
    dots = {id(answer): _dots(answer) for answer in ordered}
    highest = max([1.0, *(dot.value for own in dots.values() for dot in own)]) * 1.04
    axis = Axis(0.0, highest, nice_ticks(0.0, highest, 8), lambda tick: f"{tick:g}×")
    columns = [column for column in table.columns if column.name not in ("workload", "setting", "take")]
    rows = []
    for answer, row in zip(ordered, table.rows, strict=True):
        precision = answer.advice.precision
        label = f"Speed of all configurations of {answer.group.title}, {answer.setting}, relative to the plain loop"
        rows.append(
            {
                "answer": answer,
                "anchor": anchors.get(id(answer.group), ""),
                "take": row["take"],
                "mark": _mark(precision),
                # The interval goes below its figure.
                "cells": {column.name: column.text(row).partition(" [") for column in columns},
                "strip": _strip(dots[id(answer)], axis, label),
            }
        )
    ticks = "".join(
        text(axis.at(tick, _MARGIN, _SPAN), 12, axis.label(tick), "middle", 12, SOFT) for tick in axis.ticks
    )
    shown = {c.precision for answer in answers for c in answer.advice.rows}
    over = {r.precision for a in answers for c in a.advice.rows if (r := a.group.over_seeds.reference_of(c))}
    return {
        "columns": [(column.name, column.title) for column in columns],
        "rows": rows,
        "axis": Drawing(_SPAN + 2 * _MARGIN, 16, ticks).inline("times as fast"),
        "over": " or ".join(each for each in REFERENCES if each in over),
        "legend": [(name, _mark(name)) for name in sorted(shown, key=precision_sort_key)],
    }


def _strip(dots: Sequence[Dot], axis: Axis, label: str) -> str:
    """Return dots on a line of a table whose axis all lines share; what is ringed comes last, above the others."""
    rules = [*((tick, FAINT, "") for tick in axis.ticks), (1.0, INK, "2 3")]
    parts = [path(f"M{axis.at(x, _MARGIN, _SPAN):g} 0V26", colour, 1, dash) for x, colour, dash in rules]
    ordered = sorted(dots, key=lambda dot: (dot.is_ringed, dot.is_crossed))
    parts += [draw_dot(dot, axis, _MARGIN, _SPAN, 13) for dot in ordered]
    return Drawing(_SPAN + 2 * _MARGIN, 26, "".join(parts)).inline(label) if dots else ""


def _mark(precision: str | None) -> str:
    if precision is None:
        return ""
    look = look_of(precision)
    drawn = markers([(7, 7)], look.marker, look.colour)
    return f'<svg class="mark" viewBox="0 0 14 14" width="14" height="14">{drawn}</svg>'


def _dots(answer: Answer) -> list[Dot]:
    """Return how many times as fast as its reference each configuration of an answer's setting is."""
    found = []
    group = answer.group.over_seeds
    for config in answer.advice.rows:
        speed, status = group.times_reference(config), config.trial.status
        if speed is None and status == "ok":
            continue
        look = look_of(config.precision)
        rate = f"{format_rate(config.throughput)} {group.unit}/s" if config.throughput else ""
        lines = (
            group.label(config),
            format_ratio(speed) if speed else "",
            rate,
            "" if status == "ok" else status,
        )
        tip = "\n".join(line for line in lines if line)
        is_taken = config is answer.advice.row and answer.advice.decision in ("take", "stay")
        found.append(Dot(speed or 0.0, look.colour, look.marker, tip, None, is_taken, status != "ok"))
    return found


def _trial_table(collection: Collection, file_of: FileOf) -> tuple[DataTable[FlatRow], str]:
    """Return the table of all trials, and what is the same in all of them in a line."""
    names = names_by_fingerprint(trial.environment for trial in collection.trials)
    rows: list[FlatRow] = [
        {
            **trial_values(trial),
            "kind": "search" if is_search(trial.spec) else trial.spec.kind,
            "throughput_per_second": throughput_of(trial),
            "step_seconds": steady_metrics.step_seconds(trial),
            "peak_allocated_bytes": steady_metrics.peak_allocated_bytes(trial),
            "machine": names[trial.environment.fingerprint],
            "started_at": trial.started_at,
            "file": file_of(trial),
        }
        for trial in collection.trials
    ]
    fields = find_fields((*_QUESTION, *_RESULT, "message", "started_at", "file"))
    fields.insert(-2, Field("machine", "machine"))
    alike = [
        each for each in fields if len(rows) > 1 and each.name != "file" and len({each.text(r) for r in rows}) == 1
    ]
    known = [field for field in alike if field.value(rows[0]) not in (None, "", *field.default)]
    same = ", ".join(f"{field.title} {field.text(rows[0])}" for field in known)
    return DataTable([field for field in worth_showing(fields, rows, _RESULT) if field not in alike], rows), same


def _machine_table(collection: Collection) -> DataTable[FlatRow]:
    """Return the table of machines and their software: a column for each, or a row for each of many."""
    names = names_by_fingerprint(collection.machines.values())
    traits = {fingerprint: machine_traits(machine) for fingerprint, machine in collection.machines.items()}
    shown = [name for name in next(iter(traits.values())) if name != "fingerprint"]
    if len(names) > 4:
        rows: list[FlatRow] = [{"machine": names[key], **own} for key, own in traits.items()]
        return DataTable([Field(name, name) for name in ("machine", *shown)], rows)
    fields = [Field("trait", "property"), *(Field(key, names[key]) for key in traits)]
    return DataTable(fields, [{"trait": name} | {key: own[name] for key, own in traits.items()} for name in shown])


def _warnings(collection: Collection) -> list[tuple[TrialWarning, int, str]]:
    """Return each kind of warning as its first trial has it, with the number of trials and the names of a few."""
    found: dict[str, tuple[TrialWarning, list[str]]] = {}
    for trial in collection.trials:
        for each in warnings_of(trial):
            found.setdefault(each.name, (each, []))[1].append(f"{trial.spec.label} ({each.seen})")
    return [(each, len(labels), truncate_list(labels, separator="; ")) for each, labels in found.values()]
