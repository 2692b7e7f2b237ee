"""One self-contained HTML file: answers, charts, tables, method, environment and warnings.

Whatever a record says is anyone's word. It reaches the page as escaped text or as packed JSON whose strings the
script puts into text nodes, and the page's policy runs no script but castwise's own and plotly, and loads nothing.
"""

import base64
import gzip
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from castwise import __version__
from castwise.analyze.answers import Answer, answers_of, in_one_sentence
from castwise.analyze.collection import Collection, Topic
from castwise.errors import UsageError
from castwise.record import Trial
from castwise.report.charts.chart import Chart, OverviewSubject, TopicSubject
from castwise.report.charts.registry import charts_of, overview_charts
from castwise.report.columns import remarks, shown_columns
from castwise.report.grid import Grid
from castwise.report.html import lists
from castwise.report.palette import THEMES
from castwise.report.run_columns import run_columns, shown

# Sections with charts; more of them would make a page that no one reads and no phone opens.
_MOST_TOPICS = 40
_MOST_UNFOLDED = 8
_MOST_STATIC_ROWS = 20  # of a table, for readers without scripts; the page's script has all


@dataclass(frozen=True)
class Source:
    """Where a collection comes from.

    Attributes:
        file_of: Returns the name of the file that a trial was read from.
        problems: Files that are no records, each with its reason.
    """

    file_of: Callable[[Trial], str]
    problems: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class _Section:
    """A topic on the page."""

    anchor: str
    topic: Topic
    subtitle: str
    gist: str
    answers: Sequence[Answer]
    charts: Sequence[str]
    table: str
    remarks: Sequence[str]


class _Data:
    """The charts and tables of a page, as the script finds them, by the id of their place."""

    def __init__(self) -> None:
        self.charts: dict[str, dict[str, Any]] = {}
        self.tables: dict[str, dict[str, Any]] = {}
        self.static: dict[str, dict[str, Any]] = {}

    def add_chart(self, chart: Chart, prefix: str) -> str:
        name = f"{prefix}-{chart.name}"
        self.charts[name] = {
            "title": chart.title,
            "says": chart.says,
            "note": chart.note,
            "traces": _finite(chart.traces),
            "layout": chart.layout,
            "table": _table(chart.table),
        }
        return name

    def add_table(self, name: str, grid: Grid[Any], *, choices: Sequence[str] = ()) -> str:
        table = _table(grid)
        table["choices"] = [index for index, column in enumerate(grid.columns) if column.name in choices]
        self.tables[name] = table
        self.static[name] = {
            "columns": table["columns"],
            "rows": [[_text(cell) for cell in row] for row in table["rows"][:_MOST_STATIC_ROWS]],
            "left_out": max(0, len(table["rows"]) - _MOST_STATIC_ROWS),
        }
        return name

    def document(self) -> dict[str, Any]:
        """Return all of it for the script."""
        return {"charts": self.charts, "tables": self.tables, "themes": THEMES}


def render(collection: Collection, source: Source, title: str = "castwise report") -> str:
    """Return the report as HTML.

    Args:
        collection: What it is about.
        source: Where that comes from.
        title: The page's title.

    Raises:
        UsageError: plotly or jinja2 is not installed.
    """
    plotly, page_script = _plotly(), _read("page.js")
    data = _Data()
    answers = answers_of(collection)
    overview = [data.add_chart(chart, "all") for chart in overview_charts(OverviewSubject(collection, source.file_of))]
    sections = [
        _section(f"topic-{number}", topic, [each for each in answers if each.topic is topic], source, data)
        for number, topic in enumerate(collection.topics[:_MOST_TOPICS], start=1)
    ]
    context: Mapping[str, Any] = {
        "title": title,
        "version": __version__,
        "summary": lists.summary(collection),
        "sentence": in_one_sentence(collection, answers),
        "answers": data.add_table("answers", lists.answer_grid(answers)) if len(answers) > 1 else None,
        "overview": overview,
        "sections": sections,
        "more_topics": [topic.title for topic in collection.topics[_MOST_TOPICS:]],
        "trials": data.add_table(
            "trials",
            lists.trial_grid(collection, source.file_of),
            choices=("workload", "precision", "status", "kind"),
        ),
        "warnings": lists.warnings(collection),
        "machines": data.add_table("machines", lists.machine_grid(collection)),
        "notes": collection.notes,
        "problems": source.problems,
        "tables": data.static,
        "charts": data.charts,
        "style": _read("page.css"),
        "plotly": _packed(plotly),
        "folded": len(sections) > _MOST_UNFOLDED,
        "script": page_script,
        "policy": _policy(plotly, page_script),
        "data": _packed(json.dumps(data.document(), ensure_ascii=False, allow_nan=False, separators=(",", ":"))),
    }
    return str(_environment().get_template("page.html.j2").render(context))


def _section(anchor: str, topic: Topic, answers: Sequence[Answer], source: Source, data: _Data) -> _Section:
    charts = [data.add_chart(chart, anchor) for chart in charts_of(TopicSubject(topic, source.file_of))]
    grid: Grid[Any]
    if topic.is_training:
        grid = Grid(shown(run_columns({}), topic.runs), topic.runs)
        said = [
            f"{run.trial.spec.label}: {run.trial.status}: {run.trial.message}"
            for run in topic.runs
            if run.trial.status != "ok"
        ]
    else:
        grid = Grid(shown_columns(topic.rows), topic.rows)
        said = remarks(topic.rows)
    return _Section(
        anchor=anchor,
        topic=topic,
        subtitle=lists.topic_line(topic),
        gist="; ".join(lists.gist(answer) for answer in answers[:3]),
        answers=answers,
        charts=charts,
        table=data.add_table(f"{anchor}-results", grid),
        remarks=said,
    )


def _table(grid: Grid[Any]) -> dict[str, Any]:
    """Return a table for the script: a cell is its text, or its value and its text where it sorts by the former."""
    return {
        "columns": [{"name": column.name, "title": column.title, "left": column.left} for column in grid.columns],
        "rows": [[_cell(column.value(row), column.text(row)) for column in grid.columns] for row in grid.rows],
    }


def _cell(value: Any, text: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return text
    return [_short(value), text] if math.isfinite(value) else [None, text]


def _text(cell: Any) -> str:
    return str(cell[1]) if isinstance(cell, list) else str(cell)


def _packed(text: str) -> str:
    """Return text as a page holds much of it: gzip in base64, which is safe inside a script element by itself."""
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode()


def _short(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.7g}")


def _finite(value: Any) -> Any:
    """Return a document without NaN and infinity, which JSON does not have, and with figures of seven digits."""
    if isinstance(value, float):
        return _short(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def _policy(*scripts: str) -> str:
    """Return the page's content security policy: these scripts and none else, and nothing from anywhere."""
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UsageError(_MISSING) from None
    return str(get_plotlyjs())


def _environment() -> Any:
    try:
        from jinja2 import Environment, StrictUndefined
        from jinja2.loaders import FunctionLoader
    except ImportError:
        raise UsageError(_MISSING) from None
    return Environment(
        autoescape=True, loader=FunctionLoader(_read), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


_MISSING = "Reports need plotly and jinja2: pip install 'castwise[report]'."


def _read(name: str) -> str:
    return resources.files("castwise.report.html").joinpath(name).read_text(encoding="utf-8")
