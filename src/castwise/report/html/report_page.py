"""The report: answers, charts, tables, method, environment and warnings of a collection of records."""

from collections.abc import Sequence
from typing import Any

from castwise.max_batch import render as max_batch_render
from castwise.max_batch.tables import summary_table
from castwise.registry.precisions import BASELINE
from castwise.render import run_report, training_table
from castwise.render.notes import remarks
from castwise.render.table import DataTable
from castwise.render.units import format_ratio
from castwise.report.charts.chart import GroupSubject
from castwise.report.charts.registry import charts_of
from castwise.report.charts.throughput import overview
from castwise.report.collection import Collection, ComparisonGroup
from castwise.report.conclusions import Answer, answers_of, in_one_sentence
from castwise.report.html.page_frame import PageData, Source, assemble
from castwise.report.html.sections import answer_table, machine_table, trial_table, warnings

MAX_SECTIONS = 40  # with charts: more would make a page that no one reads and no phone opens
_MAX_UNFOLDED = 8


def render(collection: Collection, source: Source, title: str = "castwise report") -> str:
    """Return the report as HTML.

    Args:
        collection: The records.
        source: Where they come from.
        title: The page's title.

    Raises:
        UsageError: plotly or jinja2 is not installed.
    """
    data = PageData()
    answers = answers_of(collection)
    overview_chart = overview(collection, source.file_of)
    sections = [
        _section(f"group-{number}", group, [each for each in answers if each.group is group], source, data)
        for number, group in enumerate(collection.groups[:MAX_SECTIONS], start=1)
    ]
    choices = ("workload", "precision", "status", "kind")
    context = {
        "summary": collection.summary,
        "sentence": in_one_sentence(collection, answers),
        "answers": data.add_table("answers", answer_table(answers)) if len(answers) > 1 else None,
        "some_cut": any(each.cut for each in answers),
        "overview": data.add_chart(overview_chart, "all") if overview_chart is not None else None,
        "sections": sections,
        "without_charts": [group.title for group in collection.groups[MAX_SECTIONS:]],
        "trials": data.add_table("trials", trial_table(collection, source.file_of), choices=choices),
        "warnings": warnings(collection),
        "machines": data.add_table("machines", machine_table(collection)),
        "notes": collection.notes,
        "folded": len(sections) > _MAX_UNFOLDED,
    }
    return assemble("page.html.j2", title, context, data, source)


def _section(
    anchor: str, group: ComparisonGroup, answers: Sequence[Answer], source: Source, data: PageData
) -> dict[str, Any]:
    """Return what the template asks for of a comparison group."""
    subject = GroupSubject(group, source.file_of)
    table: DataTable[Any]
    if group.is_training:
        table = training_table.data_table(group.runs)
        failed = [run.trial for run in group.runs if run.trial.status != "ok"]
        lines = [f"{trial.spec.label}: {trial.status}: {trial.message}" for trial in failed]
    elif group.is_max_batch:
        found = subject.max_batches
        table = summary_table(found)
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
        "codes": list(dict.fromkeys((each.precision or "", each.code) for each in answers if each.code)),
        "charts": [data.add_chart(chart, anchor) for chart in charts_of(subject)],
        "table": data.add_table(f"{anchor}-results", table),
        "remarks": lines,
    }


def _gist(answer: Answer) -> str:
    """Return an answer in a few words, for a section that is folded."""
    if answer.precision is None:
        return "nothing ended well"
    if answer.speedup is None or answer.precision == BASELINE:
        return f"take {answer.precision}"
    verb = "fastest in runs cut short:" if answer.cut else "take"
    return f"{verb} {answer.precision}, {format_ratio(answer.speedup)}"
