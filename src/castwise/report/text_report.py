"""A collection of records as text: in a terminal, and as Markdown for issues and pull requests."""

from collections.abc import Iterable, Sequence

from rich.console import Console

from castwise.analysis.advice import Advice
from castwise.max_batch.render import markdown_max_batches, print_max_batches
from castwise.report.collection import Collection, ComparisonGroup
from castwise.report.conclusions import Answer, answer_table, answers_of, headline
from castwise.report.machine_notes import MachineNote
from castwise.show import run_report, training_table, why_report
from castwise.show.console import print_line
from castwise.show.table import markdown_grid, markdown_text, print_data_table
from castwise.show.units import pluralize

_MORE = "in the HTML report"
_MAX_LENGTH = 60_000  # characters; GitHub takes 65,536


def print_report(collection: Collection, console: Console) -> None:
    """Print the answers, and a table for each group."""
    answers = answers_of(collection)
    print_line(console, headline(collection, answers), "bold")
    print_line(console, collection.summary)
    if len(answers) > 1:
        console.print()
        print_data_table(console, answer_table(answers), drop_first=("memory_ratio", "why"), elsewhere=_MORE)

    def print_notes(notes: Sequence[MachineNote]) -> None:
        for note in notes:
            print_line(console, f"  {note.text}", "yellow" if note.is_warning else None)

    print_notes(collection.machine_notes)
    for group in collection.groups:
        print_line(console, f"\n{group.title}", "bold underline")
        if group.is_max_batch:
            print_max_batches(group.max_batches, console, more=_MORE)
        elif group.is_training:
            training_table.print_runs(group.runs, None, console)
        else:
            run_report.print_table(group.rows, _advice(group, answers), console, more=_MORE)
            for line in _why_lines(group):
                print_line(console, f"  {line}")
        print_notes(collection.machine_notes_of(*group.configurations))
    for note in collection.notes:
        print_line(console, f"  {note}", "yellow")


def markdown_report(collection: Collection) -> str:
    """Return the answers, and a folded table for each group, as Markdown that GitHub takes: not too long for it."""
    answers = answers_of(collection)
    table = answer_table(answers)
    parts = [
        f"**{markdown_text(headline(collection, answers))}**",
        markdown_text(collection.summary),
        "\n".join(markdown_grid(table.columns, table.rows[:100])) if answers else "",
        bullets(note.text for note in collection.machine_notes),
        bullets(collection.notes),
    ]
    length = sum(map(len, parts))
    folds = len(collection.groups) > 1
    for number, group in enumerate(collection.groups):
        notes = bullets((*_why_lines(group), *(n.text for n in collection.machine_notes_of(*group.configurations))))
        content = "\n\n".join(part for part in (_markdown_group(group, answers).strip(), notes) if part)
        title = markdown_text(group.title)
        part = f"### {title}\n\n{content}"
        if folds:
            part = f"<details><summary>{title}</summary>\n\n{content}\n\n</details>"
        length += len(part)
        if length > _MAX_LENGTH:
            left = pluralize(len(collection.groups) - number, "more comparison")
            parts.append(f"{left} in the HTML report: this one would be too long for GitHub.")
            break
        parts.append(part)
    return "\n\n".join(part for part in parts if part) + "\n"


def _advice(group: ComparisonGroup, answers: Sequence[Answer]) -> list[Advice]:
    return [answer.advice for answer in answers if answer.group is group]


def _why_lines(group: ComparisonGroup) -> list[str]:
    """Return the first cause of each configuration that was profiled, a line each."""
    return [
        " ".join(map(str.strip, why_report.lines_of(found, most_causes=1, name=group.label(config))))
        for config, found in group.profiled.items()
    ]


def bullets(lines: Iterable[str]) -> str:
    """Return lines as a list in Markdown."""
    return "\n".join(f"- {markdown_text(line)}" for line in lines)


def _markdown_group(group: ComparisonGroup, answers: Sequence[Answer]) -> str:
    if group.is_max_batch:
        return markdown_max_batches(group.max_batches)
    if not group.is_training:
        return run_report.to_markdown(group.rows, _advice(group, answers), more=_MORE)
    table = training_table.data_table(group.runs)
    failed = [run.trial for run in group.runs if run.trial.status != "ok"]
    notes = bullets(f"{trial.spec.label}: {trial.status}: {trial.message}" for trial in failed)
    return "\n".join([markdown_text(group.description), "", *markdown_grid(table.columns, table.rows), "", notes])
