"""`castwise report`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from castwise.cli.output import format_size, say, say_problems, show
from castwise.errors import UsageError
from castwise.records.collector import gc_disabled
from castwise.report.files import ReportOptions, find, write_card, write_pictures, write_report
from castwise.show.units import pluralize
from castwise.spec.options import Option

EXAMPLES = """\
Examples:

    castwise report                          castwise-results/, as one HTML file
    castwise report h200/ a100/ -o both.html     two machines in one report
    castwise report h200/ -o report.md           Markdown, for a pull request
    castwise report h200/ --format table         tables in the terminal
    castwise report h200/ --charts figures/      every chart as SVG
    castwise report h200/ --card answer.svg      the answer as one picture
    castwise report --example                an H100's records, without measuring
"""

_DEFAULT_REPORT, _EXAMPLE = Path("castwise-report.html"), Path("castwise-example.html")


@dataclass(frozen=True)
class ReportPrintOptions:
    format: Annotated[
        Literal["table", "markdown"] | None,
        Option("Print it on stdout in this format, and write no page.", "Output"),
    ] = None


@gc_disabled()  # as it ends, nothing that it read is worth collecting
def report(options: ReportOptions, output: ReportPrintOptions) -> None:
    """Make a report of records: one HTML file with the answer, charts and tables, or Markdown."""
    if output.format is not None and options.output is not None:
        raise UsageError("--format prints on stdout, and --output writes a file: name one of them.")
    found = find(options.folders("report"), options)
    if output.format is not None:
        from castwise.report.text_report import present

        show(output.format, present(found.collection, wide=output.format == "markdown"))
    elif options.output is not None or (options.charts is None and options.card is None):
        path = options.output or (_EXAMPLE if options.example else _DEFAULT_REPORT)
        size = write_report(found, path, options.title)
        say(f"{path}: {pluralize(len(found.collection.trials), 'trial')}, {format_size(size)}")
    if options.charts is not None:
        from castwise.report.charts.registry import pictures_of

        count = write_pictures(pictures_of(found.collection, found.file_of), options.charts)
        say(f"{options.charts}: {pluralize(count, 'picture')}")
    if options.card is not None:
        say(f"{options.card}: {format_size(write_card(found, options.card))}")
    say_problems(found.problems)
