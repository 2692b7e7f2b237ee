"""The timed blocks: their step times, and the GPU's clock, power and temperature meanwhile."""

from collections.abc import Callable, Sequence

from castwise.analysis import steady_metrics
from castwise.records.schema import TelemetrySummary
from castwise.render.fields import Field, FlatRow, worth_showing
from castwise.render.table import DataTable
from castwise.render.units import format_seconds
from castwise.report.charts.chart import MAX_LINES, Chart, GroupSubject, left_out, varied
from castwise.report.charts.svg import Panel, line_chart
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
    shown = timed[:MAX_LINES]
    lines = []
    for config in shown:
        times = steady_metrics.step_times(config.trial)
        median = steady_metrics.step_seconds(config.trial) or 1.0
        points = [(float(place), 100 * (each / median - 1)) for place, each in enumerate(times, start=1)]
        lines.append(subject.line(config, points, f"median {format_seconds(median)} a step"))
    spreads = [spread for config in shown if (spread := steady_metrics.spread(config.trial)) is not None]
    ends = dict.fromkeys(format_share(each) for each in (min(spreads), max(spreads))) if spreads else {}
    spread_text = f"; they vary by {' to '.join(ends)}" if ends else ""
    note = "The lines are the first process of each configuration." if any(len(c.trials) > 1 for c in shown) else ""
    panel = Panel("difference from the median, %", varied(lines), "timed block", least_span=_LEAST_SPAN)
    return Chart(
        name="blocks",
        title="Step time over the run",
        summary=f"Step time of each timed block relative to the median{spread_text}.",
        draw=lambda width: line_chart([panel], width),
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
    shown, what = watched[:MAX_LINES], "epoch" if group.is_training else "block"
    panels = []
    for name, title, unit, _ in _READINGS:
        lines = []
        for config, rows in shown:
            reasons = dict.fromkeys(
                r for t in config.trials for each in t.readings for r in each.throttle_reasons or ()
            )
            held = f"clock held down by {', '.join(reasons)}" if reasons else ""
            points = [(float(row["block"]), row[name]) for row in rows]
            lines.append(subject.line(config, points, held))
        is_last = name == _READINGS[-1][0]
        panels.append(Panel(f"{title}, {unit}", varied(lines), f"{what}s" if is_last else "", least_span=_LEAST_SPAN))
    several = "Of several GPUs the slowest one's clock, the mean power of one, and the hottest one's temperature."
    note = several if any(config.trial.spec.world_size > 1 for config, _ in shown) else ""
    return Chart(
        name="telemetry",
        title="GPU clock, power and temperature",
        summary=f"SM clock, power and temperature of the GPU while it was timed, {what} by {what}.",
        draw=lambda width: line_chart(panels, width),
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
