"""Memory of a topic's cells, stacked by what holds it."""

from castwise.render.theme import INK, STACK
from castwise.render.units import format_bytes
from castwise.report.charts.chart import Chart, GroupSubject
from castwise.report.charts.plotly_parts import MOST_BARS, Document, axis, hover, layout, on_lines
from castwise.report.charts.tables import bytes_column, cell_grid
from castwise.report.collection import Configuration

_MOST_UPRIGHT = 7  # bars with their names below them, on half a page
_LONGEST_UPRIGHT = 24  # characters of such a name
_NAME_WIDTH = 26  # characters of a name beside its bar, on a line
_BAR_HEIGHT, _LINE_HEIGHT = 6, 16  # pixels of a lying one: by itself, and for each line of its name
_GIB = 2**30
_DTYPE_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}


def memory(subject: GroupSubject) -> Chart | None:
    """Return the peak memory of each cell, by what holds it."""
    topic = subject.group
    every = [cell for cell in topic.configurations if cell.peak_allocated_bytes is not None]
    cells = every[:MOST_BARS]
    if not cells:
        return None
    labels = [topic.label(cell) for cell in cells]
    lying = len(cells) > _MOST_UPRIGHT or max(map(len, labels)) > _LONGEST_UPRIGHT
    names = [on_lines(label, _NAME_WIDTH) for label in labels]
    along, across = ("y", "x") if lying else ("x", "y")
    traces = []
    for index, (title, value) in enumerate(KINDS):
        values = [value(cell) for cell in cells]
        if not any(values):
            continue
        traces.append(
            {
                "type": "bar",
                "name": title,
                "orientation": "h" if lying else "v",
                along: names,
                across: [(each or 0) / _GIB for each in values],
                "marker": {"color": STACK[index], "line": {"color": INK, "width": 0.5}},
                "hovertext": [
                    hover(
                        [
                            topic.label(cell),
                            f"{title}: {format_bytes(value(cell))}",
                            _total(cell),
                            subject.file_of(cell.trial),
                        ]
                    )
                    for cell in cells
                ],
                "hoverinfo": "text",
            }
        )
    document: Document = layout(height=120 + sum(map(_height, names))) if lying else layout()
    document["barmode"] = "stack"
    document["legend"]["traceorder"] = "normal"
    tickfont = {"size": 12 if lying else 11}
    turned = "reversed" if lying else True
    document[f"{along}axis"] = axis(type="category", showgrid=False, autorange=turned, tickfont=tickfont)
    document[f"{across}axis"] = axis("GiB", rangemode="tozero")
    least = min(cells, key=lambda cell: cell.peak_allocated_bytes or 0)
    figures = [bytes_column(f"memory_{index}", title, value) for index, (title, value) in enumerate(KINDS)]
    figures.append(bytes_column("peak_allocated_bytes", "peak allocated", lambda cell: cell.peak_allocated_bytes))
    figures.append(bytes_column("peak_reserved_bytes", "peak reserved", lambda cell: cell.peak_reserved_bytes))
    on_cpu = (
        " On a CPU it is the growth of the process, an upper bound." if topic.first.spec.device_type == "cpu" else ""
    )
    left_out = (
        f" The first {len(cells)} of {len(every):,} cells are drawn; the table has all."
        if len(cells) < len(every)
        else ""
    )
    return Chart(
        name="memory",
        title="Memory, by what holds it",
        says=(f"Tensors hold least with {topic.label(least)}, {format_bytes(least.peak_allocated_bytes)} at the peak."),
        traces=traces,
        layout=document,
        table=cell_grid(subject, every, figures),
        note=f"Weights are counted, not measured; gradients and the like are the rest of the peak.{on_cpu}{left_out}",
    )


def _height(name: str) -> int:
    return _BAR_HEIGHT + _LINE_HEIGHT * (1 + name.count("<br>"))


def weights_bytes(cell: Configuration) -> int | None:
    """Return what the model's weights take, from their number and dtypes; None where a dtype is not known."""
    facts = cell.trial.facts
    if facts is None or cell.peak_allocated_bytes is None:
        return None
    sizes = [(count, _DTYPE_BYTES.get(dtype.removeprefix("torch."))) for dtype, count in facts.param_dtypes.items()]
    if any(size is None for _, size in sizes):
        return None
    return min(cell.peak_allocated_bytes, sum(count * (size or 0) for count, size in sizes))


def _batches(cell: Configuration) -> int | None:
    facts = cell.trial.facts
    if facts is None or cell.peak_allocated_bytes is None:
        return None
    return min(facts.data_bytes, cell.peak_allocated_bytes - (weights_bytes(cell) or 0))


def _rest(cell: Configuration) -> int | None:
    if cell.peak_allocated_bytes is None:
        return None
    return cell.peak_allocated_bytes - (weights_bytes(cell) or 0) - (_batches(cell) or 0)


def _unused(cell: Configuration) -> int | None:
    if cell.peak_allocated_bytes is None or cell.peak_reserved_bytes is None:
        return None
    return max(0, cell.peak_reserved_bytes - cell.peak_allocated_bytes)


def _outside(cell: Configuration) -> int | None:
    if cell.driver_used_bytes is None or cell.peak_reserved_bytes is None:
        return None
    return max(0, cell.driver_used_bytes - cell.peak_reserved_bytes)


def _total(cell: Configuration) -> str:
    return (
        f"peak allocated {format_bytes(cell.peak_allocated_bytes)}, reserved {format_bytes(cell.peak_reserved_bytes)}"
    )


KINDS = (
    ("weights", weights_bytes),
    ("batches that lie on the device", _batches),
    ("gradients, optimizer, activations, workspaces", _rest),
    ("held by the allocator, not in use", _unused),
    ("outside the allocator (CUDA context, others)", _outside),
)
