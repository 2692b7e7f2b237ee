"""Bars, lines and dots as SVG, with axes and legends: text in, text out.

Colours that depend on the theme are CSS variables of the page; `standalone` puts those of the light theme in their
place. Anyone may have written the names and messages in records: all text goes through `escape`.
"""

import html
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from castwise.render.theme import FAINT, INK, LIGHT, PAGE, SOFT

WIDE, NARROW = 640, 340  # pixels; each chart is drawn for a computer and for a phone
_SIZE = 13  # pixels, of letters
_LETTER = 0.56 * _SIZE  # mean width
_ROW, _LINE, _BAR = 24, 15, 16  # pixels: a row of bars or dots, a further line of its label, the bar
_LABEL_SHARE = 0.42  # of the width, at most, that labels take
_LEGEND_ROW, _MARK = 20, 24
_PANEL, _GAP = 150, 20
_MAX_TEXT = 160  # characters
_DASHES = {"dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3", "longdash": "12 4", "longdashdot": "12 3 2 3"}
_SHAPES = {  # of a marker with radius 1, as the points of a polygon
    "square": "-.9,-.9 .9,-.9 .9,.9 -.9,.9",
    "diamond": "0,-1.3 1.3,0 0,1.3 -1.3,0",
    "triangle-up": "0,-1.2 1.2,1 -1.2,1",
    "triangle-down": "0,1.2 1.2,-1 -1.2,-1",
    "hexagon": "-1.1,0 -.55,-1 .55,-1 1.1,0 .55,1 -.55,1",
    "star": "0,-1.5 .4,-.5 1.4,-.5 .6,.2 .9,1.3 0,.6 -.9,1.3 -.6,.2 -1.4,-.5 -.4,-.5",
    "cross": "-.4,-1.2 .4,-1.2 .4,-.4 1.2,-.4 1.2,.4 .4,.4 .4,1.2 -.4,1.2 -.4,.4 -1.2,.4 -1.2,-.4 -.4,-.4",
    "x": "0,.6 .7,1.3 1.3,.7 .6,0 1.3,-.7 .7,-1.3 0,-.6 -.7,-1.3 -1.3,-.7 -.6,0 -1.3,.7 -.7,1.3",
}
HATCH = (
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    f'<rect width="6" height="6" fill="{PAGE}" fill-opacity=".55"/><path d="M0 0V6" stroke="{INK}" stroke-width="2"/>'
    "</pattern>"
)


@dataclass(frozen=True)
class Key:
    """An entry of a legend."""

    name: str
    colour: str
    marker: str = "square"
    dash: str = ""  # a line of this kind; empty for a marker alone


@dataclass(frozen=True)
class Segment:
    """A part of a bar."""

    value: float
    colour: str
    tip: str = ""  # the text at the pointer


@dataclass(frozen=True)
class Bar:
    """A lying bar with its name on the left and its figure on the right."""

    name: str
    segments: Sequence[Segment]
    text: str = ""
    interval: tuple[float, float] | None = None
    is_hatched: bool = False  # the run did not end well


@dataclass(frozen=True)
class Dot:
    """A marker on a horizontal axis."""

    value: float
    colour: str
    marker: str = "circle"
    tip: str = ""
    interval: tuple[float, float] | None = None
    is_ringed: bool = False
    is_crossed: bool = False  # the run did not end well


