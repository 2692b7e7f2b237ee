"""Bars, lines and dots as SVG, with axes and legends: text in, text out.

Colours that depend on the theme are CSS variables of the page. Anyone may have written the names and messages in
records: all text goes through `escape`.
"""

import html
import itertools
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from castwise.show.theme import FAINT, INK, PAGE, SOFT

WIDE, NARROW = 640, 340  # pixels; each chart is drawn for a computer and for a phone
_SIZE = 13  # pixels, of letters
_LETTER = 0.56 * _SIZE  # mean width
_ROW, _LINE, _BAR = 24, 15, 16  # pixels: a row of bars or dots, a further line of its label, the bar
_LEAST_SEGMENT = 0.5  # pixels: of a thinner part of a bar one would see its outline alone
_MAY_BREAK = "\u200b"
_LEGEND_ROW, _MARK = 20, 24
_PANEL = 150  # pixels, of a panel's height
_LONGEST_WHISKER = 2.0  # times the largest value that is drawn
_MAX_TEXT = 240  # characters
_DASHES = {"dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3", "longdash": "12 4", "longdashdot": "12 3 2 3"}
_SHAPES = {  # of a marker with radius 1, as the points of a polygon
    "square": "-.9,-.9 .9,-.9 .9,.9 -.9,.9",
    "diamond": "0,-1.3 1.3,0 0,1.3 -1.3,0",
    "triangle-up": "0,-1.2 1.2,1 -1.2,1",
    "triangle-down": "0,1.2 1.2,-1 -1.2,-1",
    "triangle-left": "-1.2,0 1,-1.2 1,1.2",
    "triangle-right": "1.2,0 -1,-1.2 -1,1.2",
    "pentagon": "0,-1.2 1.15,-.4 .7,1 -.7,1 -1.15,-.4",
    "hexagon": "-1.1,0 -.55,-1 .55,-1 1.1,0 .55,1 -.55,1",
    "hourglass": "-1.1,-1.2 1.1,-1.2 -1.1,1.2 1.1,1.2",
    "bowtie": "-1.2,-1.1 -1.2,1.1 1.2,-1.1 1.2,1.1",
    "star": "0,-1.5 .4,-.5 1.4,-.5 .6,.2 .9,1.3 0,.6 -.9,1.3 -.6,.2 -1.4,-.5 -.4,-.5",
    "cross": "-.4,-1.2 .4,-1.2 .4,-.4 1.2,-.4 1.2,.4 .4,.4 .4,1.2 -.4,1.2 -.4,.4 -1.2,.4 -1.2,-.4 -.4,-.4",
    "x": "0,.6 .7,1.3 1.3,.7 .6,0 1.3,-.7 .7,-1.3 0,-.6 -.7,-1.3 -1.3,-.7 -.6,0 -1.3,.7 -.7,1.3",
}
HATCH = (
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    f'<rect width="6" height="6" fill="{PAGE}" fill-opacity=".55"/><path d="M0 0V6" stroke="{INK}" stroke-width="2"/>'
    "</pattern>"
)


_ToPixels = Callable[[float, float], tuple[float, float]]


@dataclass(frozen=True)
class Key:
    name: str
    colour: str
    marker: str = "square"
    dash: str = ""  # a line of this kind; empty for a marker alone


@dataclass(frozen=True)
class Segment:
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
class Point:
    x: float
    y: float
    tip: str = ""  # the text at the pointer
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Line:
    """Points that are connected, or markers alone if there is no dash."""

    name: str
    points: Sequence[Point]
    colour: str
    marker: str = "circle"
    dash: str = "solid"
    tip: str = ""  # the text at the pointer, of the whole line
    band: Sequence[tuple[float, float]] = ()  # from where to where values reach at each point, as a shaded area


@dataclass(frozen=True)
class Panel:
    """Lines over a common axis; panels are below each other."""

    y_title: str
    lines: Sequence[Line]
    x_title: str
    x_ticks: Sequence[float] = ()  # empty for even ones
    is_log: bool = False  # the horizontal axis
    from_zero: bool = False


