"""The parts that charts are drawn from: plotly's traces and layouts as plain documents.

Names and messages come from records and may be anyone's: whatever text reaches plotly goes through `escape`.
"""

import html
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from castwise.analysis.statistics import Estimate, has_interval
from castwise.render.theme import FAINT, INK, look_of
from castwise.render.units import format_rate, format_ratio
from castwise.report.collection import ComparisonGroup, Configuration

MOST_BARS = 60
MOST_LINES = 16
MOST_POINTS = 200  # of a line: few screens show more
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_PANEL_HEIGHT = 190
_PANEL_GAP, _TITLED_GAP = 26, 76  # pixels between panels, and where the upper one's axis has figures and a title
_LEGEND_WIDTH = 44  # characters of a line's name, as many as a phone has room for
_AROUND = 90  # pixels above and below what is drawn: one row of a legend, figures and title of the lowest axis
_LONGEST = 120  # characters of a name
_CROWN, _AIR = 0.25, 1.05  # of the highest bar: what two lines over it take, and what it has over it anyway
_TALL = 0.3  # of the highest bar: a figure fits into it, upright or level

Document = dict[str, Any]


def escape(text: object) -> str:
    """Return text that plotly prints as it stands: it takes a few HTML tags for formatting, and links for links."""
    words = str(text)
    return html.escape(words if len(words) <= _LONGEST else words[: _LONGEST - 1] + "…", quote=False)


def on_lines(text: str, width: int) -> str:
    """Return text that plotly prints on lines of so many characters."""
    return "<br>".join(escape(line) for line in textwrap.wrap(text, width)) or "–"


def beside_bar(value: float | None, highest: float, *, plain: bool) -> str:
    """Return where the figure of an upright bar stands, by plotly's names: in it, or over a short or patterned one."""
    return "inside" if plain and value and value >= _TALL * highest else "outside"


def with_headroom(bars: Document, places: Sequence[Document]) -> Document:
    """Return the axis of upright bars with room for the figures that stand over tall ones.

    Args:
        bars: The axis.
        places: The traces on it.
    """
    tops = [
        (value + above, place)
        for trace in places
        for value, above, place in zip(
            trace["y"],
            trace["error_y"]["array"] if trace["error_y"] else [0] * len(trace["y"]),
            trace["textposition"] if trace["text"] else [""] * len(trace["y"]),
            strict=True,
        )
        if value is not None
    ]
    highest = max((top for top, _ in tops), default=0.0)
    crowned = any(place == "outside" and top > (1 - _CROWN) * highest for top, place in tops)
    return {**bars, "range": [0, (1 + _CROWN if crowned else _AIR) * highest]} if highest else bars


def template(lines: Sequence[str], *, values: str) -> str:
    """Return what is said beside the pointer at any point of a line.

    Args:
        lines: Lines that all its points share.
        values: What differs, with plotly's placeholders: "%{y:.4g} W".
    """
    shared = [escape(each).replace("%{", "&#37;{") for each in lines if each]
    return "<br>".join([shared[0], values, *shared[1:]]) + "<extra></extra>"


def hover(lines: Sequence[str]) -> str:
    """Return the text beside the pointer, a line each."""
    return "<br>".join(escape(line) for line in lines if line)


def interval_text(found: Estimate | None, kind: str = "rate") -> str:
    """Return a figure's 95 % interval in words."""
    if found is None:
        return ""
    if not has_interval(found):
        return "no interval: one process" if found.n < 2 else ""
    form = format_ratio if kind == "ratio" else format_rate
    return f"95 % interval {form(found.low)} to {form(found.high)}, {found.n} processes"


def error_bars(found: Sequence[Estimate | None], scale: float = 1.0) -> Document | None:
    """Return the intervals of a trace's points; None where none of them has one."""
    if not any(has_interval(each) for each in found):
        return None
    return {
        "type": "data",
        "symmetric": False,
        "array": [scale * (each.high - each.value) if each and has_interval(each) else 0 for each in found],
        "arrayminus": [scale * (each.value - each.low) if each and has_interval(each) else 0 for each in found],
        "color": INK,
        "thickness": 1.5,
        "width": 5,
    }


def axis(title: str = "", **settings: Any) -> Document:
    """Return an axis in the page's style; names on it are never taken for numbers or dates unless it says so."""
    return {
        "title": {"text": title, "standoff": 8, "font": {"size": 13}},
        "automargin": True,
        "gridcolor": FAINT,
        "linecolor": INK,
        "zerolinecolor": INK,
        "tickcolor": INK,
        "tickfont": {"size": 12},
        "fixedrange": True,
        **settings,
    }


