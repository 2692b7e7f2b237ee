"""What the commands that read records do: find the files, and write what is asked for. None of it needs torch."""

import os
import secrets
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from castwise.errors import StoreError, UsageError, unknown_name
from castwise.records.schema import Trial
from castwise.records.store import Problem, Record, read_records
from castwise.registry.precisions import find_precision
from castwise.report.collection import Collection, collect

if TYPE_CHECKING:
    from castwise.report.charts.static_images import Picture

FileOf = Callable[[Trial], str]
HTML = (".html", ".htm")
MARKDOWN = (".md", ".markdown")


@dataclass(frozen=True)
class Asked:
    """Which records a command is about.

    Attributes:
        paths: Results folders, or single records.
        workloads: Only these workloads; None takes all.
        precisions: Only these precisions; None takes all.
    """

    paths: Sequence[Path]
    workloads: tuple[str, ...] | None = None
    precisions: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Found:
    """The records that a command is about.

    Attributes:
        collection: The records in order.
        problems: Files that are none, each with its reason.
        file_of: Returns the name of a trial's file, from the folder that was named on.
    """

    collection: Collection
    problems: list[tuple[str, str]]
    file_of: FileOf


def find(asked: Asked) -> Found:
    """Read the records that are asked for.

    Raises:
        UsageError: A path does not exist, or there are no records, or none of those asked for.
    """
    files: dict[int, str] = {}
    trials: list[Trial] = []
    problems: list[tuple[str, str]] = []
    seen: set[Path] = set()
    for path in asked.paths:
        records, failed = _read(path)
        real = path.resolve()  # once: the files below it are too many to be asked each
        for record in records:
            where = real / record.path.relative_to(path)
            if where not in seen:
                seen.add(where)
                trials.append(record.trial)
                files[id(record.trial)] = _shown(record.path, path)
        problems += [(_shown(each.path, path), each.reason) for each in failed]
    if not trials:
        raise UsageError(_nothing(asked.paths, problems))
    chosen = [trial for trial in trials if _is_chosen(trial, asked)]
    if not chosen:
        raise UsageError(
            f"None of the {len(trials)} records has the workloads and precisions asked for; leave out some of them."
        )
    return Found(collect(chosen), problems, lambda trial: files[id(trial)])


def write_report(found: Found, output: Path, title: str = "castwise report") -> int:
    """Write a report, as HTML or as Markdown by the file's suffix; return its size in bytes.

    Raises:
        UsageError: The suffix is neither's, or what HTML needs is not installed.
        StoreError: The file cannot be written.
    """
    suffix = output.suffix.lower()
    if suffix in MARKDOWN:
        from castwise.report.markdown import markdown_report

        text = markdown_report(found.collection)
    elif suffix in HTML:
        from castwise.report.html.page_frame import Source
        from castwise.report.html.report_page import render

        text = render(found.collection, Source(found.file_of, found.problems), title)
    else:
        raise UsageError(f"What '{output}' should be is not clear: its name ends in neither .html nor .md.")
    return atomic_write(output, text.encode())


def print_found(found: Found, name: str) -> None:
    """Print a report on stdout, as tables or as Markdown.

    Raises:
        UsageError: There is no such format.
    """
    if name == "table":
        from castwise.render.run_report import result_console
        from castwise.report.terminal import print_report

        print_report(found.collection, result_console())
    elif name == "markdown":
        from castwise.report.markdown import markdown_report

        sys.stdout.write(markdown_report(found.collection))
    else:
        raise unknown_name("format", name, ("table", "markdown"))


def write_pictures(found: Found, folder: Path, formats: Sequence[str]) -> int:
    """Write pictures of all charts into a folder; return how many.

    Raises:
        UsageError: There is no such format, or what draws pictures is not installed.
        StoreError: The folder cannot be written.
    """
    from castwise.report.charts.static_images import pictures_of

    return draw(pictures_of(found.collection, found.file_of), folder, formats)


