"""Throughput over the number of GPUs, and how much of the ideal it is."""

from castwise.render.theme import INK
from castwise.render.units import format_percent, format_rate
from castwise.report.charts.chart import Chart, GroupSubject
from castwise.report.charts.plotly_parts import (
    MOST_LINES,
    Document,
    error_bars,
    hover,
    interval_text,
    line,
    panel,
    panels,
    variants,
)
from castwise.report.charts.tables import cell_grid, rate_columns, share_column
from castwise.report.collection import ComparisonGroup, Configuration


def scaling(subject: GroupSubject) -> Chart | None:
    """Return throughput and scaling efficiency over the number of GPUs, for lines of two numbers and more."""
    topic = subject.group
    lines = dict(list(_lines(topic).items())[:MOST_LINES])
    if not lines:
        return None
    cells = list({id(cell): cell for own in lines.values() for cell in own}.values())
    document = panels([f"{topic.unit} per second", "efficiency, %"], ["", "GPUs"], dtick=1)
    document["yaxis"]["rangemode"] = document["yaxis2"]["rangemode"] = "tozero"
    numbers = variants([own[0].precision for own in lines.values()])
    traces = [
        trace
        for (name, own), number in zip(lines.items(), numbers, strict=True)
        for trace in _traces(subject, name, own, number)
    ]
    single = max((own[0] for own in lines.values() if own[0].trial.spec.world_size == 1), key=_rate, default=None)
    most = max(cell.trial.spec.world_size for cell in cells)
    if single is not None:
        traces.append(_ideal(_rate(single), most))
    efficient = [cell for cell in cells if cell.scaling_efficiency is not None]
    best = max(efficient, key=lambda cell: (cell.trial.spec.world_size, cell.scaling_efficiency), default=None)
    reached = (
        "" if best is None else f"; {format_percent(best.scaling_efficiency)} of the ideal with {topic.label(best)}"
    )
    efficiency = share_column("scaling_efficiency", "scaling efficiency", lambda cell: cell.scaling_efficiency)
    return Chart(
        name="scaling",
        title="Scaling over GPUs",
        says=f"Throughput on up to {most} GPUs{reached}.",
        traces=traces,
        layout=document,
        table=cell_grid(subject, cells, [*rate_columns(), efficiency]),
        note="The batch size is one GPU's: a step on N of them trains on N times as many samples.",
    )


def _lines(topic: ComparisonGroup) -> dict[str, list[Configuration]]:
    """Return the cells of each way to share a step, with the single GPU's in front."""
    alone: dict[str, list[Configuration]] = {}
    spread: dict[str, list[Configuration]] = {}
    ways: dict[str, str] = {}
    for cell in topic.configurations:
        if cell.throughput is None:
            continue
        name = topic.label(cell, "world_size", "parallelism")
        if cell.trial.spec.world_size == 1:
            alone.setdefault(name, []).append(cell)
        else:
            way = f"{name} {cell.trial.spec.parallelism}"
            ways[way] = name
            spread.setdefault(way, []).append(cell)
    lines = {way: [*alone.get(ways[way], [])[:1], *cells] for way, cells in spread.items()}
    lines = {way: sorted(cells, key=lambda cell: cell.trial.spec.world_size) for way, cells in lines.items()}
    return {way: cells for way, cells in lines.items() if len({cell.trial.spec.world_size for cell in cells}) > 1}


def _traces(subject: GroupSubject, name: str, cells: list[Configuration], variant: int) -> list[Document]:
    x = [cell.trial.spec.world_size for cell in cells]
    texts = [_hover(subject, cell) for cell in cells]
    precision = cells[0].precision
    shares = [1.0 if cell.trial.spec.world_size == 1 else cell.scaling_efficiency for cell in cells]
    above = line(name, precision, x, [_rate(cell) for cell in cells], texts, variant)
    above["error_y"] = error_bars([cell.throughput for cell in cells])
    below = line(name, precision, x, [None if share is None else 100 * share for share in shares], texts, variant)
    return [{**above, **panel(0)}, {**below, **panel(1), "showlegend": False}]


def _ideal(rate: float, most: int) -> Document:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "ideal, of the fastest",
        "x": [1, most],
        "y": [rate, rate * most],
        "line": {"color": INK, "width": 1, "dash": "dot"},
        "hoverinfo": "skip",
        **panel(0),
    }


def _hover(subject: GroupSubject, cell: Configuration) -> str:
    rate = f"{format_rate(_rate(cell))} {cell.unit}/s"
    share = "" if cell.scaling_efficiency is None else f"{format_percent(cell.scaling_efficiency)} of the ideal"
    return hover([subject.group.label(cell), rate, interval_text(cell.throughput), share, subject.file_of(cell.trial)])


def _rate(cell: Configuration) -> float:
    return cell.throughput.value if cell.throughput is not None else 0.0
