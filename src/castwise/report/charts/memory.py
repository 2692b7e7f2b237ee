"""Memory: what holds it at the peak, what a step's peak is made of, and the largest batch that fits into it."""

import itertools
from collections.abc import Callable, Sequence

from castwise.max_batch.render import breakdown_table, breakdowns_of, curve_row, loop_name, part_titles, summary_table
from castwise.report.charts.chart import Chart, GroupSubject
from castwise.report.charts.svg import Bar, Key, Segment, bar_chart
from castwise.report.charts.throughput import pick
from castwise.report.collection import Configuration
from castwise.show.fields import Field, find_field, find_fields
from castwise.show.theme import STACK, look_of
from castwise.show.units import format_bytes

_GIB = 2**30
_DTYPE_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}
_PARTS = {
    "memory_0": "weights",
    "memory_1": "batches that lie on the device",
    "memory_2": "gradients, optimizer, activations, workspaces",
    "memory_3": "held by the allocator, not in use",
    "memory_4": "outside the allocator (CUDA context, others)",
}


def stacked(
    rows: Sequence[tuple[str, Sequence[float], str, bool]],
    titles: Sequence[str],
    text: Callable[[int, float], str],
    scale: float = 1.0,
    colours: Sequence[str] = STACK,
) -> tuple[list[Bar], list[Key]]:
    """Return stacked bars, and their legend without parts that are 0 everywhere.

    Args:
        rows: Each bar's name, parts and figure, and whether its run did not end well.
        titles: What the parts are.
        text: Returns the figure of a part, from the number of its row and its value.
        scale: What is 1 on the axis.
        colours: As many as a bar has parts, or the first ones again.
    """
    parts = list(zip(titles, itertools.cycle(colours), strict=False))
    bars = []
    for number, (name, values, figure, is_failed) in enumerate(rows):
        segments = [
            Segment(own / scale, colour, f"{name}\n{title}: {text(number, own)}")
            for own, (title, colour) in zip(values, parts, strict=True)
        ]
        bars.append(Bar(name, segments, figure, is_hatched=is_failed))
    keys = [Key(*part) for place, part in enumerate(parts) if any(values[place] > 0 for _, values, *_ in rows)]
    return bars, keys


def holders(subject: GroupSubject) -> Chart | None:
    """Return the peak memory of each configuration, by what holds it."""
    measured = [config for config in subject.group.configurations if config.peak_allocated_bytes is not None]
    if not measured:
        return None
    held = {config: _memory_parts(config) for config in measured}
    names, note = pick(subject.group, measured)
    rows = [
        (name, [held[c].get(part, 0) for part in _PARTS], format_bytes(sum(held[c].values())), c.trial.status != "ok")
        for c, name in names.items()
    ]
    bars, keys = stacked(rows, list(_PARTS.values()), lambda _, own: format_bytes(round(own)), _GIB)
    fields = [
        *(Field(name, title, "bytes") for name, title in _PARTS.items()),
        *find_fields(("peak_allocated_bytes", "peak_reserved_bytes")),
    ]
    return Chart(
        title="Memory, by what holds it",
        summary="Memory at the peak of each configuration. Weights are counted; gradients and the like are the rest.",
        draw=lambda width: bar_chart(bars, width, "GiB", keys),
        table=subject.table(measured, fields, lambda config: held[config]),
        note=note,
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
    titles = part_titles(breakdowns)
    rows = [
        (loop_name(each.trial.spec), [each.bytes_of(name) for name in titles], format_bytes(each.seen_bytes), False)
        for each in breakdowns
    ]
    bars, keys = stacked(rows, list(titles.values()), lambda _, own: format_bytes(round(own)), _GIB)
    least = min(breakdowns, key=lambda each: each.seen_bytes)
    batches = {each.trial.spec.batch_size for each in breakdowns}
    batch = f" at batch {batches.pop()}" if len(batches) == 1 else " at each one's largest batch"
    return Chart(
        title=f"Where the memory goes{batch}",
        summary=f"{loop_name(least.trial.spec)} holds least, {format_bytes(least.seen_bytes)} at the peak of a step.",
        draw=lambda width: bar_chart(bars, width, "GiB", keys),
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
    bars = []
    for each, trial in found:
        name, size = loop_name(each.spec), trial.spec.batch_size
        rate = find_field("throughput_per_second").text(curve_row(trial))
        files = [subject.file_of(trial), subject.file_of(each.failing) if each.failing is not None else ""]
        tip = "\n".join(part for part in (name, f"batch {size:,}", rate, *files) if part)
        bars.append(Bar(name, [Segment(size, look_of(each.spec.precision).colour, tip)], f"{size:,} · {rate}"))
    return Chart(
        title="Largest batch that trains",
        summary=f"The largest batch that trained is {largest.spec.batch_size:,}, with {loop_name(best.spec)}.",
        draw=lambda width: bar_chart(bars, width, "largest batch that trains"),
        table=summary_table(max_batches),
        note="Each was trained in a process of its own, and so was the next one, which ran out of memory.",
    )
