"""The commands that read records: parse, call one function, print. They need no torch and no GPU."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from castwise.errors import UsageError
from castwise.records.collector import gc_disabled
from castwise.spec.quantities import parse_list, parse_share

if TYPE_CHECKING:
    from castwise.cli.report_actions import Asked

_DEFAULT_REPORT = Path("castwise-report.html")

_REPORT_EXAMPLES = """\
Examples:

    castwise report                                      castwise-results/ as castwise-report.html

    castwise report h200/ a100/ -o both.html             two machines in one report

    castwise report h200/ -o report.md                   Markdown, for an issue or a pull request

    castwise report h200/ --format table                 tables in the terminal

    castwise report h200/ --charts figures/              every chart as a picture
"""

_EXPORT_EXAMPLES = """\
Examples:

    castwise export                                      a line a trial as CSV, to stdout

    castwise export h200/ --level cells -o cells.parquet

    castwise export h200/ --level blocks -o blocks.json

    castwise export h200/ --format tensorboard -o runs/  also: mlflow, wandb (offline)
"""

_COMPARE_EXAMPLES = """\
Examples:

    castwise compare before/ after/                      how many times as fast, cell by cell

    castwise compare h200/ a100/ -o both.html            with charts

    castwise compare h200/ a100/ --charts figures/       a picture a workload

    castwise compare published:T4 castwise-results/      a source's figures as a machine; also 2080Ti, 1080Ti, K80,
                                                         P100, TitanRTX

    castwise compare main/ branch/ --fail-on slower --format markdown >> "$GITHUB_STEP_SUMMARY"

