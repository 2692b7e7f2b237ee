"""The frame of the HTML pages: one self-contained file with a sentence, charts, tables and what draws them.

Anyone may have written a record. Its texts reach the page escaped, or in packed JSON whose strings the script puts
into text nodes; the page's policy runs no script except castwise's own, and loads nothing.
"""

import base64
import gzip
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from castwise._version import __version__
from castwise.errors import UsageError
from castwise.report.charts.chart import Chart
from castwise.report.charts.svg import HATCH, NARROW, WIDE, mark_breaks
from castwise.report.collection import FileOf
from castwise.show.table import DataTable
from castwise.show.theme import LIGHT
from castwise.show.units import keep_units

MAX_SECTIONS = 12  # on the page; the script has the others, packed, and fills them in as they are unfolded


@dataclass(frozen=True)
class Source:
    file_of: FileOf
    problems: Sequence[tuple[str, str]] = ()  # files that are no records, each with its reason


class PageData:
    """The charts and tables of a page by the id of their place, as the templates and the script find them."""

    def __init__(self) -> None:
        self.charts: dict[str, dict[str, Any]] = {}
        self.tables: dict[str, dict[str, Any]] = {}

    def add_chart(self, name: str, chart: Chart, context: str) -> str:
        """Add a chart under an id, and return it; the context says of which model, machine and date it is."""
        label = f"{chart.title}. {chart.summary}"
        drawn = chart.draw(WIDE).inline(label, "wide") + chart.draw(NARROW).inline(label, "narrow")
        self.charts[name] = {"chart": chart, "svg": drawn, "context": context}
        if chart.table is not None:
            self.tables[name] = _table(chart.table)
        return name

    def add_table(self, name: str, table: DataTable[Any], *, choices: Sequence[str] = ()) -> str:
        """Add a table under an id, with a filter for each of these columns, and return the id."""
        chosen = [index for index, column in enumerate(table.columns) if column.name in choices]
        self.tables[name] = _table(table) | {"choices": chosen}
        return name


def assemble(template: str, title: str, context: Mapping[str, Any], data: PageData, source: Source) -> str:
    """Return a page as HTML from a template that extends the frame; UsageError without jinja2."""
    try:
        from jinja2 import Environment, StrictUndefined
        from jinja2.loaders import FunctionLoader
        from markupsafe import Markup, escape
    except ImportError:
        raise UsageError("Reports need jinja2: pip install 'castwise[report]'.") from None

    def breakable(value: Any) -> Any:
        """Return text in which no unit leaves its number, and words too long for a phone break after a separator.

        Attributes have no such breaks: they escape their text themselves, and escaped text stays as it is.
        """
        if type(value) is not str:
            return value
        return Markup(mark_breaks(str(escape(keep_units(value))), 19, "<wbr>"))

    environment = Environment(
        autoescape=True,
        finalize=breakable,
        loader=FunctionLoader(_read),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = _read("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    frame = {
        "title": title,
        "version": __version__,
        "problems": source.problems,
        "tables": data.tables,
        "max_sections": MAX_SECTIONS,
        "max_rows": 20,  # of a table, for readers without scripts; the page's script has all
        "charts": data.charts,
        "defs": HATCH,
        "style": _read("page.css"),
        "script": script,
        # This script and no other, and nothing from anywhere.
        "policy": (
            f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data: blob:; "
            "base-uri 'none'; form-action 'none'"
        ),
    } | dict(context)
    section = environment.get_template("section.html.j2")
    later = context.get("sections", ())[MAX_SECTIONS:]
    shown = {
        "tables": data.tables,
        "light": LIGHT,
        "later": {each["anchor"]: section.render(frame, section=each) for each in later},
    }
    document = json.dumps(shown, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Base64 is safe inside a script element.
    packed = base64.b64encode(gzip.compress(document.encode(), compresslevel=6, mtime=0)).decode()
    return str(environment.get_template(template).render(frame, data=packed))


def _table(table: DataTable[Any]) -> dict[str, Any]:
    """Return a table for the script: a cell is its text, or its value and its text if the value is no text."""

    def cell(value: Any, text: str) -> Any:
        if value is None or (isinstance(value, float) and not math.isfinite(value)):  # which JSON does not have
            return [None, text]
        if isinstance(value, float):
            return [float(f"{value:.7g}"), text]
        return [value, text] if isinstance(value, int) and not isinstance(value, bool) else text

    best = {number: sorted(rows) for number, column in enumerate(table.columns) if (rows := table.best(column))}
    return {
        **({"best": best} if best else {}),
        "columns": [{"name": column.name, "title": column.title, "left": column.left} for column in table.columns],
        "rows": [[cell(column.value(row), column.text(row)) for column in table.columns] for row in table.rows],
    }


def _read(name: str) -> str:
    return resources.files("castwise.report.html").joinpath(name).read_text(encoding="utf-8")
