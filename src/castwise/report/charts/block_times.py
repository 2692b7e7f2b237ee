"""What happened while blocks were timed: step times, and clock, power and temperature as telemetry saw them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from castwise.analysis import steady_metrics
from castwise.records.schema import TelemetrySummary
from castwise.render.table import Column, DataTable
from castwise.render.units import format_seconds
from castwise.report.charts.chart import Chart, GroupSubject
from castwise.report.charts.plotly_parts import (
    MOST_LINES,
    Document,
    axis,
    downsample,
    layout,
    line,
    panel,
    panels,
    template,
    variants,
)
from castwise.report.collection import Configuration
from castwise.spec.quantities import format_share


@dataclass(frozen=True)
class _Turn:
    """One timed block or epoch of one cell, counted from 1 over its processes."""

    cell: Configuration
    number: int
    seconds: float | None
    reading: TelemetrySummary | None


_PANELS: tuple[tuple[str, str, Callable[[TelemetrySummary], float | None]], ...] = (
    ("SM clock", "MHz", lambda reading: None if reading.sm_clock_hertz is None else reading.sm_clock_hertz / 1e6),
    ("power", "W", lambda reading: reading.gpu_power_watts),
    ("temperature", "°C", lambda reading: reading.max_temperature_celsius),
)


_LEAST_SPAN = 0.05  # of an axis, as a share of the highest value on it


def telemetry(subject: GroupSubject) -> Chart | None:
    """Return clock, power and temperature of each cell over its turns."""
    topic = subject.group
    every = ((cell, _turns(cell)) for cell in topic.configurations)
    watched = [(cell, turns) for cell, turns in every if any(_tells(turn) for turn in turns)]
    if not watched:
        return None
    shown, what = watched[:MOST_LINES], "epoch" if topic.is_training else "turn"
    traces = []
    numbers = variants([cell.precision for cell, _ in shown])
    for (cell, turns), variant in zip(shown, numbers, strict=True):
        kept = [turns[index] for index in downsample(len(turns))]
        for index, (title, unit, value) in enumerate(_PANELS):
            values = [value(turn.reading) if turn.reading is not None else None for turn in kept]
            said = template(
                [topic.label(cell), _held(cell), subject.file_of(cell.trial)],
                values=f"{title} %{{y:.0f}} {unit} in {what} %{{x}}",
            )
            trace = line(topic.label(cell), cell.precision, [turn.number for turn in kept], values, said, variant)
            traces.append({**trace, **panel(index), "showlegend": index == 0})
    titles = [f"{title}, {unit}" for title, unit, _ in _PANELS]
    return Chart(
        name="telemetry",
        title=f"Clock, power and temperature over the {what}s",
        says=f"SM clock, power and temperature of the GPU while it was timed, {what} by {what}.",
        traces=traces,
        layout=_telemetry_layout(titles, f"{what}s, as timed", traces),
        table=_grid(subject, [turn for _, turns in shown for turn in turns]),
        note=" ".join(filter(None, (_of_several(shown), _left_out(len(shown), len(watched))))),
    )


def _of_several(shown: Sequence[tuple[Configuration, Sequence[_Turn]]]) -> str:
    if all(cell.trial.spec.world_size == 1 for cell, _ in shown):
        return ""
    return "Of several GPUs the slowest one's clock, the mean power of one, and the hottest one's temperature."


def _telemetry_layout(titles: Sequence[str], x_title: str, traces: Sequence[Document]) -> Document:
    """Return the panels' layout; no axis magnifies what is steady into a storm of ticks."""
    document = panels(titles, [""] * (len(titles) - 1) + [x_title], height=150)
    for index in range(len(titles)):
        number = panel(index)["yaxis"]
        values = [value for trace in traces if trace["yaxis"] == number for value in trace["y"] if value is not None]
        if values and max(values) - min(values) < _LEAST_SPAN * max(values):
            middle, half = (max(values) + min(values)) / 2, _LEAST_SPAN * max(values) / 2
            document[number.replace("y", "yaxis", 1)]["range"] = [middle - half, middle + half]
    return document


