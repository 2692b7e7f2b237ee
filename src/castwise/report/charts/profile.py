"""Profiles: what the time of a step goes to, and how far a step is from the roofline."""

from dataclasses import replace
from typing import Literal, NamedTuple

from castwise.analysis.causes import UPDATE, Diagnosis
from castwise.analysis.model_flops import flops_of, model_flops_per_second
from castwise.analysis.roofline import least_bytes, roofline
from castwise.records.schema import StepFlops
from castwise.registry.gpus import GpuModel, find_gpu_model, peak
from castwise.render.fields import Field, find_fields
from castwise.render.theme import FAINT, KERNELS, SOFT, look_of
from castwise.render.units import format_number, format_rate, format_seconds
from castwise.report.charts.chart import MAX_LINES, Chart, GroupSubject, left_out, varied
from castwise.report.charts.memory import stack_keys, stacked
from castwise.report.charts.svg import Line, Panel, bar_chart, line_chart, log_ticks
from castwise.report.charts.throughput import bar_names, highest
from castwise.report.collection import Configuration, value_of
from castwise.spec.quantities import format_share

# What a step is drawn as, by the classes of its kernels; idle time comes last.
PARTS: dict[str, tuple[str, ...]] = {
    "products on Tensor Cores": ("tensor_core_product",),
    "other products": ("plain_product", "unknown_product"),
    "attention": ("attention",),
    "normalisation": ("normalisation",),
    "element-wise": ("elementwise",),
    "reduction, copies, others": ("reduction", "copy", "other"),
    "casts": ("cast",),
    "layout conversion": ("layout_conversion",),
    "optimizer and loss scaling": UPDATE,
    "communication": ("communication",),
}
_HEIGHT = 200  # pixels, of the roofline
_COLOURS = (*KERNELS, SOFT, FAINT)
_LEAST_FORMAT = 0.01  # of the FLOPs: a format with less has no roof of its own


def step_time(subject: GroupSubject) -> Chart | None:
    """Return the step of each configuration that was profiled, by what its time goes to."""
    group, profiled = subject.group, subject.group.profiled
    if not profiled:
        return None
    parts = {
        config: [
            found.seconds * share
            for share in (*(found.share_of(*classes) for classes in PARTS.values()), found.idle_share or 0.0)
        ]
        for config, found in profiled.items()
    }
    titles = [*PARTS, "idle"]
    shown = highest(list(profiled))
    names, base = bar_names(group, shown)
    bars = [
        stacked(
            names[config],
            [
                (title, own, f"{format_seconds(own)}, {format_share(own / profiled[config].seconds)}")
                for title, own in zip(titles, parts[config], strict=True)
            ],
            format_seconds(profiled[config].seconds),
            1e-3,
            colours=_COLOURS,
        )
        for config in shown
    ]
    keys = stack_keys(bars, titles)
    fastest = max(profiled, key=lambda config: value_of(config.throughput))
    on_cpu = group.first.spec.device_type == "cpu"
    fields = [Field(f"part_{place}", title, "seconds") for place, title in enumerate(titles)]
    notes = (
        "On a CPU it is the profiled step, whose operators take longer." if on_cpu else "",
        base,
        left_out("The {} highest of {:,} configurations are drawn; the table has all.", shown, profiled),
    )
    return Chart(
        name="profile",
        title="Where the time of a step goes",
        summary=f"By the {'operators' if on_cpu else 'kernels'} of a profile. The fastest, "
        f"{group.label(fastest)}: {profiled[fastest].bound}.",
        draw=lambda width: bar_chart(bars, width, "milliseconds a step", keys),
        table=subject.table(
            list(profiled),
            [*find_fields(("step_seconds",)), *fields],
            lambda config: {
                "step_seconds": profiled[config].seconds,
                **{f"part_{place}": own for place, own in enumerate(parts[config])},
            },
        ),
        note=" ".join(filter(None, notes)),
    )


