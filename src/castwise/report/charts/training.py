"""Loss and score of training runs, over time and over epochs.

The equivalence plot: how far each precision's score is from the baseline's, with its interval, and the margin.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from castwise.accuracy.render import COLUMNS, difference_unit, flat_row
from castwise.accuracy.result import Runs, metric_of, runs_of
from castwise.analysis.result_table import Row
from castwise.analysis.training_metrics import epochs_of
from castwise.records.schema import Trial
from castwise.registry.techniques import precision_name
from castwise.report.charts.chart import MAX_BARS, MAX_LINES, Chart, GroupSubject, downsample, left_out, varied
from castwise.report.charts.svg import (
    NARROW,
    Axis,
    Dot,
    Drawing,
    Line,
    Panel,
    Point,
    dot_chart,
    line_chart,
    nice_ticks,
    number,
)
from castwise.show.fields import Field, FlatRow, find_field, short_columns
from castwise.show.table import DataTable
from castwise.show.theme import look_of
from castwise.spec.grouping import grouped


@dataclass(frozen=True)
class _Point:
    seconds: float
    value: float
    epoch: float


def _losses(trial: Trial) -> Iterator[_Point]:
    """Yield the recorded losses; the steps of an epoch are taken to be equally long."""
    began = 0.0
    for place, epoch in enumerate(epochs_of(trial)):
        for index, loss in epoch.losses:
            done = (index + 1) / max(1, epoch.num_steps)
            yield _Point(began + done * epoch.seconds, loss, place + done)
        began += epoch.seconds + epoch.validation_seconds


def _curves(
    subject: GroupSubject, title: str, y_title: str, points_of: Callable[[Trial], Iterator[_Point]]
) -> Chart | None:
    """Return a value of each run over time and over epochs; of runs that differ in their seeds, mean and range."""
    group = subject.group
    runs: dict[str, list[tuple[Row, list[_Point]]]] = {}
    for config in group.configurations:
        if points := list(points_of(config.trial)):
            runs.setdefault(group.label(config, "seed"), []).append((config, points))
    if not runs:
        return None
    shown = list(runs.items())[:MAX_LINES]
    panels = []
    for unit in ("seconds", "epochs"):
        lines = []
        for label, seeds in shown:
            means = _means(points for _, points in seeds)
            kept = [means[number] for number in downsample(len(means))]
            drawn = [Point(own.seconds if unit == "seconds" else own.epoch, own.value) for own, _, _ in kept]
            config, end = seeds[0][0], f"at the end {means[-1][0].value:.4g}"
            name, tip, band = group.label(config), subject.tip(config, end), list[tuple[float, float]]()
            if len(seeds) > 1:
                name, tip, band = label, f"{label}, {len(seeds)} seeds\n{end}", [(low, high) for _, low, high in kept]
            if len(band) == 1:  # an area of one point has no width
                drawn, band = [replace(drawn[0], interval=band[0])], []
            look = look_of(config.precision)
            lines.append(Line(name, drawn, look.colour, look.marker, look.dash, tip, band))
        panels.append(Panel(y_title, varied(lines), unit))
    last = [f"{label} {_means(points for _, points in seeds)[-1][0].value:.4g}" for label, seeds in shown[:8]]
    most = max(len(seeds) for _, seeds in shown)
    about = f" Lines are means over up to {most} seeds, areas their ranges." if most > 1 else ""
    return Chart(
        title=f"{title} over time and epochs",
        summary=f"At the end: {', '.join(last)}.{about}",
        draw=lambda width: line_chart(panels, width),
        note=left_out("{} of {:,} runs; `castwise export` has all.", shown, runs),
    )


def _means(runs: Iterable[Sequence[_Point]]) -> list[tuple[_Point, float, float]]:
    """Return the mean point of runs at each of their epochs, with the lowest and the highest value there."""
    found = []
    at = grouped((point for points in runs for point in points), lambda point: point.epoch)
    for epoch, points in sorted(at.items()):
        values = [point.value for point in points if math.isfinite(point.value)] or [math.nan]
        mean = _Point(fmean(point.seconds for point in points), fmean(values), epoch)
        found.append((mean, min(values), max(values)))
    return found


def loss(subject: GroupSubject) -> Chart | None:
    return _curves(subject, "Training loss", "training loss", _losses)


def score(subject: GroupSubject) -> Chart | None:
    metric = metric_of([config.trial for config in subject.group.configurations])
    factor, y_title = (100, "accuracy, %") if metric.name == "accuracy" else (1, metric.name)

    def ends_of_epochs(trial: Trial) -> Iterator[_Point]:
        seconds = 0.0
        for count, epoch in enumerate(epochs_of(trial), start=1):
            seconds += epoch.seconds + epoch.validation_seconds
            found = metric.score(epoch)
            if found is not None:
                yield _Point(seconds, factor * metric.shown(found), count)

    return _curves(subject, f"Validation {metric.name}", y_title, ends_of_epochs)


def equivalence(subject: GroupSubject) -> Chart | None:
    """Return how far scores are from the baseline's, over pairs of runs with the same seeds."""
    trials: dict[str, list[Trial]] = {}  # by setting, such as a batch size
    for config in subject.group.configurations:
        trials.setdefault(subject.group.setting(config, "seed", "loss_scale", "bits"), []).append(config.trial)
    every: list[tuple[str, Runs, FlatRow]] = []
    for setting, own in trials.items():
        judged = [runs for runs in runs_of(own, None, None) if runs.verdict is not None]
        flat = [{**flat_row(runs), "setting": setting, "file": subject.file_of(runs.trials[0])} for runs in judged]
        if any(row["difference"] is not None for row in flat):
            every += [(setting, runs, row) for runs, row in zip(judged, flat, strict=True)]
    if not every:
        return None
    first = every[0][1]
    baseline, metric = precision_name(first.baseline[0].spec), first.metric
    unit, margin = difference_unit(metric), 100 * first.margin_share
    rows: list[tuple[str, list[Dot], str]] = []
    for setting, runs, row in every[:MAX_BARS]:
        scale, verdict, dots = runs.spec.changed_loss_scale, row["verdict"], []
        label = ", ".join(filter(None, (runs.name, scale and f"loss scale {scale}", setting)))
        if row["difference"] is not None:
            look = look_of(runs.spec.precision)
            ends = (100 * row["difference_low"], 100 * row["difference_high"])
            tip = f"{label}\n{row['difference_text']}{unit}\n{verdict}, {len(runs.trials)} runs\n{row['file']}"
            dots = [Dot(100 * row["difference"], look.colour, look.marker, tip, ends, is_ringed=verdict == "as good")]
        rows.append((label, dots, verdict))

    def draw(width: int) -> Drawing:
        axis = _difference_axis([dot for _, dots, _ in rows for dot in dots], margin, 5 if width > NARROW else 3)
        return dot_chart(rows, width, axis, f"difference from {baseline}:{unit}, above 0 is better")

    verdicts = ", ".join(f"{label} {verdict}" for label, _, verdict in rows[:8])
    setting_field = [Field("setting", "setting")] if any(each for each, *_ in every) else []
    precision, *others = short_columns(COLUMNS)
    fields = [precision, *setting_field, *others, find_field("file")]
    return Chart(
        title=f"Is the {metric.name} as good as in {baseline}?",
        summary=f"Shaded is the usual margin of {margin:.4g}{unit}; lines are intervals, 95 % over all looks. "
        f"{verdicts}.",
        draw=draw,
        table=DataTable(fields, [row for *_, row in every]),
        note=left_out("{} of {:,} precisions are drawn; the table has all.", rows, every),
    )


def _difference_axis(dots: Sequence[Dot], margin: float, most: int) -> Axis:
    """Return an axis around 0 with room for the margin, all dots, and most of their intervals."""
    reach = max([1.5 * margin, *(1.1 * abs(dot.value) for dot in dots)])
    farthest = max((abs(end) for dot in dots for end in dot.interval or ()), default=0.0)
    reach = max(reach, min(farthest, 2 * reach))
    return Axis(-reach, reach, nice_ticks(-reach, reach, most), number, 0.0, (-margin, margin))
