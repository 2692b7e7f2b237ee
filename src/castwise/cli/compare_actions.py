"""What `castwise compare` does: find the machines that were named, set them side by side, and write it down."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from castwise.cli.report_actions import HTML, MARKDOWN, Asked, FileOf, atomic_write, draw, find, pluralize
from castwise.errors import UsageError
from castwise.records.schema import Trial
from castwise.records.store import KEPT, slug
from castwise.registry.precisions import find_precision
from castwise.registry.published import PREFIX, find_published
from castwise.render.run_report import result_console
from castwise.report import machine_report as shown
from castwise.report.machine_comparison import MachineComparison, compare_machines
from castwise.report.machines import ComparedMachine, Origin, measured_machines, published_machine

JSON = (".json",)
FORMATS = ("table", "markdown", "json")


@dataclass(frozen=True)
class Compared:
    """Machines side by side, and where their figures are from.

    Attributes:
        comparison: The machines side by side.
        file_of: Returns the name of a trial's file.
        problems: Files that are no records, each with its reason.
    """

    comparison: MachineComparison
    file_of: FileOf
    problems: list[tuple[str, str]]


def compare(names: Sequence[str], asked: Asked, margin: float, results: Path) -> Compared:
    """Set machines side by side; the first is what the others are compared with.

    Args:
        names: Results folders, single records, machines' folders below `results`, or `published:GPU`; a folder of
            several machines stands for all of them.
        asked: Which workloads and precisions; its paths are not looked at.
        margin: How far from 1 a ratio still is "the same".
        results: Where machines' folders are looked for.

    Raises:
        UsageError: A name stands for nothing, it is fewer than two machines, or nothing of them can be compared.
    """
    files: dict[int, str] = {}
    problems: list[tuple[str, str]] = []
    origins: list[Origin] = []
    for name in names:
        if name.lower().startswith(PREFIX):
            continue
        found = find(replace(asked, paths=[_folder(name, results)]))
        trials = found.collection.trials
        origins.append(Origin(name.rstrip("/"), trials, found.collection.notes))
        files.update((id(trial), found.file_of(trial)) for trial in trials)
        problems += found.problems
    precisions = asked.precisions and [find_precision(name).name for name in asked.precisions]
    measured = iter(measured_machines(origins))
    machines: list[ComparedMachine] = []
    for name in names:
        if name.lower().startswith(PREFIX):
            machines.append(published_machine(find_published(name[len(PREFIX) :]), asked.workloads, precisions))
        else:
            machines += next(measured)
    _check(machines, origins)
    comparison = compare_machines(machines, margin)
    _check_common(comparison)
    return Compared(comparison, lambda trial: files[id(trial)], problems)


def print_compared(compared: Compared, output: str) -> None:
    """Print a comparison on stdout as table, markdown or json."""
    if output == "table":
        shown.print_comparison(compared.comparison, result_console())
    else:
        sys.stdout.write(_text(compared.comparison, "markdown" if output == "markdown" else "json"))


def write_compared(compared: Compared, output: Path, title: str) -> int:
    """Write a comparison as HTML, Markdown or JSON by the file's suffix; return its size in bytes.

    Raises:
        UsageError: The suffix is none of theirs, or what HTML needs is not installed.
        StoreError: The file cannot be written.
    """
    suffix = output.suffix.lower()
    if suffix in HTML:
        from castwise.report.html.compare_page import render_comparison
        from castwise.report.html.page_frame import Source

        text = render_comparison(compared.comparison, Source(compared.file_of, compared.problems), title)
    elif suffix in MARKDOWN:
        text = _text(compared.comparison, "markdown")
    elif suffix in JSON:
        text = _text(compared.comparison, "json")
    else:
        raise UsageError(f"What '{output}' should be is not clear: its name ends in none of .html, .md and .json.")
    return atomic_write(output, text.encode())


def write_machine_pictures(compared: Compared, folder: Path, formats: Sequence[str]) -> int:
    """Write a picture of each workload on all machines into a folder; return how many.

    Raises:
        UsageError: There is no such format, or what draws pictures is not installed.
        StoreError: The folder cannot be written.
    """
    from castwise.report.charts.static_images import pictures_of_machines

    return draw(pictures_of_machines(compared.comparison, compared.file_of), folder, formats)


def slower_lines(compared: Compared) -> list[str]:
    """Return the cells that are proven slower, or do not end well any more, a line each."""
    return shown.slower_lines(compared.comparison)


def _text(comparison: MachineComparison, kind: Literal["markdown", "json"]) -> str:
    return shown.markdown_comparison(comparison) if kind == "markdown" else shown.json_comparison(comparison)


def _folder(name: str, results: Path) -> Path:
    """Return the path that a name stands for: itself, or the one machine's folder below the results."""
    path = Path(name)
    if path.exists() or not results.is_dir():
        return path
    wanted = slug(name, KEPT)
    folders = sorted(each for each in results.iterdir() if each.is_dir() and wanted and wanted in each.name.lower())
    if len(folders) > 1:
        names = ", ".join(folder.name for folder in folders)
        raise UsageError(f"'{name}' stands for {len(folders)} machines in '{results}': {names}. Name one of them.")
    return folders[0] if folders else path


def _check(machines: Sequence[ComparedMachine], origins: Sequence[Origin]) -> None:
    if len(machines) < 2:
        raise UsageError(
            f"There is only one machine to compare: {machines[0].name}. Name another folder, or published:T4."
        )
    ordered = [sorted(origin.trials, key=_identity) for origin in origins]
    for number, own in enumerate(ordered):
        for other in range(number):
            if own == ordered[other]:
                names = f"'{origins[other].name}' and '{origins[number].name}'"
                raise UsageError(f"{names} hold the same records: there is nothing to compare.")


def _identity(trial: Trial) -> tuple[str, str, str]:
    return (trial.environment.fingerprint, trial.spec.key, trial.started_at)


def _check_common(comparison: MachineComparison) -> None:
    if comparison.rows:
        return
    refusals = comparison.incomparable
    why = f"{refusals[0].machine.name}: {refusals[0].labels[0]}: {refusals[0].reason}" if refusals else "no cells"
    more = f" (and {pluralize(len(refusals) - 1, 'more reason')})" if len(refusals) > 1 else ""
    names = " and ".join(machine.name for machine in comparison.machines)
    raise UsageError(f"Nothing of {names} can be compared. {why}{more}.")
