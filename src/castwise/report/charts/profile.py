"""What the time of a profiled step goes to: classes of kernels, the longest kernels, and modules."""

import re
import textwrap
from collections.abc import Sequence

from castwise.analysis.result_table import Row
from castwise.analysis.step_evidence import UPDATE
from castwise.records.schema import StepProfile
from castwise.registry.kernel_classes import short_name
from castwise.report.charts.chart import Chart, GroupSubject
from castwise.report.charts.svg import Bar, Key, Segment, bar_chart
from castwise.report.charts.throughput import pick
from castwise.show.fields import Field, FlatRow, find_field
from castwise.show.table import DataTable
from castwise.show.theme import FAINT, KERNELS, SOFT
from castwise.show.units import format_seconds
from castwise.show.why_report import kernel_words
from castwise.spec.quantities import format_share

_MOST, _MOST_DIFFERENCES = 10, 4  # modules, parts of a step that a caption names

_LEAST = 1e-3  # of a step: a shorter part is said to be 0

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
    before, fastest, _ = _before_and_after(subject)
    if fastest is None:
        return None
    parts: dict[Row, list[float]] = {
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
    on_cpu = group.first.spec.device_type == "cpu"
    fields = [Field(f"part_{place}", title, "seconds") for place, title in enumerate(titles)]
    on_cpu_note = "On a CPU it is the profiled step, whose operators take longer. " if on_cpu else ""
    return Chart(
        title="Where the time of a step goes",
        summary=f"By the {'operators' if on_cpu else 'kernels'} of a profile. The fastest, "
        f"{group.label(fastest)}: {profiled[fastest].bound}."
        + (f" From {group.label(before)}: {_differences(titles, parts[before], parts[fastest])}." if before else ""),
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


def kernels(subject: GroupSubject) -> Chart | None:
    """Return the longest kernels of the fastest configuration with a profile."""
    _, fastest, profile = _before_and_after(subject)
    if fastest is None or profile is None or not profile.kernels:
        return None
    colours = {kind: colour for kinds, colour in zip(PARTS.values(), (*KERNELS, SOFT), strict=True) for kind in kinds}
    bars, rows = [], list[FlatRow]()
    for each in profile.kernels:
        kind, shapes = kernel_words(each)
        words = f"{format_seconds(each.seconds)} · {each.launches:,.0f}×"
        tip = f"{short_name(each.name)}\n{words} a step"
        name = textwrap.shorten(f"{kind}: {each.operator or short_name(each.name)} {shapes}", 44, placeholder=" …")
        bars.append(Bar(name, [Segment(1e3 * each.seconds, colours.get(each.kind, SOFT), tip)], words))
        rows.append(
            {**each.model_dump(include={"operator", "name", "launches", "seconds"}), "kind": kind, "shapes": shapes}
        )
    unit = "operators" if profile.device_type == "cpu" else "kernels"
    share = format_share(sum(each.seconds for each in profile.kernels) / profile.seconds)
    fields = [Field(name, name) for name in ("kind", "operator", "shapes", "name")]
    return Chart(
        title=f"The {unit} that take longest: {subject.group.label(fastest)}",
        summary=f"These are {share} of the step, of {profile.num_kernels:,.0f} {unit}.",
        draw=lambda width: bar_chart(bars, width, "milliseconds a step, and launches"),
        table=DataTable([*fields, Field("launches", "launches", "number"), find_field("seconds")], rows),
    )


def modules(subject: GroupSubject) -> Chart | None:
    """Return the modules that take longest in the fastest configuration with a profile, each beside its time before."""
    before, fastest, profile = _before_and_after(subject)
    if fastest is None or profile is None or not profile.module_seconds:
        return None
    own, old = _module_times(profile), _module_times(before.trial.profile if before is not None else None)
    looks = (Key("forward", KERNELS[0]), Key("backward", KERNELS[1]))
    bars, rows = [], list[FlatRow]()
    for name, ways in sorted(own.items(), key=lambda each: -sum(each[1])):
        was, parts = sum(old.get(name, ())), zip(ways, looks, strict=True)
        segments = [Segment(1e3 * s, key.colour, f"{name}\n{key.name}: {format_seconds(s)}") for s, key in parts]
        bars.append(Bar(name, segments, format_seconds(sum(ways)) + (f" · was {format_seconds(was)}" if was else "")))
        rows.append({"module": name, "forward": ways[0], "backward": ways[1], "before": was or None})
    fields = [Field(name, name, "seconds") for name in ("forward", "backward", "before")]
    return Chart(
        title=f"The modules that take longest: {subject.group.label(fastest)}",
        summary="Forward and backward. A module's time is without that of those within it that are listed, too."
        + (f" “Was” is {subject.group.label(before)}." if before is not None and old else ""),
        draw=lambda width: bar_chart(bars[:_MOST], width, "milliseconds a step", looks),
        table=DataTable([Field("module", "module"), *fields], rows),
    )


def _module_times(profile: StepProfile | None) -> dict[str, list[float]]:
    """Return the seconds forward and backward of modules; those whose names differ by numbers are one."""
    found: dict[str, list[float]] = {}
    for name, each in profile.module_seconds.items() if profile is not None else ():
        own = found.setdefault(re.sub(r"\.\d+(?=\.|$)", ".*", name) or "loss and optimizer", [0.0, 0.0])
        own[0] += each.forward_seconds
        own[1] += each.backward_seconds
    return found


def _before_and_after(subject: GroupSubject) -> tuple[Row | None, Row | None, StepProfile | None]:
    """Return what the fastest configuration with a profile is compared with, if it has one; that one; its profile."""
    profiled = subject.group.profiled
    fastest = max(profiled, key=lambda config: config.throughput or 0.0, default=None)
    if fastest is None:
        return None, None, None
    before = subject.group.reference_of(fastest)
    return (before if before in profiled and before is not fastest else None), fastest, profiled[fastest].profile


def _differences(titles: Sequence[str], before: Sequence[float], after: Sequence[float]) -> str:
    """Return which parts of a step changed most, in words: `other products 242 → 0 ms`."""
    pairs = sorted(zip(titles, before, after, strict=True), key=lambda each: -abs(each[1] - each[2]))
    seen = _LEAST * sum(before)
    return ", ".join(
        f"{title} {format_seconds(old) if old > seen else '0'} → {format_seconds(new) if new > seen else '0'}"
        for title, old, new in pairs[:_MOST_DIFFERENCES]
    )
