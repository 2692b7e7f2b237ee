"""The timed blocks: their step times, and the GPU's clock, power and temperature meanwhile."""

from collections.abc import Callable

from castwise.analysis import steady_metrics
from castwise.records.schema import TelemetrySummary
from castwise.report.charts.chart import MAX_LINES, Chart, GroupSubject, varied
from castwise.report.charts.svg import Panel, line_chart
from castwise.report.charts.throughput import pick
from castwise.show.units import format_seconds
from castwise.spec.quantities import format_share

_LEAST_SPAN = 0.05  # of an axis, as a share of the highest value on it
# Title, and the value in the title's unit.
_READINGS: tuple[tuple[str, Callable[[TelemetrySummary], float | None]], ...] = (
    ("SM clock, MHz", lambda reading: reading.sm_clock_hertz and reading.sm_clock_hertz / 1e6),
    ("power, W", lambda reading: reading.gpu_power_watts),
    ("temperature, °C", lambda reading: reading.max_temperature_celsius),
)


def blocks(subject: GroupSubject) -> Chart | None:
    """Return each block's step time relative to its process's median: how steady the measurement is."""
    group = subject.group
    timed = [config for config in group.configurations if len(steady_metrics.step_times(config.trial)) > 1]
    if not timed:
        return None
    names, note = pick(group, timed, MAX_LINES, "castwise export")
    lines = []
    for config, name in names.items():
        times = steady_metrics.step_times(config.trial)
        median = steady_metrics.step_seconds(config.trial) or 1.0
        points = [(float(place), 100 * (each / median - 1)) for place, each in enumerate(times, start=1)]
        lines.append(subject.line(name, config, points, f"median {format_seconds(median)} a step"))
    spreads = [spread for config in names if (spread := steady_metrics.spread(config.trial)) is not None]
    ends = dict.fromkeys(format_share(each) for each in (min(spreads), max(spreads))) if spreads else {}
    spread_text = f"; they vary by {' to '.join(ends)}" if ends else ""
    first = "The lines are the first process of each configuration." if any(len(c.trials) > 1 for c in names) else ""
    panel = Panel("difference from the median, %", varied(lines), "timed block", least_span=_LEAST_SPAN)
    return Chart(
        title="Step time over the run",
        summary=f"Step time of each timed block relative to the median{spread_text}.",
        draw=lambda width: line_chart([panel], width),
        note=" ".join(filter(None, (first, note))),
    )


def telemetry(subject: GroupSubject) -> Chart | None:
    """Return clock, power and temperature of the GPU over the blocks of each configuration."""
    group = subject.group
    every = [(c, [reading for trial in c.trials for reading in trial.readings]) for c in group.configurations]
    watched = {c: own for c, own in every if any(value(each) is not None for each in own for *_, value in _READINGS)}
    if not watched:
        return None
    names, note = pick(group, list(watched), MAX_LINES, "castwise export")
    what = "epoch" if group.is_training else "block"
    panels = []
    for title, value in _READINGS:
        lines = []
        for config, name in names.items():
            readings = watched[config]
            reasons = dict.fromkeys(reason for reading in readings for reason in reading.throttle_reasons or ())
            held = f"clock held down by {', '.join(reasons)}" if reasons else ""
            points = [(float(place), value(reading)) for place, reading in enumerate(readings, start=1)]
            lines.append(subject.line(name, config, points, held))
        x_title = f"{what}s" if title == _READINGS[-1][0] else ""
        panels.append(Panel(title, varied(lines), x_title, least_span=_LEAST_SPAN))
    several = "Of several GPUs the slowest one's clock, the mean power of one, and the hottest one's temperature."
    means = several if any(config.trial.spec.world_size > 1 for config in names) else ""
    return Chart(
        title="GPU clock, power and temperature",
        summary=f"SM clock, power and temperature of the GPU while it was timed, {what} by {what}.",
        draw=lambda width: line_chart(panels, width),
        note=" ".join(filter(None, (means, note))),
    )
