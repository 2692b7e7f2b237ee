"""`castwise compare`: find the machines that were named, compare them, and print or write the result."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from castwise.cli.output import format_size, say, say_problems, show
from castwise.errors import UsageError
from castwise.records.collector import gc_disabled
from castwise.report.files import ChartOptions, SelectionOptions, find, write_by_suffix, write_pictures
from castwise.show.units import pluralize
from castwise.spec.options import DEFAULT_RESULTS, SHARE, Option

if TYPE_CHECKING:
    from castwise.report.collection import FileOf
    from castwise.report.machine_comparison import ComparedMachine, MachineComparison, MachinePrices

EXAMPLES = """\
Examples:

    castwise compare before/ after/                how many times as fast
    castwise compare h200/ a100/ -o both.html      with charts
    castwise compare h200/ a100/ --charts figures/   the chart as SVG
    castwise compare published:T4 castwise-results/  a source's figures as a
                           machine; also 2080Ti, 1080Ti, K80, P100, TitanRTX
    castwise compare main/ branch/ --fail-on slower --format markdown

    castwise compare h200/ a100/ --price-hour H200=4,A100=1.5

Exit codes: 0 done, 1 a proven slowdown (--fail-on), 2 nothing to compare.
"""


@dataclass(frozen=True, kw_only=True)
class CompareOptions(ChartOptions, SelectionOptions):
    machines: Annotated[
        tuple[str, ...] | None,
        Option(
            "Results folders, single records, machines by their folders in --results, or published:GPU. The others "
            "are compared with the first. Without any: all machines of --results.",
            metavar="MACHINE",
            is_argument=True,
            takes_many=True,
        ),
    ] = None
    output: Annotated[
        Path | None,
        Option("The file to write: .html, .md or .json.", "Output", flags=("--output", "-o"), metavar="FILE"),
    ] = None
    format: Annotated[
        Literal["table", "markdown", "json"], Option("How the result is printed on stdout.", "Output")
    ] = "table"
    title: Annotated[str | None, Option("The page's title; else the answer.", "Output")] = None
    fail_on: Annotated[
        Literal["slower"] | None,
        Option("Exit with 1 if something is proven slower than on the first machine.", metavar="slower"),
    ] = None
    margin: Annotated[
        float | None,
        Option("Ratios this close to 1 are the same: 1%, 0.05. Default: 3%, 1% on one card.", **SHARE),
    ] = None
    price_hour: Annotated[
        tuple[str, ...] | None,
        Option(
            "What an hour of each machine costs you; prints how much work one of the currency pays.",
            "Output",
            metavar="NAME=X,…",
        ),
    ] = None
    price_kwh: Annotated[
        float | None,
        Option("What a kilowatt-hour costs you; prints how much work one of the currency pays.", "Output", metavar="X"),
    ] = None
    results: Annotated[Path, Option("The folder that machines are looked for in.", "Records", metavar="DIR")] = (
        DEFAULT_RESULTS
    )


@dataclass(frozen=True)
class Compared:
    comparison: "MachineComparison"
    file_of: "FileOf"  # names a trial's file
    problems: list[tuple[str, str]]  # files that are no records, each with its reason


@gc_disabled()  # as it ends, nothing that it read is worth collecting
def compare(options: CompareOptions) -> int:
    """Compare machines: ratios with intervals and verdicts, what differs, and what cannot be compared."""
    from castwise.report import machine_report

    compared = compare_folders(options)
    comparison = compared.comparison
    if options.output is not None:
        say(f"{options.output}: {format_size(write_comparison(compared, options.output, options.title))}")
    elif options.charts is None:
        show(options.format, machine_report.present(comparison))
    if options.charts is not None:
        from castwise.report.charts.machines import pictures_of_machines

        count = write_pictures(pictures_of_machines(comparison, compared.file_of), options.charts)
        say(f"{options.charts}: {pluralize(count, 'picture')}")
    say_problems(compared.problems)
    slower = machine_report.slower_lines(comparison) if options.fail_on is not None else []
    for line in slower:
        say(f"Slower: {line}")
    return 1 if slower else 0


def compare_folders(options: CompareOptions) -> Compared:
    """Compare the machines that are named; a folder of several machines is all of them.

    Raises:
        UsageError: A name is unknown, it is fewer than two machines, or nothing of them can be compared.
    """
    from castwise.registry.precisions import find_precision
    from castwise.registry.published import PREFIX, find_published
    from castwise.report.machine_comparison import Origin, compare_machines, measured_machines, published_machine

    names = options.machines or (str(options.results),)
    files: dict[int, str] = {}
    problems: list[tuple[str, str]] = []
    origins: list[Origin] = []
    for name in names:
        if name.lower().startswith(PREFIX):
            continue
        found = find([_folder(name, options.results)], options)
        trials = found.collection.trials
        origins.append(Origin(name.rstrip("/"), trials, found.collection.notes))
        files.update((id(trial), found.file_of(trial)) for trial in trials)
        problems += found.problems
    precisions = options.precisions and [find_precision(name).name for name in options.precisions]
    measured = iter(measured_machines(origins))
    machines: list[ComparedMachine] = []
    for name in names:
        if name.lower().startswith(PREFIX):
            machines.append(published_machine(find_published(name[len(PREFIX) :]), options.workloads, precisions))
        else:
            machines += next(measured)
    if len(machines) < 2:
        raise UsageError(
            f"There are records of only one machine: {machines[0].name}. Name another machine's folder, too, or "
            "published:T4."
        )

    def identities(origin: Origin) -> list[tuple[str, str, str]]:
        return sorted((trial.environment.fingerprint, trial.spec.key, trial.started_at) for trial in origin.trials)

    for first, second in itertools.combinations(origins, 2):
        if identities(first) == identities(second):
            raise UsageError(f"'{first.name}' and '{second.name}' hold the same records: there is nothing to compare.")
    comparison = compare_machines(machines, options.margin, _prices(options, machines))
    if not comparison.rows:
        raise UsageError(_why_nothing(comparison))
    return Compared(comparison, lambda trial: files[id(trial)], problems)


def write_comparison(compared: Compared, output: Path, title: str | None = None) -> int:
    """Write a comparison as HTML, Markdown or JSON by the file's suffix; return its size in bytes."""
    from castwise.report import machine_report

    def html() -> str:
        from castwise.report.html.compare_page import render_comparison
        from castwise.report.html.page_frame import Source

        return render_comparison(compared.comparison, Source(compared.file_of, compared.problems), title)

    shown = machine_report.present(compared.comparison)
    return write_by_suffix(
        output, html=html, markdown=lambda: shown.text("markdown"), json=lambda: shown.text("json") + "\n"
    )


