"""A collection of records in a terminal: the answer, and a table a topic."""

from rich.console import Console

from castwise.analysis.advice import recommend
from castwise.max_batch.render import print_max_batches
from castwise.max_batch.result import max_batches_of
from castwise.render.console import print_line
from castwise.render.run_report import print_table
from castwise.render.training_table import print_runs
from castwise.report.collection import Collection, ComparisonGroup
from castwise.report.conclusions import answers_of, in_one_sentence
from castwise.report.html.sections import summary

_ELSEWHERE = "`castwise export` has all"


def print_report(collection: Collection, console: Console) -> None:
    """Print the answer, and a table for each topic."""
    print_line(console, in_one_sentence(collection, answers_of(collection)), "bold")
    print_line(console, summary(collection))
    for topic in collection.groups:
        print_line(console, f"\n{topic.title}", "bold underline")
        _print_topic(topic, console)
    for note in collection.notes:
        print_line(console, f"  {note}", "yellow")


def _print_topic(topic: ComparisonGroup, console: Console) -> None:
    if topic.is_max_batch:
        print_max_batches(max_batches_of(trial for cell in topic.configurations for trial in cell.trials), console)
    elif topic.is_training:
        print_runs(topic.runs, None, console, _ELSEWHERE)
    else:
        print_table(topic.rows, recommend(topic.rows), console, elsewhere=_ELSEWHERE)
