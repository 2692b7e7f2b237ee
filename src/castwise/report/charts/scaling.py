"""The largest batch; throughput and memory over the batch size; throughput and efficiency over the number of GPUs."""

from collections.abc import Callable, Mapping, Sequence

from castwise.analysis.energy import joules_per_unit
from castwise.analysis.result_table import Row
from castwise.analysis.steady_metrics import throughput
from castwise.max_batch.render import curve_row, summary_table
from castwise.report.charts.chart import MAX_LINES, RATE_FIELDS, Chart, GroupSubject, interval_of, interval_text, varied
from castwise.report.charts.svg import Bar, Line, Panel, Point, Segment, bar_chart, line_chart
from castwise.show.fields import find_field, find_fields
from castwise.show.theme import INK, look_of
from castwise.show.units import format_bytes, format_percent, format_rate
from castwise.spec.grouping import grouped

_GIB = 2**30

Lines = Mapping[str, Sequence[Row]]  # by their names


def largest_batch(subject: GroupSubject) -> Chart | None:
    """Return the largest batch that trained of each loop; None if none was searched for."""
    max_batches = subject.group.max_batches
    found = [(each, each.largest) for each in max_batches if each.largest is not None]
    if not found:
        return None
    best, largest = max(found, key=lambda pair: pair[1].spec.batch_size)
    bars = []
    for each, trial in found:
        name, size = each.spec.loop_name, trial.spec.batch_size
        rate = find_field("throughput_per_second").text(curve_row(trial))
        files = [subject.file_of(trial), subject.file_of(each.failing) if each.failing is not None else ""]
        tip = "\n".join(part for part in (name, f"batch {size:,}", rate, *files) if part)
        bars.append(Bar(name, [Segment(size, look_of(each.spec.precision).colour, tip)], f"{each.words} · {rate}"))
    return Chart(
        title="Largest batch that trains",
        summary=f"The largest batch that trained is {largest.spec.batch_size:,}, with {best.spec.loop_name}.",
        draw=lambda width: bar_chart(bars, width, "largest batch that trains"),
        table=summary_table(max_batches),
        note="Each was trained in a process of its own. The next one ran out of memory, unless it says at least.",
    )


def batch(subject: GroupSubject) -> Chart | None:
    """Return throughput and peak memory over the batch size, for lines of at least two batch sizes."""
    group = subject.group
    named = grouped(group.configurations, lambda config: group.label(config, "batch_size"))
    lines = _drawable(named, "batch_size")
    configurations = [config for own in lines.values() for config in own]
    loops = {config.trial.spec.techniques for config in group.configurations}
    is_search = len(loops) > 1 and not group.is_max_batch  # which tries a smaller batch for memory, not for speed
    if is_search or not any(config.throughput for config in configurations):
        return None

    above, below = _two_panels(subject, lines, "batch_size", _held)
    below += _out_of_memory(subject, configurations)
    knees = [
        Point(trial.spec.batch_size, throughput(trial) or 0.0, f"{trial.spec.label}\nknee\n{subject.file_of(trial)}")
        for found in group.max_batches
        if (trial := found.knee) is not None
    ]
    if knees:
        above.append(Line("knee", knees, INK, "ring", ""))
    batches = [config.trial.spec.batch_size for config in configurations]
    is_log = max(batches) >= 8 * min(batches)
    panels = [
        Panel(title, own, "batch size", sorted(set(batches)), is_log=is_log, from_zero=True)
        for title, own in ((f"{group.unit} per second", above), ("peak reserved, GiB", below))
    ]
    largest = max((c for c in configurations if c.throughput), key=lambda c: c.trial.spec.batch_size)
    has_energy = any(joules_per_unit(config.trial) is not None for config in configurations)
    others = (*(("joules_per_unit",) if has_energy else ()), "peak_allocated_bytes", "peak_reserved_bytes")
    return Chart(
        title="Throughput and memory over the batch size",
        summary=(
            f"Throughput and peak memory over batch sizes from {min(batches)} to {max(batches)}; "
            f"the largest that trained is {largest.trial.spec.batch_size}, with {largest.precision}."
        ),
        draw=lambda width: line_chart(panels, width),
        table=subject.table(configurations, [find_field("batch_size"), *RATE_FIELDS, *find_fields(others)]),
        note="Knees: the smallest batch within 2 % of the best throughput." if knees else "",
    )


