"""What precision and techniques bought, one after the other: from the plain loop to the tuned one."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from castwise.registry.precisions import BASELINE
from castwise.render.table import DataTable
from castwise.render.theme import INK, look_of
from castwise.render.units import format_rate, format_ratio
from castwise.report.charts.chart import Chart, GroupSubject
from castwise.report.charts.plotly_parts import axis, hover, interval_text, layout, on_lines
from castwise.report.charts.tables import cell_grid, rate_columns, text_column
from castwise.report.collection import ComparisonGroup, Configuration

_NAME_WIDTH = 18  # characters of a technique's name below its bar, on a line


@dataclass(frozen=True)
class Link:
    """A loop of a chain.

    Attributes:
        change: What it has more than the one before.
        rate: Units a second.
        ratio: Its speed-up over the one before; None for the first.
        said: What is said beside the pointer.
    """

    change: str
    rate: float
    ratio: float | None
    said: str = ""


def waterfall(subject: GroupSubject) -> Chart | None:
    """Return the chain of cells to the fastest, each with a change more than the one before, as a waterfall."""
    topic = subject.group
    chain = _longest_chain(topic)
    if len(chain) < 2:
        return None
    rates = [_rate(cell) for cell in chain]
    first, last = chain[0].precision, chain[-1].precision
    plain = "plain loop" if first == last else f"{first}, plain loop"
    changes = [plain, *(_added(cell, before) for before, cell in pairwise(chain))]
    links = [
        Link(change, rate, ratio, _said(subject, cell, rates[0]))
        for change, cell, rate, ratio in zip(
            changes, chain, rates, [None, *(after / before for before, after in pairwise(rates))], strict=True
        )
    ]
    named = {id(cell): change for cell, change in zip(chain, changes, strict=True)}
    table = cell_grid(subject, chain, [text_column("change", lambda cell: named[id(cell)]), *rate_columns()])
    title = f"What each technique bought, in {last}" if first == last else f"What each change to {first} bought"
    return drawn(links, topic.unit, last, title, table)


def drawn(links: Sequence[Link], unit: str, precision: str, title: str, table: DataTable[Any]) -> Chart:
    """Return a chain of loops as a waterfall.

    Args:
        links: The loops, the plain one first.
        unit: What their rates count.
        precision: Whose colour they have.
        title: The chart's heading.
        table: What is in it.
    """
    rates = [link.rate for link in links]
    steps = [rates[0], *(after - before for before, after in pairwise(rates)), rates[-1]]
    colour = look_of(precision).colour
    trace = {
        "type": "waterfall",
        "x": list(range(len(steps))),  # two changes may have one name
        "y": steps,
        "measure": ["absolute", *["relative"] * (len(links) - 1), "total"],
        "text": [format_rate(rates[0]), *(format_ratio(link.ratio) for link in links[1:]), format_rate(rates[-1])],
        "textposition": "outside",
        "cliponaxis": False,
        "hovertext": [*(link.said for link in links), links[-1].said],
        "hoverinfo": "text",
        "connector": {"line": {"color": INK, "width": 1, "dash": "dot"}},
        "increasing": {"marker": {"color": colour}},
        "decreasing": {"marker": {"color": colour, "line": {"color": INK, "width": 2}}},
        "totals": {"marker": {"color": colour, "line": {"color": INK, "width": 1}}},
    }
    document = layout()
    names = [on_lines(name, _NAME_WIDTH) for name in (*(link.change for link in links), "all together")]
    document["xaxis"] = axis(
        showgrid=False, zeroline=False, tickvals=trace["x"], ticktext=names, ticklabeloverflow="allow"
    )
    document["yaxis"] = axis(f"{unit} per second", rangemode="tozero")
    document["showlegend"] = False
    return Chart(
        name="waterfall",
        title=title,
        says=(
            f"Throughput as one change comes after the other: from {format_rate(rates[0])} to "
            f"{format_rate(rates[-1])} {unit} a second, {format_ratio(rates[-1] / rates[0])}."
        ),
        traces=[trace],
        layout=document,
        table=table,
    )


def _said(subject: GroupSubject, cell: Configuration, plain: float) -> str:
    return hover(
        [
            subject.group.label(cell),
            f"{format_rate(_rate(cell))} {cell.unit}/s, {format_ratio(_rate(cell) / plain)} the plain loop's",
            interval_text(cell.throughput),
            subject.file_of(cell.trial),
        ]
    )


def _longest_chain(topic: ComparisonGroup) -> list[Configuration]:
    """Return the cells of one setting where each has a change more than the one before.

    Changes are techniques, and once the precision: from float32 to another. Of the chains that begin with a plain loop:
    the one that ends fastest, by as many links as there are.
    """
    settings: dict[str, list[Configuration]] = {}
    for cell in topic.configurations:
        if cell.throughput is not None:
            settings.setdefault(topic.setting(cell, "techniques", "loss_scale"), []).append(cell)
    return max(map(_chain_of, settings.values()), key=_end, default=[])


def _chain_of(cells: list[Configuration]) -> list[Configuration]:
    best: dict[int, list[Configuration]] = {}
    ordered = sorted(cells, key=lambda each: (len(_names(each)), each.precision != BASELINE))
    for place, cell in enumerate(ordered):
        below = [best[id(each)] for each in ordered[:place] if id(each) in best and _leads(each, cell)]
        before = max(below, key=_rank, default=[])
        if before or not _names(cell):
            best[id(cell)] = [*before, cell]
    # A precision alone is a bar of other charts.
    return max((chain for chain in best.values() if len(chain) > 1 and _names(chain[-1])), key=_end, default=[])


def _leads(before: Configuration, cell: Configuration) -> bool:
    """Return whether a cell has all that another has, and more."""
    if (before.precision, before.trial.spec.loss_scale) == (cell.precision, cell.trial.spec.loss_scale):
        return _names(before) < _names(cell)
    return before.precision == BASELINE != cell.precision and _names(before) <= _names(cell)


def _rank(chain: list[Configuration]) -> tuple[int, float]:
    return len(chain), _rate(chain[-1]) if chain else 0.0


def _end(chain: list[Configuration]) -> float:
    return _rate(chain[-1]) if chain else 0.0


def _names(cell: Configuration) -> frozenset[str]:
    return frozenset(cell.trial.spec.techniques)


def _added(cell: Configuration, before: Configuration) -> str:
    new = _names(cell) - _names(before)
    words = [f"+ {name}" for name in cell.trial.spec.techniques if name in new]
    return " ".join(words if cell.precision == before.precision else [cell.precision, *words])


def _rate(cell: Configuration) -> float:
    return cell.throughput.value if cell.throughput is not None else 0.0