def layout(height: int = 340, **settings: Any) -> Document:
    """Return a layout in the page's style."""
    return {
        "height": height,
        "margin": {"l": 12, "r": 16, "t": 16, "b": 12},
        "font": {"color": INK, "size": 13, "family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": 1.02,
            "yanchor": "bottom",
            "title": {"text": ""},
            "tracegroupgap": 2,
            "maxheight": 1,
        },
        "hoverlabel": {"align": "left", "namelength": -1},
        "dragmode": False,
        "bargap": 0.25,
        **settings,
    }


def panels(
    y_titles: Sequence[str], x_titles: Sequence[str], *, height: int = _PANEL_HEIGHT, **x_settings: Any
) -> Document:
    """Return a layout of panels below each other; trace i belongs to the axes `panel(i)`.

    Args:
        y_titles: A panel each, from the top.
        x_titles: The same; an empty one shares the axis below it.
        height: Pixels of a panel.
        **x_settings: Settings of every x axis.
    """
    count = len(y_titles)
    between = _TITLED_GAP if all(x_titles) else _PANEL_GAP
    drawn = height * count + between * (count - 1)
    gap, share = between / drawn, height / drawn
    document = layout(height=drawn + _AROUND)
    for index, (y_title, x_title) in enumerate(zip(y_titles, x_titles, strict=True)):
        top = 1 - index * (share + gap)
        number = "" if index == 0 else str(index + 1)
        document[f"yaxis{number}"] = axis(y_title, domain=[max(0.0, top - share), top], anchor=f"x{number}")
        document[f"xaxis{number}"] = axis(x_title, anchor=f"y{number}", zeroline=False, **x_settings)
        if not x_title:
            document[f"xaxis{number}"]["showticklabels"] = False
    return document


def panel(index: int) -> Document:
    """Return what puts a trace into a panel, counted from the top."""
    number = "" if index == 0 else str(index + 1)
    return {"xaxis": f"x{number}", "yaxis": f"y{number}"}


def line(
    name: str,
    precision: str,
    x: Sequence[float],
    y: Sequence[float | None],
    texts: Sequence[str] | str,
    variant: int = 0,
) -> Document:
    """Return a line with markers in a precision's look.

    Args:
        name: What the legend calls it.
        precision: Whose look it has.
        x: Where its points are.
        y: The same; None where there is none.
        texts: What is said beside the pointer: a text a point, or plotly's template for all.
        variant: How many lines of the same precision come before it: these have its colour, and other dashes and
            markers.
    """
    look = look_of(precision)
    said = {"hovertemplate": texts} if isinstance(texts, str) else {"hovertext": list(texts), "hoverinfo": "text"}
    return {
        "type": "scatter",
        "mode": "lines" if len(x) > 40 else "lines+markers",
        "name": on_lines(name, _LEGEND_WIDTH),
        "legendgroup": escape(name),
        "x": list(x),
        "y": [_drawable(value) for value in y],
        "line": {"color": look.colour, "dash": _dash(look.dash, variant), "width": 2},
        "marker": {"color": look.colour, "symbol": look.marker + ("-open" if variant % 2 else ""), "size": 8},
        **said,
    }


def variants(precisions: Sequence[str]) -> list[int]:
    """Return for each line how many of the same precision come before it."""
    return [list(precisions[:place]).count(precision) for place, precision in enumerate(precisions)]


def _dash(own: str, variant: int) -> str:
    place = _DASHES.index(own) if own in _DASHES else 0
    return _DASHES[(place + variant) % len(_DASHES)]


def downsample(count: int, most: int = MOST_POINTS) -> list[int]:
    """Return which of so many points to draw: first and last, and those between at even distances."""
    if count <= most:
        return list(range(count))
    return sorted({round(index * (count - 1) / (most - 1)) for index in range(most)})


def lines_of(topic: ComparisonGroup, cells: Sequence[Configuration], *varying: str) -> dict[str, list[Configuration]]:
    """Return cells by the name of the line that they lie on: they differ in the varying axes alone."""
    found: dict[str, list[Configuration]] = {}
    for cell in cells:
        found.setdefault(topic.label(cell, *varying), []).append(cell)
    return found


def _drawable(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
