"""The timed blocks: their step times, and the GPU's clock, power and temperature meanwhile."""

from collections.abc import Callable, Sequence

from castwise.analysis import steady_metrics
from castwise.records.schema import TelemetrySummary
from castwise.render.fields import Field, FlatRow, worth_showing
from castwise.render.table import DataTable
from castwise.render.units import format_seconds
from castwise.report.charts import plotly_parts as plot
from castwise.report.charts.chart import Chart, GroupSubject, left_out
from castwise.report.collection import Configuration
from castwise.spec.quantities import format_share

_LEAST_SPAN = 0.05  # of an axis, as a share of the highest value on it
_LEFT_OUT = "{} of {:,} configurations; `castwise export` has all."
# Name, title, unit, and the value in that unit.
_READINGS: tuple[tuple[str, str, str, Callable[[TelemetrySummary], float | None]], ...] = (
    ("sm_clock", "SM clock", "MHz", lambda reading: reading.sm_clock_hertz and reading.sm_clock_hertz / 1e6),
    ("power", "power", "W", lambda reading: reading.gpu_power_watts),
    ("temperature", "temperature", "°C", lambda reading: reading.max_temperature_celsius),
)


def blocks(subject: GroupSubject) -> Chart | None:
    """Return each block's step time relative to its process's median: how steady the measurement is."""
    group = subject.group
    timed = [config for config in group.configurations if len(steady_metrics.step_times(config.trial)) > 1]
    if not timed:
        return None
    shown = timed[: plot.MAX_LINES]
    traces = []
    for config in shown:
        times = steady_metrics.step_times(config.trial)
        median = steady_metrics.step_seconds(config.trial) or 1.0
        kept = plot.downsample(len(times))
        text = plot.hover_template(
            [group.label(config), f"median {format_seconds(median)} a step", subject.file_of(config.trial)],
            "block %{x}: %{y:+.2f} % from the median",
        )
        y = [100 * (times[index] / median - 1) for index in kept]
        traces.append(subject.line(config, [index + 1 for index in kept], y, text))
    plot.vary_lines(traces)
    spreads = [spread for config in shown if (spread := steady_metrics.spread(config.trial)) is not None]
    spread_text = f"; they spread by {format_share(min(spreads))} to {format_share(max(spreads))}" if spreads else ""
    note = "The lines are the first process of each configuration." if any(len(c.trials) > 1 for c in shown) else ""
    return Chart(
        name="blocks",
        title="How steady the blocks were",
        summary=f"Step time of each timed block relative to the median{spread_text}.",
        traces=traces,
        layout=plot.layout(xaxis=plot.axis("timed block", zeroline=False), yaxis=plot.axis("from the median, %")),
        table=_table([_rows(subject, config) for config in shown]),
        note=f"{note} {left_out(_LEFT_OUT, shown, timed)}".strip(),
    )


def telemetry(subject: GroupSubject) -> Chart | None:
    """Return clock, power and temperature of the GPU over the blocks of each configuration."""
    group = subject.group
    every = [(config, _rows(subject, config)) for config in group.configurations]
    watched = [(c, rows) for c, rows in every if any(row[name] is not None for row in rows for name, *_ in _READINGS)]
    if not watched:
        return None
    shown, what = watched[: plot.MAX_LINES], "epoch" if group.is_training else "block"
    traces = []
    for config, rows in shown:
        kept = [rows[index] for index in plot.downsample(len(rows))]
        reasons = dict.fromkeys(r for t in config.trials for each in t.readings for r in each.throttle_reasons or ())
        held = f"clock held down by {', '.join(reasons)}" if reasons else ""
        lines = [group.label(config), held, subject.file_of(config.trial)]
        for place, (name, title, unit, _) in enumerate(_READINGS):
            text = plot.hover_template(lines, f"{title} %{{y:.0f}} {unit} in {what} %{{x}}")
            x, y = [row["block"] for row in kept], [row[name] for row in kept]
            traces.append(subject.line(config, x, y, text, place))
    plot.vary_lines(traces)
    document = plot.panels([f"{title}, {unit}" for _, title, unit, _ in _READINGS], ["", "", f"{what}s, as timed"], 150)
    for place in range(len(_READINGS)):
        name = plot.panel(place)["yaxis"]
        values = [value for trace in traces if trace["yaxis"] == name for value in trace["y"] if value is not None]
        span = _LEAST_SPAN * max(values, default=0.0)
        if values and max(values) - min(values) < span:  # do not magnify a constant value's noise
            middle = (max(values) + min(values)) / 2
            document[name.replace("y", "yaxis")]["range"] = [middle - span / 2, middle + span / 2]
    several = "Of several GPUs the slowest one's clock, the mean power of one, and the hottest one's temperature."
    note = several if any(config.trial.spec.world_size > 1 for config, _ in shown) else ""
    return Chart(
        name="telemetry",
        title=f"Clock, power and temperature over the {what}s",
        summary=f"SM clock, power and temperature of the GPU while it was timed, {what} by {what}.",
        traces=traces,
        layout=document,
        table=_table([rows for _, rows in shown]),
        note=f"{note} {left_out(_LEFT_OUT, shown, watched)}".strip(),
    )


def _rows(subject: GroupSubject, config: Configuration) -> list[FlatRow]:
    """Return a row for each timed block or epoch of a configuration, counted from 1 over its processes."""
    rows: list[FlatRow] = []
    label = subject.group.label(config)
    for trial in config.trials:
        times, readings = steady_metrics.step_times(trial), trial.readings
        for index in range(max(len(times), len(readings))):
            reading = readings[index] if index < len(readings) else None
            values = {name: None if reading is None else value(reading) for name, _, _, value in _READINGS}
            seconds = times[index] if index < len(times) else None
            rows.append({"configuration": label, "block": len(rows) + 1, "step_seconds": seconds, **values})
    return rows


def _table(rows_of: Sequence[Sequence[FlatRow]]) -> DataTable[FlatRow]:
    def whole_number(name: str) -> Callable[[FlatRow], str]:
        return lambda row: f"{row[name]:.0f}"

    rows = [row for rows in rows_of for row in rows]
    fields = [
        Field("configuration", "configuration"),
        Field("block", "block", "count"),
        Field("step_seconds", "step time", "seconds"),
        *(Field(name, f"{title}, {unit}", "count", whole_number(name)) for name, title, unit, _ in _READINGS),
    ]
    return DataTable(worth_showing(fields, rows), rows)
