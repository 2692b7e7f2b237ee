"""A collection of records as text: in a terminal, and as Markdown for issues and pull requests."""

from collections.abc import Iterable, Sequence

from rich.console import Console

from castwise.analysis.advice import recommend
from castwise.max_batch.render import markdown_max_batches, print_max_batches
from castwise.render import run_report, training_table
from castwise.render.console import print_line
from castwise.render.table import markdown_grid, markdown_text
from castwise.report.collection import Collection, ComparisonGroup
from castwise.report.conclusions import answers_of, in_one_sentence
from castwise.report.machine_notes import MachineNote

_MORE = "in the HTML report"


def print_report(collection: Collection, console: Console) -> None:
    """Print the answer, and a table for each group."""
    print_line(console, in_one_sentence(collection, answers_of(collection)), "bold")
    print_line(console, collection.summary)
    _print_notes(collection.machine_notes, console)
    for group in collection.groups:
        print_line(console, f"\n{group.title}", "bold underline")
        if group.is_max_batch:
            print_max_batches(group.max_batches, console, more=_MORE)
        elif group.is_training:
            training_table.print_runs(group.runs, None, console)
        else:
            run_report.print_table(group.rows, recommend(group.rows), console, more=_MORE)
        _print_notes(collection.machine_notes_of(*group.configurations), console)
    for note in collection.notes:
        print_line(console, f"  {note}", "yellow")


def _print_notes(notes: Sequence[MachineNote], console: Console) -> None:
    for note in notes:
        print_line(console, f"  {note.text}", "yellow" if note.is_warning else None)


def markdown_report(collection: Collection) -> str:
    """Return the answer, and a table for each group, as Markdown."""
    parts = [
        f"**{markdown_text(in_one_sentence(collection, answers_of(collection)))}**",
        markdown_text(collection.summary),
        _bullets(note.text for note in collection.machine_notes),
        *(
            f"### {markdown_text(group.title)}\n\n{_markdown_group(group)}\n"
            + _bullets(note.text for note in collection.machine_notes_of(*group.configurations))
            for group in collection.groups
        ),
        _bullets(collection.notes),
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts if part) + "\n"


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {markdown_text(line)}" for line in lines)


def _markdown_group(group: ComparisonGroup) -> str:
    if group.is_max_batch:
        return markdown_max_batches(group.max_batches)
    if not group.is_training:
        return run_report.to_markdown(group.rows, recommend(group.rows), more=_MORE)
    table = training_table.data_table(group.runs)
    failed = [run.trial for run in group.runs if run.trial.status != "ok"]
    notes = [f"- {markdown_text(f'{t.spec.label}: {t.status}: {t.message}')}" for t in failed]
    return "\n".join([markdown_text(group.description), "", *markdown_grid(table.columns, table.rows), "", *notes])