def draw(pictures: "Iterable[Picture]", folder: Path, formats: Sequence[str]) -> int:
    """Write pictures of charts into a folder; return how many.

    Raises:
        UsageError: There is no such format, or what draws pictures is not installed.
        StoreError: The folder cannot be written.
    """
    from castwise.report.charts.static_images import FORMATS
    from castwise.report.charts.static_images import write_pictures as write

    for name in formats:
        if name not in FORMATS:
            raise unknown_name("format of pictures", name, FORMATS)
    try:
        return len(write(pictures, folder, formats))
    except OSError as error:
        raise StoreError(f"'{folder}' cannot be written: {error.strerror or error}.") from None


def export(found: Found, level: str, name: str | None, output: Path | None) -> str | None:
    """Write records for another program; return a line that says what was written, None where stdout has it.

    Args:
        found: The records.
        level: What a row is, by a name of `exports.levels.LEVELS`; trackers have a run a trial whatever it is.
        name: The format; None takes the one that the output's suffix stands for, and CSV without an output.
        output: The file, or the folder for a tracker; None writes text to stdout.

    Raises:
        UsageError: The format or the level is unknown, or the output does not suit the format.
        StoreError: The output cannot be written.
    """
    from castwise.report.export.formats import FileFormat, find_format, format_of
    from castwise.report.export.tables import flat_table
    from castwise.report.export.tracker_runs import tracked_runs

    row = find_format(name) if name is not None else format_of(output) if output is not None else find_format("csv")
    if row is None:
        raise UsageError(f"What '{output}' should be is not clear from its name; say --format.")
    if isinstance(row, FileFormat):
        content = row.encode(flat_table(level, found.collection, found.file_of))
        if output is None and row.is_text:
            sys.stdout.write(content.decode())
            return None
        if output is None:
            raise UsageError(f"{row.name} is not for terminals; name a file with --output.")
        return f"{output}: {level} as {row.name}, {format_size(atomic_write(output, content))}"
    if output is None:
        raise UsageError(f"{row.name} needs a folder; name one with --output.")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"'{output}' is there already; name a new folder, so that no run is in it twice.")
    try:
        count = row.write(tracked_runs(found.collection, found.file_of), output)
    except OSError as error:
        raise StoreError(f"'{output}' cannot be written: {error.strerror or error}.") from None
    return f"{output}: {pluralize(count, 'run')}. To see them: {row.then.format(folder=output)}"


def pluralize(number: int, what: str) -> str:
    """Return a number of things in words: "1 trial", "10,000 trials"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def format_size(size: int) -> str:
    """Return a file's size in words."""
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"


def atomic_write(path: Path, content: bytes) -> int:
    """Write a file, all of it or nothing, and return its size; one that is there is replaced.

    Raises:
        StoreError: It cannot be written.
    """
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(content)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"'{path}' cannot be written: {error.strerror or error}.") from None
    return len(content)


def _read(path: Path) -> tuple[list[Record], list[Problem]]:
    if not path.exists():
        raise UsageError(f"There is no folder or file '{path}'.")
    try:
        return read_records([path] if path.is_file() else sorted(path.rglob("*.json")))
    except OSError as error:
        raise StoreError(f"'{path}' cannot be read: {error.strerror or error}.") from None


def _shown(file: Path, named: Path) -> str:
    """Return a file's name from the folder named on: where that lies is no business of a report's readers."""
    return file.name if file == named else str(Path(named.name, file.relative_to(named)))


def _nothing(paths: Sequence[Path], problems: Sequence[tuple[str, str]]) -> str:
    where = ", ".join(f"'{path}'" for path in paths)
    if not problems:
        return f"There are no records in {where}. `castwise run` writes them to 'castwise-results'."
    count = "The only JSON file" if len(problems) == 1 else f"None of the {len(problems)} JSON files"
    verb = "is none" if len(problems) == 1 else "is one"
    return f"There are no records in {where}. {count} there {verb}: '{problems[0][0]}': {problems[0][1]}."


def _is_chosen(trial: Trial, asked: Asked) -> bool:
    precisions = asked.precisions and {find_precision(name).name for name in asked.precisions}
    return (asked.workloads is None or trial.spec.workload in asked.workloads) and (
        precisions is None or trial.spec.precision in precisions
    )
