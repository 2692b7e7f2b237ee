"""`castwise report`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from castwise.cli.output import emit, format_size, say
from castwise.cli.records import (
    ChartOptions,
    Found,
    RecordsOptions,
    find,
    say_problems,
    write_by_suffix,
    write_pictures,
)
from castwise.errors import UsageError
from castwise.records.collector import gc_disabled
from castwise.render.units import pluralize
from castwise.spec.options import Option

EXAMPLES = """\
Examples:

    castwise report                                      castwise-results/ as castwise-report.html

    castwise report h200/ a100/ -o both.html             two machines in one report

    castwise report h200/ -o report.md                   Markdown, for an issue or a pull request

    castwise report h200/ --format table                 tables in the terminal

    castwise report h200/ --charts figures/              every chart as a picture
"""

_DEFAULT_REPORT = Path("castwise-report.html")


@dataclass(frozen=True, kw_only=True)
class ReportOptions(ChartOptions, RecordsOptions):
    """What `castwise report` writes, and of which records."""

    output: Annotated[
        Path | None, Option("The file to write: .html or .md.", flags=("--output", "-o"), metavar="FILE")
    ] = None
    title: Annotated[str, Option("The report's title.")] = "castwise report"
    format: Annotated[
        Literal["table", "markdown"] | None, Option("Print it on stdout in this format, and write no page.")
    ] = None


@gc_disabled()  # as it ends, nothing that it read is worth collecting
def report(options: ReportOptions) -> None:
    """Make a report of records: one HTML file with the answer, charts and tables, or Markdown."""
    if options.format is not None and options.output is not None:
        raise UsageError("--format prints on stdout, and --output writes a file: name one of them.")
    found = find(options.folders("report"), options)
    if options.format is not None:
        from castwise.report.text_report import markdown_report, print_report

        emit(
            options.format,
            table=lambda console: print_report(found.collection, console),
            markdown=lambda: markdown_report(found.collection),
        )
    elif options.output is not None or options.charts is None:
        path = options.output or _DEFAULT_REPORT
        size = write_report(found, path, options.title)
        say(f"{path}: {pluralize(len(found.collection.trials), 'trial')}, {format_size(size)}")
    if options.charts is not None:
        from castwise.report.charts.static_images import pictures_of

        write_pictures(pictures_of(found.collection, found.file_of), options)
    say_problems(found.problems)


def write_report(found: Found, output: Path, title: str = ReportOptions.title) -> int:
    """Write a report, as HTML or as Markdown by the file's suffix; return its size in bytes."""

    def html() -> str:
        from castwise.report.html.page_frame import Source
        from castwise.report.html.report_page import render

        return render(found.collection, Source(found.file_of, found.problems), title)

    def markdown() -> str:
        from castwise.report.text_report import markdown_report

        return markdown_report(found.collection)

    return write_by_suffix(output, html=html, markdown=markdown)
