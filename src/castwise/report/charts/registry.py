"""The charts of a comparison group, in the order in which a report shows them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from castwise.records.store import free_name, slug
from castwise.report.charts import profile, scaling, throughput, training
from castwise.report.charts.chart import Chart, GroupSubject
from castwise.report.collection import Collection, FileOf
from castwise.report.conclusions import Answer, answers_of

GROUP_CHARTS: dict[str, Callable[[GroupSubject], Chart | None]] = {
    "largest": scaling.largest_batch,
    "throughput": throughput.throughput,
    "profile": profile.step_time,
    "equivalence": training.equivalence,
    "memory": throughput.memory,
    "kernels": profile.kernels,
    "modules": profile.modules,
    "batch": scaling.batch,
    "scaling": scaling.scaling,
    "loss": training.loss,
    "score": training.score,
}
# Of a search for the largest batch; bars of every batch that it tried would be too many.
_OF_MAX_BATCH = ("largest", "batch")


def charts_of(subject: GroupSubject, answers: Sequence[Answer]) -> dict[str, Chart]:
    """Return the charts that the records have something for, by name."""
    subject = replace(
        subject, taken=[row for each in answers if each.advice.decision == "take" and (row := each.advice.row)]
    )
    names = _OF_MAX_BATCH if subject.group.is_max_batch else GROUP_CHARTS
    found = {"ladder": throughput.ladder(subject, answers), **{name: GROUP_CHARTS[name](subject) for name in names}}
    return {name: chart for name, chart in found.items() if chart is not None}


def pictures_of(collection: Collection, file_of: FileOf) -> Iterator[tuple[str, str]]:
    """Yield the file names and the SVG of all charts of a collection; no two have the same name."""
    answers = answers_of(collection)
    taken = set[str]()
    for group in collection.groups:
        name = free_name(slug(group.title)[:80] or "group", taken, "-")
        taken.add(name)
        subject = GroupSubject(group, file_of)
        for kind, chart in charts_of(subject, [each for each in answers if each.group is group]).items():
            yield f"{name}-{kind}.svg", chart.as_file(subject.context)