def _prices(options: CompareOptions, machines: "Sequence[ComparedMachine]") -> "MachinePrices":
    """Return the prices that were given; a machine has that of the longest NAME which is part of its own name.

    Raises:
        UsageError: A price is none, or no machine has such a name.
    """
    from castwise.analysis.energy import Prices
    from castwise.report.machine_comparison import MachinePrices

    Prices(options.price_kwh).check()
    given: dict[str, float] = {}
    for pair in options.price_hour or ():
        name, _, text = pair.rpartition("=")
        try:
            price = float(text)
        except ValueError:
            price = math.nan
        if not (name and 0 < price < math.inf):
            raise UsageError(f"--price-hour takes NAME=PRICE, such as H200=2.5; '{pair}' is none.")
        given[name.strip()] = price
    per_hour: dict[str, float] = {}
    known = {machine.name: f"{machine.name} {machine.traits.get('device', '')}".lower() for machine in machines}
    for name in sorted(given, key=len):
        of_name = [machine for machine, names in known.items() if name.lower() in names]
        if not of_name:
            raise UsageError(f"--price-hour: no machine here is named '{name}'. They are: {'; '.join(known)}.")
        per_hour.update(dict.fromkeys(of_name, given[name]))
    return MachinePrices(per_hour, options.price_kwh)


def _why_nothing(comparison: "MachineComparison") -> str:
    from castwise.spec.quantities import truncate_list

    workloads = {
        machine.name: list(dict.fromkeys(result.spec.workload for result in machine.results.values()))
        for machine in comparison.machines
    }
    has = [f"{name} has {truncate_list(names) or 'none'}" for name, names in workloads.items()]
    near = [refused for refused in comparison.incomparable if not refused.reason.startswith("no other machine")]
    example = f" {near[0].labels[0]} of {near[0].machine.name}: {near[0].reason}." if near else ""
    return f"Nothing can be compared: no configuration is common to two machines. Workloads: {'; '.join(has)}.{example}"


def _folder(name: str, results: Path) -> Path:
    """Return the path that a name means: itself, or the one machine's folder below the results."""
    from castwise.records.store import KEPT, slug

    path = Path(name)
    if path.exists() or not results.is_dir():
        return path
    wanted = slug(name, KEPT)
    folders = sorted(
        folder for folder in results.iterdir() if folder.is_dir() and wanted and wanted in folder.name.lower()
    )
    if len(folders) > 1:
        names = ", ".join(folder.name for folder in folders)
        raise UsageError(f"'{name}' stands for {len(folders)} machines in '{results}': {names}. Name one of them.")
    return folders[0] if folders else path