@dataclass(frozen=True)
class Line:
    """Points that are connected, or markers alone if there is no dash."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    marker: str = "circle"
    dash: str = "solid"
    tips: Sequence[str] = ()  # one for each point, or one for all
    intervals: Sequence[tuple[float, float] | None] = ()


@dataclass(frozen=True)
class Panel:
    """Lines over a common axis; panels are below each other."""

    y_title: str
    lines: Sequence[Line]
    x_title: str = ""  # empty if the panel below has the same axis
    x_ticks: Sequence[float] = ()  # empty for even ones
    is_log: bool = False  # the horizontal axis
    from_zero: bool = False
    least_span: float = 0.0  # of the vertical axis, as a share of the highest value: noise is not magnified


@dataclass(frozen=True)
class Axis:
    """A horizontal axis: where values are, and the numbers on it."""

    low: float
    high: float
    ticks: Sequence[float]
    label: Callable[[float], str]
    rule: float | None = None  # where a dotted line is
    is_log: bool = False

    def at(self, value: float, left: float, width: float) -> float:
        """Return the place of a value on `width` pixels from `left`."""
        low, high, value = (
            (math.log(each) if self.is_log else each)
            for each in (self.low, self.high, min(max(value, self.low), self.high))
        )
        return round(left + width * (value - low) / ((high - low) or 1), 1)


@dataclass(frozen=True)
class Drawing:
    """A picture of a chart."""

    width: float
    height: float
    body: str

    def inline(self, label: str = "", kind: str = "") -> str:
        """Return it as an element of a page."""
        named = f' role="img" aria-label="{escape(label)}"' if label else ""
        size = f'viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}" height="{self.height:g}"'
        return f'<svg class="{kind}" {size}{named}>{self.body}</svg>'


def standalone(drawing: Drawing, title: str, context: str) -> str:
    """Return a drawing as an SVG file in light colours, with a title and what it is of."""
    lines = textwrap.wrap(title, 68) + textwrap.wrap(context, 88)
    num_titles = len(textwrap.wrap(title, 68))
    heads = [
        text(
            12,
            26 + 20 * number,
            line,
            size=17 if number < num_titles else _SIZE,
            fill=INK if number < num_titles else SOFT,
        )
        for number, line in enumerate(lines)
    ]
    top = 26 + 20 * len(lines)
    width, height = drawing.width + 24, top + drawing.height + 12
    whole = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="Helvetica, Arial, sans-serif"><defs>{HATCH}</defs>'
        f'<rect width="100%" height="100%" fill="{PAGE}"/>{"".join(heads)}'
        f'<g transform="translate(12 {top})">{drawing.body}</g></svg>\n'
    )
    for name, colour in LIGHT.items():
        whole = whole.replace(name, colour)
    return whole


def escape(words: object) -> str:
    """Return text for an element or an attribute, without what XML does not allow."""
    line = "".join(each if each.isprintable() else " " for each in str(words))
    return html.escape(line if len(line) <= _MAX_TEXT else line[: _MAX_TEXT - 1] + "…")


def text(x: float, y: float, words: str, anchor: str = "", size: int = _SIZE, fill: str = INK) -> str:
    """Return a line of text; its anchor is empty, "middle" or "end"."""
    anchored = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}"{anchored}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str = INK, width: float = 1, dash: str = "") -> str:
    """Return a straight line."""
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke="{colour}" stroke-width="{width:g}"{dashed}/>'


def marker(x: float, y: float, shape: str, colour: str, radius: float = 5, tip: str = "") -> str:
    """Return a marker with the text at the pointer; a shape that ends on "-open" is not filled."""
    name, is_open = shape.removesuffix("-open"), shape.endswith("-open")
    look = f'fill="{PAGE if is_open else colour}" stroke="{colour if is_open else INK}" stroke-width="{2 if is_open else 0.5}"'
    title = f"<title>{escape(tip)}</title>" if tip else ""
    if name == "ring":
        return f'<circle cx="{x:g}" cy="{y:g}" r="9" fill="none" stroke="{INK}" stroke-width="2">{title}</circle>'
    if name not in _SHAPES:
        return f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" {look}>{title}</circle>'
    points = " ".join(
        f"{x + radius * float(a):.1f},{y + radius * float(b):.1f}"
        for a, b in (pair.split(",") for pair in _SHAPES[name].split())
    )
    return f'<polygon points="{points}" {look}>{title}</polygon>'


def nice_ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most so many round numbers from `low` to `high`."""
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [low]
    power = math.floor(math.log10(span)) - 2
    steps = (mantissa * 10.0**exponent for exponent in range(power, power + 5) for mantissa in (1, 2, 5))
    step = next(each for each in steps if math.floor(high / each) - math.ceil(low / each) + 1 <= most)
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most so many of 1, 2, 5, 10 and so on from `low` to `high`."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for mantissas in ((1, 2, 5), (1, 3), (1,)):
        found = [m * 10.0**n for n in decades for m in mantissas if low <= m * 10.0**n <= high]
        if len(found) <= most:
            break
    return found


