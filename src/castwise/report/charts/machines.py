"""How many times as fast configurations are as on the first machine: a row each, on a logarithmic axis."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from castwise.report.charts.chart import Chart, interval_of, interval_text, left_out
from castwise.report.charts.svg import NARROW, Axis, Dot, Drawing, Key, cut_off, dot_chart, log_ticks, nice_ticks
from castwise.report.collection import FileOf
from castwise.report.machine_comparison import ComparisonRow, GeometricMeans, MachineComparison, MachineResult
from castwise.report.machine_report import result_table, title_of, verdict_text
from castwise.show.fields import precise_ratio, ratio_text
from castwise.show.theme import INK, STACK, look_of
from castwise.show.units import format_ratio

_MAX_ROWS = 40
# Of machines: a colour and a marker each.
_LOOKS = ((STACK[3], "circle"), (STACK[0], "square"), (STACK[2], "diamond"), (STACK[4], "triangle-up"))
_WORK = ("work for the same money", "work_per_price")
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
    speeds = {each.machine.name: precise_ratio(each.speed or 1.0) for each in means}
    rows = list({id(row): (title, row) for title, row, _ in found}.values())
    shown = rows[:_MAX_ROWS]
    is_alone = len(others) == 1
    lines = [_line_of(title, row, looks, file_of) for title, row in shown]
    lines = _with_short_intervals([*lines, *_mean_lines(means, looks)])
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
        table=result_table(comparison),
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


def _mean_lines(means: Sequence[GeometricMeans], looks: Mapping[str, tuple[str, str]]) -> Iterator[_Line]:
    """Yield what is over all configurations: mean speeds, those of the best on each machine, and work per money."""
    for name, figure in (("geometric mean", "speed"), ("best against best", "best"), _WORK):
        dots = []
        for own in means:
            if (value := getattr(own, figure)) is not None:
                look = (INK, "diamond") if len(looks) == 1 else looks[own.machine.name]
                dots.append(Dot(value, *look, f"{name}\n{precise_ratio(value)}"))
        if dots:
            yield name, dots, precise_ratio(dots[0].value) if len(looks) == 1 else ""


def _with_short_intervals(lines: Sequence[_Line]) -> list[_Line]:
    """Return lines whose intervals do not make the ratios tiny."""
    values = [dot.value for _, dots, _ in lines for dot in dots]
    low = min(values) / 2
    return [
        (name, [replace(dot, interval=cut_off(dot.interval, low, values)) for dot in dots], text)
        for name, dots, text in lines
    ]


def pictures_of_machines(comparison: MachineComparison, file_of: FileOf) -> Iterator[tuple[str, str]]:
    """Yield the file name and the SVG of the chart of compared machines, if they have a ratio."""
    chart = ratios(comparison, file_of)
    if chart is not None:
        yield "ratios.svg", chart.as_file(chart.summary)


def _speed_axis(lines: Sequence[_Line], most: int) -> Axis:
    """Return a logarithmic axis with at most so many numbers."""
    ends = [1.0, *(end for _, dots, _ in lines for dot in dots for end in dot.interval or (dot.value,))]
    ends += [1 / _LEAST_SPAN, _LEAST_SPAN] if max(ends) / min(ends) < _LEAST_SPAN else []
    margin = (max(ends) / min(ends)) ** 0.05
    low, high = min(ends) / margin, max(ends) * margin
    ticks = nice_ticks(low, high, most) if high / low < 2.5 else log_ticks(low, high, most)
    return Axis(low, high, ticks, lambda tick: f"{tick:g}×", rule=1.0, is_log=True)