def _out_of_memory(subject: GroupSubject, configurations: Sequence[Row]) -> list[Line]:
    """Return marks at the memory that there is, for batches that did not fit."""
    first = subject.group.first
    capacity = first.spec.memory_limit_bytes or first.environment.gpu_memory_bytes
    failed = [config for config in configurations if config.trial.status == "oom"]
    if capacity is None or not failed:
        return []
    full = capacity / _GIB
    points = [Point(each.trial.spec.batch_size, full, subject.tip(each, "ran out of memory")) for each in failed]
    return [Line("out of memory", points, INK, "x", "")]


def _held(config: Row) -> tuple[float | None, str]:
    allocated, reserved = config.peak_allocated_bytes, config.peak_reserved_bytes
    most = allocated if reserved is None else reserved
    text = f"peak reserved {format_bytes(reserved)}, allocated {format_bytes(allocated)}"
    return None if most is None else most / _GIB, text


def scaling(subject: GroupSubject) -> Chart | None:
    """Return throughput and scaling efficiency over the number of GPUs, for lines of at least two numbers."""
    group = subject.group
    on_one: dict[str, Row] = {}
    named: dict[str, list[Row]] = {}  # by number of GPUs, the single GPU first
    measured = [config for config in group.configurations if config.throughput is not None]
    for config in sorted(measured, key=lambda c: c.trial.spec.world_size):
        name = group.label(config, "world_size", "parallelism")
        if config.trial.spec.world_size == 1:
            on_one.setdefault(name, config)
        else:
            first = [on_one[name]] if name in on_one else []
            named.setdefault(f"{name} {config.trial.spec.parallelism}", first).append(config)
    lines = _drawable(named, "world_size")
    if not lines:
        return None

    def efficiency(config: Row) -> tuple[float | None, str]:
        share = config.scaling_efficiency
        text = "" if share is None else f"{format_percent(share)} of the ideal"
        share = 1.0 if config.trial.spec.world_size == 1 else share
        return None if share is None else 100 * share, text

    above, below = _two_panels(subject, lines, "world_size", efficiency)
    configurations = list(dict.fromkeys(config for own in lines.values() for config in own))
    most = max(config.trial.spec.world_size for config in configurations)
    single = max(((c.throughput or 0.0) for c in configurations if c.trial.spec.world_size == 1), default=None)
    if single is not None:
        ideal = [Point(1, single), Point(most, single * most)]
        above.append(Line("ideal, of the fastest", ideal, INK, "", "dot"))
    efficient = [config for config in configurations if config.scaling_efficiency is not None]
    best = max(efficient, key=lambda c: (c.trial.spec.world_size, c.scaling_efficiency), default=None)
    reached = "" if best is None else f"; {efficiency(best)[1]} with {group.label(best)}"
    ticks = list(range(1, most + 1))
    panels = [
        Panel(title, own, "GPUs", ticks, from_zero=True)
        for title, own in ((f"{group.unit} per second", above), ("efficiency, %", below))
    ]
    return Chart(
        title="Scaling over GPUs",
        summary=f"Throughput on up to {most} GPUs{reached}.",
        draw=lambda width: line_chart(panels, width),
        table=subject.table(configurations, [*RATE_FIELDS, find_field("scaling_efficiency")]),
        note="The batch size is one GPU's: a step on N of them trains on N times as many samples.",
    )


def _drawable(lines: Lines, option: str) -> Lines:
    """Return as many lines as a chart has room for, of those with at least two values of an option."""
    several = [name for name, own in lines.items() if len({getattr(c.trial.spec, option) for c in own}) > 1]
    return {name: lines[name] for name in several[:MAX_LINES]}


def _two_panels(
    subject: GroupSubject, lines: Lines, option: str, below: Callable[[Row], tuple[float | None, str]]
) -> tuple[list[Line], list[Line]]:
    """Return lines of throughput with intervals, and lines of other values, each with its words, to go below them."""
    rates: list[Line] = []
    others: list[Line] = []
    for name, own in lines.items():
        upper, lower = [], []
        for config in own:
            rate = config.throughput_estimate
            if rate is None:
                continue
            x, (value, words) = getattr(config.trial.spec, option), below(config)
            figure = f"{format_rate(rate.value)} {subject.group.unit}/s"
            tip = subject.tip(config, figure, interval_text(rate, format_rate), words)
            upper.append(Point(x, rate.value, tip, interval_of(rate)))
            if value is not None:
                lower.append(Point(x, value, tip))
        look = look_of(own[0].precision)
        rates.append(Line(name, upper, look.colour, look.marker, look.dash))
        others.append(Line(name, lower, look.colour, look.marker, look.dash))
    return varied(rates), varied(others)
