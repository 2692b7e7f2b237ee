"""Throughput and speed-up of a topic's cells as bars, and the speed-ups of all topics side by side."""

from collections.abc import Callable, Sequence

from castwise.analysis.statistics import Estimate, has_interval
from castwise.registry.precisions import BASELINE
from castwise.render.table import DataTable
from castwise.render.theme import INK, ink_on, look_of
from castwise.render.units import format_rate, format_ratio
from castwise.report.charts.chart import Chart, CollectionSubject, GroupSubject
from castwise.report.charts.plotly_parts import (
    MOST_BARS,
    Document,
    axis,
    beside_bar,
    error_bars,
    escape,
    hover,
    interval_text,
    layout,
    on_lines,
    with_headroom,
)
from castwise.report.charts.tables import cell_grid, rate_columns, ratio_columns, text_column
from castwise.report.collection import ComparisonGroup, Configuration

_MOST_TOPICS = 14  # side by side
_MOST_LEVEL_TEXTS, _MOST_TEXTS = 8, 30  # bars with their figures in them, on half a page
_BAR_HEIGHT = 17  # pixels of a lying one
_SETTING_WIDTH = 20  # characters of a setting below its bars, on a line
_TITLE_WIDTH = 30  # characters of a topic's title beside its bars

_Get = Callable[[Configuration], Estimate | None]


def throughput(subject: GroupSubject) -> Chart | None:
    """Return the throughput of each cell."""
    topic = subject.group
    cells = _shown(topic.configurations, lambda cell: cell.throughput)
    if not any(cell.throughput for cell in cells):
        return None
    best = max((cell for cell in cells if cell.throughput), key=lambda cell: _value(cell.throughput))
    says = f"The highest is {format_rate(_value(best.throughput))} {topic.unit} a second, with {topic.label(best)}."
    traces = _bars(subject, cells, lambda cell: cell.throughput, _rate_text, "rate")
    document = _bar_layout(topic, cells, f"{topic.unit} per second")
    document["yaxis"] = with_headroom(document["yaxis"], traces)
    return Chart(
        name="throughput",
        title="Throughput",
        says=says,
        traces=traces,
        layout=document,
        table=cell_grid(subject, topic.configurations, rate_columns()),
        note=_left_out(topic.configurations, cells),
    )


def speedup(subject: GroupSubject) -> Chart | None:
    """Return the speed-up of each cell over float32."""
    topic = subject.group
    compared = [cell for cell in topic.configurations if cell.speedup is not None]
    others = [cell for cell in compared if cell.precision != BASELINE]
    if not others:
        return None
    cells = _shown(compared, lambda cell: cell.speedup)
    best = max(others, key=lambda cell: _value(cell.speedup))
    traces = _bars(subject, cells, lambda cell: cell.speedup, _ratio_text, "ratio")
    document = _bar_layout(topic, cells, "speed-up over fp32")
    document["yaxis"] = with_headroom(document["yaxis"], traces)
    document["shapes"] = [_line_at_one()]
    return Chart(
        name="speedup",
        title="Speed-up over fp32",
        says=f"The largest is {format_ratio(_value(best.speedup))}, with {topic.label(best)}.",
        traces=traces,
        layout=document,
        table=cell_grid(subject, compared, ratio_columns()),
        note=_left_out(compared, cells),
    )