def blocks(subject: GroupSubject) -> Chart | None:
    """Return each block's step time beside its process's median: how steady the figures are."""
    topic = subject.group
    timed = [(cell, times) for cell in topic.configurations if len(times := steady_metrics.step_times(cell.trial)) > 1]
    if not timed:
        return None
    shown = timed[:MOST_LINES]
    traces = []
    numbers = variants([cell.precision for cell, _ in shown])
    for (cell, times), variant in zip(shown, numbers, strict=True):
        middle = steady_metrics.step_seconds(cell.trial) or 1.0
        kept = downsample(len(times))
        values = [100 * (times[index] / middle - 1) for index in kept]
        said = template(
            [topic.label(cell), f"median {format_seconds(middle)} a step", subject.file_of(cell.trial)],
            values="block %{x}: %{y:+.2f} % beside the median",
        )
        traces.append(line(topic.label(cell), cell.precision, [index + 1 for index in kept], values, said, variant))
    document = layout()
    document["xaxis"] = axis("timed block", zeroline=False)
    document["yaxis"] = axis("beside the median, %")
    spreads = [spread for cell, _ in shown if (spread := steady_metrics.spread(cell.trial)) is not None]
    return Chart(
        name="blocks",
        title="How steady the blocks were",
        says="Step time of each timed block beside its median"
        + (f"; they spread by {format_share(min(spreads))} to {format_share(max(spreads))}." if spreads else "."),
        traces=traces,
        layout=document,
        table=_grid(subject, [turn for cell, _ in shown for turn in _turns(cell)]),
        note=" ".join(
            words
            for words in (
                "The lines are the first process of each cell."
                if any(len(cell.trials) > 1 for cell, _ in shown)
                else "",
                _left_out(len(shown), len(timed)),
            )
            if words
        ),
    )


def _turns(cell: Configuration) -> list[_Turn]:
    found: list[_Turn] = []
    for trial in cell.trials:
        times: Sequence[float] = steady_metrics.step_times(trial)
        for index in range(max(len(times), len(trial.readings))):
            seconds = times[index] if index < len(times) else None
            reading = trial.readings[index] if index < len(trial.readings) else None
            found.append(_Turn(cell, len(found) + 1, seconds, reading))
    return found


def _tells(turn: _Turn) -> bool:
    return turn.reading is not None and any(value(turn.reading) is not None for _, _, value in _PANELS)


def _left_out(shown: int, every: int) -> str:
    return f"{shown} of {every:,} cells; `castwise export` has all." if shown < every else ""


def _held(cell: Configuration) -> str:
    """Return what held the clock down in any turn."""
    seen = (reason for trial in cell.trials for each in trial.readings for reason in each.throttle_reasons or ())
    reasons = ", ".join(dict.fromkeys(seen))
    return f"clock held down by {reasons}" if reasons else ""


def _grid(subject: GroupSubject, turns: Sequence[_Turn]) -> DataTable[_Turn]:
    columns: list[Column[_Turn]] = [
        Column("cell", "cell", lambda t: subject.group.label(t.cell), lambda t: subject.group.label(t.cell), left=True),
        Column("turn", "turn", lambda t: t.number, lambda t: str(t.number)),
        Column("step_seconds", "step time", lambda t: t.seconds, lambda t: format_seconds(t.seconds)),
    ]
    if any(_tells(turn) for turn in turns):
        columns += [_reading_column(title, unit, value) for title, unit, value in _PANELS]
    return DataTable(columns, turns)


def _reading_column(title: str, unit: str, value: Callable[[TelemetrySummary], float | None]) -> Column[_Turn]:
    def of(turn: _Turn) -> float | None:
        return None if turn.reading is None else value(turn.reading)

    return Column(title.replace(" ", "_").lower(), f"{title}, {unit}", of, lambda turn: _number(of(turn)))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"
