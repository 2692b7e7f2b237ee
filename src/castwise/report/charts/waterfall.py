"""What each technique bought, one after the other: from the plain loop to the tuned one."""

from itertools import pairwise

from castwise.analyze.collection import Cell, Topic
from castwise.report.charts.cell_columns import cell_grid, rate_columns, text_column
from castwise.report.charts.chart import Chart, TopicSubject
from castwise.report.charts.drawing import axis, hover, inert, layout
from castwise.report.palette import INK, look_of
from castwise.report.units import format_rate, format_ratio


def waterfall(subject: TopicSubject) -> Chart | None:
    """Return the longest chain of cells that have a technique more each, as a waterfall."""
    topic = subject.topic
    chain = _longest_chain(topic)
    if len(chain) < 2:
        return None
    rates = [_rate(cell) for cell in chain]
    names = [inert(_added(cell)) for cell in chain]
    texts = [
        hover(
            [
                topic.label(cell),
                f"{format_rate(_rate(cell))} {cell.unit}/s, {format_ratio(_rate(cell) / rates[0])} the plain loop's",
                subject.file_of(cell.trial),
            ]
        )
        for cell in chain
    ]
    steps = [rates[0], *(after - before for before, after in pairwise(rates)), rates[-1]]
    colour = look_of(chain[0].precision).colour
    trace = {
        "type": "waterfall",
        "x": [*names, "all together"],
        "y": steps,
        "measure": ["absolute", *["relative"] * (len(chain) - 1), "total"],
        "text": [
            format_rate(rates[0]),
            *(f"{format_ratio(after / before)}" for before, after in pairwise(rates)),
            format_rate(rates[-1]),
        ],
        "textposition": "outside",
        "cliponaxis": False,
        "hovertext": [*texts, texts[-1]],
        "hoverinfo": "text",
        "connector": {"line": {"color": INK, "width": 1, "dash": "dot"}},
        "increasing": {"marker": {"color": colour}},
        "decreasing": {"marker": {"color": colour, "line": {"color": INK, "width": 2}}},
        "totals": {"marker": {"color": colour, "line": {"color": INK, "width": 1}}},
    }
    document = layout()
    document["xaxis"], document["yaxis"] = (
        axis(type="category", showgrid=False),
        axis(f"{topic.unit} per second", rangemode="tozero"),
    )
    document["showlegend"] = False
    return Chart(
        name="waterfall",
        title=f"What each technique bought, in {chain[0].precision}",
        says=(
            f"Throughput as techniques are added: from {format_rate(rates[0])} to {format_rate(rates[-1])} "
            f"{topic.unit} a second, {format_ratio(rates[-1] / rates[0])}."
        ),
        traces=[trace],
        layout=document,
        table=cell_grid(subject, chain, [text_column("technique", _added), *rate_columns()]),
    )


def _longest_chain(topic: Topic) -> list[Cell]:
    """Return the cells of one precision and setting where each has one technique more than the one before."""
    chains: dict[str, list[Cell]] = {}
    for cell in sorted(topic.cells, key=lambda each: len(each.trial.spec.techniques)):
        if cell.throughput is None:
            continue
        chain = chains.setdefault(topic.label(cell, "techniques"), [])
        techniques = cell.trial.spec.techniques
        before = chain[-1].trial.spec.techniques if chain else None
        if (before is None and not techniques) or (before is not None and techniques[:-1] == before and techniques):
            chain.append(cell)
    return max(chains.values(), key=lambda chain: (len(chain), _rate(chain[-1]) if chain else 0.0), default=[])


def _added(cell: Cell) -> str:
    techniques = cell.trial.spec.techniques
    return f"+ {techniques[-1]}" if techniques else "plain loop"


def _rate(cell: Cell) -> float:
    return cell.throughput.value if cell.throughput is not None else 0.0
