"""Gradients of a step by their exponent, with the range of float16."""

import math

from castwise.analysis.causes import Diagnosis
from castwise.analysis.numerics import RANGES, format_of, least_sqnr_db, lost_share
from castwise.records.schema import GradientHistogram, ModuleNumerics
from castwise.render.fields import Field
from castwise.render.theme import SOFT, look_of
from castwise.report.charts.chart import MAX_LINES, Chart, GroupSubject, varied
from castwise.report.charts.svg import Line, Panel, line_chart
from castwise.report.charts.throughput import highest
from castwise.spec.quantities import format_share

_TICK = 8  # exponents


def exponents(subject: GroupSubject) -> Chart | None:
    """Return the gradients of each configuration that was compared with float32, by exponent; None if none was."""
    profiled = subject.group.profiled
    compared = {each: found for each, found in profiled.items() if found.numerics and found.numerics.modules}
    if not compared:
        return None
    shown = highest(list(compared), MAX_LINES // 2)
    panels = []
    for title, of_weights in (("weights' gradients, %", True), ("outputs' gradients, %", False)):
        lines = []
        for config in shown:
            found, look = compared[config], look_of(config.precision)
            shares = _shares(_modules_of(found), of_weights=of_weights)
            scale = found.numerics.loss_scale if found.numerics else None
            for factor in (1.0, scale) if scale else (1.0,):
                name = subject.group.label(config) + (f", scaled by {factor:,.6g}" if factor != 1 else "")
                points = [(exponent + math.log2(factor), share) for exponent, share in shares]
                lines.append(Line(name, points, look.colour, look.marker, look.dash))
        highest_share = max((share for line in lines for _, share in line.points), default=0.0)
        ends = (RANGES["float16"].lowest - 1, RANGES["float16"].highest + 1)
        edges = [Line("float16's range", [(x, 0.0), (x, highest_share)], SOFT, marker="", dash="dot") for x in ends]
        lines = [*varied(lines), *edges]
        places = [x for line in lines for x, _ in line.points]
        ticks = range(int(min(places) // _TICK) * _TICK + _TICK, int(max(places)) + 1, _TICK)
        panels.append(Panel(title, lines, "log2 of the absolute value", ticks, from_zero=True))
    lost = {config: max(lost_share(each, "float16") for each in _modules_of(compared[config])) for config in compared}
    worst = max(compared, key=lambda config: lost[config])
    fields = [
        Field(
            "most_lost_in_float16",
            "most lost in float16",
            "share",
            lambda row: format_share(row["most_lost_in_float16"]),
        ),
        Field("most_lost", "most lost here", "share", lambda row: format_share(row["most_lost"])),
        Field("least_sqnr_db", "lowest SQNR", "number", lambda row: f"{row['least_sqnr_db']:.0f} dB"),
    ]
    return Chart(
        name="numerics",
        title="Gradients by exponent",
        summary=f"float16 without scaling rounds at most {format_share(lost[worst])} of a module's gradients to zero.",
        draw=lambda width: line_chart(panels, width),
        table=subject.table(list(compared), fields, lambda config: _row(compared[config], lost[config])),
        note="Of one step in float32, each module with the same weight. Left of the range float16 rounds to zero, "
        "right of it to infinity.",
    )


def _modules_of(found: Diagnosis) -> tuple[ModuleNumerics, ...]:
    return found.numerics.modules if found.numerics is not None else ()


def _row(found: Diagnosis, lost: float) -> dict[str, float]:
    modules, scale = _modules_of(found), (found.numerics and found.numerics.loss_scale) or 1.0
    return {
        "most_lost_in_float16": lost,
        "most_lost": max(lost_share(each, format_of(found.precision), scale) for each in modules),
        "least_sqnr_db": min(map(least_sqnr_db, modules)),
    }


def _shares(modules: tuple[ModuleNumerics, ...], *, of_weights: bool) -> list[tuple[float, float]]:
    """Return the percentage of nonzero gradients that have each exponent, from the least to the largest."""
    own: list[GradientHistogram] = [each.weights if of_weights else each.outputs for each in modules]
    counts = [each.by_exponent for each in own if each.counts]
    if not counts:
        return []
    totals = dict.fromkeys(range(min(map(min, counts)), max(map(max, counts)) + 1), 0.0)
    for each in counts:
        for exponent, count in each.items():
            totals[exponent] += 100 * count / sum(each.values()) / len(counts)
    return [(float(exponent), share) for exponent, share in totals.items()]