def overview(subject: CollectionSubject) -> Chart | None:
    """Return the speed-ups of all topics, a group of bars each."""
    topics = [topic for topic in subject.collection.groups if _compared(topic) and not topic.is_max_batch]
    if len(topics) < 2:
        return None
    shown = topics[:_MOST_TOPICS]
    best = {topic.title: _best_by_precision(topic) for topic in shown}
    traces = []
    for precision in dict.fromkeys(name for topic in shown for name in topic.precisions if name != BASELINE):
        having = [topic for topic in shown if precision in best[topic.title]]
        cells = [best[topic.title][precision] for topic in having]
        found = [cell.speedup for cell in cells]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": escape(precision),
                "y": [on_lines(topic.title, _TITLE_WIDTH) for topic in having],
                "x": [_value(each) for each in found],
                "error_x": error_bars(found),
                "text": [format_ratio(_value(each)) for each in found],
                "textposition": "inside" if any(has_interval(each) for each in found) else "outside",
                "insidetextanchor": "start",
                "textfont": {"size": 10},
                "constraintext": "none",
                "cliponaxis": False,
                "marker": {"color": look_of(precision).colour, "line": {"color": INK, "width": 0.5}},
                "hovertext": [
                    _hover(subject.file_of(cell.trial), f"{topic.title}: {topic.label(cell)}", cell.speedup, "ratio")
                    for topic, cell in zip(having, cells, strict=True)
                ],
                "hoverinfo": "text",
            }
        )
    document = layout(height=120 + sum(_BAR_HEIGHT * max(2, len(best[topic.title])) + 10 for topic in shown))
    document["barmode"] = "group"
    document["xaxis"] = axis("speed-up", rangemode="tozero")
    order = [on_lines(topic.title, _TITLE_WIDTH) for topic in shown]
    document["yaxis"] = axis(
        type="category", showgrid=False, autorange="reversed", categoryorder="array", categoryarray=order
    )
    document["shapes"] = [_line_at_one(vertical=True)]
    rows = [(topic, cell) for topic in topics for cell in _best_by_precision(topic).values()]
    grid = cell_grid(GroupSubject(topics[0], subject.file_of), [cell for _, cell in rows], ratio_columns())
    titles = {id(cell): topic for topic, cell in rows}
    columns = [
        text_column("topic", lambda cell: titles[id(cell)].title),
        *(column for column in grid.columns if column.name != "setting"),
    ]
    columns.insert(2, text_column("setting", lambda cell: titles[id(cell)].setting(cell)))
    return Chart(
        name="overview",
        title="Speed-up over fp32, side by side",
        says=f"By precision, of {len(shown)} comparisons; the dotted line is fp32.",
        traces=traces,
        layout=document,
        table=DataTable(columns, [cell for _, cell in rows]),
        note=f"{len(shown)} of {len(topics)} shown; the table has all." if len(shown) < len(topics) else "",
    )


def _compared(topic: ComparisonGroup) -> list[Configuration]:
    return [cell for cell in topic.configurations if cell.precision != BASELINE and cell.speedup is not None]


def _best_by_precision(topic: ComparisonGroup) -> dict[str, Configuration]:
    found: dict[str, Configuration] = {}
    for cell in _compared(topic):
        before = found.get(cell.precision)
        if before is None or _value(cell.speedup) > _value(before.speedup):
            found[cell.precision] = cell
    return found


def _bars(
    subject: GroupSubject, cells: Sequence[Configuration], get: _Get, text: Callable[[Configuration], str], kind: str
) -> list[Document]:
    """Return a trace for all cells where they differ in precision alone, else one for each precision."""
    topic = subject.group
    if not any(topic.setting(cell) for cell in cells):
        return [_trace(subject, cells, [escape(cell.precision) for cell in cells], get, text, kind)]
    traces = []
    for precision in topic.precisions:
        own = [cell for cell in cells if cell.precision == precision]
        if own:
            names = [on_lines(topic.setting(cell), _SETTING_WIDTH) for cell in own]
            traces.append({**_trace(subject, own, names, get, text, kind), "name": escape(precision)})
    return traces