class _Point(NamedTuple):
    """A configuration under the roofs."""

    flops: StepFlops
    bound: Literal["compute", "memory"]
    intensity: float  # FLOPs for each byte that a step moves at least
    model_flops_per_second: float  # of one GPU
    of_roof: float  # the rate's share of what the roof allows


def _point(config: Configuration, found: Diagnosis, gpu: GpuModel | None) -> _Point | None:
    flops, rate = flops_of(config.trials), model_flops_per_second(config.trials, found.row.step_seconds)
    least = roofline(flops, gpu) if flops is not None else None
    if flops is None or least is None or rate is None or not least_bytes(flops):
        return None
    rate /= config.trial.spec.world_size
    return _Point(flops, least.bound, flops.total / least_bytes(flops), rate, rate * least.seconds / flops.total)


def step_roofline(subject: GroupSubject) -> Chart | None:
    """Return the model FLOP/s of profiled configurations under the roofs of their GPU; None if those are not known."""
    group = subject.group
    gpu = find_gpu_model(group.first.environment.gpu or "")
    found = {config: point for config, each in group.profiled.items() if (point := _point(config, each, gpu))}
    if gpu is None or not found:
        return None
    shown = highest(list(found), MAX_LINES)
    names, base = bar_names(group, shown)
    bandwidth = gpu.bandwidth_bytes_per_second
    formats: dict[float, list[str]] = {}
    for point in found.values():
        for name, own in point.flops.by_format.items():
            limit = peak(gpu, name)
            if limit is not None and own >= _LEAST_FORMAT * point.flops.total:
                formats.setdefault(limit, []).append(name)
    ridges = [limit / bandwidth for limit in formats]
    low = min(*ridges, *(point.intensity for point in found.values())) / 2
    high = max(*ridges, *(point.intensity for point in found.values())) * 4
    roofs = [((low, low * bandwidth), (max(ridges), max(formats)), f"memory: {bandwidth / 1e12:.3g} TB/s")]
    for limit, used in sorted(formats.items()):
        name = f"{', '.join(dict.fromkeys(used))}: {format_number(limit / 1e12)}"
        roofs.append(((limit / bandwidth, limit), (high, limit), name))
    points = []
    for config in shown:
        point, look = found[config], look_of(config.precision)
        teraflops = point.model_flops_per_second / 1e12
        words = f"{format_rate(teraflops)} TFLOP/s, {format_share(point.of_roof)} of its roof"
        tip = subject.tip(config, words, f"{format_rate(point.intensity)} FLOPs per byte")
        points.append(Line(names[config], [(point.intensity, teraflops)], look.colour, look.marker, tips=[tip]))
    lines = varied(Line(name, [(x, y / 1e12) for x, y in ends], SOFT, marker="") for *ends, name in roofs)
    lines += [replace(each, dash="") for each in varied(points)]
    fastest = max(found, key=lambda config: value_of(config.throughput))
    best, of_one = found[fastest], " of one GPU" * any(config.trial.spec.world_size > 1 for config in found)
    fields = [
        Field("intensity", "arithmetic intensity", "number", lambda row: format_rate(row["intensity"])),
        *find_fields(("model_flops_per_second",)),
        Field("of_roof", "of its roof", "share"),
    ]
    panel = Panel(
        f"model TFLOP/s{of_one}",
        lines,
        "arithmetic intensity, FLOPs per byte",
        log_ticks(low, high, 9),
        is_log=True,
        is_log_y=True,
        height=_HEIGHT,
    )
    bound = "the peak of its formats" if best.bound == "compute" else "the memory's bandwidth"
    return Chart(
        name="roofline",
        title="Roofline",
        summary=f"The fastest, {group.label(fastest)}, reaches {format_share(best.of_roof)} of its roof, {bound}.",
        draw=lambda width: line_chart([panel], width),
        table=subject.table(
            list(found),
            fields,
            lambda config: {field.name: getattr(found[config], field.name) for field in fields},
        ),
        note=f"Lines are the datasheet's limits, by format; bytes are the least that a step moves. {base}".strip(),
    )