@dataclass(frozen=True)
class Axis:
    """A horizontal axis: where values are, and the numbers on it."""

    low: float
    high: float
    ticks: Sequence[float]
    label: Callable[[float], str]
    rule: float | None = None  # where a dotted line is
    band: tuple[float, float] | None = None  # from where to where it is shaded
    is_log: bool = False

    def at(self, value: float, left: float, width: float) -> float:
        """Return the place of a value on `width` pixels from `left`."""
        ends = (self.low, self.high, min(max(value, self.low), self.high))
        low, high, inside = map(math.log, ends) if self.is_log else ends
        return round(left + width * (inside - low) / ((high - low) or 1), 1)


@dataclass(frozen=True)
class Drawing:
    width: float
    height: float
    body: str

    def inline(self, label: str, kind: str = "") -> str:
        """Return it as an element of a page; the label is for those who do not see it."""
        size = f'viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}" height="{self.height:g}"'
        return f'<svg class="{kind}" {size} role="img" aria-label="{escape(label)}">{self.content}</svg>'

    @property
    def content(self) -> str:
        """Return the elements in a group that has the look of most text, which `text` leaves out."""
        return f'<g font-size="{_SIZE}" fill="{INK}">{self.body}</g>'


def escape(words: object) -> str:
    """Return text for an element or an attribute, without what XML does not allow."""
    line = "".join(each if each.isprintable() or each == "\n" else " " for each in str(words))
    return html.escape(line if len(line) <= _MAX_TEXT else line[: _MAX_TEXT - 1] + "…")


def mark_breaks(words: str, longest: int, mark: str) -> str:
    """Return text with marks between the parts of words of more letters, such as names of models."""
    long = rf"\S{{{longest + 1},}}"
    return re.sub(long, lambda word: re.sub(r"(?<=[_:/-])(?=\w)|(?<=\.)(?=[a-z])", mark, word[0]), words)


def text(x: float, y: float, words: str, anchor: str = "", size: int = _SIZE, fill: str = INK) -> str:
    """Return a line of text; its anchor is empty, "middle" or "end"."""
    look = "".join(
        f' {name}="{value}"'
        for name, value, usual in (("font-size", size, _SIZE), ("fill", fill, INK), ("text-anchor", anchor, ""))
        if value != usual
    )
    return f'<text x="{x:g}" y="{y:g}"{look}>{escape(words)}</text>'


def path(shape: str, colour: str = INK, width: float = 1, dash: str = "") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="{shape}" fill="none" stroke="{colour}" stroke-width="{width:g}"{dashed}/>'


def markers(centres: Sequence[tuple[float, float]], shape: str, colour: str, radius: float = 5, tip: str = "") -> str:
    """Return markers of one look as one element, which is a third as long as an element for each.

    A shape that ends on "-open" is not filled. The tip is the text at the pointer.
    """
    name, is_open = shape.removesuffix("-open"), shape.endswith("-open")
    fill, stroke, width = (PAGE, colour, 2) if is_open else (colour, INK, 0.5)
    if name == "ring":
        radius, fill, stroke, width = 9, "none", INK, 2
    points = (point.split(",") for point in _SHAPES.get(name, "").split())
    pairs = [(radius * float(a), radius * float(b)) for a, b in points]
    if pairs:
        left, top = pairs[0]
        steps = (f"{x2 - x1:.1f} {y2 - y1:.1f}" for (x1, y1), (x2, y2) in itertools.pairwise(pairs))
        outline = f"l{' '.join(steps)}z"
    else:
        left, top, arc = -radius, 0.0, f"a{radius:g} {radius:g} 0 1 0"
        outline = f"{arc} {2 * radius:g} 0{arc} {-2 * radius:g} 0z"
    shapes = "".join(f"M{x + left:.1f} {y + top:.1f}{outline}" for x, y in centres)
    return f'<path d="{shapes}" fill="{fill}" stroke="{stroke}" stroke-width="{width}">{_tip(tip)}</path>'


def nice_ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most so many round numbers from `low` to `high`."""
    if not (high > low and math.isfinite(high - low)):
        return [low]
    power = math.floor(math.log10(high - low)) - 2
    steps = (mantissa * 10.0**exponent for exponent in range(power, power + 5) for mantissa in (1, 2, 5))
    step = next(each for each in steps if math.floor(high / each) - math.ceil(low / each) + 1 <= most)
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most so many of 1, 2, 5, 10 and so on from `low` to `high`."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = ([m * 10.0**n for n in decades for m in each] for each in ((1, 2, 5), (1, 3), (1,)))
    found = [[tick for tick in ticks if low <= tick <= high] for ticks in every]
    return next((ticks for ticks in found if len(ticks) <= most), found[-1][:: -(-len(found[-1]) // most)])


def number(value: float) -> str:
    """Return a number of an axis: `12,000`, `0.25`."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}".replace("-", "−")


