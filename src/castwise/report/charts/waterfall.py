"""What each technique bought, one after the other: from the plain loop to the tuned one."""

from itertools import pairwise

from castwise.analyze.collection import Cell, Topic
from castwise.report.charts.cell_columns import cell_grid, rate_columns, text_column
from castwise.report.charts.chart import Chart, TopicSubject
from castwise.report.charts.drawing import axis, hover, interval_text, layout, on_lines
from castwise.report.palette import INK, look_of
from castwise.report.units import format_rate, format_ratio

_NAME_WIDTH = 18  # characters of a technique's name below its bar, on a line


def waterfall(subject: TopicSubject) -> Chart | None:
    """Return the chain of cells to the fastest, each with techniques more than the one before, as a waterfall."""
    topic = subject.topic
    chain = _longest_chain(topic)
    if len(chain) < 2:
        return None
    rates = [_rate(cell) for cell in chain]
    added = {id(cell): _added(cell, before) for before, cell in zip([None, *chain], chain, strict=False)}
    names = [on_lines(added[id(cell)], _NAME_WIDTH) for cell in chain]
    texts = [
        hover(
            [
                topic.label(cell),
                f"{format_rate(_rate(cell))} {cell.unit}/s, {format_ratio(_rate(cell) / rates[0])} the plain loop's",
                interval_text(cell.throughput),
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
        table=cell_grid(subject, chain, [text_column("technique", lambda cell: added[id(cell)]), *rate_columns()]),
    )


def _longest_chain(topic: Topic) -> list[Cell]:
    """Return the cells of one precision and setting where each has techniques more than the one before.

    Of the chains of sets that begin with the plain loop, each within the next: the one that ends fastest, by as many
    links as there are.
    """
    settings: dict[str, list[Cell]] = {}
    for cell in topic.cells:
        if cell.throughput is not None:
            settings.setdefault(topic.label(cell, "techniques"), []).append(cell)
    return max(map(_chain_of, settings.values()), key=_end, default=[])


def _chain_of(cells: list[Cell]) -> list[Cell]:
    best: dict[str, list[Cell]] = {}
    for cell in sorted(cells, key=lambda each: len(_names(each))):
        own = _names(cell)
        below = [best[each.trial.spec.cell] for each in cells if _names(each) < own and each.trial.spec.cell in best]
        before = max(below, key=_rank, default=[])
        if before or not own:
            best[cell.trial.spec.cell] = [*before, cell]
    return max((chain for chain in best.values() if len(chain) > 1), key=_end, default=[])


def _rank(chain: list[Cell]) -> tuple[int, float]:
    return len(chain), _rate(chain[-1]) if chain else 0.0


def _end(chain: list[Cell]) -> float:
    return _rate(chain[-1]) if chain else 0.0


def _names(cell: Cell) -> frozenset[str]:
    return frozenset(cell.trial.spec.techniques)


def _added(cell: Cell, before: Cell | None) -> str:
    new = _names(cell) - (_names(before) if before is not None else frozenset())
    return " ".join(f"+ {name}" for name in cell.trial.spec.techniques if name in new) or "plain loop"


def _rate(cell: Cell) -> float:
    return cell.throughput.value if cell.throughput is not None else 0.0
