"""Gradients of a step by their exponent, with the range of float16."""

import math
from collections import Counter

from castwise.records.schema import StepNumerics
from castwise.render.theme import SOFT, look_of
from castwise.render.why_report import numerics_lines, numerics_table
from castwise.report.charts.chart import MAX_LINES, Chart, GroupSubject, varied
from castwise.report.charts.svg import Line, Panel, line_chart
from castwise.report.charts.throughput import highest

_EDGES = (-25, 16)  # the exponents between which float16 makes no number 0 or infinite
_TICK = 8  # exponents


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
    ticks = range(math.ceil(min(places) / _TICK) * _TICK, int(max(places)) + 1, _TICK)
    panel = Panel("% of gradients", [*varied(lines), *edges], "log2 of the absolute value", ticks, from_zero=True)
    return Chart(
        name="numerics",
        title="Gradients by exponent",
        summary=" ".join(numerics_lines([found[config] for config in compared])[:1]),
        draw=lambda width: line_chart([panel], width),
        table=numerics_table([found[config] for config in compared]),
        note="Of one step in float32: weights' and outputs' gradients, each module with the same weight. float16 makes "
        "0 of what is left of its range.",
    )


def _shares(numerics: StepNumerics) -> list[tuple[int, float]]:
    """Return the percentage of nonzero gradients that have each exponent, from the least to the largest."""
    histograms = [
        own for each in numerics.modules for own in (each.weights.by_exponent, each.outputs.by_exponent) if own
    ]
    shares: Counter[int] = Counter()
    for own in histograms:
        for exponent, count in own.items():
            shares[exponent] += 100 * count / sum(own.values()) / len(histograms)  # type: ignore[assignment]
    return [(each, shares[each]) for each in range(min(shares), max(shares) + 1)] if shares else []
