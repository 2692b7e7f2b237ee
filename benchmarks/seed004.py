"""Image models on 1, 2 and 4 GPUs, as jorism1993/nvidia_amd_gpu_comparison measured them: the table and the chart.

`measure_again.py DIR seed004/MODEL ...` measures them, with DistributedDataParallel and DataParallel, in float32 and in
mixed precision. Both have the batch that the source gives mixed precision, which is twice its float32's.
"""

from collections.abc import Sequence
from functools import cache

from hero import for_dark_pages
from stored import RECORDS, load, markdown, where_of

from castwise.analysis.result_table import Row, rows_of_steps
from castwise.analysis.warnings import NOISE
from castwise.report.charts.chart import Chart, varied
from castwise.report.charts.svg import Line, Panel, Point, line_chart
from castwise.show.theme import INK, look_of
from castwise.show.units import format_percent, format_rate

# The batch of one GPU. The source has no figures in numbers.
BATCHES = {
    "inception_v3": 128,
    "resnet50": 192,
    "resnet101": 128,
    "efficientnet_b0": 192,
    "efficientnet_b4": 64,
    "efficientnet_b7": 28,
}
PRECISIONS = ("fp32", "fp16-mixed")
WORLD_SIZES = (1, 2, 4)


def options(model: str, num_gpus: int) -> tuple[str, ...]:
    """Return the options of `castwise run` for a model, on as many of the numbers of GPUs as there are."""
    sizes = ",".join(str(size) for size in WORLD_SIZES if size <= num_gpus)
    spread = () if num_gpus == 1 else ("--parallelism", "ddp,dp")
    batch = ("--batch-size", str(BATCHES[model]))
    return ("--gpus", sizes, *spread, *batch, "--precision", ",".join(PRECISIONS), "--rounds", "1", "--seconds", "0.5")


@cache
def measured() -> dict[tuple[str, str, int, str], Row]:
    """Return what is on record, by model, precision, number of GPUs and parallelism."""
    specs = [(row, row.trial.spec) for row in rows_of_steps(load(RECORDS / "seed004"))]
    return {(spec.workload, spec.precision, spec.world_size, spec.parallelism): row for row, spec in specs}


def table(_: str) -> str:
    """Return images per second of each model, and the scaling efficiency on several GPUs, with the chart."""
    found = measured()
    if not found:
        return "None is on record yet.\n"
    columns = sorted({(size, kind) for _, _, size, kind in found}, key=lambda each: (each[0], each[1] == "dp"))
    cells = [
        [model, batch, precision, *(_cell(model, precision, *column) for column in columns)]
        for model, batch in BATCHES.items()
        for precision in PRECISIONS
        if any(key[:2] == (model, precision) for key in found)
    ]
    names = [f"{size} GPU{'s' if size > 1 else ''}{f', {kind}' if size > 1 else ''}" for size, kind in columns]
    places = dict.fromkeys(where_of(row.trial) for row in found.values())
    heading = " | ".join(["model | batch | precision", *names])
    picture = "![Speed-up over the number of GPUs, by model](../images/scaling-models.svg)"
    lines = [f"Images per second; {'; '.join(places)}", "", *markdown(heading, "lrl" + "r" * len(names), cells)]
    return "\n".join([*lines, "", picture, ""])


def _cell(model: str, precision: str, size: int, kind: str) -> str:
    row = measured().get((model, precision, size, kind))
    if row is None or row.throughput is None:
        return "–" if row is None else row.trial.status
    share = _efficiency(model, precision, size, kind) if size > 1 else None
    noisy = ", noisy" * _is_noisy(row)
    return format_rate(row.throughput) + ("" if share is None else f" ({format_percent(share)}{noisy})")


def _is_noisy(row: Row) -> bool:
    return row.spread is not None and row.spread > NOISE


def _efficiency(model: str, precision: str, size: int, kind: str) -> float | None:
    """Return the throughput over that on one GPU of the machine, which may be another, and the number of GPUs."""
    rows = [measured().get((model, precision, *key)) for key in ((size, kind), (1, "none"))]
    several, one = (None if row is None else row.throughput for row in rows)
    return several / one / size if several and one else None


def plot() -> str:
    """Return a chart of how many times as fast each model is on several GPUs, as SVG; empty without records."""
    found, models, panels = measured(), list(BATCHES), list[Panel]()
    most = max((size for _, _, size, _ in found), default=1)
    if most == 1:
        return ""
    for precision in PRECISIONS:
        lines = [Line("ideal", [Point(1, 1), Point(most, most)], INK, "", "dot")]
        for kind in ("ddp", "dp"):
            own = [Line(f"{model} {kind}", _speedups(model, precision, kind), "") for model in models]
            colour = look_of("bf16-mixed" if kind == "ddp" else "fp32").colour
            lines += varied(Line(line.name, line.points, colour) for line in own if len(line.points) > 1)
        panels.append(Panel(f"{precision}: times as fast as on one GPU", lines, "GPUs", WORLD_SIZES, from_zero=True))
    chart = Chart("Speed-up over GPUs", "", lambda width: line_chart(panels, width))
    return for_dark_pages(chart.as_file(where_of(next(iter(found.values())).trial)))


def _speedups(model: str, precision: str, kind: str) -> Sequence[Point]:
    rows = {size: measured().get((model, precision, size, kind)) for size in WORLD_SIZES[1:]}
    quiet = [size for size, row in rows.items() if row is not None and not _is_noisy(row)]
    shares = [(size, _efficiency(model, precision, size, kind)) for size in quiet]
    return [Point(1, 1.0), *(Point(size, size * share, f"{model} {kind}") for size, share in shares if share)]
