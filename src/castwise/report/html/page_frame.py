"""What the HTML pages share: one self-contained file with a sentence, charts, tables and what draws them.

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

from castwise._version import __version__
from castwise.errors import UsageError
from castwise.records.schema import Trial
from castwise.render.table import DataTable
from castwise.render.theme import THEMES
from castwise.report.charts.chart import Chart
from castwise.report.charts.plotly_parts import HALF_PAGE, LEGEND_ROW, PHONE, PHONE_LEGEND_ROW, legend_rows
from castwise.spec.quantities import truncate_list

_NUMBERS = (int, float)  # a union would be made anew for each of a million cells
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


class PageData:
    """The charts and tables of a page, as the script finds them, by the id of their place."""

    def __init__(self) -> None:
        self.charts: dict[str, dict[str, Any]] = {}
        self.tables: dict[str, dict[str, Any]] = {}
        self.static: dict[str, dict[str, Any]] = {}

    def add_chart(self, chart: Chart, prefix: str) -> str:
        """Add a chart and return its id."""
        name = f"{prefix}-{chart.name}"
        layout = chart.layout
        narrow = {**layout, **chart.narrow}
        legend_height = LEGEND_ROW * max(0, legend_rows(chart.traces, HALF_PAGE) - 1)  # layouts have room for one row
        phone_height = PHONE_LEGEND_ROW * max(0, legend_rows(chart.traces, PHONE) - 1)
        self.charts[name] = {
            "title": chart.title,
            "says": chart.says,
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

    def add_table(self, name: str, grid: DataTable[Any], *, choices: Sequence[str] = ()) -> str:
        """Add a table under an id, with a filter for each of these columns, and return the id."""
        table = _table(grid)
        table["choices"] = [index for index, column in enumerate(grid.columns) if column.name in choices]
        self.tables[name] = table
        self.static[name] = {
            "columns": table["columns"],
            "rows": [[_text(cell) for cell in row] for row in table["rows"][:_MOST_STATIC_ROWS]],
            "best": table.get("best", {}),
            "left_out": max(0, len(table["rows"]) - _MOST_STATIC_ROWS),
        }
        return name

    def document(self) -> dict[str, Any]:
        """Return all of it for the script."""
        return {"charts": self.charts, "tables": self.tables, "themes": THEMES}


def assemble(template: str, title: str, context: Mapping[str, Any], data: PageData, source: Source) -> str:
    """Return a page as HTML.

    Args:
        template: The template's file, one that extends the frame.
        title: The page's title.
        context: What the template asks for besides what all pages have.
        data: The page's charts and tables.
        source: Where it all comes from.

    Raises:
        UsageError: plotly or jinja2 is not installed.
    """
    plotly, page_script = _plotly(), _read("page.js")
    frame: Mapping[str, Any] = {
        "title": title,
        "version": __version__,
        "problems": source.problems,
        "tables": data.static,
        "charts": data.charts,
        "style": _read("page.css"),
        "plotly": _packed(plotly),
        "script": page_script,
        "policy": _policy(plotly, page_script),
        "data": _packed(json.dumps(data.document(), ensure_ascii=False, allow_nan=False, separators=(",", ":"))),
    }
    return str(_environment().get_template(template).render({**frame, **context}))


def _table(grid: DataTable[Any]) -> dict[str, Any]:
    """Return a table for the script: a cell is its text, or its value and its text where it sorts by the former."""
    best = {number: sorted(places) for number, column in enumerate(grid.columns) if (places := grid.best(column))}
    return {
        **({"best": best} if best else {}),
        "columns": [{"name": column.name, "title": column.title, "left": column.left} for column in grid.columns],
        "rows": [[_cell(column.value(row), column.text(row)) for column in grid.columns] for row in grid.rows],
    }


def _cell(value: Any, text: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, _NUMBERS):
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
    environment = Environment(
        autoescape=True, loader=FunctionLoader(_read), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["few"] = truncate_list
    return environment


_MISSING = "Reports need plotly and jinja2: pip install 'castwise[report]'."


def _read(name: str) -> str:
    return resources.files("castwise.report.html").joinpath(name).read_text(encoding="utf-8")
