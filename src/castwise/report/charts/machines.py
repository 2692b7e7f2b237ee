"""How many times as fast configurations are as on the first machine: a row each, on a logarithmic axis."""

import math
from collections.abc import Sequence

from castwise.analysis.statistics import Estimate, has_interval
from castwise.render.fields import Field, FlatRow, difference_text, find_fields, ratio_text
from castwise.render.table import DataTable
from castwise.render.theme import INK, STACK, look_of
from castwise.render.units import format_ratio, pluralize
from castwise.report.charts import plotly_parts as plot
from castwise.report.charts.chart import Chart, left_out
from castwise.report.collection import FileOf
from castwise.report.machine_comparison import ComparisonRow, MachineComparison, MachineResult
from castwise.report.machine_report import flat_row, short_ratio, title_of, verdict_text

_MAX_ROWS = 40
_ROW, _NARROW_ROW, _AROUND = 30, 42, 70  # pixels of a row, of one on a narrow screen, and above and below the rows
_SYMBOLS = ("circle", "square", "diamond", "triangle-up")
_COLOURS = (STACK[3], STACK[0], STACK[2], STACK[4])  # of machines
_MOST_TICKS, _MOST_NARROW_TICKS = 8, 4
_EVEN_STEPS = 2.5  # of the axis' ends: below it, numbers are at even steps from 1
_STEPS = range(-10, 20)
_IN_PERCENT = 1.12  # of the axis' ends, or 1 over it

_Found = tuple[str, ComparisonRow, MachineResult, Estimate]  # the group's title, and a result with its ratio


def ratios(comparison: MachineComparison, file_of: FileOf) -> Chart | None:
    """Return the ratio of each configuration on each of the other machines, and their geometric means, if any."""
    found: list[_Found] = [
        (title, row, result, result.ratio)
        for title, rows in comparison.groups.items()
        for row in rows
        for result in row.results
        if result.ratio is not None
    ]
    if not found:
        return None
    first = comparison.machines[0]
    others = [machine for machine in comparison.machines[1:] if any(each[2].machine is machine for each in found)]
    rows = list({id(row): (title, row) for title, row, _, _ in found}.values())
    shown = rows[:_MAX_ROWS]
    height = {id(row): len(shown) - number for number, (_, row) in enumerate(shown)}  # the first is at the top
    drawn = [each for each in found if id(each[1]) in height]
    traces = []
    for number, machine in enumerate(others):
        own = [each for each in drawn if each[2].machine is machine]
        # Next to each other if there are several; colours are then the machines', else the precisions'.
        offset = 0.25 - 0.5 * number / (len(others) - 1) if len(others) > 1 else 0.0
        colours = [
            look_of(row.spec.precision).colour if len(others) == 1 else _COLOURS[number % len(_COLOURS)]
            for _, row, *_ in own
        ]
        means = comparison.means_of(machine)
        mean = f"geometric mean over {pluralize(means.num_speeds, 'configuration')}"
        trace: plot.Document = {
            "type": "scatter",
            "mode": "markers",
            "name": plot.wrap(machine.name, 44),
            "x": [ratio.value for *_, ratio in own],
            "y": [height[id(row)] + offset for _, row, *_ in own],
            "error_x": plot.error_bars([ratio for *_, ratio in own]),
            "marker": {
                "color": colours,
                "symbol": _SYMBOLS[number % len(_SYMBOLS)],
                "size": 11,
                "line": {"color": INK, "width": 0.5},
            },
            "hovertext": [_hover(each, file_of) for each in own],
            "hoverinfo": "text",
            "legendgroup": str(number),
            "showlegend": len(others) > 1,
        }
        of_mean = {"x": [means.speed], "y": [offset], "hovertext": [plot.hover([mean, short_ratio(means.speed or 1)])]}
        marker = {
            "marker": trace["marker"] | {"symbol": "diamond", "size": 15, "color": colours[0] if colours else INK}
        }
        if len(others) == 1:
            marker["marker"]["color"] = INK
        traces += [trace, trace | of_mean | marker | {"error_x": None, "showlegend": False}]
    ends = [1.0, *(end for *_, ratio in drawn for end in _ends(ratio))]
    margin = (max(ends) / min(ends)) ** 0.05
    low, high = min(ends) / margin, max(ends) * margin
    labels = [plot.wrap(f"{title}, {row.spec.precision}, batch {row.spec.batch_size}", 50) for title, row in shown]
    title = plot.escape(f"speed relative to {first.name}")
    document = plot.layout(
        _ROW * (len(shown) + 1) + _AROUND,
        xaxis=_speed_axis(title, low, high, _MOST_TICKS),
        yaxis=_rows_axis([*labels, "<b>geometric mean</b>"]),
    )
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 0.5, "y1": 0.5}
    document["shapes"] = [
        plot.rule_at_one("x") | {"layer": "above", "line": {"color": INK, "width": 1.5, "dash": "dot"}},
        line | {"line": {"color": INK, "width": 0.5}},
    ]
    narrow: plot.Document = {
        "height": _NARROW_ROW * (len(shown) + 1) + _AROUND,
        "xaxis": _speed_axis(title, low, high, _MOST_NARROW_TICKS),
        "yaxis": _rows_axis([*(_narrow_label(title, row, comparison) for title, row in shown), "<b>mean</b>"]),
    }
    if len(others) == 1:
        # The figures are the labels of a second axis, which appears only if a trace is on it.
        texts = [ratio_text(ratio) for *_, ratio in drawn] + [short_ratio(comparison.means_of(others[0]).speed or 1)]
        side = {"overlaying": "y", "side": "right"}
        document["yaxis2"] = _rows_axis(texts) | side
        narrow["yaxis2"] = _rows_axis([text.split(" [")[0] for text in texts]) | side
        traces.append({"type": "scatter", "mode": "none", "x": [1], "y": [0], "yaxis": "y2", "showlegend": False})
    fields = [
        *find_fields(("workload", "precision", "loss_scale", "batch_size")),
        Field("machine", "machine"),
        Field("ratio", "ratio", "ratio", difference_text("ratio")),
        *find_fields(("verdict", "file")),
    ]
    table_rows: list[FlatRow] = [
        {**flat_row(row, result), "workload": title, "file": _file(result, file_of)} for title, row, result, _ in found
    ]
    return Chart(
        name="ratios",
        title=f"Speed, {title_of(comparison)}",
        summary=_summary(comparison),
        traces=traces,
        layout=document,
        narrow=narrow,
        table=DataTable(fields, table_rows),
        note=left_out("{} of {:,} configurations are drawn; the table has all.", shown, rows),
    )


