"""The commands that read records: parse, call one function, print. They need no torch and no GPU."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from castwise.errors import UsageError

_DEFAULT_REPORT = Path("castwise-report.html")

_REPORT_EXAMPLES = """\
Examples:

    castwise report                                      castwise-results/ as castwise-report.html

    castwise report h200/ a100/ -o both.html             two machines in one report

    castwise report h200/ -o report.md                   Markdown, for an issue or a pull request

    castwise report h200/ --charts figures/              every chart as a picture
"""

_Records = Annotated[
    list[Path] | None,
    typer.Argument(help="Results folders, or single records.", metavar="[DIR]...", show_default=False),
]
_Workloads = Annotated[str | None, typer.Option("--workload", help="Only these workloads, comma-separated.")]
_Precisions = Annotated[str | None, typer.Option("--precision", help="Only these precisions, comma-separated.")]


def add_to(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command(epilog=_REPORT_EXAMPLES)(report)


def report(
    records: _Records = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write: .html or .md.", metavar="FILE")
    ] = None,
    title: Annotated[str, typer.Option(help="The report's title.")] = "castwise report",
    workload: _Workloads = None,
    precision: _Precisions = None,
) -> None:
    """Make a report of records: one HTML file with the answer, charts and tables, or Markdown."""
    from castwise.reporting import Asked, find, write_report

    found = find(Asked(_folders(records), _names(workload), _names(precision)))
    path = output or _DEFAULT_REPORT
    size = write_report(found, path, title)
    _say(f"{path}: {len(found.collection.trials):,} trials, {size / 1e6:.1f} MB")
    _tell_problems(found.problems)


def _folders(records: list[Path] | None) -> list[Path]:
    return records or [Path("castwise-results")]


def _names(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise UsageError(f"A list of names is empty: '{text}'. Name at least one, or leave it out.")
    return names


def _tell_problems(problems: list[tuple[str, str]]) -> None:
    for path, reason in problems[:5]:
        _say(f"Left out: {path}: {reason}")
    if len(problems) > 5:
        _say(f"Left out: {len(problems) - 5} more files that are no records")


def _say(line: str) -> None:
    print(line, file=sys.stderr)
