"""What the time of a profiled step goes to."""

from castwise.analysis.step_evidence import UPDATE
from castwise.report.charts.chart import Chart, GroupSubject
from castwise.report.charts.svg import Bar, Key, Segment, bar_chart
from castwise.report.charts.throughput import pick
from castwise.show.fields import Field, find_field
from castwise.show.theme import FAINT, KERNELS, SOFT
from castwise.show.units import format_seconds
from castwise.spec.quantities import format_share

# What a step is drawn as, by the classes of its kernels; idle time comes last.
PARTS: dict[str, tuple[str, ...]] = {
    "products on Tensor Cores": ("tensor_core_product",),
    "other products": ("plain_product", "unknown_product"),
    "attention": ("attention",),
    "normalisation": ("normalisation",),
    "element-wise": ("elementwise",),
    "reduction, copies, others": ("reduction", "copy", "host_copy", "indexing", "other"),
    "casts": ("cast",),
    "layout conversion": ("layout_conversion",),
    "optimizer and loss scaling": UPDATE,
    "communication": ("communication",),
}


def step_time(subject: GroupSubject) -> Chart | None:
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
    looks = list(zip(titles, (*KERNELS, SOFT, FAINT), strict=True))
    bars = []
    for config, name in names.items():
        whole = profiled[config].seconds
        segments = [
            Segment(1e3 * own, colour, f"{name}\n{title}: {format_seconds(own)}, {format_share(own / whole)}")
            for own, (title, colour) in zip(parts[config], looks, strict=True)
        ]
        bars.append(Bar(name, segments, format_seconds(whole)))
    keys = [Key(*look) for place, look in enumerate(looks) if any(parts[config][place] > 0 for config in names)]
    fastest = max(profiled, key=lambda config: config.throughput or 0.0)
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
            [find_field("step_seconds"), *fields],
            lambda config: {
                "step_seconds": profiled[config].seconds,
                **{f"part_{place}": own for place, own in enumerate(parts[config])},
            },
        ),
        note=f"{on_cpu_note}{note}".strip(),
    )
