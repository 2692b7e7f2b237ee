"""Compared machines as a page: the result, the table, a chart for each group, and what was not compared."""

from castwise.report import machine_report
from castwise.report.charts.machines import machines
from castwise.report.html.page_frame import PageData, Source, assemble
from castwise.report.machine_comparison import MachineComparison, headline, verdict_counts

_MAX_CHARTS = 30


def render_comparison(comparison: MachineComparison, source: Source, title: str = "castwise comparison") -> str:
    """Return the comparison as HTML.

    Raises:
        UsageError: plotly or jinja2 is not installed.
    """
    data = PageData()
    charts = [
        (f"group-{number}", chart)
        for number, (group, rows) in enumerate(comparison.groups.items(), start=1)
        if (chart := machines(group, rows, source.file_of)) is not None
    ]
    traits = machine_report.trait_table(comparison)
    results = machine_report.result_table(comparison)
    data.add_table("ratios", results, choices=("workload", "precision", "machine", "verdict"))
    if traits.rows:
        data.add_table("traits", traits)
    context = {
        "summary": " · ".join(machine.name for machine in comparison.machines),
        "sentence": headline(comparison),
        "verdict_counts": verdict_counts(comparison).replace("`", ""),
        "slower": machine_report.slower_lines(comparison),
        "remarks": machine_report.remark_lines(comparison),
        "shown": [data.add_chart(chart, prefix) for prefix, chart in charts[:_MAX_CHARTS]],
        "without_charts": max(0, len(charts) - _MAX_CHARTS),
        "traits": bool(traits.rows),
        "shared_traits": machine_report.shared_traits(comparison),
        "incomparable": [machine_report.incomparable_line(each) for each in comparison.incomparable],
        "first": comparison.machines[0].name,
        "margin": f"{100 * comparison.margin:.3g} %",
        "notes": machine_report.note_lines(comparison),
    }
    return assemble("versus.html.j2", title, context, data, source)
