"""A collection of records as text: in a terminal, and as Markdown for issues and pull requests."""

from rich.console import Console

from castwise.analysis.advice import recommend
from castwise.max_batch.render import markdown_max_batches, print_max_batches
from castwise.render import run_report, training_table
from castwise.render.console import print_line
from castwise.render.table import markdown_grid, markdown_text
from castwise.report.collection import Collection, ComparisonGroup
from castwise.report.conclusions import answers_of, in_one_sentence

_ELSEWHERE = "`castwise export` has all"


def print_report(collection: Collection, console: Console) -> None:
    """Print the answer, and a table for each group."""
    print_line(console, in_one_sentence(collection, answers_of(collection)), "bold")
    print_line(console, collection.summary)
    for group in collection.groups:
        print_line(console, f"\n{group.title}", "bold underline")
        if group.is_max_batch:
            print_max_batches(group.max_batches, console)
        elif group.is_training:
            training_table.print_runs(group.runs, None, console, _ELSEWHERE)
        else:
            run_report.print_table(group.rows, recommend(group.rows), console, elsewhere=_ELSEWHERE)
    for note in collection.notes:
        print_line(console, f"  {note}", "yellow")


def markdown_report(collection: Collection) -> str:
    """Return the answer, and a table for each group, as Markdown."""
    parts = [
        f"**{markdown_text(in_one_sentence(collection, answers_of(collection)))}**",
        markdown_text(collection.summary),
        *(f"### {markdown_text(group.title)}\n\n{_markdown_group(group)}" for group in collection.groups),
        "\n".join(f"- {markdown_text(note)}" for note in collection.notes),
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts if part) + "\n"


def _markdown_group(group: ComparisonGroup) -> str:
    if group.is_max_batch:
        return markdown_max_batches(group.max_batches)
    if not group.is_training:
        return run_report.to_markdown(group.rows, recommend(group.rows))
    table = training_table.data_table(group.runs)
    failed = [run.trial for run in group.runs if run.trial.status != "ok"]
    notes = [f"- {markdown_text(f'{t.spec.label}: {t.status}: {t.message}')}" for t in failed]
    return "\n".join([markdown_text(group.description), "", *markdown_grid(table.columns, table.rows), "", *notes])
