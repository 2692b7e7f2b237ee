"""Parts of plotly figures in the page's style, as plain dictionaries: plotly's classes take a second for 300 charts.

Anyone may have written the names and messages in records: all text for plotly goes through `escape`.
"""

import html
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from castwise.analysis.statistics import Estimate, has_interval
from castwise.render.theme import FAINT, INK, STACK, ink_on, look_of

MAX_BARS = 60
MAX_LINES = 16
MAX_POINTS = 200  # of a line: few screens show more
HALF_PAGE, PICTURE, PHONE = 480, 820, 225  # pixels between the axes
LEGEND_ROW, PHONE_LEGEND_ROW = 20, 17  # pixels
_LEGEND_MARK, _LEGEND_LETTER = 45, 7.3  # pixels that plotly takes for the mark and the gap, and for a letter
_PANEL_GAP, _TITLED_GAP = 26, 76  # pixels between panels, and between panels whose axes all have a title
_AROUND = 90  # pixels above and below panels: one row of a legend, numbers and title of the lowest axis
_MAX_NAME = 120  # characters
_MAX_LEVEL_FIGURES, _MAX_FIGURES = 8, 32  # bars of a panel with level figures in them, and with any
_TALL_BAR = 0.3  # of the highest bar: a figure fits into it
_PATTERNS = ("", "/", ".")  # of a stack's parts when the colours are used up
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")

Document = dict[str, Any]


def escape(text: object) -> str:
    """Return text that plotly prints as it is: plotly takes a few HTML tags for formatting, and links for links."""
    words = str(text)
    return html.escape(words if len(words) <= _MAX_NAME else words[: _MAX_NAME - 1] + "…", quote=False)


def wrap(text: str, width: int) -> str:
    """Return text that plotly prints on lines of at most `width` characters."""
    return "<br>".join(escape(line) for line in textwrap.wrap(text, width)) or "–"


def hover(lines: Sequence[str]) -> str:
    """Return the text at the pointer, one line each; empty lines are left out."""
    return "<br>".join(escape(line) for line in lines if line)


def hover_template(lines: Sequence[str], values: str) -> str:
    """Return the text at the pointer of a line; `values` is the part with plotly's placeholders: "%{y:.4g} W"."""
    first, *others = (escape(each).replace("%{", "&#37;{") for each in lines if each)
    return "<br>".join([first, values, *others]) + "<extra></extra>"


def interval_text(found: Estimate | None, form: Callable[[float], str]) -> str:
    """Return the 95 % interval of a figure in words; empty if there is no figure."""
    if found is not None and has_interval(found):
        return f"95 % interval {form(found.low)} to {form(found.high)}, {found.n} processes"
    return "no interval: one process" if found is not None and found.n < 2 else ""


def error_bars(found: Sequence[Estimate | None]) -> Document | None:
    """Return the intervals of a trace's points; None if no point has one."""
    if not any(has_interval(each) for each in found):
        return None
    return {
        "type": "data",
        "symmetric": False,
        "array": [each.high - each.value if each and has_interval(each) else 0 for each in found],
        "arrayminus": [each.value - each.low if each and has_interval(each) else 0 for each in found],
        "color": INK,
        "thickness": 1.5,
        "width": 5,
    }


def axis(title: str = "", **settings: Any) -> Document:
    """Return an axis in the page's style."""
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


def names_axis(**settings: Any) -> Document:
    """Return an axis of names, which plotly must not take for numbers or dates."""
    return axis(type="category", showgrid=False, **settings)


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
            "traceorder": "normal",
            "tracegroupgap": 2,
            "maxheight": 1,
        },
        "hoverlabel": {"align": "left", "namelength": -1},
        "dragmode": False,
        "bargap": 0.25,
        **settings,
    }


def panels(y_titles: Sequence[str], x_titles: Sequence[str], height: int = 190, **x_settings: Any) -> Document:
    """Return a layout of panels below each other, from the top; `panel(i)` puts a trace into panel i.

    A panel with an empty x title shares the axis below it. The height is a panel's, in pixels.
    """
    count = len(y_titles)
    gap = _TITLED_GAP if all(x_titles) else _PANEL_GAP
    total = height * count + gap * (count - 1)
    document = layout(total + _AROUND)
    for index, (y_title, x_title) in enumerate(zip(y_titles, x_titles, strict=True)):
        top = 1 - index * (height + gap) / total
        place = panel(index)
        x_name, y_name = place["xaxis"].replace("x", "xaxis"), place["yaxis"].replace("y", "yaxis")
        document[y_name] = axis(y_title, domain=[max(0.0, top - height / total), top], anchor=place["xaxis"])
        document[x_name] = axis(x_title, anchor=place["yaxis"], zeroline=False, **x_settings)
        document[x_name]["showticklabels"] = bool(x_title)
    return document


def panel(index: int) -> Document:
    """Return the settings that put a trace into a panel, counted from the top."""
    number = "" if index == 0 else str(index + 1)
    return {"xaxis": f"x{number}", "yaxis": f"y{number}"}


def rule_at_one(across: str = "y") -> Document:
    """Return a dotted line over the whole panel at the value 1 of an axis, "x" or "y"."""
    along = "x" if across == "y" else "y"
    return {
        "type": "line",
        f"{along}ref": "paper",
        f"{along}0": 0,
        f"{along}1": 1,
        f"{across}0": 1,
        f"{across}1": 1,
        "line": {"color": INK, "width": 1, "dash": "dot"},
        "layer": "between",  # over the grid, and below the figures in bars
    }


