"""The speed-up from each change of precision and technique, one after the other: from the plain loop to the fastest."""

from itertools import pairwise

from castwise.registry.precisions import BASELINE, DEFAULT
from castwise.render.fields import Field
from castwise.render.theme import INK, look_of
from castwise.render.units import format_rate, format_ratio
from castwise.report.charts import plotly_parts as plot
from castwise.report.charts.chart import RATE_FIELDS, Chart, GroupSubject
from castwise.report.collection import ComparisonGroup, Configuration, value_of


def waterfall(subject: GroupSubject) -> Chart | None:
    """Return the chain of configurations to the fastest, each with one more change, as a waterfall."""
    group = subject.group
    chain = _longest_chain(group)
    if len(chain) < 2:
        return None
    rates = [value_of(config.throughput) for config in chain]
    first, last = chain[0].precision, chain[-1].precision
    changes = [f"{first}, plain loop"]
    for before, config in pairwise(chain):
        new = [f"+ {name}" for name in config.trial.spec.techniques if name not in before.trial.spec.techniques]
        changes.append(" ".join(new if config.precision == before.precision else [config.precision, *new]))
    ratios = [after / before for before, after in pairwise(rates)]
    colour = look_of(last).colour
    hovers = []
    for config, rate in zip(chain, rates, strict=True):
        text = f"{format_rate(rate)} {group.unit}/s, {format_ratio(rate / rates[0])} the plain {first} loop's"
        hovers.append(subject.hover(config, text, plot.interval_text(config.throughput, format_rate)))
    places = list(range(len(chain) + 1))  # not names: two changes may have the same
    trace = {
        "type": "waterfall",
        "x": places,
        "y": [rates[0], *(after - before for before, after in pairwise(rates)), rates[-1]],
        "measure": ["absolute", *["relative"] * len(ratios), "total"],
        "text": [format_rate(rates[0]), *map(format_ratio, ratios), format_rate(rates[-1])],
        "textposition": "outside",
        "cliponaxis": False,
        "hovertext": [*hovers, hovers[-1]],
        "hoverinfo": "text",
        "connector": {"line": {"color": INK, "width": 1, "dash": "dot"}},
        "increasing": {"marker": {"color": colour}},
        "decreasing": {"marker": {"color": colour, "line": {"color": INK, "width": 2}}},
        "totals": {"marker": {"color": colour, "line": {"color": INK, "width": 1}}},
    }
    names = [plot.wrap(name, 18) for name in (*changes, "all together")]
    change_of = dict(zip(chain, changes, strict=True))
    return Chart(
        name="waterfall",
        title=f"Speed-up from each technique, in {last}" if first == last else f"Speed-up from each change to {first}",
        summary=(
            f"Throughput as one change comes after the other: from {format_rate(rates[0])} to {format_rate(rates[-1])} "
            f"{group.unit} a second, {format_ratio(rates[-1] / rates[0])} the plain {first} loop's."
        ),
        traces=[trace],
        layout=plot.layout(
            showlegend=False,
            xaxis=plot.axis(showgrid=False, zeroline=False, tickvals=places, ticktext=names, ticklabeloverflow="allow"),
            yaxis=plot.axis(f"{group.unit} per second", rangemode="tozero"),
        ),
        table=subject.table(chain, [Field("change", "change"), *RATE_FIELDS], lambda c: {"change": change_of[c]}),
    )


def _longest_chain(group: ComparisonGroup) -> list[Configuration]:
    """Return the configurations of one setting in which each has a change more than the one before.

    Changes are techniques, and once the precision: from PyTorch's default, or from fp32 if that was not measured. Of
    the chains that begin with a plain loop it is the one that ends fastest, with as many links as there are.
    """
    settings: dict[str, list[Configuration]] = {}
    for config in group.configurations:
        if config.throughput is not None:
            settings.setdefault(group.setting(config, "techniques", "loss_scale"), []).append(config)
    found: list[list[Configuration]] = []
    for configurations in settings.values():
        plain = {config.precision for config in configurations if not config.trial.spec.techniques}
        base = DEFAULT if DEFAULT in plain else BASELINE
        longest: list[list[Configuration]] = []  # to each configuration
        for config in sorted(configurations, key=lambda c: (len(c.trial.spec.techniques), c.precision != base)):
            below = [chain for chain in longest if _extends(config, chain[-1], base)]
            before = max(below, key=lambda chain: (len(chain), value_of(chain[-1].throughput)), default=[])
            if before or not config.trial.spec.techniques:
                longest.append([*before, config])
        found += [chain for chain in longest if len(chain) > 1 and chain[-1].trial.spec.techniques]
    return max(found, key=lambda chain: value_of(chain[-1].throughput), default=[])


def _extends(config: Configuration, before: Configuration, base: str) -> bool:
    """Return whether a configuration has all changes of another, and more; a change of precision is from `base`."""
    new, old = set(config.trial.spec.techniques), set(before.trial.spec.techniques)
    if (before.precision, before.trial.spec.loss_scale) == (config.precision, config.trial.spec.loss_scale):
        return old < new
    return before.precision == base != config.precision and old <= new
