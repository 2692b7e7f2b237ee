"""Throughput and peak memory of a group's configurations as bars, and the changes that led to the loop to take."""

from collections.abc import Sequence
from itertools import pairwise
from math import inf

from castwise.analysis.decide import WORTHWHILE
from castwise.analysis.result_table import Row
from castwise.registry.techniques import TECHNIQUES
from castwise.report.charts.chart import MAX_BARS, RATE_FIELDS, Chart, GroupSubject, interval_of, interval_text
from castwise.report.charts.svg import Bar, Segment, bar_chart
from castwise.report.collection import REFERENCES, ComparisonGroup
from castwise.report.conclusions import Answer
from castwise.show.fields import Field, find_field, find_fields
from castwise.show.theme import FAINT, look_of
from castwise.show.units import format_bytes, format_rate, format_ratio
from castwise.tune.measurements import Measurements

_GIB = 2**30
_LONG = 4  # techniques in a name


def rate_of(config: Row) -> float:
    """Return a configuration's throughput, 0 if it has none."""
    return config.throughput or 0.0


def throughput(subject: GroupSubject) -> Chart | None:
    group = subject.group.over_seeds
    if all(config.throughput is None for config in group.configurations):
        return None
    names, note = pick(group, group.configurations)
    bars = []
    for config, name in names.items():
        found, speedup = config.throughput_estimate, group.times_reference(config)
        status = "" if config.trial.status == "ok" else config.trial.status
        figure = format_rate(found.value) if found else ""
        lines = [f"{figure} {group.unit}/s" if found else "", interval_text(found, format_rate)]
        lines += [f"{status}: {config.trial.message}" if status else ""]
        ratio = format_ratio(speedup) if speedup is not None else ""
        segment = Segment(rate_of(config), look_of(config.precision).colour, subject.tip(config, *lines))
        taken = "take" if config in subject.taken else ""
        words = " · ".join(each for each in (figure, status or ratio, taken) if each)
        bars.append(Bar(name, [segment], words, interval_of(found), bool(status)))
    references = dict.fromkeys(r.precision for c in names if (r := group.reference_of(c)) is not None)
    over = f"; × is over {' or '.join(references)}" if references else ""
    best = max((each for each in group.configurations if each.trial.status == "ok"), key=rate_of, default=None)
    summary = "No configuration ended well."
    if best is not None:
        fastest = names.get(best, group.label(best))
        summary = f"The highest is {format_rate(best.throughput)} {group.unit} a second, with {fastest}."
    return Chart(
        title="Throughput and speed-up",
        summary=summary,
        draw=lambda width: bar_chart(bars, width, f"{group.unit} per second{over}"),
        table=subject.table(
            group.configurations,
            [*RATE_FIELDS, Field("times_reference", "speed-up", "ratio"), find_field("verdict")],
            lambda config: {"times_reference": group.times_reference(config)},
        ),
        note=note,
    )


def memory(subject: GroupSubject) -> Chart | None:
    """Return the peak memory of each configuration, in the order of the throughput chart."""
    group = subject.group.over_seeds
    measured = [config for config in group.configurations if config.peak_allocated_bytes is not None]
    if not measured:
        return None
    names, note = pick(group, measured)
    bars = []
    for config in names:
        peak, reference = config.peak_allocated_bytes or 0, group.reference_of(config)
        base = reference.peak_allocated_bytes if reference is not None else None
        ratio = format_ratio(peak / base) if base else ""
        is_failed = config.trial.status != "ok"
        words = " · ".join(each for each in (format_bytes(peak), config.trial.status if is_failed else ratio) if each)
        lines = [f"peak allocated {format_bytes(peak)}", f"reserved {format_bytes(config.peak_reserved_bytes)}"]
        segment = Segment(peak / _GIB, look_of(config.precision).colour, subject.tip(config, *lines))
        bars.append(Bar(names[config], [segment], words, is_hatched=is_failed))
    ended = [config for config in measured if config.trial.status == "ok"] or measured
    least = min(ended, key=lambda config: config.peak_allocated_bytes or 0)
    peak_text, name = format_bytes(least.peak_allocated_bytes), names.get(least, group.label(least))
    bound = "On a CPU it is the growth of the process, an upper bound." if group.first.spec.device_type == "cpu" else ""
    return Chart(
        title="Peak memory",
        summary=f"Tensors hold least with {name}, {peak_text} at the peak.",
        draw=lambda width: bar_chart(bars, width, "peak allocated, GiB"),
        table=subject.table(measured, find_fields(("peak_allocated_bytes", "peak_reserved_bytes"))),
        note=f"{bound} {note}".strip(),
    )


def highest(configurations: Sequence[Row]) -> list[Row]:
    """Return as many configurations as a chart has room for, in their order: references, and the fastest ones."""
    has_loops = len({config.trial.spec.techniques for config in configurations}) > 1
    most = 14 if has_loops else MAX_BARS  # names are long then

    def rank(config: Row) -> tuple[bool, float]:
        is_reference = config.precision in REFERENCES and not config.trial.spec.techniques
        return not is_reference, -rate_of(config)

    kept = sorted(configurations, key=rank)[:most]
    return [config for config in configurations if config in kept]


