"""A collection of records in a terminal: the answer, and a table a group."""

from rich.console import Console

from castwise.analysis.advice import recommend
from castwise.max_batch.render import print_max_batches
from castwise.max_batch.result import max_batches_of
from castwise.render.console import print_line
from castwise.render.run_report import print_table
from castwise.render.training_table import print_runs
from castwise.report.collection import Collection, ComparisonGroup
from castwise.report.conclusions import answers_of, in_one_sentence

_ELSEWHERE = "`castwise export` has all"


def print_report(collection: Collection, console: Console) -> None:
    """Print the answer, and a table for each group."""
    print_line(console, in_one_sentence(collection, answers_of(collection)), "bold")
    print_line(console, collection.summary)
    for group in collection.groups:
        print_line(console, f"\n{group.title}", "bold underline")
        _print_group(group, console)
    for note in collection.notes:
        print_line(console, f"  {note}", "yellow")


def _print_group(group: ComparisonGroup, console: Console) -> None:
    if group.is_max_batch:
        print_max_batches(max_batches_of(trial for config in group.configurations for trial in config.trials), console)
    elif group.is_training:
        print_runs(group.runs, None, console, _ELSEWHERE)
    else:
        print_table(group.rows, recommend(group.rows), console, elsewhere=_ELSEWHERE)
