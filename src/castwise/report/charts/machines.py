"""How many times as fast configurations are as on the first machine: a row each, on a logarithmic axis."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from castwise.report.charts.chart import Chart, interval_of, interval_text, left_out
from castwise.report.charts.svg import NARROW, Axis, Dot, Drawing, Key, cut_off, dot_chart, log_ticks, nice_ticks
from castwise.report.collection import FileOf
from castwise.report.machine_comparison import ComparisonRow, GeometricMeans, MachineComparison, MachineResult
from castwise.report.machine_report import flat_row, short_ratio, title_of, verdict_text
from castwise.show.fields import Field, FlatRow, difference_text, find_fields, ratio_text
from castwise.show.table import DataTable
from castwise.show.theme import INK, STACK, look_of
from castwise.show.units import format_ratio, pluralize

_MAX_ROWS = 40
# Of machines: a colour and a marker each.
_LOOKS = ((STACK[3], "circle"), (STACK[0], "square"), (STACK[2], "diamond"), (STACK[4], "triangle-up"))
_Line = tuple[str, list[Dot], str]  # of a chart: its name, its dots, and a figure
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
    compared = {result.machine for *_, result in found}
    others = [machine for machine in comparison.machines if machine.name in compared]
    looks = dict(zip((machine.name for machine in others), itertools.cycle(_LOOKS), strict=False))
    means = [comparison.means_of(machine) for machine in others]
    speeds = {each.machine.name: short_ratio(each.speed or 1.0) for each in means}
    rows = list({id(row): (title, row) for title, row, _ in found}.values())
    shown = rows[:_MAX_ROWS]
    is_alone = len(others) == 1
    lines = [_line_of(title, row, looks, file_of) for title, row in shown]
    lines = _with_short_intervals([*lines, _mean_line(means, looks)])
    keys = [] if is_alone else [Key(name, *look) for name, look in looks.items()]
    words = speeds.values() if is_alone else [f"{speed} ({name})" for name, speed in speeds.items()]
    intervals = "" if comparison.is_without_intervals else ", lines are 95 % intervals"

    def draw(width: int) -> Drawing:
        is_narrow = width <= NARROW
        short = [(name, dots, text.split(" [")[0] if is_narrow else text) for name, dots, text in lines]
        axis = _speed_axis(lines, 4 if is_narrow else 6)
        return dot_chart(short, width, axis, f"speed relative to {comparison.machines[0].name}", keys)

    return Chart(
        title=f"Speed, {title_of(comparison)}",
        summary=f"To the right of the dotted line is faster{intervals}. Geometric mean: {', '.join(words)}.",
        draw=draw,
        table=_table(found, file_of),
        note=left_out("{} of {:,} configurations are drawn; the table has all.", shown, rows),
    )


def _file(result: MachineResult, file_of: FileOf) -> str:
    return file_of(result.trials[0]) if result.trials else "published"


def _line_of(title: str, row: ComparisonRow, looks: Mapping[str, tuple[str, str]], file_of: FileOf) -> _Line:
    """Return a configuration's ratios: of one machine alone in the colour of the precision, and with its figure."""
    dots, texts = [], []
    for result in row.results:
        if result.ratio is None:
            continue
        texts.append(ratio_text(result.ratio))
        where, interval = f"{row.spec.label} on {result.machine}", interval_text(result.ratio, format_ratio)
        tips = (where, texts[-1], interval, verdict_text(result), _file(result, file_of))
        colour, symbol = looks[result.machine]
        colour = look_of(row.spec.precision).colour if len(looks) == 1 else colour
        dots.append(Dot(result.ratio.value, colour, symbol, "\n".join(filter(None, tips)), interval_of(result.ratio)))
    return f"{title}, {row.spec.precision}, batch {row.spec.batch_size}", dots, texts[0] if len(looks) == 1 else ""


def _mean_line(means: Sequence[GeometricMeans], looks: Mapping[str, tuple[str, str]]) -> _Line:
    dots = []
    for own in means:
        speed, look = own.speed or 1.0, (INK, "diamond") if len(looks) == 1 else looks[own.machine.name]
        over = f"geometric mean over {pluralize(own.num_speeds, 'configuration')}"
        dots.append(Dot(speed, *look, f"{over}\n{short_ratio(speed)}"))
    return "geometric mean", dots, short_ratio(dots[0].value) if len(looks) == 1 else ""


def _with_short_intervals(lines: Sequence[_Line]) -> list[_Line]:
    """Return lines whose intervals do not make the ratios tiny."""
    values = [dot.value for _, dots, _ in lines for dot in dots]
    low = min(values) / 2
    return [
        (name, [replace(dot, interval=cut_off(dot.interval, low, values)) for dot in dots], text)
        for name, dots, text in lines
    ]


def _table(found: Sequence[tuple[str, ComparisonRow, MachineResult]], file_of: FileOf) -> DataTable[FlatRow]:
    fields = [
        *find_fields(("workload", "precision", "loss_scale", "batch_size")),
        Field("machine", "machine"),
        Field("ratio", "ratio", "ratio", difference_text("ratio")),
        *find_fields(("verdict", "file")),
    ]
    rows: list[FlatRow] = [
        {**flat_row(row, result), "workload": title, "file": _file(result, file_of)} for title, row, result in found
    ]
    return DataTable(fields, rows)


def pictures_of_machines(comparison: MachineComparison, file_of: FileOf) -> Iterator[tuple[str, str]]:
    """Yield the file name and the SVG of the chart of compared machines, if they have a ratio."""
    chart = ratios(comparison, file_of)
    if chart is not None:
        yield "ratios.svg", chart.as_file(chart.summary)


def _speed_axis(lines: Sequence[_Line], most: int) -> Axis:
    """Return a logarithmic axis with at most so many numbers, in per cent if all are near 1."""
    ends = [1.0, *(end for _, dots, _ in lines for dot in dots for end in dot.interval or (dot.value,))]
    ends += [1 / _LEAST_SPAN, _LEAST_SPAN] if max(ends) / min(ends) < _LEAST_SPAN else []
    margin = (max(ends) / min(ends)) ** 0.05
    low, high = min(ends) / margin, max(ends) * margin
    in_percent = max(high, 1 / low) < 1.12
    ticks = nice_ticks(low, high, most) if high / low < 2.5 else log_ticks(low, high, most)

    def label(tick: float) -> str:
        if in_percent:
            return f"{100 * (tick - 1):+z.3g} %".replace("-", "−").replace("+0 %", "0 %")
        return f"{tick:g}×"

    return Axis(low, high, ticks, label, rule=1.0, is_log=True)
