"""Throughput and memory over the batch size."""

from castwise.analysis.energy import joules_per_unit
from castwise.analysis.steady_metrics import throughput
from castwise.records.schema import Trial
from castwise.render.table import Column
from castwise.render.theme import INK
from castwise.render.units import format_bytes, format_rate
from castwise.report.charts.chart import Chart, GroupSubject
from castwise.report.charts.plotly_parts import (
    MOST_LINES,
    Document,
    error_bars,
    hover,
    interval_text,
    line,
    lines_of,
    panel,
    panels,
    variants,
)
from castwise.report.charts.tables import bytes_column, cell_grid, rate_columns
from castwise.report.collection import Configuration

_GIB = 2**30
_LOGARITHMIC_FROM = 8  # largest batch over smallest


def batch(subject: GroupSubject) -> Chart | None:
    """Return throughput and peak memory over the batch size, for lines of two batch sizes and more."""
    topic = subject.group
    lines = lines_of(topic, topic.configurations, "batch_size")
    lines = {name: cells for name, cells in lines.items() if len({cell.trial.spec.batch_size for cell in cells}) > 1}
    lines = dict(list(lines.items())[:MOST_LINES])
    cells = [cell for own in lines.values() for cell in own]
    if not any(cell.throughput for cell in cells):
        return None
    batches = [cell.trial.spec.batch_size for cell in cells]
    document = panels([f"{topic.unit} per second", "peak reserved, GiB"], ["", "batch size"])
    if max(batches) >= _LOGARITHMIC_FROM * min(batches):
        for name in ("xaxis", "xaxis2"):
            document[name]["type"] = "log"
    document["yaxis"]["rangemode"] = document["yaxis2"]["rangemode"] = "tozero"
    document["hovermode"] = "closest"
    numbers = variants([own[0].precision for own in lines.values()])
    traces = [
        trace
        for (name, own), variant in zip(lines.items(), numbers, strict=True)
        for trace in _traces(subject, name, own, variant)
    ]
    whole = topic.first.spec.memory_limit_bytes or topic.first.environment.gpu_memory_bytes
    failed = [cell for cell in cells if cell.trial.status == "oom"]
    if whole is not None and failed:
        traces.append(_out_of_memory(subject, failed, whole))
    knees = [fit.knee for fit in subject.fits if fit.knee is not None]
    if knees:
        traces.append(_knees(subject, knees))
    figures = [
        Column[Configuration](
            "batch_size", "batch", lambda cell: cell.trial.spec.batch_size, lambda cell: str(cell.trial.spec.batch_size)
        ),
        *rate_columns(),
        *_energy(cells),
        bytes_column("peak_allocated_bytes", "peak allocated", lambda cell: cell.peak_allocated_bytes),
        bytes_column("peak_reserved_bytes", "peak reserved", lambda cell: cell.peak_reserved_bytes),
    ]
    largest = max((cell for cell in cells if cell.throughput), key=lambda cell: cell.trial.spec.batch_size)
    return Chart(
        name="batch",
        title="Throughput and memory over the batch size",
        says=(
            f"Throughput and peak memory over batch sizes from {min(batches)} to {max(batches)}; "
            f"the largest that trained is {largest.trial.spec.batch_size}, with {largest.precision}."
        ),
        traces=traces,
        layout=document,
        table=cell_grid(subject, cells, figures),
        note=" ".join(_notes(failed=bool(failed), knees=bool(knees))),
    )


def _notes(*, failed: bool, knees: bool) -> list[str]:
    return (["Crosses are batches that ran out of memory."] if failed else []) + (
        ["Rings are knees: the smallest batch within 2 % of the best throughput."] if knees else []
    )


def _energy(cells: list[Configuration]) -> list[Column[Configuration]]:
    """Return the column of energy, where any cell's was measured."""
    column = Column[Configuration](
        "joules_per_unit",
        "energy",
        lambda cell: joules_per_unit(cell.trial),
        lambda cell: _joules(joules_per_unit(cell.trial)),
    )
    return [column] if any(column.value(cell) is not None for cell in cells) else []


def _joules(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g} J"


def _knees(subject: GroupSubject, trials: list[Trial]) -> Document:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "knee",
        "x": [trial.spec.batch_size for trial in trials],
        "y": [throughput(trial) for trial in trials],
        "marker": {"symbol": "circle-open", "size": 16, "color": INK, "line": {"width": 2, "color": INK}},
        "hovertext": [hover([trial.spec.label, "knee", subject.file_of(trial)]) for trial in trials],
        "hoverinfo": "text",
        **panel(0),
    }


def _traces(subject: GroupSubject, name: str, cells: list[Configuration], variant: int) -> list[Document]:
    rated = sorted((cell for cell in cells if cell.throughput), key=lambda cell: cell.trial.spec.batch_size)
    x = [cell.trial.spec.batch_size for cell in rated]
    rates = [cell.throughput.value if cell.throughput else None for cell in rated]
    texts = [_hover(subject, cell) for cell in rated]
    reserved = [_reserved(cell) for cell in rated]
    precision = cells[0].precision
    above = line(name, precision, x, rates, texts, variant)
    above["error_y"] = error_bars([cell.throughput for cell in rated])
    below = line(name, precision, x, reserved, texts, variant)
    return [{**above, **panel(0)}, {**below, **panel(1), "showlegend": False}]


def _reserved(cell: Configuration) -> float | None:
    held = cell.peak_allocated_bytes if cell.peak_reserved_bytes is None else cell.peak_reserved_bytes
    return None if held is None else held / _GIB


def _out_of_memory(subject: GroupSubject, cells: list[Configuration], whole: int) -> Document:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "out of memory",
        "x": [cell.trial.spec.batch_size for cell in cells],
        "y": [whole / _GIB] * len(cells),
        "marker": {"symbol": "x-thin", "size": 10, "line": {"width": 2, "color": INK}},
        "hovertext": [
            hover([subject.group.label(cell), "ran out of memory", subject.file_of(cell.trial)]) for cell in cells
        ],
        "hoverinfo": "text",
        **panel(1),
    }


def _hover(subject: GroupSubject, cell: Configuration) -> str:
    rate = "" if cell.throughput is None else f"{format_rate(cell.throughput.value)} {cell.unit}/s"
    memory = (
        f"peak reserved {format_bytes(cell.peak_reserved_bytes)}, allocated {format_bytes(cell.peak_allocated_bytes)}"
    )
    return hover([subject.group.label(cell), rate, interval_text(cell.throughput), memory, subject.file_of(cell.trial)])