def legend(keys: Sequence[Key], width: float) -> tuple[str, float]:
    parts, x, y = [], 0.0, 12.0
    for key in keys:
        name = textwrap.shorten(key.name, int((width - _MARK) / _LETTER), placeholder=" …")
        own = _MARK + len(name) * _LETTER + 12
        if x and x + own > width:
            x, y = 0.0, y + _LEGEND_ROW
        if key.dash:
            parts.append(path(f"M{x:g} {y - 4:g}h18", key.colour, 2, _DASHES.get(key.dash, "")))
        if key.marker:
            parts.append(markers([(x + 9, y - 4)], key.marker, key.colour, 4.5))
        parts.append(text(x + _MARK, y, name))
        x += own
    return "".join(parts), y + 8 if keys else 0.0


def bar_chart(bars: Sequence[Bar], width: int, title: str, keys: Sequence[Key] = ()) -> Drawing:
    """Return lying bars from 0 on; the title is that of the axis."""
    ends = [sum(max(0.0, part.value) for part in bar.segments) for bar in bars]
    bars = [replace(bar, interval=cut_off(bar.interval, 0.0, ends)) for bar in bars]
    high = max([*ends, *(bar.interval[1] for bar in bars if bar.interval)], default=0.0) or 1.0
    axis = Axis(0.0, high, nice_ticks(0.0, high, 5 if width > NARROW else 3), number)

    look = f' stroke="{INK}" stroke-width=".5"'

    def draw(index: int, left: float, span: float, y: float) -> str:
        bar, parts, at = bars[index], [], 0.0
        for part in bar.segments:
            x1, x2 = axis.at(at, left, span), axis.at(at + part.value, left, span)
            at += max(0.0, part.value)
            if x2 - x1 < _LEAST_SEGMENT and len(bar.segments) > 1:
                continue
            shape = f'<rect x="{x1:g}" y="{y - _BAR / 2:g}" width="{max(0.0, x2 - x1):.1f}" height="{_BAR}"'
            outline = look if part.value > 0 and len(bar.segments) == 1 else ""
            parts.append(f'{shape} fill="{part.colour}"{outline}>{_tip(part.tip)}</rect>')
            parts.append(f'{shape} fill="url(#hatch)">{_tip(part.tip)}</rect>' if bar.is_hatched else "")
        if len(bar.segments) > 1:
            parts = [f"<g{look}>{''.join(parts)}</g>"]
        parts.append(_whisker(bar.interval, axis, left, span, y))
        end = axis.at(max(at, bar.interval[1] if bar.interval else 0.0), left, span)
        return "".join(parts) + text(end + 7, y + 4.5, bar.text)

    keys = [*keys, Key("did not end well", "url(#hatch)")] if any(bar.is_hatched for bar in bars) else keys
    return _rows([bar.name for bar in bars], [bar.text for bar in bars], draw, axis, title, width, keys)


def dot_chart(
    rows: Sequence[tuple[str, Sequence[Dot], str]], width: int, axis: Axis, title: str, keys: Sequence[Key] = ()
) -> Drawing:
    """Return rows of dots on one axis, each with its name and a figure on the right."""

    def draw(index: int, left: float, span: float, y: float) -> str:
        _, dots, figure = rows[index]
        middle = (len(dots) - 1) / 2
        drawn = (draw_dot(dot, axis, left, span, y + 6 * (n - middle)) for n, dot in enumerate(dots))
        return "".join(drawn) + text(width, y + 4.5, figure, "end")

    return _rows([name for name, *_ in rows], [figure for *_, figure in rows], draw, axis, title, width, keys)


