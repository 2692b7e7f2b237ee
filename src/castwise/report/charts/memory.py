"""Memory: what holds it at the peak, what a step's peak is made of, and the largest batch that fits into it."""

from castwise.max_batch.render import breakdown_table, breakdowns_of, curve_row, loop_name, part_titles, summary_table
from castwise.render.fields import Field, find_field, find_fields
from castwise.render.theme import look_of
from castwise.render.units import format_bytes
from castwise.report.charts import plotly_parts as plot
from castwise.report.charts.chart import Chart, GroupSubject, left_out
from castwise.report.collection import Configuration

_MAX_UPRIGHT = 7  # bars with their names below them, on half a page
_MAX_UPRIGHT_NAME = 24  # characters
_GIB = 2**30
_DTYPE_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}
_PARTS = {
    "memory_0": "weights",
    "memory_1": "batches that lie on the device",
    "memory_2": "gradients, optimizer, activations, workspaces",
    "memory_3": "held by the allocator, not in use",
    "memory_4": "outside the allocator (CUDA context, others)",
}


def memory(subject: GroupSubject) -> Chart | None:
    """Return the peak memory of each configuration, by what holds it."""
    group = subject.group
    measured = [config for config in group.configurations if config.peak_allocated_bytes is not None]
    if not measured:
        return None
    shown = measured[: plot.MAX_BARS]
    held = {config: _memory_parts(config) for config in measured}
    labels = [group.label(config) for config in shown]
    names = [plot.wrap(label, 26) for label in labels]
    parts = []
    for name, title in _PARTS.items():
        hovers = [
            subject.hover(
                config,
                f"{title}: {format_bytes(held[config].get(name))}",
                f"peak allocated {format_bytes(config.peak_allocated_bytes)}, "
                f"reserved {format_bytes(config.peak_reserved_bytes)}",
            )
            for config in shown
        ]
        parts.append((title, [held[config].get(name, 0) / _GIB for config in shown], hovers))
    gib = plot.axis("GiB", rangemode="tozero")
    lying = len(shown) > _MAX_UPRIGHT or max(map(len, labels)) > _MAX_UPRIGHT_NAME
    if lying:
        height = 120 + sum(22 + 16 * name.count("<br>") for name in names)
        document = plot.layout(height, barmode="stack", xaxis=gib, yaxis=plot.names_axis(autorange="reversed"))
    else:
        document = plot.layout(barmode="stack", xaxis=plot.names_axis(tickfont={"size": 11}), yaxis=gib)
    least = min(shown, key=lambda config: config.peak_allocated_bytes or 0)
    lowest_peak = format_bytes(least.peak_allocated_bytes)
    notes = [
        "Weights are counted, not measured; gradients and the like are the rest of the peak.",
        "On a CPU it is the growth of the process, an upper bound." if group.first.spec.device_type == "cpu" else "",
        left_out("The first {} of {:,} configurations are drawn; the table has all.", shown, measured),
    ]
    fields = [
        *(Field(name, title, "bytes") for name, title in _PARTS.items()),
        *find_fields(("peak_allocated_bytes", "peak_reserved_bytes")),
    ]
    return Chart(
        name="memory",
        title="Memory, by what holds it",
        summary=f"Tensors hold least with {group.label(least)}, {lowest_peak} at the peak.",
        traces=plot.stacked_bars(names, parts, orientation="h" if lying else "v"),
        layout=document,
        table=subject.table(measured, fields, lambda config: held[config]),
        note=" ".join(note for note in notes if note),
    )


def _memory_parts(config: Configuration) -> dict[str, int]:
    """Return the bytes of each of `_PARTS` at a configuration's peak; what is not known is left out."""
    allocated, reserved, driver = config.peak_allocated_bytes, config.peak_reserved_bytes, config.driver_used_bytes
    parts: dict[str, int] = {}
    facts, rest = config.trial.facts, allocated or 0
    if facts is not None:
        sizes = {dtype: _DTYPE_BYTES.get(dtype.removeprefix("torch.")) for dtype in facts.param_dtypes}
        if None not in sizes.values():
            parts["memory_0"] = min(rest, sum(n * (sizes[name] or 0) for name, n in facts.param_dtypes.items()))
        rest -= parts.get("memory_0", 0)
        parts["memory_1"] = min(rest, facts.data_bytes)
        rest -= parts["memory_1"]
    parts["memory_2"] = rest
    if reserved is not None:
        parts["memory_3"] = max(0, reserved - (allocated or 0))
        if driver is not None:
            parts["memory_4"] = max(0, driver - reserved)
    return parts


def memory_breakdown(subject: GroupSubject) -> Chart | None:
    """Return a bar for each loop, stacked by what held its memory; None if no step was taken apart."""
    breakdowns = breakdowns_of(subject.group.max_batches)
    if not breakdowns:
        return None
    parts = []
    for name, title in part_titles(breakdowns).items():
        held = [each.bytes_of(name) for each in breakdowns]
        hovers = [
            plot.hover([loop_name(each.trial.spec), f"{title}: {format_bytes(own)}", subject.file_of(each.trial)])
            for each, own in zip(breakdowns, held, strict=True)
        ]
        parts.append((title, [own / _GIB for own in held], hovers))
    least = min(breakdowns, key=lambda each: each.seen_bytes)
    batches = {each.trial.spec.batch_size for each in breakdowns}
    batch = f" at batch {batches.pop()}" if len(batches) == 1 else " at each one's largest batch"
    return Chart(
        name="parts",
        title=f"Where the memory goes{batch}",
        summary=f"{loop_name(least.trial.spec)} holds least, {format_bytes(least.seen_bytes)} at the peak of a step.",
        traces=plot.stacked_bars([plot.escape(loop_name(each.trial.spec)) for each in breakdowns], parts),
        layout=plot.layout(420, barmode="stack", xaxis=plot.names_axis(), yaxis=plot.axis("GiB", rangemode="tozero")),
        table=breakdown_table(breakdowns),
        note="Of one step after the timed ones, at the moment when it held most.",
    )


def max_batch(subject: GroupSubject) -> Chart | None:
    """Return the largest batch that trained of each loop; None if none was searched for."""
    max_batches = subject.group.max_batches
    found = [(each, each.largest) for each in max_batches if each.largest is not None]
    if not found:
        return None
    best, largest = max(found, key=lambda pair: pair[1].spec.batch_size)
    batches = [trial.spec.batch_size for _, trial in found]
    hovers = []
    for each, trial in found:
        rate = find_field("throughput_per_second").text(curve_row(trial))
        files = [subject.file_of(trial), subject.file_of(each.failing) if each.failing is not None else ""]
        hovers.append(plot.hover([loop_name(each.spec), f"batch {trial.spec.batch_size:,}", rate, *files]))
    trace = plot.bars(
        [plot.escape(loop_name(each.spec)) for each, _ in found],
        batches,
        [look_of(each.spec.precision).colour for each, _ in found],
        hovers,
        text=[f"{batch:,}" for batch in batches],
        textposition="auto",
    )
    return Chart(
        name="largest",
        title="Largest batch that trains",
        summary=f"The largest batch that trained is {largest.spec.batch_size:,}, with {loop_name(best.spec)}.",
        traces=[trace],
        layout=plot.layout(
            showlegend=False, xaxis=plot.names_axis(), yaxis=plot.axis("largest batch that trains", rangemode="tozero")
        ),
        table=summary_table(max_batches),
        note="Each was trained in a process of its own, and so was the next one, which ran out of memory.",
    )
