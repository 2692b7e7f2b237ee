"""A collection of records as text: in a terminal, and as Markdown for issues and pull requests."""

from collections.abc import Sequence

from castwise.analysis.decide import Advice
from castwise.max_batch import render as max_batch_render
from castwise.report.collection import Collection, ComparisonGroup
from castwise.report.conclusions import answer_table, answers_of, headline
from castwise.report.machine_notes import MachineNote
from castwise.show import run_report, training_table, why_report
from castwise.show.presentation import Fold, Grid, Lines, Part, Presentation, paragraph

_MORE = "in the HTML report"
_MOST_ANSWERS = 100
_MAX_LENGTH = 60_000  # characters; GitHub takes 65,536


def present(collection: Collection, *, wide: bool = False) -> Presentation:
    """Return the answers, and a table for each group; in all columns of searches and training runs if it is wide."""
    answers = answers_of(collection)
    table = answer_table(answers[:_MOST_ANSWERS])
    parts: list[Part] = [paragraph(headline(collection, answers)), paragraph(collection.summary, "")]
    if len(answers) > (0 if wide else 1):
        parts += [Lines([""]), Grid(table, drop_first=("memory_ratio", "why"), elsewhere=_MORE)]
    parts += [
        *_machine_lines(collection.machine_notes_of(collection.configurations)),
        Lines([f"  {note}" for note in collection.notes], "yellow"),
    ]
    for group in collection.groups:
        advice = [answer.advice for answer in answers if answer.group is group]
        causes = [
            " ".join(map(str.strip, why_report.lines_of(found, most_causes=1, name=group.label(config))))
            for config, found in group.profiled.items()
        ]
        own = [
            *_group_parts(group, advice, wide=wide),
            Lines([f"  {line}" for line in causes]),
            *_machine_lines(collection.machine_notes_of(group.configurations)),
        ]
        title = paragraph(group.title, "bold underline", gap=True)
        parts += [title, *own] if len(collection.groups) == 1 else [Fold(group.title, own, "bold underline")]
    return Presentation(parts, longest=_MAX_LENGTH)


def _group_parts(group: ComparisonGroup, advice: Sequence[Advice], *, wide: bool) -> Sequence[Part]:
    if group.is_max_batch:
        return max_batch_render.parts(group.max_batches, wide=wide, verbose=wide, more=_MORE)
    if not group.is_training:
        return run_report.present(group.configurations, advice, more=_MORE).parts
    return [
        paragraph(group.description, "dim"),
        *training_table.parts(group.configurations, wide=wide),
        Lines([f"  {line}" for line in training_table.failure_lines(group.configurations)], "yellow"),
    ]


def _machine_lines(notes: list[MachineNote]) -> list[Part]:
    return [Lines([f"  {note.text}"], "yellow" if note.is_warning else "") for note in notes]
