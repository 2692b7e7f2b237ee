"""Profiles: what the time of a step goes to, how far it is from the roofline, and its gradients by their exponent."""

import math
from collections import defaultdict
from dataclasses import replace
from typing import Any

from castwise.analysis.causes import UPDATE, Diagnosis
from castwise.analysis.model_flops import flops_of, model_flops_per_second
from castwise.analysis.roofline import least_bytes, roofline
from castwise.records.schema import StepNumerics
from castwise.registry.gpus import GpuModel, find_gpu_model, peak
from castwise.report.charts.chart import MAX_LINES, Chart, GroupSubject, varied
from castwise.report.charts.memory import stacked
from castwise.report.charts.svg import Line, Panel, bar_chart, line_chart, log_ticks
from castwise.report.charts.throughput import highest, pick
from castwise.report.collection import Configuration, value_of
from castwise.show.fields import Field, find_fields
from castwise.show.theme import FAINT, KERNELS, SOFT, look_of
from castwise.show.units import format_number, format_rate, format_seconds
from castwise.show.why_report import numerics_lines, numerics_table
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
_EDGES = (-25, 16)  # the exponents between which float16 makes no number 0 or infinite
_VISIBLE = 0.05  # per cent of all gradients; less looks like 0


def step_time(subject: GroupSubject) -> Chart | None:
    """Return the step of each configuration that was profiled, by what its time goes to."""
    group, profiled = subject.group, subject.group.profiled
    if not profiled:
        return None
    parts = {
        config: [
            found.seconds * share
            for share in (*(found.share_of(*each) for each in PARTS.values()), found.idle_share or 0.0)
        ]
        for config, found in profiled.items()
    }
    titles = [*PARTS, "idle"]
    names, note = pick(group, list(profiled))
    rows = [(name, parts[c], format_seconds(profiled[c].seconds), False) for c, name in names.items()]
    seconds = [profiled[config].seconds for config in names]
    bars, keys = stacked(
        rows,
        titles,
        lambda row, own: f"{format_seconds(own)}, {format_share(own / seconds[row])}",
        1e-3,
        (*KERNELS, SOFT, FAINT),
    )
    fastest = max(profiled, key=lambda config: value_of(config.throughput))
    on_cpu = group.first.spec.device_type == "cpu"
    fields = [Field(f"part_{place}", title, "seconds") for place, title in enumerate(titles)]
    on_cpu_note = "On a CPU it is the profiled step, whose operators take longer. " if on_cpu else ""
    return Chart(
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
        note=f"{on_cpu_note}{note}".strip(),
    )


def _under_roof(config: Configuration, found: Diagnosis, gpu: GpuModel | None) -> dict[str, Any] | None:
    """Return where a configuration is under the roofs, of one GPU; None if that is not known."""
    flops, rate = flops_of(config.trials), model_flops_per_second(config.trials, found.row.step_seconds)
    least = roofline(flops, gpu) if flops is not None else None
    if flops is None or least is None or rate is None or not least_bytes(flops):
        return None
    rate /= config.trial.spec.world_size
    return {
        "bound": least.bound,  # "compute" or "memory"
        "intensity": flops.total / least_bytes(flops),  # FLOPs for each byte that a step moves at least
        "model_flops_per_second": rate,
        "of_roof": rate * least.seconds / flops.total,  # the rate's share of what the roof allows
    }


