"""The frame of the HTML pages: one self-contained file with a sentence, charts, tables and what draws them.

Anyone may have written a record. Its texts reach the page escaped, or in packed JSON whose strings the script puts
into text nodes; the page's policy runs no script except castwise's own and plotly, and loads nothing.
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
from castwise.render.table import DataTable
from castwise.render.theme import THEMES
from castwise.report.charts.chart import Chart
from castwise.report.charts.plotly_parts import HALF_PAGE, LEGEND_ROW, PHONE, PHONE_LEGEND_ROW, legend_rows
from castwise.report.collection import FileOf
from castwise.spec.quantities import truncate_list

_MAX_STATIC_ROWS = 20  # of a table, for readers without scripts; the page's script has all


@dataclass(frozen=True)
class Source:
    """Where a collection comes from."""

    file_of: FileOf
    problems: Sequence[tuple[str, str]] = ()  # files that are no records, each with its reason


class PageData:
    """The charts and tables of a page by the id of their place, as the script finds them."""

    def __init__(self) -> None:
        self.charts: dict[str, dict[str, Any]] = {}
        self.tables: dict[str, dict[str, Any]] = {}

    def add_chart(self, chart: Chart, prefix: str) -> str:
        """Add a chart and return its id."""
        name = f"{prefix}-{chart.name}"
        layout = chart.layout
        narrow = {**layout, **chart.narrow}
        # Layouts have room for one row of a legend.
        legend_height = LEGEND_ROW * max(0, legend_rows(chart.traces, HALF_PAGE) - 1)
        phone_height = PHONE_LEGEND_ROW * max(0, legend_rows(chart.traces, PHONE) - 1)
        self.charts[name] = {
            "title": chart.title,
            "summary": chart.summary,
            "note": chart.note,
            "traces": _finite(chart.traces),
            "layout": layout | {"height": layout["height"] + legend_height},
            "narrow": chart.narrow
            | {
                "height": narrow["height"] + phone_height,
                "margin": layout["margin"] | {"l": 4, "r": 6},
                "font": layout["font"] | {"size": 12},
                "legend": layout["legend"] | {"font": {"size": 11}},
            },
            "table": _table(chart.table),
        }
        return name

    def add_table(self, name: str, table: DataTable[Any], *, choices: Sequence[str] = ()) -> str:
        """Add a table under an id, with a filter for each of these columns, and return the id."""
        chosen = [index for index, column in enumerate(table.columns) if column.name in choices]
        self.tables[name] = _table(table) | {"choices": chosen}
        return name


def assemble(template: str, title: str, context: Mapping[str, Any], data: PageData, source: Source) -> str:
    """Return a page as HTML from a template that extends the frame.

    Raises:
        UsageError: plotly or jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, StrictUndefined
        from jinja2.loaders import FunctionLoader
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UsageError("Reports need plotly and jinja2: pip install 'castwise[report]'.") from None
    environment = Environment(
        autoescape=True, loader=FunctionLoader(_read), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["few"] = truncate_list
    scripts = (str(get_plotlyjs()), _read("page.js"))
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    document = {"charts": data.charts, "tables": data.tables, "themes": THEMES}
    frame = {
        "title": title,
        "version": __version__,
        "problems": source.problems,
        "tables": data.tables,
        "max_rows": _MAX_STATIC_ROWS,
        "charts": data.charts,
        "style": _read("page.css"),
        "plotly": _packed(scripts[0]),
        "script": scripts[1],
        # These scripts and no others, and nothing from anywhere.
        "policy": (
            f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
            "base-uri 'none'; form-action 'none'"
        ),
        "data": _packed(json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))),
    }
    return str(environment.get_template(template).render(frame | dict(context)))


def _table(table: DataTable[Any]) -> dict[str, Any]:
    """Return a table for the script: a cell is its text, or its value and its text if it sorts by the value."""

    def cell(value: Any, text: str) -> Any:
        # A union in the check would be made anew for each of a million cells.
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return [_finite(value), text] if is_number else text

    best = {number: sorted(places) for number, column in enumerate(table.columns) if (places := table.best(column))}
    return {
        **({"best": best} if best else {}),
        "columns": [{"name": column.name, "title": column.title, "left": column.left} for column in table.columns],
        "rows": [[cell(column.value(row), column.text(row)) for column in table.columns] for row in table.rows],
    }


def _finite(value: Any) -> Any:
    """Return a document with figures of seven digits, and None for NaN and infinity, which JSON does not have."""
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def _packed(text: str) -> str:
    """Return text as gzip in base64, which is safe inside a script element."""
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode()


def _read(name: str) -> str:
    return resources.files("castwise.report.html").joinpath(name).read_text(encoding="utf-8")