def number(value: float) -> str:
    """Return a number of an axis: `12,000`, `0.25`."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}".replace("-", "−")


def scale(high: float, width: float, low: float = 0.0) -> Axis:
    """Return an axis with numbers for `width` pixels."""
    return Axis(low, high, nice_ticks(low, high, max(2, int(width / 75))), number)


def legend(keys: Sequence[Key], width: float, top: float = 0) -> tuple[str, float]:
    """Return a legend and the place below it."""
    parts, x, y = [], 0.0, top + 12
    for key in keys:
        name = (
            key.name
            if len(key.name) * _LETTER + _MARK < width
            else key.name[: int((width - _MARK) / _LETTER) - 1] + "…"
        )
        own = _MARK + len(name) * _LETTER + 12
        if x and x + own > width:
            x, y = 0.0, y + _LEGEND_ROW
        if key.dash:
            parts.append(line(x, y - 4, x + 18, y - 4, key.colour, 2, _DASHES.get(key.dash, "")))
        shape = marker(x + 9, y - 4, key.marker, key.colour, 4.5)
        if key.marker == "hatch":
            shape = f'<rect x="{x + 3:g}" y="{y - 10:g}" width="12" height="12" fill="url(#hatch)" stroke="{INK}"/>'
        parts += [shape, text(x + _MARK, y, name)]
        x += own
    return "".join(parts), y + 8 if keys else top


def bar_chart(bars: Sequence[Bar], width: int, title: str, keys: Sequence[Key] = (), high: float = 0.0) -> Drawing:
    """Return lying bars from 0 on; the title is that of the axis."""
    keys = [*keys, Key("did not end well", INK, "hatch")] if any(bar.is_hatched for bar in bars) else keys
    head, top = legend(keys, width)
    names, left = _labels([bar.name for bar in bars], width)
    room = max((len(bar.text) for bar in bars), default=0) * _LETTER + 14
    if width - left - room < 0.25 * width:  # figures are on lines of their own
        names, left, room = (
            [[*lines, bar.text] if bar.text else lines for lines, bar in zip(names, bars, strict=True)],
            left,
            8,
        )
    is_below = room == 8
    ends = (sum(max(0.0, s.value) for s in bar.segments) for bar in bars)
    highs = (bar.interval[1] for bar in bars if bar.interval)
    axis = scale(max([high, *ends, *highs]) or 1.0, width - left - room)
    span = width - left - room
    parts, y = [head], top
    for bar, lines in zip(bars, names, strict=True):
        height = _ROW + _LINE * (len(lines) - 1)
        middle = y + height / 2
        parts.append(_label(lines, left, middle))
        at = 0.0
        for segment in bar.segments:
            x1, x2 = axis.at(at, left, span), axis.at(at + segment.value, left, span)
            shape = f'<rect x="{x1:g}" y="{middle - _BAR / 2:g}" width="{max(0.0, x2 - x1):.1f}" height="{_BAR}"'
            tip = f"<title>{escape(segment.tip)}</title>" if segment.tip else ""
            outline = f' stroke="{INK}" stroke-width=".5"' if segment.value > 0 else ""
            parts.append(f'{shape} fill="{segment.colour}"{outline}>{tip}</rect>')
            if bar.is_hatched:
                parts.append(f'{shape} fill="url(#hatch)">{tip}</rect>')
            at += max(0.0, segment.value)
        if bar.interval:
            parts.append(_whisker(bar.interval, axis, left, span, middle))
        if not is_below:
            end = axis.at(max(at, bar.interval[1] if bar.interval else 0.0), left, span)
            parts.append(text(end + 7, middle + 4.5, bar.text))
        y += height
    grid, bottom = _grid(axis, left, span, top, y, title)
    return Drawing(width, bottom, grid + "".join(parts))


def dot_chart(
    rows: Sequence[tuple[str, Sequence[Dot], str]], width: int, axis: Axis, title: str, keys: Sequence[Key] = ()
) -> Drawing:
    """Return rows of dots on one axis, each with its name and a figure on the right."""
    head, top = legend(keys, width)
    names, left = _labels([name for name, _, _ in rows], width)
    room = max((len(figure) for _, _, figure in rows), default=0) * _LETTER + 14
    span = width - left - room
    parts, y = [head], top
    for (_, dots, figure), lines in zip(rows, names, strict=True):
        height = _ROW + _LINE * (len(lines) - 1)
        middle = y + height / 2
        shift = 6.0 if len(dots) > 1 else 0.0
        parts.append(_label(lines, left, middle))
        for place, dot in enumerate(dots):
            parts.append(_dot(dot, axis, left, span, middle + shift * (place - (len(dots) - 1) / 2)))
        parts.append(text(width, middle + 4.5, figure, "end"))
        y += height
    grid, bottom = _grid(axis, left, span, top, y, title)
    return Drawing(width, bottom, grid + "".join(parts))


def strip(dots: Sequence[Dot], axis: Axis, width: int, height: int = 26) -> Drawing:
    """Return dots on one line of a table whose axis all lines share; what is ringed comes last, above the others."""
    margin = 9
    span = width - 2 * margin
    parts = [line(x := axis.at(tick, margin, span), 0, x, height, FAINT) for tick in axis.ticks]
    if axis.rule is not None:
        parts.append(line(x := axis.at(axis.rule, margin, span), 0, x, height, INK, 1, "2 3"))
    ordered = sorted(dots, key=lambda dot: (dot.is_ringed, dot.is_crossed))
    parts += [_dot(dot, axis, margin, span, height / 2) for dot in ordered]
    return Drawing(width, height, "".join(parts))


def strip_axis(axis: Axis, width: int) -> Drawing:
    """Return the numbers above the lines of a table of strips."""
    labels = [text(axis.at(tick, 9, width - 18), 12, axis.label(tick), "middle", 12, SOFT) for tick in axis.ticks]
    return Drawing(width, 16, "".join(labels))


def line_chart(panels: Sequence[Panel], width: int) -> Drawing:
    """Return panels of lines below each other, with one legend."""
    once = {entry.name: entry for panel in panels for entry in panel.lines if entry.name}
    keys = [Key(each.name, each.colour, each.marker, each.dash) for each in once.values()]
    head, top = legend(keys if len(keys) > 1 else [], width)
    left = 62.0
    parts = [head]
    for panel in panels:
        body, top = _panel(panel, left, width - left - 14, top + 18)
        parts.append(body)
    return Drawing(width, top, "".join(parts))


def _panel(panel: Panel, left: float, span: float, top: float) -> tuple[str, float]:
    """Return a panel and the place below it."""
    points = [point for each in panel.lines for point in each.points if math.isfinite(point[1])]
    ends = [end for each in panel.lines for interval in each.intervals if interval for end in interval]
    xs, ys = [x for x, _ in points] or [0.0], [*(y for _, y in points), *ends] or [0.0]
    low, high = (0.0 if panel.from_zero else min(ys)), max(ys)
    least = max(panel.least_span * abs(high), 1e-9)
    if high - low < least:
        low, high = (low + high - least) / 2, (low + high + least) / 2
    pad = 0.06 * (high - low)
    vertical = Axis(low if panel.from_zero else low - pad, high + pad, nice_ticks(low, high + pad, 5), number)
    across = replace(scale(max(xs), span, min(xs)), is_log=panel.is_log)
    if panel.x_ticks:
        across = replace(across, ticks=_spaced(panel.x_ticks, across, span))
    bottom = top + _PANEL

    def place(x: float, y: float) -> tuple[float, float]:
        return across.at(x, left + 8, span - 16), bottom + top - vertical.at(y, top, _PANEL)

    parts = [text(0, top - 6, panel.y_title, fill=SOFT)]
    for tick in vertical.ticks:
        _, y = place(across.low, tick)
        parts += [line(left, y, left + span, y, FAINT), text(left - 6, y + 4, number(tick), "end", 12)]
    for entry in panel.lines:
        known = [(n, *place(*point)) for n, point in enumerate(entry.points) if math.isfinite(point[1])]
        tips = list(entry.tips) if len(entry.tips) == len(entry.points) else [""] * len(entry.points)
        if entry.dash and len(known) > 1:
            whole = f"<title>{escape(entry.tips[0])}</title>" if len(entry.tips) == 1 else ""
            path = " ".join(f"{x:g},{y:g}" for _, x, y in known)
            dash = f' stroke-dasharray="{_DASHES[entry.dash]}"' if entry.dash in _DASHES else ""
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{entry.colour}" stroke-width="2"{dash}>{whole}</polyline>'
            )
        for n, x, y in known if entry.marker and (len(known) <= 40 or not entry.dash) else ():
            if n < len(entry.intervals) and (interval := entry.intervals[n]):
                parts.append(line(x, place(0, interval[0])[1], x, place(0, interval[1])[1], INK, 1.5))
            parts.append(marker(x, y, entry.marker, entry.colour, 4.5, tips[n] or " ".join(entry.tips[:1])))
    parts.append(line(left, bottom, left + span, bottom, INK))
    if not panel.x_title:
        return "".join(parts), bottom + _GAP
    for tick in across.ticks:
        x, _ = place(tick, vertical.low)
        parts += [line(x, bottom, x, bottom + 4), text(x, bottom + 18, number(tick), "middle", 12)]
    parts.append(text(left + span / 2, bottom + 36, panel.x_title, "middle", fill=SOFT))
    return "".join(parts), bottom + 46


def _spaced(ticks: Iterable[float], axis: Axis, span: float) -> list[float]:
    """Return those of the ticks whose numbers do not touch each other."""
    kept: list[float] = []
    for tick in sorted(set(ticks)):
        if not kept or axis.at(tick, 0, span) - axis.at(kept[-1], 0, span) > 38:
            kept.append(tick)
    return kept


def _labels(names: Sequence[str], width: int) -> tuple[list[list[str]], float]:
    """Return names on as many lines as they need, and the pixels that they take."""
    most = max(8, int(_LABEL_SHARE * width / _LETTER))
    lines = [textwrap.wrap(name, most)[:3] or ["–"] for name in names]
    longest = max((len(each) for own in lines for each in own), default=0)
    return lines, round(longest * _LETTER + 10)


def _label(lines: Sequence[str], left: float, middle: float) -> str:
    first = middle + 4.5 - _LINE * (len(lines) - 1) / 2
    return "".join(text(left - 8, first + _LINE * place, words, "end") for place, words in enumerate(lines))


def _dot(dot: Dot, axis: Axis, left: float, span: float, y: float) -> str:
    x = axis.at(dot.value, left, span)
    interval = _whisker(dot.interval, axis, left, span, y) if dot.interval else ""
    if dot.is_crossed:
        tip = f"<title>{escape(dot.tip)}</title>"
        cross = f"M{x - 4:g} {y - 4:g}l8 8m0 -8l-8 8"
        return (
            f'<g><path d="{cross}" stroke="{PAGE}" stroke-width="5"/><path d="{cross}" stroke="{dot.colour}" '
            f'stroke-width="2.5"/><circle cx="{x:g}" cy="{y:g}" r="6" fill="{PAGE}" fill-opacity="0">{tip}</circle></g>'
        )
    if not dot.is_ringed:
        return interval + marker(x, y, dot.marker, dot.colour, 5, dot.tip)
    ring = f'<circle cx="{x:g}" cy="{y:g}" r="8.5" fill="{PAGE}" stroke="{INK}" stroke-width="2"/>'
    return ring + interval + marker(x, y, dot.marker, dot.colour, 5, dot.tip)


def _whisker(interval: tuple[float, float], axis: Axis, left: float, span: float, y: float) -> str:
    x1, x2 = (axis.at(end, left, span) for end in interval)
    ends = "".join(line(x, y - 4, x, y + 4, INK, 1.5) for x in (x1, x2))
    return line(x1, y, x2, y, INK, 1.5) + ends


def _grid(axis: Axis, left: float, span: float, top: float, bottom: float, title: str) -> tuple[str, float]:
    """Return grid, numbers and title of a horizontal axis, and the place below them."""
    parts = []
    for tick in axis.ticks:
        x = axis.at(tick, left, span)
        parts += [line(x, top, x, bottom, FAINT), text(x, bottom + 15, axis.label(tick), "middle", 12)]
    if axis.rule is not None:
        x = axis.at(axis.rule, left, span)
        parts.append(line(x, top, x, bottom, INK, 1, "2 3"))
    parts.append(text(left + span / 2, bottom + 33, title, "middle", fill=SOFT))
    return "".join(parts), bottom + 40
