"""Loss and accuracy of training runs, over time and over epochs, and where their time went."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from castwise.analysis import training_metrics
from castwise.records.schema import Epoch
from castwise.render.table import Column, DataTable
from castwise.render.theme import INK, STACK
from castwise.render.units import format_percent, format_seconds
from castwise.report.charts.chart import Chart, GroupSubject
from castwise.report.charts.plotly_parts import (
    MOST_BARS,
    MOST_LINES,
    Document,
    axis,
    downsample,
    hover,
    layout,
    line,
    on_lines,
    panel,
    panels,
    template,
    variants,
)
from castwise.report.charts.tables import cell_grid
from castwise.report.collection import Configuration


@dataclass(frozen=True)
class _Point:
    """A moment of a run: seconds since it began, epochs since it began, and what was seen then."""

    cell: Configuration
    seconds: float
    epoch: float
    value: float


def loss(subject: GroupSubject) -> Chart | None:
    """Return the training loss over time and over epochs."""
    return _curves(subject, "loss", "Training loss", "training loss", _losses)


def accuracy(subject: GroupSubject) -> Chart | None:
    """Return the validation accuracy over time and over epochs."""
    return _curves(subject, "accuracy", "Validation accuracy", "accuracy, %", _accuracies)


def perplexity(subject: GroupSubject) -> Chart | None:
    """Return a language model's perplexity over time and over epochs."""
    return _curves(subject, "perplexity", "Validation perplexity", "perplexity", _perplexities)


def time_split(subject: GroupSubject) -> Chart | None:
    """Return where the wall time of each run went."""
    topic = subject.group
    every = [cell for cell in topic.configurations if training_metrics.split(cell.trial) is not None]
    cells = every[:MOST_BARS]
    if not cells:
        return None
    names = [on_lines(topic.label(cell), _NAME_WIDTH) for cell in cells]
    traces = []
    for (title, field), colour in zip(_PARTS, STACK, strict=False):
        values = [_part(cell, field) for cell in cells]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": title,
                "y": names,
                "x": values,
                "marker": {"color": colour, "line": {"color": INK, "width": 0.5}},
                "hovertext": [
                    hover([topic.label(cell), f"{title}: {format_seconds(value)}", subject.file_of(cell.trial)])
                    for cell, value in zip(cells, values, strict=True)
                ],
                "hoverinfo": "text",
            }
        )
    document = layout(height=130 + 30 * len(cells))
    document["barmode"] = "stack"
    document["legend"]["traceorder"] = "normal"
    document["xaxis"] = axis("seconds", rangemode="tozero")
    document["yaxis"] = axis(type="category", autorange="reversed")
    shares = [share for cell in cells if (share := training_metrics.data_share(cell.trial)) is not None]
    waits = "; none of it waits for data" if len(shares) == len(cells) else ""  # some records do not know
    if shares and max(shares) >= _WAITS:
        waits = f"; up to {format_percent(max(shares))} of the training is waiting for data"
    figures = [_part_column(title, field) for title, field in _PARTS]
    return Chart(
        name="time",
        title="Where the time went",
        says=f"Wall time of each run{waits}.",
        traces=traces,
        layout=document,
        table=cell_grid(subject, every, figures),
    )


_NAME_WIDTH = 26  # characters of a name beside its bar, on a line
_WAITS = 0.0005  # of the training: less is shown as nothing
_PARTS = (("first step", "start"), ("waiting for data", "data"), ("training", "train"), ("validation", "validation"))


def _part(cell: Configuration, field: str) -> float:
    parts = training_metrics.split(cell.trial)
    return float(getattr(parts, field)) if parts is not None else 0.0


def _part_column(title: str, field: str) -> Column[Configuration]:
    return Column(
        f"{field}_seconds", title, lambda cell: _part(cell, field), lambda cell: format_seconds(_part(cell, field))
    )


def _curves(
    subject: GroupSubject, name: str, title: str, y_title: str, points_of: Callable[[Configuration], Iterator[_Point]]
) -> Chart | None:
    topic = subject.group
    found = [(cell, _thin(list(points_of(cell)))) for cell in topic.configurations]
    drawn = [(cell, points) for cell, points in found if points]
    if not drawn:
        return None
    shown = drawn[:MOST_LINES]
    traces: list[Document] = []
    numbers = variants([cell.precision for cell, _ in shown])
    for (cell, points), variant in zip(shown, numbers, strict=True):
        label, values = topic.label(cell), [point.value for point in points]
        for index, (x, unit) in enumerate((([p.seconds for p in points], "s"), ([p.epoch for p in points], "epochs"))):
            said = template(
                [label, subject.file_of(cell.trial)], values=f"{y_title}: %{{y:.4g}}, after %{{x:.4g}} {unit}"
            )
            trace = line(label, cell.precision, x, values, said, variant)
            traces.append({**trace, **panel(index), "showlegend": index == 0})
    last = [f"{topic.label(cell)} {points[-1].value:.4g}" for cell, points in shown[:8]]
    left_out = f"{len(shown)} of {len(drawn):,} runs; `castwise export` has all." if len(shown) < len(drawn) else ""
    return Chart(
        name=name,
        title=f"{title} over time and epochs",
        says=f"At the end: {', '.join(last)}.",
        traces=traces,
        layout=panels([y_title, y_title], ["seconds", "epochs"]),
        table=_point_grid(subject, [point for _, points in shown for point in points], name),
        note=left_out,
    )


def _losses(cell: Configuration) -> Iterator[_Point]:
    """Return the losses that were written down; within an epoch steps are taken to be equally long."""
    began = 0.0
    for number, epoch in enumerate(training_metrics.epochs_of(cell.trial)):
        for step, value in epoch.losses:
            done = (step + 1) / max(1, epoch.num_steps)
            yield _Point(cell, began + done * epoch.seconds, number + done, value)
        began += epoch.seconds + epoch.validation_seconds


def _accuracies(cell: Configuration) -> Iterator[_Point]:
    for point, epoch in _epoch_ends(cell):
        if epoch.accuracy is not None:
            yield replace(point, value=100 * epoch.accuracy)


def _perplexities(cell: Configuration) -> Iterator[_Point]:
    for point, epoch in _epoch_ends(cell):
        value = training_metrics.perplexity(epoch)
        if value is not None:
            yield replace(point, value=value)


def _epoch_ends(cell: Configuration) -> Iterator[tuple[_Point, Epoch]]:
    seconds = 0.0
    for number, epoch in enumerate(training_metrics.epochs_of(cell.trial), start=1):
        seconds += epoch.seconds + epoch.validation_seconds
        yield _Point(cell, seconds, number, 0.0), epoch


def _thin(points: list[_Point]) -> list[_Point]:
    return [points[index] for index in downsample(len(points))]


def _point_grid(subject: GroupSubject, points: Sequence[_Point], name: str) -> DataTable[_Point]:
    return DataTable(
        (
            Column(
                "cell", "cell", lambda p: subject.group.label(p.cell), lambda p: subject.group.label(p.cell), left=True
            ),
            Column("seconds", "time", lambda p: p.seconds, lambda p: format_seconds(p.seconds)),
            Column("epoch", "epoch", lambda p: p.epoch, lambda p: f"{p.epoch:.4g}"),
            Column(name, name, lambda p: p.value, lambda p: f"{p.value:.4g}"),
        ),
        points,
    )