def pick(group: ComparisonGroup, configurations: Sequence[Row]) -> tuple[dict[Row, str], str]:
    """Return the configurations that a chart has room for with their names, and what a reader must know of these.

    That is what the word "base" in names stands for, if they would be long without it, and how many are left out.
    """
    shown = highest(configurations)
    loops = [set(config.trial.spec.techniques) for config in shown]
    base = min(loops, key=lambda one: sum(len(one ^ other) for other in loops if len(other) >= _LONG), default=set())
    names = {config: group.label(config) for config in shown}
    notes = []
    if len(base) >= _LONG:
        notes.append(f"Base: {', '.join(row.name for row in TECHNIQUES if row.name in base)}.")
        for config, loop in zip(shown, loops, strict=True):
            if len(loop ^ base) < len(loop):
                words = ", ".join(filter(None, (config.precision, group.setting(config, "techniques"), "base")))
                added = [f" + {name}" for name in config.trial.spec.techniques if name not in base]
                names[config] = "".join([words, *added, *(f" − {name}" for name in sorted(base - loop))])
    if len(shown) < len(configurations):
        of = f"{len(shown)} fastest of {len(configurations):,}"
        notes.append(f"The {of} configurations are drawn; the table has all.")
    return names, " ".join(notes)


def ladder(subject: GroupSubject, answers: Sequence[Answer]) -> Chart | None:
    """Return the changes from the plain loop to the one to take, each with its factor over the one before."""
    group = subject.group.over_seeds
    taken = [each.advice for each in answers if each.advice.decision == "take" and each.advice.techniques]
    advice = max(taken, key=lambda each: rate_of(each.row) if each.row else 0.0, default=None)
    if advice is None or advice.row is None or advice.reference is None or advice.reference.techniques:
        return None
    steps = faster_steps(group, advice.reference, advice.row)
    if len(steps) < 2:
        return None
    changes = _changes(steps, is_training=group.is_training)
    bars, below = list[Bar](), 0.0
    for config, (name, factor) in zip(steps, changes, strict=True):
        rate = rate_of(config)
        interval = interval_text(config.throughput_estimate, format_rate)
        tip = subject.tip(config, f"{format_rate(rate)} {group.unit}/s", interval)
        parts = [Segment(below, FAINT, tip)] if below else []
        words = format_rate(rate) if factor is None else f"{format_rate(rate)} · ×{factor:.2f}"
        bars.append(Bar(name, [*parts, Segment(rate - below, look_of(config.precision).colour, tip)], words))
        below = rate
    first, last = format_rate(rate_of(steps[0])), format_rate(rate_of(steps[-1]))
    over = f"{advice.speedup or 0.0:.2f}× {steps[0].precision}"
    values = {config: {"change": name, "factor": factor} for config, (name, factor) in zip(steps, changes, strict=True)}
    return Chart(
        title=f"What each change adds: {over}",
        summary=(
            f"From {first} to {last} {group.unit} a second: {over}, plain loop. "
            "Each bar is one more change that was measured faster."
        ),
        draw=lambda width: bar_chart(bars, width, f"{group.unit} per second; × is over the bar above"),
        table=subject.table(
            steps,
            [Field("change", "change"), *RATE_FIELDS, Field("factor", "× before", "ratio")],
            lambda config: values[config],
        ),
    )


def _changes(steps: Sequence[Row], *, is_training: bool) -> list[tuple[str, float | None]]:
    """Return what each step adds, and its factor over the one before; None for the first."""
    measured = Measurements().plus(trial for config in steps for trial in config.trials)
    found: list[tuple[str, float | None]] = [(f"{steps[0].precision}, plain loop", None)]
    for before, config in pairwise(steps):
        new = [config.precision] if config.precision != before.precision else []
        new += [name for name in config.trial.spec.techniques if name not in before.trial.spec.techniques]
        if is_training:  # whose rates may be of several seeds
            factor = rate_of(config) / rate_of(before)
        else:
            ratio = measured.ratio(before.trial.spec, config.trial.spec)
            factor = ratio.value if ratio else 0.0
        found.append((" ".join(f"+ {name}" for name in new), factor))
    return found


def faster_steps(group: ComparisonGroup, start: Row, winner: Row) -> list[Row]:
    """Return the longest chain from the plain loop to a winner in which each was faster than the one before.

    Each has more of the winner's techniques, or another precision that is among the fastest with these techniques.
    """
    measured = Measurements().plus(trial for config in group.configurations for trial in config.trials)
    wanted = set(winner.trial.spec.techniques)
    setting = group.setting(winner, "techniques", "loss_scale")
    rest = [
        config
        for config in group.configurations
        if config.throughput is not None
        and group.setting(config, "techniques", "loss_scale") == setting
        and set(config.trial.spec.techniques) <= wanted
    ]
    best: dict[tuple[str, ...], float] = {}
    for config in rest:
        loop = config.trial.spec.techniques
        best[loop] = max(best.get(loop, 0.0), rate_of(config))
    rest = [c for c in rest if rate_of(c) * WORTHWHILE >= best[c.trial.spec.techniques] or c is winner]
    rest.sort(key=lambda c: (len(c.trial.spec.techniques), rate_of(c)))
    chains: list[list[Row]] = [[start]]
    for config in rest:
        names = set(config.trial.spec.techniques)
        below = [
            chain
            for chain in chains
            if set(chain[-1].trial.spec.techniques) <= names
            and chain[-1] is not config
            and measured.is_accepted(chain[-1].trial.spec, config.trial.spec, inf)
        ]
        if below:
            chains.append([*max(below, key=len), config])
    return max((chain for chain in chains if chain[-1] is winner), key=len, default=[])
