"""Throughput and speed-up of a group's configurations as bars, and the speed-ups of all groups next to each other."""

from collections.abc import Callable, Sequence

from castwise.analysis.statistics import Estimate, has_interval
from castwise.registry.precisions import BASELINE
from castwise.render.fields import Field, FlatRow, find_field, find_fields
from castwise.render.table import DataTable
from castwise.render.theme import look_of
from castwise.render.units import format_rate, format_ratio
from castwise.report.charts import plotly_parts as plot
from castwise.report.charts.chart import RATE_FIELDS, SPEEDUP_FIELDS, Chart, GroupSubject, left_out
from castwise.report.collection import Collection, ComparisonGroup, Configuration, FileOf, value_of

_MAX_GROUPS = 14  # of the overview
_SETTING_WIDTH, _TITLE_WIDTH = 20, 30  # characters on a line below upright bars, and next to lying ones


def throughput(subject: GroupSubject) -> Chart | None:
    """Return the throughput of each configuration."""
    group = subject.group
    best = max(group.configurations, key=lambda c: value_of(c.throughput))
    if best.throughput is None:
        return None
    y_title = f"{group.unit} per second"
    traces, document, note = _bars(
        subject, group.configurations, lambda c: c.throughput, format_rate, f" {group.unit}/s", y_title
    )
    rate = format_rate(best.throughput.value)
    return Chart(
        name="throughput",
        title="Throughput",
        summary=f"The highest is {rate} {group.unit} a second, with {group.label(best)}.",
        traces=traces,
        layout=document,
        table=subject.table(group.configurations, RATE_FIELDS),
        note=note,
    )


def speedup(subject: GroupSubject) -> Chart | None:
    """Return the speed-up of each configuration over float32."""
    group = subject.group
    compared = [config for config in group.configurations if config.speedup is not None]
    others = [config for config in compared if config.precision != BASELINE]
    if not others:
        return None
    best = max(others, key=lambda c: value_of(c.speedup))
    traces, document, note = _bars(subject, compared, lambda c: c.speedup, format_ratio, "", "speed-up over fp32")
    document["shapes"] = [plot.rule_at_one()]
    return Chart(
        name="speedup",
        title="Speed-up over fp32",
        summary=f"The largest is {format_ratio(value_of(best.speedup))}, with {group.label(best)}.",
        traces=traces,
        layout=document,
        table=subject.table(compared, SPEEDUP_FIELDS),
        note=note,
    )


def _bars(
    subject: GroupSubject,
    configurations: Sequence[Configuration],
    get: Callable[[Configuration], Estimate | None],
    text_of: Callable[[float | None], str],
    unit: str,
    y_title: str,
) -> tuple[list[plot.Document], plot.Document, str]:
    """Return a trace for each precision, or one trace if nothing else differs; their layout; and what is left out."""
    group = subject.group
    highest_first = sorted(configurations, key=lambda config: -value_of(get(config)))
    kept = set(highest_first[: plot.MAX_BARS])
    shown = [config for config in configurations if config in kept]
    settings = list(dict.fromkeys(group.setting(config) for config in shown))
    is_alone = settings == [""]

    def bar(config: Configuration) -> plot.Bar:
        trial, found = config.trial, get(config)
        status = "" if trial.status == "ok" else trial.status
        figure = text_of(found.value) if found else ""
        trouble = f"{status}: {trial.message}" if status else ""
        return plot.Bar(
            name=plot.escape(config.precision) if is_alone else plot.wrap(group.setting(config), _SETTING_WIDTH),
            precision=config.precision,
            found=found,
            label="<br>".join(plot.escape(text) for text in (figure, status) if text),
            pattern="/" if status else "",
            hover=subject.hover(config, figure and f"{figure}{unit}", plot.interval_text(found, text_of), trouble),
        )

    traces = []
    for precision in [""] if is_alone else group.precisions:
        own = [bar(config) for config in shown if precision in ("", config.precision)]
        if own:
            highest = value_of(get(highest_first[0]))
            legend = {"name": plot.escape(precision), "showlegend": not is_alone}
            traces.append(plot.labelled_bars(own, highest, len(group.configurations), **legend))
    x_axis = plot.names_axis(tickfont={"size": 11})
    if not is_alone:
        x_axis |= {"categoryorder": "array", "categoryarray": [plot.wrap(each, _SETTING_WIDTH) for each in settings]}
    y_axis = plot.axis(y_title, rangemode="tozero", tickformat=",", range=plot.bar_range(traces))
    note = left_out("The {} highest of {:,} configurations are drawn; the table has all.", shown, configurations)
    return traces, plot.layout(barmode="group", xaxis=x_axis, yaxis=y_axis), note


def overview(collection: Collection, file_of: FileOf) -> Chart | None:
    """Return the largest speed-up of each precision in each group."""
    groups = [(group, best) for group in collection.groups if (best := _best_by_precision(group))]
    if len(groups) < 2:
        return None
    shown = groups[:_MAX_GROUPS]
    traces = []
    for precision in dict.fromkeys(name for group, _ in shown for name in group.precisions if name != BASELINE):
        pairs = [(group, best[precision]) for group, best in shown if precision in best]
        found = [config.speedup for _, config in pairs]
        values = [value_of(each) for each in found]
        texts = [format_ratio(value) for value in values]
        hovers = []
        for (group, config), text in zip(pairs, texts, strict=True):
            interval = plot.interval_text(config.speedup, format_ratio)
            hovers.append(plot.hover([f"{group.title}: {group.label(config)}", text, interval, file_of(config.trial)]))
        trace = plot.bars(
            [plot.wrap(group.title, _TITLE_WIDTH) for group, _ in pairs],
            values,
            look_of(precision).colour,
            hovers,
            name=plot.escape(precision),
            orientation="h",
            error_x=plot.error_bars(found),
            text=texts,
            textposition="inside" if any(has_interval(each) for each in found) else "outside",
            insidetextanchor="start",
            textfont={"size": 10},
            constraintext="none",
            cliponaxis=False,
        )
        traces.append(trace)
    order = [plot.wrap(group.title, _TITLE_WIDTH) for group, _ in shown]
    rows: list[FlatRow] = [
        {**config.values, "group": group.title, "setting": group.setting(config), "file": file_of(config.trial)}
        for group, best in groups
        for config in best.values()
    ]
    which = [Field("group", "group"), find_field("precision"), Field("setting", "setting")]
    return Chart(
        name="overview",
        title="Speed-up over fp32, by comparison",
        summary=f"By precision, of {len(shown)} comparisons; the dotted line is fp32.",
        traces=traces,
        layout=plot.layout(
            120 + sum(17 * max(2, len(best)) + 10 for _, best in shown),
            barmode="group",
            xaxis=plot.axis("speed-up", rangemode="tozero"),
            yaxis=plot.names_axis(autorange="reversed", categoryorder="array", categoryarray=order),
            shapes=[plot.rule_at_one("x")],
        ),
        table=DataTable([*which, *SPEEDUP_FIELDS, *find_fields(("status", "file"))], rows),
        note=left_out("{} of {} shown; the table has all.", shown, groups),
    )


def _best_by_precision(group: ComparisonGroup) -> dict[str, Configuration]:
    best: dict[str, Configuration] = {}
    for config in [] if group.is_max_batch else group.configurations:
        before = best.get(config.precision)
        if config.precision != BASELINE and config.speedup is not None:
            best[config.precision] = max(before or config, config, key=lambda c: value_of(c.speedup))
    return best
