"""The timed blocks: their step times, and the GPU's clock, power and temperature meanwhile."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from castwise.analysis import steady_metrics
from castwise.records.schema import TelemetrySummary
from castwise.render.fields import Field, FlatRow, worth_showing
from castwise.render.table import DataTable
from castwise.render.units import format_seconds
from castwise.report.charts.chart import Chart, GroupSubject
from castwise.report.charts.plotly_parts import (
    MAX_LINES,
    axis,
    downsample,
    hover_template,
    layout,
    line,
    panel,
    panels,
    tell_apart,
)
from castwise.report.collection import Configuration
from castwise.spec.quantities import format_share

_LEAST_SPAN = 0.05  # of an axis, as a share of the highest value on it


@dataclass(frozen=True)
class _Block:
    """A timed block or epoch of a configuration, counted from 1 over its processes."""

    config: Configuration
    number: int
    seconds: float | None
    reading: TelemetrySummary | None

    def read(self, value: Callable[[TelemetrySummary], float | None]) -> float | None:
        return None if self.reading is None else value(self.reading)


_READINGS: tuple[tuple[str, str, str, Callable[[TelemetrySummary], float | None]], ...] = (
    (
        "sm_clock",
        "SM clock",
        "MHz",
        lambda reading: None if reading.sm_clock_hertz is None else reading.sm_clock_hertz / 1e6,
    ),
    ("power", "power", "W", lambda reading: reading.gpu_power_watts),
    ("temperature", "temperature", "°C", lambda reading: reading.max_temperature_celsius),
)


def blocks(subject: GroupSubject) -> Chart | None:
    """Return each block's step time relative to its process's median: how steady the measurement is."""
    group = subject.group
    timed = [config for config in group.configurations if len(steady_metrics.step_times(config.trial)) > 1]
    if not timed:
        return None
    shown = timed[:MAX_LINES]
    traces = []
    for config in shown:
        times = steady_metrics.step_times(config.trial)
        median = steady_metrics.step_seconds(config.trial) or 1.0
        kept = downsample(len(times))
        text = hover_template(
            [group.label(config), f"median {format_seconds(median)} a step", subject.file_of(config.trial)],
            "block %{x}: %{y:+.2f} % from the median",
        )
        x, y = [index + 1 for index in kept], [100 * (times[index] / median - 1) for index in kept]
        traces.append(line(group.label(config), config.precision, x, y, text))
    tell_apart(traces)
    spreads = [spread for config in shown if (spread := steady_metrics.spread(config.trial)) is not None]
    spread_text = f"; they spread by {format_share(min(spreads))} to {format_share(max(spreads))}" if spreads else ""
    note = "The lines are the first process of each configuration." if any(len(c.trials) > 1 for c in shown) else ""
    return Chart(
        name="blocks",
        title="How steady the blocks were",
        says=f"Step time of each timed block relative to the median{spread_text}.",
        traces=traces,
        layout=layout(xaxis=axis("timed block", zeroline=False), yaxis=axis("from the median, %")),
        table=_table(subject, shown),
        note=f"{note} {_left_out(shown, timed)}".strip(),
    )


def telemetry(subject: GroupSubject) -> Chart | None:
    """Return clock, power and temperature of the GPU over the blocks of each configuration."""
    group = subject.group
    watched = [config for config in group.configurations if any(_has_reading(block) for block in _blocks(config))]
    if not watched:
        return None
    shown, what = watched[:MAX_LINES], "epoch" if group.is_training else "block"
    traces = []
    for config in shown:
        every = _blocks(config)
        kept = [every[index] for index in downsample(len(every))]
        held = dict.fromkeys(r for t in config.trials for each in t.readings for r in each.throttle_reasons or ())
        lines = [
            group.label(config),
            f"clock held down by {', '.join(held)}" if held else "",
            subject.file_of(config.trial),
        ]
        for place, (_, title, unit, value) in enumerate(_READINGS):
            text = hover_template(lines, f"{title} %{{y:.0f}} {unit} in {what} %{{x}}")
            x, y = [block.number for block in kept], [block.read(value) for block in kept]
            traces.append(line(group.label(config), config.precision, x, y, text, place))
    tell_apart(traces)
    document = panels([f"{title}, {unit}" for _, title, unit, _ in _READINGS], ["", "", f"{what}s, as timed"], 150)
    for place in range(len(_READINGS)):
        name = panel(place)["yaxis"]
        values = [value for trace in traces if trace["yaxis"] == name for value in trace["y"] if value is not None]
        span = _LEAST_SPAN * max(values, default=0.0)
        if values and max(values) - min(values) < span:  # do not magnify a constant value's noise
            middle = (max(values) + min(values)) / 2
            document[name.replace("y", "yaxis")]["range"] = [middle - span / 2, middle + span / 2]
    several = "Of several GPUs the slowest one's clock, the mean power of one, and the hottest one's temperature."
    note = several if any(config.trial.spec.world_size > 1 for config in shown) else ""
    return Chart(
        name="telemetry",
        title=f"Clock, power and temperature over the {what}s",
        says=f"SM clock, power and temperature of the GPU while it was timed, {what} by {what}.",
        traces=traces,
        layout=document,
        table=_table(subject, shown),
        note=f"{note} {_left_out(shown, watched)}".strip(),
    )


def _blocks(config: Configuration) -> list[_Block]:
    found: list[_Block] = []
    for trial in config.trials:
        times: Sequence[float] = steady_metrics.step_times(trial)
        for index in range(max(len(times), len(trial.readings))):
            seconds = times[index] if index < len(times) else None
            reading = trial.readings[index] if index < len(trial.readings) else None
            found.append(_Block(config, len(found) + 1, seconds, reading))
    return found


def _has_reading(block: _Block) -> bool:
    return any(block.read(value) is not None for *_, value in _READINGS)


def _left_out(shown: Sequence[Configuration], every: Sequence[Configuration]) -> str:
    if len(shown) == len(every):
        return ""
    return f"{len(shown)} of {len(every):,} configurations; `castwise export` has all."


def _table(subject: GroupSubject, shown: Sequence[Configuration]) -> DataTable[FlatRow]:
    rows: list[FlatRow] = [
        {
            "configuration": subject.group.label(config),
            "block": block.number,
            "step_seconds": block.seconds,
            **{name: block.read(value) for name, _, _, value in _READINGS},
        }
        for config in shown
        for block in _blocks(config)
    ]
    fields = [
        Field("configuration", "configuration"),
        Field("block", "block", "count"),
        Field("step_seconds", "step time", "seconds"),
        *(Field(name, f"{title}, {unit}", "count", _whole_number(name)) for name, title, unit, _ in _READINGS),
    ]
    return DataTable(worth_showing(fields, rows), rows)


def _whole_number(name: str) -> Callable[[FlatRow], str]:
    return lambda row: f"{row[name]:.0f}"