def _trace(
    subject: GroupSubject,
    cells: Sequence[Configuration],
    names: list[str],
    get: _Get,
    text: Callable[[Configuration], str],
    kind: str,
) -> Document:
    found = [get(cell) for cell in cells]
    count, highest = len(subject.group.configurations), max(_value(get(cell)) for cell in subject.group.configurations)
    return {
        "type": "bar",
        "x": names,
        # A cell that failed keeps its place, with its status over no bar.
        "y": [_value(each) for each in found],
        "error_y": error_bars(found),
        "text": None if count > _MOST_TEXTS else [_over(cell, text(cell)) for cell in cells],
        "textposition": [
            beside_bar(_value(each), highest, plain=cell.trial.status == "ok")
            for each, cell in zip(found, cells, strict=True)
        ],
        "constraintext": "inside",
        "insidetextanchor": "start" if any(has_interval(each) for each in found) else "end",
        "insidetextfont": {"color": [ink_on(look_of(cell.precision).colour) for cell in cells]},
        "textangle": -90 if count > _MOST_LEVEL_TEXTS else 0,
        "cliponaxis": False,
        "marker": {
            "color": [look_of(cell.precision).colour for cell in cells],
            "line": {"color": INK, "width": 0.5},
            "pattern": {"shape": ["" if cell.trial.status == "ok" else "/" for cell in cells]},
        },
        "hovertext": [_hover_of(subject, cell, get(cell), kind) for cell in cells],
        "hoverinfo": "text",
        "showlegend": any(name != escape(cell.precision) for name, cell in zip(names, cells, strict=True)),
    }


def _over(cell: Configuration, text: str) -> str:
    """Return what stands over a bar: its figure, and what became of a cell that did not end well."""
    status = cell.trial.status
    return escape(text) if status in ("ok", text) else f"{escape(text)}<br>{escape(status)}"


def _hover_of(subject: GroupSubject, cell: Configuration, found: Estimate | None, kind: str) -> str:
    unit = f" {cell.unit}/s" if kind == "rate" else ""
    return _hover(
        subject.file_of(cell.trial), subject.group.label(cell), found, kind, unit, cell.trial.status, cell.trial.message
    )


def _hover(  # noqa: PLR0913, PLR0917  what a reader is told of a bar
    file: str, label: str, found: Estimate | None, kind: str, unit: str = "", status: str = "ok", message: str = ""
) -> str:
    form = format_ratio if kind == "ratio" else format_rate
    value = "" if found is None else f"{form(found.value)}{unit}"
    trouble = "" if status == "ok" else f"{status}: {message}"
    return hover([label, value, interval_text(found, kind), trouble, file])


def _rate_text(cell: Configuration) -> str:
    return cell.trial.status if cell.throughput is None else format_rate(cell.throughput.value)


def _ratio_text(cell: Configuration) -> str:
    return cell.trial.status if cell.speedup is None else format_ratio(cell.speedup.value)


def _bar_layout(topic: ComparisonGroup, cells: Sequence[Configuration], title: str) -> Document:
    document = layout()
    document["xaxis"] = axis(type="category", showgrid=False, tickfont={"size": 11})
    document["yaxis"] = axis(title, rangemode="tozero", tickformat=",")
    document["barmode"] = "group"
    settings = [setting for setting in topic.settings if setting]
    if settings:
        shown = {topic.setting(cell) for cell in cells}
        order = [on_lines(setting, _SETTING_WIDTH) for setting in settings if setting in shown]
        document["xaxis"] |= {"categoryorder": "array", "categoryarray": order}
    return document


def _line_at_one(*, vertical: bool = False) -> Document:
    along, across = ("y", "x") if vertical else ("x", "y")
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


def _shown(cells: Sequence[Configuration], get: _Get) -> list[Configuration]:
    """Return the cells that fit into a chart: all, or the highest."""
    if len(cells) <= MOST_BARS:
        return list(cells)
    highest = sorted(cells, key=lambda cell: -_value(get(cell)))[:MOST_BARS]
    kept = {id(cell) for cell in highest}
    return [cell for cell in cells if id(cell) in kept]


def _left_out(cells: Sequence[Configuration], shown: Sequence[Configuration]) -> str:
    if len(shown) == len(cells):
        return ""
    return f"The {len(shown)} highest of {len(cells):,} cells are drawn; the table has all."


def _value(found: Estimate | None) -> float:
    return found.value if found is not None else 0.0
