"""A collection of records in a terminal: the answer, and a table a topic."""

from rich.console import Console

from castwise.analyze.answers import answers_of, in_one_sentence
from castwise.analyze.collection import Collection, Topic
from castwise.analyze.fit import fits_of
from castwise.analyze.recommend import recommend
from castwise.report.fitting import print_fit
from castwise.report.html.lists import summary
from castwise.report.saying import say
from castwise.report.suites import print_runs
from castwise.report.tables import print_table

_ELSEWHERE = "`castwise export` has all"


def print_report(collection: Collection, console: Console) -> None:
    """Print the answer, and a table for each topic."""
    say(console, in_one_sentence(collection, answers_of(collection)), "bold")
    say(console, summary(collection))
    for topic in collection.topics:
        say(console, f"\n{topic.title}", "bold underline")
        _print_topic(topic, console)
    for note in collection.notes:
        say(console, f"  {note}", "yellow")


def _print_topic(topic: Topic, console: Console) -> None:
    if topic.is_fit:
        print_fit(fits_of(trial for cell in topic.cells for trial in cell.trials), console)
    elif topic.is_training:
        print_runs(topic.runs, {}, console, _ELSEWHERE)
    else:
        print_table(topic.rows, recommend(topic.rows), console, elsewhere=_ELSEWHERE)
