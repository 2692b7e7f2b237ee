"""Loss, accuracy and perplexity of training runs, over time and over epochs, and where the wall time went."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from castwise.analysis import training_metrics
from castwise.records.schema import Epoch
from castwise.render.fields import Field, FlatRow, find_field
from castwise.render.table import DataTable
from castwise.render.units import format_percent, format_seconds
from castwise.report.charts.chart import Chart, GroupSubject
from castwise.report.charts.plotly_parts import (
    MAX_BARS,
    MAX_LINES,
    axis,
    downsample,
    hover_template,
    layout,
    line,
    names_axis,
    panels,
    stacked_bars,
    tell_apart,
    wrap,
)
from castwise.report.collection import Configuration

_PARTS = {"first step": "start", "waiting for data": "data", "training": "train", "validation": "validation"}
_LEAST_WAIT = 0.0005  # of the training: less is shown as nothing


@dataclass(frozen=True)
class _Point:
    """A value of a run, and the seconds and epochs since the run began."""

    config: Configuration
    seconds: float
    epoch: float
    value: float


def loss(subject: GroupSubject) -> Chart | None:
    """Return the training loss over time and over epochs."""
    return _curves(subject, "loss", "Training loss", "training loss", _losses)


def accuracy(subject: GroupSubject) -> Chart | None:
    """Return the validation accuracy over time and over epochs."""

    def percent(epoch: Epoch) -> float | None:
        return None if epoch.accuracy is None else 100 * epoch.accuracy

    return _curves(subject, "accuracy", "Validation accuracy", "accuracy, %", lambda c: _epoch_ends(c, percent))


def perplexity(subject: GroupSubject) -> Chart | None:
    """Return a language model's perplexity over time and over epochs."""
    return _curves(
        subject,
        "perplexity",
        "Validation perplexity",
        "perplexity",
        lambda c: _epoch_ends(c, training_metrics.perplexity),
    )


def time_split(subject: GroupSubject) -> Chart | None:
    """Return where the wall time of each run went."""
    group = subject.group
    splits = {id(c): split for c in group.configurations if (split := training_metrics.split(c.trial)) is not None}
    measured = [config for config in group.configurations if id(config) in splits]
    shown = measured[:MAX_BARS]
    if not shown:
        return None

    def part(config: Configuration, title: str) -> float:
        return float(getattr(splits[id(config)], _PARTS[title]))

    def hover_text(index: int, title: str) -> str:
        return subject.hover(shown[index], f"{title}: {format_seconds(part(shown[index], title))}")

    def part_values(config: Configuration) -> FlatRow:
        return {f"{name}_seconds": part(config, title) for title, name in _PARTS.items()}

    fields = [Field(f"{name}_seconds", title, "seconds") for title, name in _PARTS.items()]
    names = [wrap(group.label(config), 26) for config in shown]
    values = {title: [part(config, title) for config in shown] for title in _PARTS}
    shares = [share for config in shown if (share := training_metrics.data_share(config.trial)) is not None]
    waits = "; none of it waits for data" if len(shares) == len(shown) else ""  # some records do not know
    if shares and max(shares) >= _LEAST_WAIT:
        waits = f"; up to {format_percent(max(shares))} of the training is waiting for data"
    return Chart(
        name="time",
        title="Where the time went",
        says=f"Wall time of each run{waits}.",
        traces=stacked_bars(names, values, hover_text, orientation="h"),
        layout=layout(
            130 + 30 * len(shown),
            barmode="stack",
            xaxis=axis("seconds", rangemode="tozero"),
            yaxis=names_axis(autorange="reversed"),
        ),
        table=subject.table(measured, fields, part_values),
    )


def _curves(
    subject: GroupSubject, name: str, title: str, y_title: str, points_of: Callable[[Configuration], Iterator[_Point]]
) -> Chart | None:
    group = subject.group
    every = [points for config in group.configurations if (points := list(points_of(config)))]
    if not every:
        return None
    shown = [[points[index] for index in downsample(len(points))] for points in every[:MAX_LINES]]
    traces = []
    for points in shown:
        config, values = points[0].config, [point.value for point in points]
        label, precision = group.label(config), config.precision
        over = {"s": [point.seconds for point in points], "epochs": [point.epoch for point in points]}
        for place, (unit, x) in enumerate(over.items()):
            text = hover_template(
                [label, subject.file_of(config.trial)], f"{y_title}: %{{y:.4g}}, after %{{x:.4g}} {unit}"
            )
            traces.append(line(label, precision, x, values, text, place))
    tell_apart(traces)
    last = [f"{group.label(points[0].config)} {points[-1].value:.4g}" for points in shown[:8]]
    fields = [
        Field("configuration", "configuration"),
        find_field("seconds"),
        Field("epoch", "epoch", "number", lambda row: f"{row['epoch']:.4g}"),
        Field(name, name, "number", lambda row: f"{row[name]:.4g}"),
    ]
    rows: list[FlatRow] = [
        {"configuration": group.label(p.config), "seconds": p.seconds, "epoch": p.epoch, name: p.value}
        for points in shown
        for p in points
    ]
    left_out = f"{len(shown)} of {len(every):,} runs; `castwise export` has all." if len(shown) < len(every) else ""
    return Chart(
        name=name,
        title=f"{title} over time and epochs",
        says=f"At the end: {', '.join(last)}.",
        traces=traces,
        layout=panels([y_title, y_title], ["seconds", "epochs"]),
        table=DataTable(fields, rows),
        note=left_out,
    )


def _losses(config: Configuration) -> Iterator[_Point]:
    """Yield the recorded losses; the steps of an epoch are taken to be equally long."""
    began = 0.0
    for number, epoch in enumerate(training_metrics.epochs_of(config.trial)):
        for step, value in epoch.losses:
            done = (step + 1) / max(1, epoch.num_steps)
            yield _Point(config, began + done * epoch.seconds, number + done, value)
        began += epoch.seconds + epoch.validation_seconds


def _epoch_ends(config: Configuration, value_of: Callable[[Epoch], float | None]) -> Iterator[_Point]:
    seconds = 0.0
    for number, epoch in enumerate(training_metrics.epochs_of(config.trial), start=1):
        seconds += epoch.seconds + epoch.validation_seconds
        value = value_of(epoch)
        if value is not None:
            yield _Point(config, seconds, number, value)
