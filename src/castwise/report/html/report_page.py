"""The report: answers, charts, tables, method, environment and warnings of a collection of records."""

from typing import Any

from castwise.analysis import steady_metrics
from castwise.analysis.warnings import TrialWarning, warnings_of
from castwise.max_batch import render as max_batch_render
from castwise.registry.suites import is_search
from castwise.render import run_report, training_table
from castwise.render.fields import Field, FlatRow, find_field, find_fields, trial_values, worth_showing
from castwise.render.notes import remarks
from castwise.render.table import DataTable
from castwise.render.units import format_ratio
from castwise.report.charts.chart import GroupSubject
from castwise.report.charts.registry import charts_of
from castwise.report.charts.throughput import overview
from castwise.report.collection import Collection, ComparisonGroup, FileOf, machine_traits, throughput_of
from castwise.report.conclusions import Answer, answers_of, in_one_sentence, loop_of
from castwise.report.html.page_frame import PageData, Source, assemble
from castwise.spec.quantities import truncate_list

MAX_SECTIONS = 40  # with charts: more would make a page that no one reads and no phone opens
_MAX_UNFOLDED = 8
_MAX_MACHINE_COLUMNS = 4
_QUESTION = (
    *("workload", "kind", "data_set", "precision", "loss_scale", "batch_size"),
    *("gpus", "techniques", "seed", "repeat"),
)
_RESULT = ("throughput_per_second", "step_seconds", "peak_allocated_bytes", "status")


def render(collection: Collection, source: Source, title: str = "castwise report") -> str:
    """Return the report as HTML.

    Raises:
        UsageError: plotly or jinja2 is not installed.
    """
    data = PageData()
    answers = answers_of(collection)
    overview_chart = overview(collection, source.file_of)
    sections = [
        _section(f"group-{number}", group, [each for each in answers if each.group is group], collection, source, data)
        for number, group in enumerate(collection.groups[:MAX_SECTIONS], start=1)
    ]
    choices = ("workload", "precision", "status", "kind")
    context = {
        "summary": collection.summary,
        "sentence": in_one_sentence(collection, answers),
        "answers": data.add_table("answers", _answer_table(answers)) if len(answers) > 1 else None,
        "some_cut": any(each.cut for each in answers),
        "overview": data.add_chart(overview_chart, "all") if overview_chart is not None else None,
        "sections": sections,
        "without_charts": [group.title for group in collection.groups[MAX_SECTIONS:]],
        "trials": data.add_table("trials", _trial_table(collection, source.file_of), choices=choices),
        "warnings": _warnings(collection),
        "machine_notes": collection.machine_notes,
        "machines": data.add_table("machines", _machine_table(collection)),
        "notes": collection.notes,
        "folded": len(sections) > _MAX_UNFOLDED,
    }
    return assemble("page.html.j2", title, context, data, source)


def _section(
    anchor: str, group: ComparisonGroup, answers: list[Answer], collection: Collection, source: Source, data: PageData
) -> dict[str, Any]:
    table: DataTable[Any]
    if group.is_training:
        table = training_table.data_table(group.runs)
        failed = [run.trial for run in group.runs if run.trial.status != "ok"]
        lines = [f"{trial.spec.label}: {trial.status}: {trial.message}" for trial in failed]
    elif group.is_max_batch:
        found = group.max_batches
        table = max_batch_render.summary_table(found)
        lines = [*max_batch_render.conclusions(found), *max_batch_render.remarks(found)]
    else:
        table = run_report.data_table(group.rows)
        lines = remarks(group.rows)
    return {
        "anchor": anchor,
        "title": group.title,
        "description": group.description,
        "gist": "; ".join(_gist(answer) for answer in answers[:3]),
        "answers": answers,
        # Answers for several batch sizes mostly have the same lines of code.
        "codes": list(
            dict.fromkeys((each.advice.precision or "", each.advice.code) for each in answers if each.advice.code)
        ),
        "charts": [data.add_chart(chart, anchor) for chart in charts_of(GroupSubject(group, source.file_of))],
        "table": data.add_table(f"{anchor}-results", table),
        "remarks": [*(note.text for note in collection.machine_notes_of(*group.configurations)), *lines],
    }


