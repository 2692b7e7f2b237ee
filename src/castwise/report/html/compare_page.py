"""Machines side by side as a page: what it comes to, the table, a chart a workload, and what was not compared."""

from collections.abc import Mapping
from typing import Any

from castwise.report import machine_report as said
from castwise.report.charts.machines import MachinesSubject, machines
from castwise.report.html.page_frame import PageData, Source, assemble
from castwise.report.machine_comparison import MachineComparison, headline, tally

_MOST_CHARTS = 30


def render_comparison(comparison: MachineComparison, source: Source, title: str = "castwise comparison") -> str:
    """Return the comparison as HTML.

    Args:
        comparison: Machines side by side.
        source: Where their figures come from.
        title: The page's title.

    Raises:
        UsageError: plotly or jinja2 is not installed.
    """
    data = PageData()
    made = (
        (number, machines(MachinesSubject(group, rows, source.file_of)))
        for number, (group, rows) in enumerate(comparison.groups.items(), start=1)
    )
    charts = [(number, chart) for number, chart in made if chart is not None]
    traits = said.trait_grid(comparison)
    data.add_table("ratios", said.figure_grid(comparison), choices=("workload", "precision", "machine", "verdict"))
    if traits.rows:
        data.add_table("traits", traits)
    context: Mapping[str, Any] = {
        "summary": " · ".join(machine.name for machine in comparison.machines),
        "sentence": headline(comparison),
        "tally": tally(comparison).replace("`", ""),
        "slower": said.failure_lines(comparison),
        "remarks": [*said.basis_lines(comparison), *said.reason_lines(comparison)],
        "shown": [data.add_chart(chart, f"topic-{number}") for number, chart in charts[:_MOST_CHARTS]],
        "more": max(0, len(charts) - _MOST_CHARTS),
        "traits": bool(traits.rows),
        "alike": said.shared_traits(comparison),
        "refusals": [said.refusal_line(refusal) for refusal in comparison.incomparable],
        "first": comparison.machines[0].name,
        "margin": f"{100 * comparison.margin:.3g} %",
        "notes": said.note_lines(comparison),
    }
    return assemble("versus.html.j2", title, context, data, source)
