"""How many times as fast configurations are as on the first machine: a row each, on a logarithmic axis."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from castwise.report.charts.chart import Chart, interval_of, interval_text, left_out
from castwise.report.charts.svg import NARROW, Axis, Dot, Drawing, Key, cut_off, dot_chart, log_ticks, nice_ticks
from castwise.report.collection import FileOf
from castwise.report.machine_comparison import MachineComparison, MachineResult
from castwise.report.machine_report import flat_row, short_ratio, title_of, verdict_text
from castwise.show.fields import Field, FlatRow, difference_text, find_fields, ratio_text
from castwise.show.table import DataTable
from castwise.show.theme import INK, STACK, look_of
from castwise.show.units import format_ratio, pluralize

_MAX_ROWS = 40
# Of machines: a colour and a marker each.
_LOOKS = ((STACK[3], "circle"), (STACK[0], "square"), (STACK[2], "diamond"), (STACK[4], "triangle-up"))
_LEAST_SPAN = 1.02  # of the axis: noise is not magnified


def ratios(comparison: MachineComparison, file_of: FileOf) -> Chart | None:
    """Return the ratio of each configuration on each of the other machines, and their geometric means, if any."""
    found = [
        (title, row, result)
        for title, rows in comparison.groups.items()
        for row in rows
        for result in row.results
        if result.ratio is not None
    ]
    if not found:
        return None
    first = comparison.machines[0]
    others = [machine for machine in comparison.machines[1:] if any(each[2].machine == machine.name for each in found)]
    looks = list(zip(others, itertools.cycle(_LOOKS), strict=False))
    rows = list({id(row): (title, row) for title, row, _ in found}.values())
    shown = rows[:_MAX_ROWS]
    is_alone = len(others) == 1

    def file(result: MachineResult) -> str:
        return file_of(result.trials[0]) if result.trials else "published"

    lines: list[tuple[str, list[Dot], str]] = []
    for title, row in shown:
        dots, text = [], ""
        for machine, (own_colour, symbol) in looks:
            result = row.result_on(machine)
            if result is None or result.ratio is None:
                continue
            colour = look_of(row.spec.precision).colour if is_alone else own_colour
            where, interval = f"{row.spec.label} on {machine.name}", interval_text(result.ratio, format_ratio)
            tips = (where, ratio_text(result.ratio), interval, verdict_text(result), file(result))
            tip = "\n".join(each for each in tips if each)
            dots.append(Dot(result.ratio.value, colour, symbol, tip, interval_of(result.ratio)))
            text = ratio_text(result.ratio) if is_alone else ""
        lines.append((f"{title}, {row.spec.precision}, batch {row.spec.batch_size}", dots, text))
    means = [(comparison.means_of(machine), look) for machine, look in looks]
    mean_dots = [
        Dot(
            each.speed,
            *((INK, "diamond") if is_alone else look),
            f"geometric mean over {pluralize(each.num_speeds, 'configuration')}\n{short_ratio(each.speed)}",
        )
        for each, look in means
        if each.speed
    ]
    lines.append(("geometric mean", mean_dots, short_ratio(means[0][0].speed or 1) if is_alone else ""))
    values = [dot.value for _, dots, _ in lines for dot in dots]
    lines = [
        (name, [replace(dot, interval=cut_off(dot.interval, min(values) / 2, values)) for dot in dots], text)
        for name, dots, text in lines
    ]
    ends = [1.0, *(end for _, dots, _ in lines for dot in dots for end in dot.interval or (dot.value,))]
    ends += [1 / _LEAST_SPAN, _LEAST_SPAN] if max(ends) / min(ends) < _LEAST_SPAN else []
    margin = (max(ends) / min(ends)) ** 0.05
    keys = [] if is_alone else [Key(machine.name, *look) for machine, look in looks]
    fields = [
        *find_fields(("workload", "precision", "loss_scale", "batch_size")),
        Field("machine", "machine"),
        Field("ratio", "ratio", "ratio", difference_text("ratio")),
        *find_fields(("verdict", "file")),
    ]
    table_rows: list[FlatRow] = [
        {**flat_row(row, result), "workload": title, "file": file(result)} for title, row, result in found
    ]
    words = [f"{short_ratio(each.speed)} ({each.machine.name})" for each, _ in means if each.speed]
    words = [words[0].split(" (")[0]] if is_alone else words
    intervals = "" if comparison.is_without_intervals else ", lines are 95 % intervals"

    def draw(width: int) -> Drawing:
        is_narrow = width <= NARROW
        short = [(name, dots, text.split(" [")[0] if is_narrow else text) for name, dots, text in lines]
        axis = _speed_axis(min(ends) / margin, max(ends) * margin, 4 if is_narrow else 6)
        return dot_chart(short, width, axis, f"speed relative to {first.name}", keys)

    return Chart(
        title=f"Speed, {title_of(comparison)}",
        summary=f"To the right of the dotted line is faster{intervals}. Geometric mean: {', '.join(words)}.",
        draw=draw,
        table=DataTable(fields, table_rows),
        note=left_out("{} of {:,} configurations are drawn; the table has all.", shown, rows),
    )


def pictures_of_machines(comparison: MachineComparison, file_of: FileOf) -> Iterator[tuple[str, str]]:
    """Yield the file name and the SVG of the chart of compared machines, if they have a ratio."""
    chart = ratios(comparison, file_of)
    if chart is not None:
        yield "ratios.svg", chart.as_file(chart.summary)


def _speed_axis(low: float, high: float, most: int) -> Axis:
    """Return a logarithmic axis with at most so many numbers, in per cent if all are near 1."""
    in_percent = max(high, 1 / low) < 1.12
    ticks = nice_ticks(low, high, most) if high / low < 2.5 else log_ticks(low, high, most)

    def label(tick: float) -> str:
        if in_percent:
            return f"{100 * (tick - 1):+z.3g} %".replace("-", "−").replace("+0 %", "0 %")
        return f"{tick:g}×"

    return Axis(low, high, ticks, label, rule=1.0, is_log=True)
