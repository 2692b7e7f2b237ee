"""The equivalence plot: how far each precision's score is from the baseline's, with its interval, and the margin."""

from castwise.accuracy.render import SHORT, difference_unit, flat_row, verdict_text
from castwise.accuracy.result import Runs, runs_of
from castwise.records.schema import Trial
from castwise.render.fields import Field, find_field
from castwise.render.table import DataTable
from castwise.render.theme import look_of
from castwise.report.charts.chart import MAX_BARS, Chart, GroupSubject, left_out
from castwise.report.charts.svg import NARROW, Axis, Dot, Drawing, dot_chart, nice_ticks, number

_LEAST_REACH = 1.5  # of the axis, in margins


def runs_in(subject: GroupSubject) -> list[tuple[str, tuple[Runs, ...]]]:
    """Return the paired runs of a group for each setting, such as a batch size; the baseline's first."""
    trials: dict[str, list[Trial]] = {}
    for config in subject.group.configurations:
        trials.setdefault(subject.group.setting(config, "seed", "loss_scale"), []).append(config.trial)
    found = []
    for setting, own in trials.items():
        runs = runs_of(own, None, None, max(trial.spec.seed for trial in own) + 1)
        if any(each.verdict is not None and each.verdict.difference is not None for each in runs):
            found.append((setting, runs))
    return found


def equivalence(subject: GroupSubject) -> Chart | None:
    """Return how far scores are from the baseline's, over pairs of runs with the same seeds."""
    every = [(setting, runs) for setting, own in runs_in(subject) for runs in own if runs.verdict is not None]
    if not every:
        return None
    metric = every[0][1].metric
    baseline = every[0][1].baseline[0].spec.precision
    unit = difference_unit(metric)
    margin = 100 * every[0][1].margin_share
    rows: list[tuple[str, list[Dot], str]] = []
    for setting, runs in every[:MAX_BARS]:
        row, verdict = flat_row(runs), verdict_text(runs)
        label = f"{runs.spec.precision}, {setting}" if setting else runs.spec.precision
        dots = []
        if row["difference"] is not None:
            look = look_of(runs.spec.precision)
            ends = (100 * row["difference_low"], 100 * row["difference_high"])
            tip = f"{label}\n{row['difference_text']}{unit}\n{verdict}, {len(runs.trials)} runs"
            tip += f"\n{subject.file_of(runs.trials[0])}"
            dots = [Dot(100 * row["difference"], look.colour, look.marker, tip, ends, is_ringed=verdict == "as good")]
        rows.append((label, dots, verdict))
    values = [abs(dot.value) for _, dots, _ in rows for dot in dots]
    reach = max(_LEAST_REACH * margin, 1.1 * max(values, default=0.0))
    farthest = max((abs(end) for _, dots, _ in rows for dot in dots for end in dot.interval or ()), default=0.0)
    reach = max(reach, min(farthest, 2 * reach))

    def draw(width: int) -> Drawing:
        axis = Axis(
            -reach, reach, nice_ticks(-reach, reach, 5 if width > NARROW else 3), number, 0.0, (-margin, margin)
        )
        return dot_chart(rows, width, axis, f"difference from {baseline}:{unit}, above 0 is better")

    verdicts = ", ".join(f"{label} {verdict}" for label, _, verdict in rows[:8])
    fields = [find_field("precision"), *([Field("setting", "setting")] if any(each for each, _ in every) else [])]
    fields += [find_field(name, title) for name, title in SHORT.items() if name != "precision"]
    fields.append(find_field("file"))
    return Chart(
        title=f"Is the {metric.name} as good as in {baseline}?",
        summary=f"Shaded is a margin of {margin:.2g}{unit}; lines are 95 % intervals. {verdicts}.",
        draw=draw,
        table=DataTable(
            fields,
            [
                {**flat_row(runs), "setting": setting, "file": subject.file_of(runs.trials[0])}
                for setting, runs in every
            ],
        ),
        note=left_out("{} of {:,} precisions are drawn; the table has all.", rows, every),
    )
