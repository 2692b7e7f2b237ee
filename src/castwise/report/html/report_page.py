"""The report: answers, charts, tables, method, environment and warnings of a collection of records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from castwise.max_batch.columns import shown_summary
from castwise.max_batch.sentences import conclusions
from castwise.max_batch.sentences import remarks as fit_remarks
from castwise.render import run_report, training_table
from castwise.render.notes import remarks
from castwise.render.table import DataTable
from castwise.report.charts.chart import CollectionSubject, GroupSubject
from castwise.report.charts.registry import charts_of, overview_charts
from castwise.report.collection import Collection, ComparisonGroup
from castwise.report.conclusions import Answer, answers_of, in_one_sentence
from castwise.report.html import sections as parts
from castwise.report.html.page_frame import PageData, Source, assemble

# Sections with charts; more of them would make a page that no one reads and no phone opens.
_MOST_TOPICS = 40
_MOST_UNFOLDED = 8


@dataclass(frozen=True)
class _Section:
    """A topic on the page."""

    anchor: str
    topic: ComparisonGroup
    subtitle: str
    gist: str
    answers: Sequence[Answer]
    codes: Sequence[tuple[str, str]]
    charts: Sequence[str]
    table: str
    remarks: Sequence[str]


def render(collection: Collection, source: Source, title: str = "castwise report") -> str:
    """Return the report as HTML.

    Args:
        collection: What it is about.
        source: Where that comes from.
        title: The page's title.

    Raises:
        UsageError: plotly or jinja2 is not installed.
    """
    data = PageData()
    answers = answers_of(collection)
    overview = [
        data.add_chart(chart, "all") for chart in overview_charts(CollectionSubject(collection, source.file_of))
    ]
    sections = [
        _section(f"topic-{number}", topic, [each for each in answers if each.group is topic], source, data)
        for number, topic in enumerate(collection.groups[:_MOST_TOPICS], start=1)
    ]
    context: Mapping[str, Any] = {
        "summary": parts.summary(collection),
        "sentence": in_one_sentence(collection, answers),
        "answers": data.add_table("answers", parts.answer_grid(answers)) if len(answers) > 1 else None,
        "some_cut": any(each.cut for each in answers),
        "overview": overview,
        "sections": sections,
        "more_topics": [topic.title for topic in collection.groups[_MOST_TOPICS:]],
        "trials": data.add_table(
            "trials",
            parts.trial_grid(collection, source.file_of),
            choices=("workload", "precision", "status", "kind"),
        ),
        "warnings": parts.warnings(collection),
        "machines": data.add_table("machines", parts.machine_grid(collection)),
        "notes": collection.notes,
        "folded": len(sections) > _MOST_UNFOLDED,
    }
    return assemble("page.html.j2", title, context, data, source)


def _section(
    anchor: str, topic: ComparisonGroup, answers: Sequence[Answer], source: Source, data: PageData
) -> _Section:
    charts = [data.add_chart(chart, anchor) for chart in charts_of(GroupSubject(topic, source.file_of))]
    grid: DataTable[Any]
    if topic.is_training:
        grid = training_table.data_table(topic.runs)
        said = [
            f"{run.trial.spec.label}: {run.trial.status}: {run.trial.message}"
            for run in topic.runs
            if run.trial.status != "ok"
        ]
    elif topic.is_max_batch:
        fits = GroupSubject(topic, source.file_of).max_batches
        grid, said = DataTable(shown_summary(fits), fits), [*conclusions(fits), *fit_remarks(fits)]
    else:
        grid = run_report.data_table(topic.rows)
        said = remarks(topic.rows)
    return _Section(
        anchor=anchor,
        topic=topic,
        subtitle=parts.topic_line(topic),
        gist="; ".join(parts.gist(answer) for answer in answers[:3]),
        answers=answers,
        # Answers for several batch sizes are mostly the same lines of code.
        codes=list(dict.fromkeys((each.precision or "", each.code) for each in answers if each.code)),
        charts=charts,
        table=data.add_table(f"{anchor}-results", grid),
        remarks=said,
    )