def _rows(  # noqa: PLR0913, PLR0917  all that a chart of rows is made of
    names: Sequence[str],
    figures: Sequence[str],
    draw: Callable[[int, float, float, float], str],
    axis: Axis,
    title: str,
    width: int,
    keys: Sequence[Key],
) -> Drawing:
    """Return rows with their names on the left, drawn between those and their figures, over a grid."""
    head, top = legend(keys, width)
    room = max(map(len, figures), default=0) * _LETTER + 14
    most = max(8, int(min(0.42 * width, width - room - 60) / _LETTER))  # letters of a label
    wrapper = textwrap.TextWrapper(most, max_lines=5, placeholder=" …")
    wrapper.wordsep_re = re.compile(rf"(?<!batch)(\s+)|{_MAY_BREAK}")
    labels = [wrapper.wrap(mark_breaks(name, most, _MAY_BREAK)) or ["–"] for name in names]
    left = max((len(each) for own in labels for each in own), default=0) * _LETTER + 10
    span, y, rows = width - left - room, top, []
    for index, lines in enumerate(labels):
        height = _ROW + _LINE * (len(lines) - 1)
        first = y + height / 2 + 4.5 - _LINE * (len(lines) - 1) / 2
        rows += [text(left - 8, first + _LINE * n, words, "end") for n, words in enumerate(lines)]
        rows.append(draw(index, left, span, y + height / 2))
        y += height
    xs = [axis.at(tick, left, span) for tick in axis.ticks]
    low, high = (axis.at(end, left, span) for end in axis.band or (0.0, 0.0))
    shade = f'<rect x="{low:g}" y="{top:g}" width="{high - low:g}" height="{y - top:g}" fill="{FAINT}"/>'
    grid = [shade if axis.band else "", path("".join(f"M{x:g} {top:g}V{y:g}" for x in xs), FAINT)]
    free = -math.inf
    for x, words in zip(xs, map(axis.label, axis.ticks), strict=True):
        if x - len(words) * _LETTER / 2 > free:  # numbers do not touch each other
            grid.append(text(x, y + 15, words, "middle", 12))
            free = x + len(words) * _LETTER / 2 + 4
    if axis.rule is not None:
        grid.append(path(f"M{axis.at(axis.rule, left, span):g} {top:g}V{y:g}", INK, 1, "2 3"))
    grid.append(text(min(left + span / 2, width - len(title) * _LETTER / 2), y + 33, title, "middle", fill=SOFT))
    return Drawing(width, y + 40, head + "".join(grid + rows))


def line_chart(panels: Sequence[Panel], width: int) -> Drawing:
    once = {entry.name: entry for panel in panels for entry in panel.lines if entry.name}
    keys = [Key(each.name, each.colour, each.marker, each.dash) for each in once.values()]
    head, top = legend(keys if len(keys) > 1 else [], width)
    parts = [head]
    for panel in panels:
        body, top = _panel(panel, 62, width - 76, top + 18)
        parts.append(body)
    return Drawing(width, top, "".join(parts))


def _panel(panel: Panel, left: float, span: float, top: float) -> tuple[str, float]:
    """Return a panel and the place below it."""
    points = [point for each in panel.lines for point in each.points if math.isfinite(point.y)]
    values, xs = [point.y for point in points], [point.x for point in points] or [0.0]
    vertical = _vertical_axis(panel, points)
    across = Axis(min(xs), max(xs), nice_ticks(min(xs), max(xs), int(span / 75)), number, is_log=panel.is_log)
    bottom = top + _PANEL

    def to_pixels(x: float, y: float) -> tuple[float, float]:
        return across.at(x, left + 8, span - 16), bottom + top - vertical.at(y, top, _PANEL)

    parts = [text(0, top - 6, panel.y_title, fill=SOFT)]
    for tick in vertical.ticks:
        _, y = to_pixels(across.low, tick)
        parts += [path(f"M{left:g} {y:g}h{span:g}", FAINT), text(left - 6, y + 4, number(tick), "end", 12)]
    parts += [_line(entry, values, to_pixels) for entry in panel.lines]
    parts.append(path(f"M{left:g} {bottom:g}h{span:g}"))
    last = -math.inf
    for tick in sorted(set(panel.x_ticks)) or across.ticks:
        x, _ = to_pixels(tick, vertical.low)
        if x - last > 38:  # numbers do not touch each other
            parts += [path(f"M{x:g} {bottom:g}v4"), text(x, bottom + 18, number(tick), "middle", 12)]
            last = x
    parts.append(text(left + span / 2, bottom + 36, panel.x_title, "middle", fill=SOFT))
    return "".join(parts), bottom + 46


