"""Where memory goes at a step's peak, by what it is there for."""

from castwise.max_batch.columns import breakdown_columns, breakdown_name, breakdowns_of, part_titles
from castwise.max_batch.memory_breakdown import MemoryBreakdown
from castwise.render.table import DataTable
from castwise.render.theme import INK, STACK
from castwise.render.units import format_bytes
from castwise.report.charts.chart import Chart, GroupSubject
from castwise.report.charts.plotly_parts import Document, axis, escape, hover, layout

_GIB = 2**30
# Colours come around again with another pattern: there are more parts than steps of the scale.
_PATTERNS = ("", "/", ".")


def parts(subject: GroupSubject) -> Chart | None:
    """Return a bar for each loop, stacked by what held its memory; None where no step was taken apart."""
    accounts = breakdowns_of(subject.fits)
    if not accounts:
        return None
    least = min(accounts, key=lambda each: each.seen_bytes)
    titles = part_titles(accounts)
    traces = [_bars(subject, accounts, number, *named) for number, named in enumerate(titles.items())]
    document = layout(height=420)
    document["barmode"] = "stack"
    document["legend"]["traceorder"] = "normal"
    document["xaxis"] = axis(type="category", showgrid=False)
    document["yaxis"] = axis("GiB", rangemode="tozero")
    batches = {account.trial.spec.batch_size for account in accounts}
    batch = f" at batch {batches.pop()}" if len(batches) == 1 else " at each one's largest batch"
    return Chart(
        name="parts",
        title=f"Where the memory goes{batch}",
        says=f"{breakdown_name(least)} holds least, {format_bytes(least.seen_bytes)} at the peak of a step.",
        traces=traces,
        layout=document,
        table=DataTable(breakdown_columns(accounts), accounts),
        note="Of one step after the timed ones, at the moment when it held most.",
    )


def _bars(subject: GroupSubject, accounts: list[MemoryBreakdown], number: int, name: str, title: str) -> Document:
    return {
        "type": "bar",
        "name": title,
        "x": [escape(breakdown_name(account)) for account in accounts],
        "y": [account.bytes_of(name) / _GIB for account in accounts],
        "marker": {
            "color": STACK[number % len(STACK)],
            "pattern": {"shape": _PATTERNS[number // len(STACK) % len(_PATTERNS)]},
            "line": {"color": INK, "width": 0.5},
        },
        "hovertext": [
            hover([breakdown_name(each), f"{title}: {format_bytes(each.bytes_of(name))}", subject.file_of(each.trial)])
            for each in accounts
        ],
        "hoverinfo": "text",
    }
