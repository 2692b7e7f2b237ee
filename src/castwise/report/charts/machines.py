"""Machines side by side: throughput of each precision on the left, what precision buys on each machine on the right."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from castwise.analysis.statistics import Estimate, has_interval
from castwise.records.schema import Trial
from castwise.registry.precisions import BASELINE
from castwise.render.intervals import ratio_text
from castwise.render.table import Column, DataTable
from castwise.render.theme import INK, ink_on, look_of
from castwise.render.units import format_rate, format_ratio
from castwise.report.charts.chart import Chart
from castwise.report.charts.plotly_parts import (
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
from castwise.report.machine_comparison import ComparisonRow, MachineResult
from castwise.report.machine_report import rate_text, verdict_text

_MOST_LINES = 24  # cells of a chart
_PATTERNS = ("", ".", "-", "+")  # of the cells of one precision; "/" is of those that did not end well
_MOST_LEVEL_TEXTS, _MOST_TEXTS = 8, 36  # bars with their figures in them
_NAME_WIDTH = 16  # characters of a machine's name below its bars
_GAP = 0.1  # between the two panels, of the width


@dataclass(frozen=True)
class MachinesSubject:
    """What a chart of one topic on several machines is drawn from.

    Attributes:
        title: The topic.
        lines: Its cells on all machines.
        file_of: Returns the name of the file that a trial was read from.
    """

    title: str
    lines: Sequence[ComparisonRow]
    file_of: Callable[[Trial], str]


def machines(subject: MachinesSubject) -> Chart | None:
    """Return throughput and speed-up of each cell, a group of bars a machine."""
    drawn = [line for line in subject.lines if any(_shown(place) for place in line.results)]
    if not drawn:
        return None
    lines = drawn[:_MOST_LINES]
    traces = []
    for line in lines:
        places = [place for place in line.results if place.entry is not None]
        names = [on_lines(place.machine.name, _NAME_WIDTH) for place in places]
        name = _label(line, subject.lines)
        rates = [place.throughput for place in places]
        left = {**_bars(subject, line, name, places, rates, "rate"), "x": names}
        traces.append(left)
        if line.spec.precision != BASELINE:
            gains = [place.speedup for place in places]
            right = _bars(subject, line, name, places, gains, "ratio")
            traces.append({**right, "x": names, "xaxis": "x2", "yaxis": "y2", "showlegend": not any(rates)})
    compared = {name for trace in traces if trace.get("yaxis") == "y2" for name in trace["x"]}
    document = _layout(lines, len(compared))
    for name in ("yaxis", "yaxis2"):
        own = [trace for trace in traces if trace.get("yaxis", "y") == name.replace("axis", "")]
        document[name] = with_headroom(document[name], own)
    return Chart(
        name="machines",
        title=subject.title,
        says=_says(lines),
        traces=traces,
        layout=document,
        narrow=_one_below_the_other(document),
        table=_grid(subject),
        note="" if len(lines) == len(drawn) else f"{len(lines)} of {len(drawn):,} cells are drawn; the table has all.",
    )


def _shown(place: MachineResult) -> bool:
    return place.throughput is not None or place.speedup is not None


def _bars(
    subject: MachinesSubject,
    line: ComparisonRow,
    name: str,
    places: Sequence[MachineResult],
    found: Sequence[Estimate | None],
    kind: str,
) -> Document:
    look = look_of(line.spec.precision)
    form = format_ratio if kind == "ratio" else format_rate
    count = len(subject.lines) * len(places)
    panel = (place.speedup if kind == "ratio" else place.throughput for each in subject.lines for place in each.results)
    highest = max((each.value for each in panel if each is not None), default=0.0)
    own = _PATTERNS[min(_order(line, subject.lines), len(_PATTERNS) - 1)]
    patterns = [own if place.entry and place.entry.status == "ok" else "/" for place in places]
    return {
        "type": "bar",
        "name": escape(name),
        "legendgroup": escape(name),
        "y": [each.value if each is not None else None for each in found],
        "error_y": error_bars(found),
        "text": None if count > _MOST_TEXTS else [form(each.value) if each is not None else "" for each in found],
        "insidetextfont": {"color": ink_on(look.colour)},
        "textangle": -90 if count > _MOST_LEVEL_TEXTS else 0,
        "textposition": [
            beside_bar(each.value if each else None, highest, plain=not pattern)
            for each, pattern in zip(found, patterns, strict=True)
        ],
        "constraintext": "inside",
        "insidetextanchor": "start" if any(has_interval(each) for each in found) else "end",
        "cliponaxis": False,
        "marker": {
            "color": look.colour,
            "line": {"color": INK, "width": 0.5},
            "pattern": {"shape": patterns},
        },
        "hovertext": [_hover(subject, line, place, each, kind) for place, each in zip(places, found, strict=True)],
        "hoverinfo": "text",
    }


def _order(line: ComparisonRow, lines: Sequence[ComparisonRow]) -> int:
    """Return how many cells of the same precision come before one."""
    alike = [each for each in lines if each.spec.precision == line.spec.precision]
    return next(number for number, each in enumerate(alike) if each is line)


def _hover(
    subject: MachinesSubject, line: ComparisonRow, place: MachineResult, found: Estimate | None, kind: str
) -> str:
    assert place.entry is not None, "only places with a cell are drawn"
    form = format_ratio if kind == "ratio" else format_rate
    unit = f" {line.unit}/s" if kind == "rate" else f" over fp32 at batch {line.baseline_batch}"
    trials = place.entry.trials
    return hover(
        [
            f"{line.spec.label} on {place.machine.name}",
            "" if found is None else f"{form(found.value)}{unit}",
            interval_text(found, kind),
            f"{verdict_text(place)} {ratio_text(place.ratio)}" if place.verdict is not None else "",
            subject.file_of(trials[0]) if trials else "published",
        ]
    )


def _says(lines: Sequence[ComparisonRow]) -> str:
    gains = [
        (place.speedup.value, line, place) for line in lines for place in line.results if place.speedup is not None
    ]
    what = "Throughput of whole runs, validation included" if lines[0].is_whole else "Throughput"
    if not gains:
        return f"{what}; no cell has float32 beside it on its machine."
    value, line, place = max(gains, key=lambda each: each[0])
    return (
        f"{what}, and speed-up over fp32 on the same machine: the largest is {format_ratio(value)}, "
        f"{line.spec.precision} on {place.machine.name}."
    )


def _layout(lines: Sequence[ComparisonRow], num_machines: int) -> Document:
    document = layout(height=380)
    half = (1 - _GAP) / 2
    document["barmode"] = "group"
    document["xaxis"] = axis(type="category", showgrid=False, domain=[0, half], anchor="y")
    document["yaxis"] = axis(
        f"{lines[0].unit} per second", rangemode="tozero", tickformat=",", anchor="x", domain=[0, 1]
    )
    document["xaxis2"] = axis(type="category", showgrid=False, domain=[half + _GAP, 1], anchor="y2")
    document["yaxis2"] = axis("speed-up over fp32", rangemode="tozero", anchor="x2", domain=[0, 1])
    document["shapes"] = [
        {
            "type": "line",
            "xref": "x2",
            "yref": "y2",
            "x0": -0.5,  # categories are counted from 0
            "x1": num_machines - 0.5,
            "y0": 1,
            "y1": 1,
            "line": {"color": INK, "width": 1, "dash": "dot"},
            "layer": "between",  # over the grid, and below the figures in bars
        }
    ]
    return document


def _one_below_the_other(document: Document) -> Document:
    """Return what of a layout is another where two panels do not fit beside each other."""
    return {
        "height": 620,
        "xaxis": {**document["xaxis"], "domain": [0, 1]},
        "yaxis": {**document["yaxis"], "domain": [0.62, 1]},
        "xaxis2": {**document["xaxis2"], "domain": [0, 1]},
        "yaxis2": {**document["yaxis2"], "domain": [0, 0.38]},
    }


def _label(line: ComparisonRow, lines: Sequence[ComparisonRow]) -> str:
    """Return what tells a cell from the others of its chart."""
    spec = line.spec
    batches = {each.spec.batch_size for each in lines}
    scales = {each.spec.loss_scale for each in lines if each.spec.precision == spec.precision}
    parts = [spec.precision, f"batch {spec.batch_size}" if len(batches) > 1 else ""]
    parts.append(f"loss scale {spec.loss_scale}" if len(scales) > 1 else "")
    return ", ".join(part for part in parts if part)


def _grid(subject: MachinesSubject) -> DataTable[tuple[ComparisonRow, MachineResult]]:
    rows = [(line, place) for line in subject.lines for place in line.results if place.entry is not None]
    words: list[tuple[str, Callable[[tuple[ComparisonRow, MachineResult]], str]]] = [
        ("machine", lambda row: row[1].machine.name),
        ("precision", lambda row: row[0].spec.precision),
        ("loss scale", lambda row: row[0].spec.loss_scale),
    ]
    columns: list[Column[tuple[ComparisonRow, MachineResult]]] = [
        Column(name.replace(" ", "_"), name, text, text, left=True) for name, text in words
    ]
    columns.append(Column("batch_size", "batch", lambda r: r[0].spec.batch_size, lambda r: str(r[0].spec.batch_size)))
    columns += [
        *_ends("throughput", lambda row: row[1].throughput, lambda row: rate_text(row[1], row[0].unit)),
        *_ends("speedup", lambda row: row[1].speedup, lambda row: ratio_text(row[1].speedup)),
        *_ends("ratio", lambda row: row[1].ratio, lambda row: ratio_text(row[1].ratio)),
        Column("verdict", "verdict", lambda r: verdict_text(r[1]), lambda r: verdict_text(r[1]), left=True),
        Column("file", "file", lambda r: _file(subject, r[1]), lambda r: _file(subject, r[1]), left=True),
    ]
    return DataTable(columns, rows)


def _ends(
    name: str,
    get: Callable[[tuple[ComparisonRow, MachineResult]], Estimate | None],
    text: Callable[[tuple[ComparisonRow, MachineResult]], str],
) -> list[Column[tuple[ComparisonRow, MachineResult]]]:
    title = {"speedup": "speed-up over fp32"}.get(name, name)
    return [Column(name, title, lambda row: found.value if (found := get(row)) is not None else None, text)]


def _file(subject: MachinesSubject, place: MachineResult) -> str:
    trials = place.entry.trials if place.entry is not None else ()
    return subject.file_of(trials[0]) if trials else "published"
