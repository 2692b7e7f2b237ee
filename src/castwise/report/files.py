"""Where a report's records are, and the files that are made of them. None of it needs torch."""

import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from castwise.errors import StoreError, UsageError, printable
from castwise.spec.options import DEFAULT_RESULTS, PRECISIONS, Option

if TYPE_CHECKING:
    from castwise.records.schema import Trial
    from castwise.report.collection import Collection, FileOf

_HINT = f"`castwise run` writes them to '{DEFAULT_RESULTS}'. `castwise report --example` shows a page of others."


@dataclass(frozen=True, kw_only=True)
class SelectionOptions:
    """Which of the records a command is about; None takes all."""

    workloads: Annotated[
        tuple[str, ...] | None,
        Option("Only these workloads, comma-separated.", "Records", keyword="workload", completion="workloads"),
    ] = None
    precisions: Annotated[
        tuple[str, ...] | None,
        Option("Only these precisions, comma-separated.", "Records", **PRECISIONS),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ChartOptions:
    """Charts as pictures."""

    charts: Annotated[
        Path | None, Option("Write each chart as an SVG picture into this folder.", "Output", metavar="DIR")
    ] = None


@dataclass(frozen=True, kw_only=True)
class RecordsOptions(SelectionOptions):
    """Where the records of a command are."""

    records: Annotated[
        tuple[Path, ...] | None,
        Option("Results folders, or single records.", metavar="DIR", is_argument=True, takes_many=True),
    ] = None
    # An option of the commands that measure; here it only gives a better error message.
    results: Annotated[Path | None, Option(hidden=True)] = None

    def folders(self, command: str) -> Sequence[Path]:
        """Return where the records are, for a command of this name; UsageError if that is given by `--results`."""
        if self.results is not None:
            import shlex

            where = shlex.quote(str(self.results))
            raise UsageError(f"{command} takes its folders without --results: castwise {command} {where}")
        return self.records or (DEFAULT_RESULTS,)


@dataclass(frozen=True, kw_only=True)
class ReportOptions(ChartOptions, RecordsOptions):
    """What a report is made of, and where it is written."""

    output: Annotated[
        Path | None, Option("The file to write: .html or .md.", "Output", flags=("--output", "-o"), metavar="FILE")
    ] = None
    title: Annotated[str | None, Option("The report's title; else the answer.", "Output")] = None
    card: Annotated[
        Path | None, Option("Write the answer as one SVG picture, to share.", "Output", metavar="FILE.svg")
    ] = None
    example: Annotated[
        bool, Option("Take records of an H100 that come with castwise, to see what a report is.", "Records")
    ] = False

    def folders(self, command: str) -> Sequence[Path]:
        """Return what `RecordsOptions` does, or the folder of the example."""
        if not self.example:
            return super().folders(command)
        if self.records is not None:
            raise UsageError("--example has records of its own. Leave yours out.")
        return (Path(__file__).with_name("example"),)


@dataclass(frozen=True)
class Found:
    collection: "Collection"  # in order
    problems: list[tuple[str, str]]  # files that are none, each with its reason
    file_of: "FileOf"  # names a trial's file, from the folder that was named on


def find(paths: Sequence[Path], selection: SelectionOptions) -> Found:
    """Read the selected records from results folders, or from single files.

    UsageError is raised if a path does not exist or no record is selected, StoreError if a folder cannot be read.
    """
    from castwise.records.store import read_records
    from castwise.registry.precisions import find_precision
    from castwise.report.collection import collect

    files: dict[int, str] = {}
    trials: list[Trial] = []
    problems: list[tuple[str, str]] = []
    seen: set[Path] = set()
    for path in paths:
        if not path.exists():
            raise UsageError(f"There is no folder or file '{path}'." + (f" {_HINT}" if path == DEFAULT_RESULTS else ""))
        try:
            records, failed = read_records([path] if path.is_file() else sorted(path.rglob("*.json")))
        except OSError as error:
            raise StoreError(f"'{path}' cannot be read: {error.strerror or error}.") from None
        real = path.resolve()  # once: the files below it are too many to be asked each
        for record in records:
            where = real / record.path.relative_to(path)
            if where not in seen:
                seen.add(where)
                trials.append(record.trial)
                files[id(record.trial)] = _name_from(path, record.path)
        problems += [(_name_from(path, each.path), each.reason) for each in failed]
    if not trials:
        raise UsageError(_why_nothing(paths, problems))
    precisions = selection.precisions and {find_precision(name).name for name in selection.precisions}
    chosen = [
        trial
        for trial in trials
        if (selection.workloads is None or trial.spec.workload in selection.workloads)
        and (precisions is None or trial.spec.precision in precisions)
    ]
    if not chosen:
        raise UsageError(
            f"None of the {len(trials)} records has the workloads and precisions asked for; leave out some of them."
        )
    return Found(collect(chosen), problems, lambda trial: files[id(trial)])


def _name_from(named: Path, file: Path) -> str:
    """Return a file's name from the named folder on; a report does not show where that folder is."""
    return file.name if file == named else str(Path(named.name, file.relative_to(named)))


def _why_nothing(paths: Sequence[Path], problems: Sequence[tuple[str, str]]) -> str:
    where = ", ".join(f"'{path}'" for path in paths)
    if not problems:
        return f"There are no records in {where}. {_HINT}"
    count = "The only JSON file" if len(problems) == 1 else f"None of the {len(problems)} JSON files"
    verb = "is none" if len(problems) == 1 else "is one"
    return f"There are no records in {where}. {count} there {verb}: '{problems[0][0]}': {problems[0][1]}."


def write_report(found: Found, output: Path, title: str | None = None) -> int:
    """Write a report, as HTML or as Markdown by the file's suffix; return its size in bytes."""

    def html() -> str:
        from castwise.report.html.page_frame import Source
        from castwise.report.html.report_page import render

        return render(found.collection, Source(found.file_of, found.problems), title)

    def markdown() -> str:
        from castwise.report.text_report import present

        return present(found.collection, wide=True).text("markdown")

    return write_by_suffix(output, html=html, markdown=markdown)


def write_card(found: Found, path: Path) -> int:
    """Write the answer with the largest gain as a picture, and return its size; UsageError if there is none."""
    from castwise.report.charts.card import card
    from castwise.report.conclusions import answers_of, ranked

    answers = [each for each in ranked(answers_of(found.collection)) if each.advice.decision != "nothing"]
    if not answers:
        raise UsageError("--card shows an answer, and these records have none: nothing in them was compared.")
    return atomic_write(path, card(answers[0]).encode())


def write_pictures(pictures: Iterable[tuple[str, str]], folder: Path) -> int:
    """Write pictures, each a file name with its SVG, into a folder, or raise StoreError; return how many they are."""
    return len([atomic_write(folder / name, picture.encode()) for name, picture in pictures])


def write_by_suffix(path: Path, **texts: Callable[[], str]) -> int:
    """Write the text of the format that a file's suffix names (html, markdown or json), and return the file's size.

    UsageError is raised if the suffix is none of theirs or HTML needs more, StoreError if the file cannot be written.
    """
    suffixes = {"html": (".html", ".htm"), "markdown": (".md", ".markdown"), "json": (".json",)}
    for name, text in texts.items():
        if path.suffix.lower() in suffixes[name]:
            return atomic_write(path, printable(text()).encode())
    known = ", ".join(suffixes[name][0] for name in texts)
    raise UsageError(f"'{path}' has no suffix of a format that can be written. End its name with one of {known}.")


def atomic_write(path: Path, content: bytes) -> int:
    """Write a file, all of it or nothing, and return its size, or raise StoreError; one that is there is replaced."""
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