def step_roofline(subject: GroupSubject) -> Chart | None:
    """Return the model FLOP/s of profiled configurations under the roofs of their GPU; None if those are not known."""
    group = subject.group
    gpu = find_gpu_model(group.first.environment.gpu or "")
    found = {config: point for config, each in group.profiled.items() if (point := _under_roof(config, each, gpu))}
    if gpu is None or not found:
        return None
    names, note = pick(group, list(found), MAX_LINES)
    bandwidth = gpu.bandwidth_bytes_per_second
    formats: dict[float, list[str]] = {}
    for flops in filter(None, (flops_of(config.trials) for config in found)):
        for name, own in flops.by_format.items():
            limit = peak(gpu, name)
            if limit is not None and own >= 0.01 * flops.total:  # one with less has no roof of its own
                formats.setdefault(limit, []).append(name)
    ridges = [limit / bandwidth for limit in formats]
    intensities = [*ridges, *(point["intensity"] for point in found.values())]
    low, high = min(intensities) / 2, max(intensities) * 4
    roofs = [((low, low * bandwidth), (max(ridges), max(formats)), f"memory: {bandwidth / 1e12:.3g} TB/s")]
    for limit, used in sorted(formats.items()):
        name = f"{', '.join(dict.fromkeys(used))}: {format_number(limit / 1e12)}"
        roofs.append(((limit / bandwidth, limit), (high, limit), name))
    points = []
    for config, name in names.items():
        point, look = found[config], look_of(config.precision)
        teraflops = point["model_flops_per_second"] / 1e12
        words = f"{format_rate(teraflops)} TFLOP/s, {format_share(point['of_roof'])} of its roof"
        tip = subject.tip(config, words, f"{format_rate(point['intensity'])} FLOPs per byte")
        points.append(Line(name, [(point["intensity"], teraflops)], look.colour, look.marker, tips=[tip]))
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
        height=200,
    )
    bound = "the peak of its formats" if best["bound"] == "compute" else "the memory's bandwidth"
    return Chart(
        title="Roofline",
        summary=f"The fastest, {group.label(fastest)}, reaches {format_share(best['of_roof'])} of its roof, {bound}.",
        draw=lambda width: line_chart([panel], width),
        table=subject.table(list(found), fields, lambda config: found[config]),
        note=f"Lines are the datasheet's limits, by format; bytes are the least that a step moves. {note}".strip(),
    )


def exponents(subject: GroupSubject) -> Chart | None:
    """Return the gradients of each configuration that was compared with float32, by exponent; None if none was."""
    found = {config: each for config, each in subject.group.profiled.items() if each.numerics}
    compared = {config: each.numerics for config, each in found.items() if each.numerics and each.numerics.modules}
    if not compared:
        return None
    lines = []
    for config in highest(list(compared), MAX_LINES // 2):
        look, scale = look_of(config.precision), compared[config].loss_scale
        for factor in (1.0, scale) if scale else (1.0,):
            name = subject.group.label(config) + (f", scaled by {factor:,.6g}" if factor != 1 else "")
            points = [(each + math.log2(factor), share) for each, share in _shares(compared[config])]
            lines.append(Line(name, points, look.colour, look.marker, look.dash, subject.tip(config)))
    high = max((share for line in lines for _, share in line.points), default=0.0)
    edges = [Line("float16's range", [(x, 0.0), (x, high)], SOFT, marker="", dash="dot") for x in _EDGES]
    places = [*_EDGES, *(x for line in lines for x, _ in line.points)]
    ticks = range(math.ceil(min(places) / 8) * 8, int(max(places)) + 1, 8)
    panel = Panel("% of gradients", [*varied(lines), *edges], "log2 of the absolute value", ticks, from_zero=True)
    return Chart(
        title="Gradients by exponent",
        summary=" ".join(numerics_lines([found[config] for config in compared])[:1]),
        draw=lambda width: line_chart([panel], width),
        table=numerics_table([found[config] for config in compared]),
        note="Of one step in float32: weights' and outputs' gradients, each module with the same weight. float16 makes "
        "0 of what is left of its range.",
    )


def _shares(numerics: StepNumerics) -> list[tuple[int, float]]:
    """Return the percentage of nonzero gradients by exponent, from the least with a visible share to the largest."""
    every = [own for each in numerics.modules for own in (each.weights.by_exponent, each.outputs.by_exponent) if own]
    shares: dict[int, float] = defaultdict(float)
    for own in every:
        for exponent, count in own.items():
            shares[exponent] += 100 * count / sum(own.values()) / len(every)
    visible = [exponent for exponent, share in shares.items() if share >= _VISIBLE]
    return [(each, shares[each]) for each in range(min(visible), max(visible) + 1)] if visible else []
