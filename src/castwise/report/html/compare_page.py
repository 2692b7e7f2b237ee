"""Compared machines as a page: the result, a chart of the ratios, tables, and what was not compared."""

from castwise.report import machine_report
from castwise.report.charts.machines import ratios
from castwise.report.html.page_frame import PageData, Source, assemble
from castwise.report.machine_comparison import MachineComparison


def render_comparison(comparison: MachineComparison, source: Source, title: str | None = None) -> str:
    """Return the comparison as HTML; without a title the answer is its title."""
    data = PageData()
    machines = []  # each with its device, and when it was measured
    for machine in comparison.machines:
        device, when = machine.traits.get("device", "–"), machine.traits.get("measured", "")
        machines.append(f"{machine.name}: {device}" + (f", {when}" if when else ""))
    chart = ratios(comparison, source.file_of)
    traits, costs = machine_report.trait_table(comparison), machine_report.cost_table(comparison)
    choices = ("workload", "precision", "machine", "verdict")
    data.add_table("ratios", machine_report.result_table(comparison), choices=choices)
    if costs.rows:
        data.add_table("costs", costs)
    if traits.rows:
        data.add_table("traits", traits)
    context = {
        "summary": " · ".join(machines),
        "sentence": "",
        "details": machine_report.detail_lines(comparison),
        "verdict_counts": machine_report.verdict_counts(comparison).replace("`", ""),
        "slower": machine_report.slower_lines(comparison),
        "remarks": machine_report.remark_lines(comparison),
        "chart": data.add_chart("comparison-ratios", chart, chart.summary) if chart is not None else "",
        "costs": bool(costs.rows) and machine_report.COSTS,
        "traits": bool(traits.rows),
        "shared_traits": machine_report.shared_traits(comparison),
        "incomparable": machine_report.refused_lines(comparison),
        "first": comparison.machines[0].name,
        "margin": f"{100 * comparison.margin:.3g} %",
        "notes": machine_report.note_lines(comparison),
    }
    return assemble("versus.html.j2", title or machine_report.headline(comparison), context, data, source)