def _gist(answer: Answer) -> str:
    """Return an answer in a few words, for a section that is folded."""
    loop = loop_of(answer)
    if answer.advice.decision == "nothing":
        return "nothing to recommend"
    if loop is None:
        return "undecided"
    if answer.advice.decision == "stay":
        return f"stay with {loop}"
    if answer.speedup is None:
        return f"take {loop}"
    verb = "fastest in runs cut short:" if answer.cut else "take"
    return f"{verb} {loop}, {format_ratio(answer.speedup)}"


def _answer_table(answers: list[Answer]) -> DataTable[FlatRow]:
    """Return the table of what to take for which workload; what is no recommendation is in brackets."""
    rows: list[FlatRow] = []
    for answer in answers:
        group, config, spec, advice = answer.group, answer.config, answer.spec, answer.advice
        take = loop_of(answer) or advice.decision
        setting = ", ".join(part for part in (f"batch {spec.batch_size}", spec.world_size_label) if part)
        source = f"cut runs: {answer.cut}" if answer.cut else "training runs" if group.is_training else "steady state"
        rows.append(
            {
                "workload": group.title,
                "setting": setting,
                "take": f"({take})" if answer.cut else take,
                "default_speedup": advice.over_default.value if advice.over_default else None,
                "speedup": advice.over_fp32.value if advice.over_fp32 else None,
                "throughput_per_second": config.throughput.value if config and config.throughput else None,
                "unit": group.unit,
                "memory_ratio": advice.memory_ratio,
                "why": advice.why,
                "how_sure": advice.how_sure,
                "based_on": source,
            }
        )
    fields = [
        find_field("workload"),
        Field("setting", "setting"),
        Field("take", "take"),
        Field("default_speedup", "speed-up over default", "ratio"),
        Field("speedup", "speed-up over fp32", "ratio"),
        find_field("throughput_per_second"),
        find_field("memory_ratio", "memory over fp32"),
        Field("why", "why this one"),
        Field("how_sure", "how sure"),
        Field("based_on", "based on"),
    ]
    return DataTable(worth_showing(fields, rows, always=("workload", "setting", "take", "why", "how_sure")), rows)


def _trial_table(collection: Collection, file_of: FileOf) -> DataTable[FlatRow]:
    rows: list[FlatRow] = [
        {
            **trial_values(trial),
            "kind": "search" if is_search(trial.spec) else trial.spec.kind,
            "throughput_per_second": throughput_of(trial),
            "step_seconds": steady_metrics.step_seconds(trial),
            "peak_allocated_bytes": steady_metrics.peak_allocated_bytes(trial),
            "machine": f"{trial.environment.device_name} {trial.environment.fingerprint}",
            "started_at": trial.started_at,
            "file": file_of(trial),
        }
        for trial in collection.trials
    ]
    fields = [
        *find_fields((*_QUESTION, *_RESULT)),
        Field("machine", "machine", varies=True),
        *find_fields(("started_at", "file", "message")),
    ]
    return DataTable(worth_showing(fields, rows, ("workload", "kind", "batch_size", *_RESULT, "started_at")), rows)


def _machine_table(collection: Collection) -> DataTable[FlatRow]:
    """Return the table of machines and their software: a column for each, or a row for each of many."""
    machines = list(collection.machines.values())
    traits = [machine_traits(machine) for machine in machines]
    if len(machines) > _MAX_MACHINE_COLUMNS:
        return DataTable([Field(name, name) for name in traits[0]], traits)
    devices = [machine.device_name for machine in machines]
    fields = [Field("trait", "of the machine")]
    for machine in machines:
        distinction = f" {machine.fingerprint}" if devices.count(machine.device_name) > 1 else ""
        fields.append(Field(machine.fingerprint, machine.device_name + distinction))
    rows = [{"trait": name} | {own["fingerprint"]: own[name] for own in traits} for name in traits[0]]
    return DataTable(fields, rows)


def _warnings(collection: Collection) -> list[tuple[TrialWarning, int, str]]:
    """Return each kind of warning as its first trial has it, with the number of trials and the names of a few."""
    found: dict[str, tuple[TrialWarning, list[str]]] = {}
    for trial in collection.trials:
        for each in warnings_of(trial):
            found.setdefault(each.name, (each, []))[1].append(f"{trial.spec.label} ({each.seen})")
    return [(each, len(labels), truncate_list(labels, separator="; ")) for each, labels in found.values()]