Exit codes: 0 done, 1 a proven slowdown where --fail-on asks for it, 2 usage or nothing to compare.
"""

_Records = Annotated[
    list[Path] | None,
    typer.Argument(help="Results folders, or single records.", metavar="DIR", show_default=False),
]


def _refuse_results(ctx: typer.Context, folder: Path | None) -> None:
    if folder is not None:
        where = shlex.quote(str(folder))
        raise UsageError(f"{ctx.info_name} takes its folders without --results: {ctx.command_path} {where}")


# What every command that measures has, and here nobody needs.
_NoResults = Annotated[Path | None, typer.Option("--results", hidden=True, callback=_refuse_results)]
_Workloads = Annotated[str | None, typer.Option("--workload", help="Only these workloads, comma-separated.")]
_Charts = Annotated[Path | None, typer.Option(help="Write each chart as a picture into this folder.", metavar="DIR")]
_ChartFormats = Annotated[str, typer.Option(help="Formats of the pictures, comma-separated.")]
_Precisions = Annotated[str | None, typer.Option("--precision", help="Only these precisions, comma-separated.")]


def add_to(app: typer.Typer) -> None:
    """Add the commands to the command line; as they end, nothing that they read is worth collecting."""
    app.command(epilog=_REPORT_EXAMPLES)(gc_disabled()(report))
    app.command(epilog=_COMPARE_EXAMPLES)(gc_disabled()(compare))
    app.command(epilog=_EXPORT_EXAMPLES)(gc_disabled()(export))


def report(
    records: _Records = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write: .html or .md.", metavar="FILE")
    ] = None,
    title: Annotated[str, typer.Option(help="The report's title.")] = "castwise report",
    charts: _Charts = None,
    chart_format: _ChartFormats = "png,svg",
    format_: Annotated[
        str | None, typer.Option("--format", help="table or markdown: print it on stdout and write no page.")
    ] = None,
    workload: _Workloads = None,
    precision: _Precisions = None,
    results: _NoResults = None,
) -> None:
    """Make a report of records: one HTML file with the answer, charts and tables, or Markdown."""
    del results
    from castwise.cli.report_actions import find, format_size, pluralize, print_found, write_pictures, write_report

    if format_ is not None and output is not None:
        raise UsageError("--format prints on stdout, and --output writes a file: name one of them.")
    found = find(_asked(_folders(records), workload, precision))
    if format_ is not None:
        print_found(found, format_)
    elif output is not None or charts is None:
        path = output or _DEFAULT_REPORT
        size = write_report(found, path, title)
        _say(f"{path}: {pluralize(len(found.collection.trials), 'trial')}, {format_size(size)}")
    if charts is not None:
        count = write_pictures(found, charts, parse_list("--chart-format", chart_format) or ())
        _say(f"{charts}: {pluralize(count, 'picture')}")
    _tell_problems(found.problems)


def compare(
    machines: Annotated[
        list[str] | None,
        typer.Argument(
            help="Results folders, single records, machines by their folders in --results, or published:GPU. The "
            "others are compared with the first. Without any: all machines of --results.",
            metavar="MACHINE",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file to write: .html, .md or .json.", metavar="FILE"),
    ] = None,
    format_: Annotated[str, typer.Option("--format", help="table, markdown or json on stdout.")] = "table",
    title: Annotated[str, typer.Option(help="The page's title.")] = "castwise comparison",
    fail_on: Annotated[
        str | None,
        typer.Option(help="slower: exit 1 where a cell is proven slower than on the first machine.", metavar="WHAT"),
    ] = None,
    margin: Annotated[
        str, typer.Option(help="How far from 1 a ratio still is the same: 1%, 0.05.", metavar="SHARE")
    ] = "1%",
    charts: _Charts = None,
    chart_format: _ChartFormats = "png,svg",
    results: Annotated[Path, typer.Option(help="The folder that machines are looked for in.", metavar="DIR")] = Path(
        "castwise-results"
    ),
    workload: _Workloads = None,
    precision: _Precisions = None,
) -> None:
    """Set machines side by side: ratios with intervals and verdicts, what differs, and what cannot be compared."""
    from castwise.cli import compare_actions
    from castwise.cli.report_actions import format_size, pluralize
    from castwise.errors import unknown_name

    if fail_on not in (None, "slower"):
        raise unknown_name("reason to fail", fail_on or "", ("slower",))
    if format_ not in compare_actions.FORMATS:
        raise unknown_name("format", format_, compare_actions.FORMATS)
    asked = _asked([], workload, precision)
    compared = compare_actions.compare(machines or [str(results)], asked, parse_share("--margin", margin), results)
    if output is not None:
        _say(f"{output}: {format_size(compare_actions.write_compared(compared, output, title))}")
    elif charts is None:
        compare_actions.print_compared(compared, format_)
    if charts is not None:
        count = compare_actions.write_machine_pictures(
            compared, charts, parse_list("--chart-format", chart_format) or ()
        )
        _say(f"{charts}: {pluralize(count, 'picture')}")
    _tell_problems(compared.problems)
    if fail_on is not None:
        slower = compare_actions.slower_lines(compared)
        for line in slower:
            _say(f"Slower: {line}")
        if slower:
            raise typer.Exit(1)


def export(
    records: _Records = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file to write, or the folder for a tracker.", metavar="PATH"),
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format", help="csv, json, parquet, tensorboard, mlflow or wandb. Without it: by the file's name."
        ),
    ] = None,
    level: Annotated[
        str, typer.Option(help="What a row is: cells, trials, blocks, epochs, losses or readings.")
    ] = "trials",
    workload: _Workloads = None,
    precision: _Precisions = None,
    results: _NoResults = None,
) -> None:
    """Write records for other programs: flat tables, or runs for an experiment tracker. Nothing is sent anywhere."""
    del results
    from castwise.cli import report_actions

    found = report_actions.find(_asked(_folders(records), workload, precision))
    line = report_actions.export(found, level, format_, output)
    if line is not None:
        _say(line)
    _tell_problems(found.problems)


def _folders(records: list[Path] | None) -> list[Path]:
    return records or [Path("castwise-results")]


def _asked(folders: list[Path], workload: str | None, precision: str | None) -> "Asked":
    from castwise.cli.report_actions import Asked

    return Asked(folders, parse_list("--workload", workload), parse_list("--precision", precision))


def _tell_problems(problems: list[tuple[str, str]]) -> None:
    """Say which files were left out: first the records of a newer castwise, as these are no accident."""
    from castwise.cli.report_actions import pluralize

    ordered = sorted(problems, key=lambda problem: not problem[1].startswith("a record of schema"))
    for path, reason in ordered[:5]:
        _say(f"Left out: {path}: {reason}")
    if len(problems) > 5:
        _say(f"Left out: {pluralize(len(problems) - 5, 'more file')} without a record to read")


def _say(line: str) -> None:
    print(line, file=sys.stderr)
