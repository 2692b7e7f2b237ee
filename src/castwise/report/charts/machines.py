"""Machines next to each other: throughput of each configuration on the left, its speed-up over float32 on the right."""

from collections.abc import Callable, Sequence

from castwise.analysis.statistics import Estimate
from castwise.registry.precisions import BASELINE
from castwise.render.fields import Field, FlatRow, find_field, find_fields, interval_text, ratio_text
from castwise.render.table import DataTable
from castwise.render.units import format_rate, format_ratio
from castwise.report.charts import plotly_parts as plot
from castwise.report.charts.chart import Chart, left_out
from castwise.report.collection import FileOf, value_of
from castwise.report.machine_comparison import ComparisonRow, MachineResult
from castwise.report.machine_report import flat_row, verdict_text

_MAX_ROWS = 24
_PATTERNS = ("", ".", "-", "+")  # of the configurations of one precision; "/" is of those that failed
_NAME_WIDTH = 16  # characters of a machine's name below its bars, on a line
_HALF = 0.45  # of the width, for each of the two panels


def machines(title: str, rows: Sequence[ComparisonRow], file_of: FileOf) -> Chart | None:
    """Return throughput and speed-up of each configuration, a group of bars for each machine."""
    measured = [row for row in rows if any(result.throughput or result.speedup for result in row.results)]
    if not measured:
        return None
    shown = measured[:_MAX_ROWS]
    rates, speedups = [], []
    for row in shown:
        rates.append(_bars(rows, row, lambda result: result.throughput, format_rate, f" {row.unit}/s", file_of))
        if row.spec.precision != BASELINE:
            over = f" over fp32 at batch {row.baseline_batch}"
            bars = _bars(rows, row, lambda result: result.speedup, format_ratio, over, file_of)
            speedups.append(bars | plot.panel(1) | {"showlegend": False})
    document = plot.layout(
        380,
        barmode="group",
        xaxis=plot.names_axis(domain=[0, _HALF], anchor="y"),
        yaxis=plot.axis(
            f"{shown[0].unit} per second", tickformat=",", anchor="x", domain=[0, 1], range=plot.bar_range(rates)
        ),
        xaxis2=plot.names_axis(domain=[1 - _HALF, 1], anchor="y2"),
        yaxis2=plot.axis(
            "speed-up over fp32", rangemode="tozero", anchor="x2", domain=[0, 1], range=plot.bar_range(speedups)
        ),
    )
    if speedups:
        num_machines = len({name for trace in speedups for name in trace["x"]})
        # Categories count from 0. An xref to the axis' domain fails with a layer between traces and grid.
        document["shapes"] = [plot.rule_at_one() | {"xref": "x2", "yref": "y2", "x0": -0.5, "x1": num_machines - 0.5}]
    domains = {"xaxis": [0, 1], "yaxis": [0.62, 1], "xaxis2": [0, 1], "yaxis2": [0, 0.38]}  # below each other
    narrow = {"height": 620} | {name: document[name] | {"domain": domain} for name, domain in domains.items()}
    table_rows: list[FlatRow] = [
        {**flat_row(row, result), "file": _file(result, file_of)} for row in rows for result in row.results
    ]
    fields = [
        Field("machine", "machine"),
        *find_fields(("precision", "loss_scale", "batch_size", "throughput_per_second")),
        find_field("speedup", "speed-up over fp32"),
        Field("ratio", "ratio", "ratio", interval_text("ratio")),
        *find_fields(("verdict", "status", "file")),
    ]
    return Chart(
        name="machines",
        title=title,
        summary=_summary(shown),
        traces=[*rates, *speedups],
        layout=document,
        narrow=narrow,
        table=DataTable(fields, table_rows),
        note=left_out("{} of {:,} configurations are drawn; the table has all.", shown, measured),
    )


def _bars(
    rows: Sequence[ComparisonRow],
    row: ComparisonRow,
    get: Callable[[MachineResult], Estimate | None],
    form: Callable[[float | None], str],
    unit: str,
    file_of: FileOf,
) -> plot.Document:
    same_precision = [each for each in rows if each.spec.precision == row.spec.precision]
    pattern = _PATTERNS[min(same_precision.index(row), len(_PATTERNS) - 1)]

    def bar(result: MachineResult) -> plot.Bar:
        figure = get(result)
        text = form(figure.value) if figure else ""
        verdict = f"{verdict_text(result)} {ratio_text(result.ratio)}" if result.verdict is not None else ""
        where = f"{row.spec.label} on {result.machine.name}"
        interval = plot.interval_text(figure, form)
        return plot.Bar(
            name=plot.wrap(result.machine.name, _NAME_WIDTH),
            precision=row.spec.precision,
            found=figure,
            label=text,
            pattern=pattern if result.entry.status == "ok" else "/",
            hover=plot.hover([where, text and f"{text}{unit}", interval, verdict, _file(result, file_of)]),
        )

    batches = {each.spec.batch_size for each in rows}
    scales = {each.spec.loss_scale for each in same_precision}
    batch = f", batch {row.spec.batch_size}" if len(batches) > 1 else ""
    scale = f", loss scale {row.spec.loss_scale}" if len(scales) > 1 else ""
    name = plot.escape(f"{row.spec.precision}{batch}{scale}")
    highest = max(value_of(get(result)) for each in rows for result in each.results)
    return plot.labelled_bars(
        [bar(result) for result in row.results], highest, len(rows) * len(row.results), name=name, legendgroup=name
    )


def _summary(rows: Sequence[ComparisonRow]) -> str:
    speedups = [(result.speedup.value, row, result) for row in rows for result in row.results if result.speedup]
    what = "Throughput of whole runs, validation included" if rows[0].is_whole else "Throughput"
    if not speedups:
        return f"{what}; no configuration can be compared with float32 on its machine."
    value, row, result = max(speedups, key=lambda each: each[0])
    return (
        f"{what}, and speed-up over fp32 on the same machine: the largest is {format_ratio(value)}, "
        f"{row.spec.precision} on {result.machine.name}."
    )


def _file(result: MachineResult, file_of: FileOf) -> str:
    return file_of(result.entry.trials[0]) if result.entry.trials else "published"
