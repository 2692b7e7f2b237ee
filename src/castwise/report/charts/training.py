"""Loss, accuracy and perplexity of training runs, over time and over epochs, and where the wall time went."""

from collections.abc import Callable, Iterator
from functools import partial

from castwise.analysis import training_metrics
from castwise.records.schema import Trial
from castwise.render.fields import Field
from castwise.render.units import format_percent, format_seconds
from castwise.report import series
from castwise.report.charts.chart import MAX_BARS, MAX_LINES, Chart, GroupSubject, left_out, varied
from castwise.report.charts.memory import stack_keys, stacked
from castwise.report.charts.svg import Panel, bar_chart, line_chart
from castwise.report.series import Point

_PARTS = {"first step": "start", "waiting for data": "data", "training": "train", "validation": "validation"}
_LEAST_WAIT = 0.0005  # of the training: less is shown as nothing


def _curves(
    subject: GroupSubject, name: str, title: str, y_title: str, points_of: Callable[[Trial], Iterator[Point]]
) -> Chart | None:
    """Return a value of each run over time and over epochs."""
    group = subject.group
    every = [(config, points) for config in group.configurations if (points := list(points_of(config.trial)))]
    if not every:
        return None
    shown = every[:MAX_LINES]
    panels = []
    for unit in ("seconds", "epochs"):
        lines = []
        for config, points in shown:
            over = [(point.seconds if unit == "seconds" else point.epoch, point.value) for point in points]
            lines.append(subject.line(config, over, f"at the end {points[-1].value:.4g}"))
        panels.append(Panel(y_title, varied(lines), unit))
    last = [f"{group.label(config)} {points[-1].value:.4g}" for config, points in shown[:8]]
    return Chart(
        name=name,
        title=f"{title} over time and epochs",
        summary=f"At the end: {', '.join(last)}.",
        draw=lambda width: line_chart(panels, width),
        note=left_out("{} of {:,} runs; `castwise export` has all.", shown, every),
    )


loss = partial(_curves, name="loss", title="Training loss", y_title="training loss", points_of=series.losses)
accuracy = partial(
    _curves,
    name="accuracy",
    title="Validation accuracy",
    y_title="accuracy, %",
    points_of=partial(
        series.epoch_ends, value_of=lambda epoch: None if epoch.accuracy is None else 100 * epoch.accuracy
    ),
)
perplexity = partial(
    _curves,
    name="perplexity",
    title="Validation perplexity",
    y_title="perplexity",
    points_of=partial(series.epoch_ends, value_of=training_metrics.perplexity),
)


def time_split(subject: GroupSubject) -> Chart | None:
    """Return where the wall time of each run went."""
    group = subject.group
    splits = {config: split for config in group.configurations if (split := training_metrics.split(config.trial))}
    if not splits:
        return None
    shown = list(splits)[:MAX_BARS]
    bars = [
        stacked(
            group.label(config),
            [(title, own := getattr(splits[config], name), format_seconds(own)) for title, name in _PARTS.items()],
            format_seconds(splits[config].total),
            is_failed=config.trial.status != "ok",
        )
        for config in shown
    ]
    keys = stack_keys(bars, list(_PARTS))
    fields = [Field(f"{name}_seconds", title, "seconds") for title, name in _PARTS.items()]
    shares = [share for config in shown if (share := training_metrics.data_share(config.trial)) is not None]
    waits = "; none of it waits for data" if len(shares) == len(shown) else ""  # some records do not know
    if shares and max(shares) >= _LEAST_WAIT:
        waits = f"; up to {format_percent(max(shares))} of the training is waiting for data"
    return Chart(
        name="time",
        title="Where the time went",
        summary=f"Wall time of each run{waits}.",
        draw=lambda width: bar_chart(bars, width, "seconds", keys),
        table=subject.table(
            list(splits), fields, lambda c: {f"{name}_seconds": getattr(splits[c], name) for name in _PARTS.values()}
        ),
    )