def _vertical_axis(panel: Panel, points: Sequence[Point]) -> Axis:
    """Return an axis with room for a panel's points, their intervals and bands."""
    values = [point.y for point in points]
    ranges = [cut_off(point.interval, 0.0, values) for point in points]
    ranges += [each for line in panel.lines for each in line.band]
    ends = [*values, *itertools.chain(*filter(None, ranges))] or [0.0]
    low, high = (0.0 if panel.from_zero else min(ends)), max(ends)
    if high - low < 1e-9:
        low, high = low - 5e-10, high + 5e-10
    pad = 0.06 * (high - low)
    return Axis(low if panel.from_zero else low - pad, high + pad, nice_ticks(low, high + pad, 5), number)


def _line(line: Line, values: Sequence[float], to_pixels: _ToPixels) -> str:
    """Return a line with its band, intervals and markers; the values are those of the whole panel."""
    parts = []
    if line.band:
        lower = [to_pixels(point.x, low) for point, (low, _) in zip(line.points, line.band, strict=True)]
        upper = [to_pixels(point.x, high) for point, (_, high) in zip(line.points, line.band, strict=True)]
        outline = " ".join(f"{x:g},{y:.1f}" for x, y in (*upper, *reversed(lower)))
        parts.append(f'<polygon points="{outline}" fill="{line.colour}" fill-opacity=".18"/>')
    points = [point for point in line.points if math.isfinite(point.y)]
    pixels = [to_pixels(point.x, point.y) for point in points]
    if line.dash and len(pixels) > 1:
        steps = ((x2 - x1, y2 - y1) for (x1, y1), (x2, y2) in itertools.pairwise(pixels))
        moves = " ".join(f"{round(x, 1):g} {round(y, 1):g}" for x, y in steps)
        start = f"M{pixels[0][0]:g} {pixels[0][1]:g}l"
        shape = path(start + moves.replace(" -", "-"), line.colour, 2, _DASHES.get(line.dash, ""))
        parts.append(f"<g>{shape}{_tip(line.tip)}</g>" if line.tip else shape)
    if line.marker and points:
        parts += _marks(line, points, values, to_pixels)
    return "".join(parts)


def _marks(line: Line, points: Sequence[Point], values: Sequence[float], to_pixels: _ToPixels) -> list[str]:
    """Return intervals and markers; of points without texts of their own a few have a marker."""
    parts, pixels = [], [to_pixels(point.x, point.y) for point in points]
    has_tips = any(point.tip for point in points)
    for point, (x, y) in zip(points, pixels, strict=True):
        if interval := cut_off(point.interval, 0.0, values):
            low, high = (to_pixels(point.x, end)[1] for end in interval)
            parts.append(path(f"M{x:g} {low:g}V{high:g}", INK, 1.5))
        if has_tips:
            parts.append(markers([(x, y)], line.marker, line.colour, 4.5, point.tip))
    every = -(-len(pixels) // 8) if line.dash else 1
    return parts if has_tips else [*parts, markers(pixels[::every], line.marker, line.colour, 4.5)]


def draw_dot(dot: Dot, axis: Axis, left: float, span: float, y: float) -> str:
    """Return a dot on an axis of `span` pixels from `left`."""
    x = axis.at(dot.value, left, span)
    if dot.is_crossed:
        cross = f"M{x - 4:g} {y - 4:g}l8 8m0 -8l-8 8"
        return f"<g>{path(cross, PAGE, 5)}{path(cross, dot.colour, 2.5)}{_tip(dot.tip)}</g>"
    ring = f'<circle cx="{x:g}" cy="{y:g}" r="8.5" fill="{PAGE}" stroke="{INK}" stroke-width="2"/>'
    whisker = _whisker(dot.interval, axis, left, span, y)
    return (ring if dot.is_ringed else "") + whisker + markers([(x, y)], dot.marker, dot.colour, 5, dot.tip)


def cut_off(interval: tuple[float, float] | None, low: float, values: Sequence[float]) -> tuple[float, float] | None:
    """Return an interval that ends at twice the largest value drawn, or at `low`: no whisker makes the figures tiny."""
    return interval and (max(interval[0], low), min(interval[1], _LONGEST_WHISKER * max(values, default=0.0)))


def _whisker(interval: tuple[float, float] | None, axis: Axis, left: float, span: float, y: float) -> str:
    x1, x2 = (axis.at(end, left, span) for end in interval or (0.0, 0.0))
    return path(f"M{x1:g} {y - 4:g}v8m0 -4H{x2:g}m0 -4v8", INK, 1.5) if interval else ""


def _tip(words: str) -> str:
    return f"<title>{escape(words)}</title>" if words else ""