def bars(
    names: Sequence[str], values: Sequence[float | None], colour: str | list[str], hovers: list[str], **settings: Any
) -> Document:
    """Return a trace of bars; they lie if `settings` has the orientation "h"."""
    along, across = ("y", "x") if settings.get("orientation") == "h" else ("x", "y")
    return {
        "type": "bar",
        along: list(names),
        across: list(values),
        "marker": {"color": colour, "line": {"color": INK, "width": 0.5}},
        "hovertext": hovers,
        "hoverinfo": "text",
        **settings,
    }


@dataclass(frozen=True)
class Bar:
    """An upright bar with its figure; without one it has no height."""

    name: str
    precision: str
    found: Estimate | None
    label: str
    pattern: str  # plotly's, empty for none
    hover: str


def labelled_bars(shown: Sequence[Bar], highest: float, num_bars: int, **settings: Any) -> Document:
    """Return upright bars with their figures in them, or over those that are short or have a pattern.

    `highest` and `num_bars` are of the whole panel: figures in many bars are written upwards, in very many left out.
    """
    found = [bar.found for bar in shown]
    colours = [look_of(bar.precision).colour for bar in shown]
    values = [each.value if each else 0.0 for each in found]
    trace = bars([bar.name for bar in shown], values, colours, [bar.hover for bar in shown], **settings)
    trace["marker"]["pattern"] = {"shape": [bar.pattern for bar in shown]}
    return trace | {
        "error_y": error_bars(found),
        "text": [bar.label for bar in shown] if num_bars <= _MAX_FIGURES else None,
        "textposition": [
            "inside" if not bar.pattern and value >= _TALL_BAR * highest > 0 else "outside"
            for bar, value in zip(shown, values, strict=True)
        ],
        "textangle": -90 if num_bars > _MAX_LEVEL_FIGURES else 0,
        "constraintext": "inside",
        "insidetextanchor": "start" if any(has_interval(each) for each in found) else "end",
        "insidetextfont": {"color": [ink_on(colour) for colour in colours]},
        "cliponaxis": False,
    }


def bar_range(traces: Sequence[Document]) -> list[float] | None:
    """Return the range of labelled bars' axis, with room for figures over tall bars; None if all bars have height 0."""
    tops = []
    for trace in traces:
        above = trace["error_y"]["array"] if trace["error_y"] else [0] * len(trace["y"])
        tops += [(y + up, place) for y, up, place in zip(trace["y"], above, trace["textposition"], strict=True)]
    highest = max((top for top, _ in tops), default=0.0)
    has_figure_above = any(place == "outside" and top > 0.75 * highest for top, place in tops)
    return [0, (1.25 if has_figure_above else 1.05) * highest] if highest else None


def stacked_bars(
    names: Sequence[str], parts: Sequence[tuple[str, list[float], list[str]]], **settings: Any
) -> list[Document]:
    """Return bars of parts on top of each other; parts that are 0 everywhere are left out.

    A part is its title, with a value and a text at the pointer for each bar.
    """
    traces = []
    for number, (title, values, hovers) in enumerate(parts):
        if any(values):
            trace = bars(names, values, STACK[number % len(STACK)], hovers, name=title, **settings)
            trace["marker"]["pattern"] = {"shape": _PATTERNS[number // len(STACK) % len(_PATTERNS)]}
            traces.append(trace)
    return traces


def line(
    name: str, precision: str, x: Sequence[float], y: Sequence[float | None], texts: Sequence[str] | str, place: int = 0
) -> Document:
    """Return a line with markers in a precision's look; only lines of the first panel are in the legend.

    `texts` is the text at the pointer of each point, or plotly's template for all.
    """
    look = look_of(precision)
    hover_texts = (
        {"hovertemplate": texts} if isinstance(texts, str) else {"hovertext": list(texts), "hoverinfo": "text"}
    )
    return {
        "type": "scatter",
        "mode": "lines" if len(x) > 40 else "lines+markers",
        "name": wrap(name, 44),  # as many characters as a phone has room for
        "legendgroup": escape(name),
        "x": list(x),
        "y": [value if value is not None and math.isfinite(value) else None for value in y],
        "line": {"color": look.colour, "dash": look.dash, "width": 2},
        "marker": {"color": look.colour, "symbol": look.marker, "size": 8},
        **hover_texts,
        **panel(place),
        "showlegend": place == 0,
    }


def vary_lines(lines: Sequence[Document]) -> None:
    """Give lines of one colour different dashes and markers; lines of one legend group stay alike."""
    groups: dict[str, list[str]] = {}
    for trace in lines:
        of_colour = groups.setdefault(trace["line"]["color"], [])
        if trace["legendgroup"] not in of_colour:
            of_colour.append(trace["legendgroup"])
        variant = of_colour.index(trace["legendgroup"])
        dash = trace["line"]["dash"]
        first = _DASHES.index(dash) if dash in _DASHES else 0
        trace["line"]["dash"] = _DASHES[(first + variant) % len(_DASHES)]
        trace["marker"]["symbol"] += "-open" if variant % 2 else ""


def downsample(count: int, most: int = MAX_POINTS) -> list[int]:
    """Return which of `count` points to draw: the first, the last, and points at even distances between them."""
    if count <= most:
        return list(range(count))
    return sorted({round(index * (count - 1) / (most - 1)) for index in range(most)})


def legend_rows(traces: Sequence[Document], width: int) -> int:
    """Return how many rows a horizontal legend takes at most in a width in pixels; 0 without a legend."""
    shown = [trace for trace in traces if trace.get("name") and trace.get("showlegend", True)]
    groups = {trace.get("legendgroup", trace["name"]): trace["name"] for trace in shown}
    widths = [_LEGEND_MARK + _LEGEND_LETTER * len(html.unescape(name)) for name in groups.values()]
    if sum(widths) <= width:
        return min(1, len(widths))
    return math.ceil(len(widths) / max(1, width // max(widths)))