def _narrow_label(title: str, row: ComparisonRow, comparison: MachineComparison) -> str:
    """Return a row's label on at most three short lines; it names the batch size if the group has several."""
    has_batches = len({each.spec.batch_size for each in comparison.groups[title]}) > 1
    last = f"{row.spec.precision}, {row.spec.batch_size}" if has_batches else row.spec.precision
    return "<br>".join([*plot.wrap(title, 20).split("<br>")[:2], plot.escape(last)])


def _rows_axis(texts: Sequence[str]) -> plot.Document:
    """Return an axis with a text for each row, the first at the top; the last is that of the mean, at 0."""
    positions = [len(texts) - 1 - number for number in range(len(texts))]
    return plot.axis(
        tickmode="array", tickvals=positions, ticktext=list(texts), range=[-0.7, len(texts) - 0.3], zeroline=False
    ) | {"showgrid": False}


def _ends(ratio: Estimate) -> Sequence[float]:
    return (ratio.low, ratio.high) if has_interval(ratio) else (ratio.value,)


def _label(title: str, row: ComparisonRow) -> str:
    return plot.escape(f"{title}, {row.spec.precision}, batch {row.spec.batch_size}")


def _narrow(label: str) -> str:
    return "<br>".join(label.split(", ")[:2])


def _speed_axis(title: str, low: float, high: float, most: int) -> plot.Document:
    """Return a logarithmic axis from `low` to `high` with at most so many numbers, in per cent if all are near 1."""
    in_percent = max(high, 1 / low) < _IN_PERCENT
    if high / low < _EVEN_STEPS:
        steps = (step * 10.0**power for power in range(-4, 1) for step in (1, 2, 5))
        ticks = next(
            found for step in steps if len(found := _between([1 + n * step for n in _STEPS], low, high)) <= most
        )
    else:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        mantissas = next(
            (each for each in ((1, 2, 5), (1, 3)) if len(_between(_powers(each, decades), low, high)) <= most), (1,)
        )
        ticks = _between(_powers(mantissas, decades), low, high)
    return plot.axis(
        title,
        type="log",
        range=[math.log10(low), math.log10(high)],
        tickmode="array",
        tickvals=ticks,
        ticktext=[
            f"{100 * (tick - 1):+z.3g} %".replace("-", "−").replace("+0 %", "0 %") if in_percent else f"{tick:g}×"
            for tick in ticks
        ],
        zeroline=False,
    )


def _powers(mantissas: Sequence[int], decades: Sequence[int]) -> list[float]:
    return [mantissa * 10.0**decade for decade in decades for mantissa in mantissas]


def _between(values: Sequence[float], low: float, high: float) -> list[float]:
    return [value for value in values if low <= value <= high]


def _hover(found: _Found, file_of: FileOf) -> str:
    _, row, result, ratio = found
    interval = plot.interval_text(ratio, format_ratio)
    where = f"{row.spec.label} on {result.machine.name}"
    return plot.hover([where, ratio_text(ratio), interval, verdict_text(result), _file(result, file_of)])


def _summary(comparison: MachineComparison) -> str:
    means = [comparison.means_of(machine) for machine in comparison.machines[1:]]
    words = [f"{short_ratio(each.speed)} ({each.machine.name})" for each in means if each.speed]
    words = [words[0].split(" (")[0]] if len(words) == 1 else words
    lines = "" if comparison.is_without_intervals else ", lines are 95 % intervals"
    return f"To the right of the dotted line is faster{lines}. Geometric mean: {', '.join(words)}."


def _file(result: MachineResult, file_of: FileOf) -> str:
    return file_of(result.entry.trials[0]) if result.entry.trials else "published"
