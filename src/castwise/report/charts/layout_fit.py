"""How a chart fits where it is shown: as high as its legend asks for, and smaller on a phone."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from castwise.report.charts.chart import Chart
from castwise.report.charts.plotly_parts import Document


@dataclass(frozen=True)
class Place:
    """Where charts are shown.

    Attributes:
        plot_width: Pixels between the axes.
        font_size: Of the legend, in pixels.
    """

    plot_width: int
    font_size: int


ON_HALF_A_PAGE = Place(plot_width=480, font_size=13)
ON_A_PICTURE = Place(plot_width=820, font_size=13)
ON_A_PHONE = Place(plot_width=225, font_size=11)

# plotly's, in pixels: what stands before an entry's name, and between entries; and by the font's size: a letter, a row.
_MARK, _LETTER, _ROW = 45, 0.56, 1.55


def fitted(chart: Chart) -> Document:
    """Return a chart's layout with room for its legend above what is drawn."""
    extra = _room(chart.traces, ON_HALF_A_PAGE)
    return {**chart.layout, "height": chart.layout["height"] + extra}


def legend_height(chart: Chart, place: Place) -> int:
    """Return the pixels that a chart's legend takes; 0 where it has none."""
    if chart.layout.get("showlegend") is False:
        return 0
    return round(_ROW * place.font_size) * _num_rows(chart.traces, place)


def fitted_to_phone(chart: Chart) -> Document:
    """Return what of a chart's layout is another on a narrow screen."""
    layout = {**chart.layout, **chart.narrow}
    return {
        **chart.narrow,
        "height": layout["height"] + _room(chart.traces, ON_A_PHONE),
        "margin": {**layout["margin"], "l": 4, "r": 6},
        "font": {**layout["font"], "size": 12},
        "legend": {**layout["legend"], "font": {"size": ON_A_PHONE.font_size}},
    }


def _room(traces: Sequence[Document], place: Place) -> int:
    """Return the pixels that a legend's rows but the first take."""
    rows = _num_rows(traces, place)
    return round(_ROW * place.font_size) * max(0, rows - 1)


def _num_rows(traces: Sequence[Document], place: Place) -> int:
    """Return the rows of a horizontal legend: groups flow like words; entries without groups stand in columns."""
    shown = [trace for trace in traces if trace.get("name") and trace.get("showlegend", True)]
    widths = [_width(trace["name"], place) for trace in shown]
    if not widths:
        return 0
    if any("legendgroup" in trace for trace in shown):
        return _flowing([max(widths[i] for i, _ in group) for group in _groups(shown)], place.plot_width)
    if sum(widths) <= place.plot_width:
        return 1
    columns = max(1, int(place.plot_width // max(widths)))
    return -(-len(widths) // columns)


def _groups(traces: Sequence[Document]) -> list[list[tuple[int, Any]]]:
    numbered = list(enumerate(traces))
    return [list(group) for _, group in groupby(numbered, key=lambda pair: pair[1].get("legendgroup", pair[0]))]


def _flowing(widths: Sequence[float], available: int) -> int:
    rows, used = 1, 0.0
    for width in widths:
        if used and used + width > available:
            rows, used = rows + 1, 0.0
        used += width
    return rows


def _width(name: str, place: Place) -> float:
    return _MARK + _LETTER * place.font_size * len(html.unescape(name))
