"""Machines next to each other: throughput of each configuration on the left, its speed-up over float32 on the right."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from castwise.analysis.statistics import Estimate
from castwise.records.schema import Trial
from castwise.registry.precisions import BASELINE
from castwise.render.intervals import ratio_text
from castwise.render.table import Column, DataTable
from castwise.render.units import format_rate, format_ratio
from castwise.report.charts.chart import Chart, value_of, words
from castwise.report.charts.plotly_parts import (
    Document,
    axis,
    bar_range,
    escape,
    hover,
    interval_text,
    labelled_bars,
    layout,
    names_axis,
    panel,
    rule_at_one,
    wrap,
)
from castwise.report.machine_comparison import ComparisonRow, MachineResult
from castwise.report.machine_report import rate_text, verdict_text

_MAX_ROWS = 24
_PATTERNS = ("", ".", "-", "+")  # of the configurations of one precision; "/" is of those that failed
_NAME_WIDTH = 16  # characters of a machine's name below its bars, on a line
_HALF = 0.45  # of the width, for each of the two panels


@dataclass(frozen=True)
class MachinesSubject:
    """What a chart of one comparison group on several machines is drawn from.

    Attributes:
        title: The group's title.
        rows: Its configurations on all machines.
        file_of: Returns the name of the file that a trial was read from.
    """

    title: str
    rows: Sequence[ComparisonRow]
    file_of: Callable[[Trial], str]


def machines(subject: MachinesSubject) -> Chart | None:
    """Return throughput and speed-up of each configuration, a group of bars for each machine."""
    measured = [row for row in subject.rows if any(result.throughput or result.speedup for result in row.results)]
    if not measured:
        return None
    shown = measured[:_MAX_ROWS]
    rates = [_bars(subject, row, lambda result: result.throughput, format_rate, f" {row.unit}/s") for row in shown]
    compared = [row for row in shown if row.spec.precision != BASELINE]
    speedups = [
        _bars(subject, row, lambda result: result.speedup, format_ratio, f" over fp32 at batch {row.baseline_batch}")
        | panel(1)
        | {"showlegend": False}
        for row in compared
    ]
    document = layout(
        380,
        barmode="group",
        xaxis=names_axis(domain=[0, _HALF], anchor="y"),
        yaxis=axis(f"{shown[0].unit} per second", tickformat=",", anchor="x", domain=[0, 1], range=bar_range(rates)),
        xaxis2=names_axis(domain=[1 - _HALF, 1], anchor="y2"),
        yaxis2=axis("speed-up over fp32", rangemode="tozero", anchor="x2", domain=[0, 1], range=bar_range(speedups)),
    )
    if speedups:
        num_machines = len({name for trace in speedups for name in trace["x"]})
        # Categories count from 0. An xref to the axis' domain fails with a layer between traces and grid.
        document["shapes"] = [rule_at_one() | {"xref": "x2", "yref": "y2", "x0": -0.5, "x1": num_machines - 0.5}]
    below_each_other = {
        "height": 620,
        "xaxis": {**document["xaxis"], "domain": [0, 1]},
        "yaxis": {**document["yaxis"], "domain": [0.62, 1]},
        "xaxis2": {**document["xaxis2"], "domain": [0, 1]},
        "yaxis2": {**document["yaxis2"], "domain": [0, 0.38]},
    }
    left_out = f"{len(shown)} of {len(measured):,} configurations are drawn; the table has all."
    return Chart(
        name="machines",
        title=subject.title,
        says=_says(shown),
        traces=[*rates, *speedups],
        layout=document,
        narrow=below_each_other,
        table=_table(subject),
        note=left_out if len(shown) < len(measured) else "",
    )


def _bars(
    subject: MachinesSubject,
    row: ComparisonRow,
    get: Callable[[MachineResult], Estimate | None],
    form: Callable[[float | None], str],
    unit: str,
) -> Document:
    results = [result for result in row.results if result.entry is not None]
    found = [get(result) for result in results]
    same_precision = [each for each in subject.rows if each.spec.precision == row.spec.precision]
    pattern = _PATTERNS[min(same_precision.index(row), len(_PATTERNS) - 1)]

    def hover_text(result: MachineResult, figure: Estimate | None) -> str:
        verdict = f"{verdict_text(result)} {ratio_text(result.ratio)}" if result.verdict is not None else ""
        return hover(
            [
                f"{row.spec.label} on {result.machine.name}",
                f"{form(figure.value)}{unit}" if figure else "",
                interval_text(figure, form),
                verdict,
                _file(subject, result),
            ]
        )

    return labelled_bars(
        [wrap(result.machine.name, _NAME_WIDTH) for result in results],
        found,
        [row.spec.precision] * len(results),
        [form(each.value) if each else "" for each in found],
        [pattern if result.entry and result.entry.status == "ok" else "/" for result in results],
        [hover_text(result, each) for result, each in zip(results, found, strict=True)],
        highest=max(value_of(get(result)) for each in subject.rows for result in each.results),
        num_bars=len(subject.rows) * len(results),
        name=escape(_label(row, subject.rows)),
        legendgroup=escape(_label(row, subject.rows)),
    )


def _label(row: ComparisonRow, rows: Sequence[ComparisonRow]) -> str:
    """Return what tells a configuration from the others of its chart."""
    spec = row.spec
    batches = {each.spec.batch_size for each in rows}
    scales = {each.spec.loss_scale for each in rows if each.spec.precision == spec.precision}
    batch = f", batch {spec.batch_size}" if len(batches) > 1 else ""
    scale = f", loss scale {spec.loss_scale}" if len(scales) > 1 else ""
    return f"{spec.precision}{batch}{scale}"


def _says(rows: Sequence[ComparisonRow]) -> str:
    speedups = [(result.speedup.value, row, result) for row in rows for result in row.results if result.speedup]
    what = "Throughput of whole runs, validation included" if rows[0].is_whole else "Throughput"
    if not speedups:
        return f"{what}; no configuration can be compared with float32 on its machine."
    value, row, result = max(speedups, key=lambda each: each[0])
    return (
        f"{what}, and speed-up over fp32 on the same machine: the largest is {format_ratio(value)}, "
        f"{row.spec.precision} on {result.machine.name}."
    )


def _table(subject: MachinesSubject) -> DataTable[tuple[ComparisonRow, MachineResult]]:
    rows = [(row, result) for row in subject.rows for result in row.results if result.entry is not None]

    def figure(
        name: str,
        title: str,
        get: Callable[[MachineResult], Estimate | None],
        text: Callable[[tuple[ComparisonRow, MachineResult]], str],
    ) -> Column[tuple[ComparisonRow, MachineResult]]:
        return Column(name, title, lambda pair: found.value if (found := get(pair[1])) else None, text)

    return DataTable(
        [
            words("machine", lambda pair: pair[1].machine.name),
            words("precision", lambda pair: pair[0].spec.precision),
            words("loss scale", lambda pair: pair[0].spec.loss_scale),
            Column(
                "batch_size", "batch", lambda pair: pair[0].spec.batch_size, lambda pair: str(pair[0].spec.batch_size)
            ),
            figure("throughput", "throughput", lambda r: r.throughput, lambda pair: rate_text(pair[1], pair[0].unit)),
            figure("speedup", "speed-up over fp32", lambda r: r.speedup, lambda pair: ratio_text(pair[1].speedup)),
            figure("ratio", "ratio", lambda r: r.ratio, lambda pair: ratio_text(pair[1].ratio)),
            words("verdict", lambda pair: verdict_text(pair[1])),
            words("file", lambda pair: _file(subject, pair[1])),
        ],
        rows,
    )


def _file(subject: MachinesSubject, result: MachineResult) -> str:
    trials = result.entry.trials if result.entry is not None else ()
    return subject.file_of(trials[0]) if trials else "published"
