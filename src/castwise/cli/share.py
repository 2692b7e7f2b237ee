"""`castwise share`."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from castwise.cli.output import say, say_problems
from castwise.errors import StoreError, UsageError
from castwise.records.collector import gc_disabled
from castwise.report.files import RecordsOptions, atomic_write, find
from castwise.show.units import pluralize
from castwise.spec.options import Option

EXAMPLES = """\
Examples:

    castwise share --dry-run                     what would be shared, to stdout
    castwise share h200/                         files for a pull request
    castwise share --check castwise-shared/      what is wrong with such files
"""

_FOLDER = Path("castwise-shared")


@dataclass(frozen=True, kw_only=True)
class ShareOptions(RecordsOptions):
    dry_run: Annotated[bool, Option("Print the records on stdout, and write nothing.", "Output")] = False
    output: Annotated[
        Path | None, Option("The folder to write to.", "Output", flags=("--output", "-o"), metavar="DIR")
    ] = None
    check: Annotated[
        bool, Option("Say what is wrong with files that this command has written, or someone sent.", "Records")
    ] = False


@gc_disabled()  # as it ends, nothing that it read is worth collecting
def share(options: ShareOptions) -> None:
    """Write compact records to share: GPU, software and figures of built-in workloads, and nothing about you."""
    from castwise.report.share import shared_of

    if options.check:
        _check(options.records or (_FOLDER,))
        return
    found, output = find(options.folders("share"), options), options.output or _FOLDER
    records, left = shared_of(found.collection.configurations)
    for line in left:
        say(f"Left out: {line}")
    if not records:
        raise UsageError("Nothing is left to share: it takes undisturbed steps of built-in workloads on a GPU.")
    for record in records:
        if options.dry_run:
            sys.stdout.write(record.text)
        else:
            atomic_write(output / record.path, record.text.encode())
            say(f"{output / record.path}: {pluralize(len(record.rows), 'configuration')}, {record.gpu}")
    say_problems(found.problems)


def _check(paths: tuple[Path, ...]) -> None:
    """Say what is wrong with each file; StoreError if anything is."""
    from castwise.records.shared import problems_of

    wrong, num_files = 0, 0
    for path in paths:
        if not path.exists():
            raise UsageError(f"There is no folder or file '{path}'.")
        for file in [path] if path.is_file() else sorted(path.rglob("*.json")):
            num_files += 1
            problems = problems_of(file.read_bytes(), file.name)
            wrong += bool(problems)
            for line in problems:
                print(f"{file}: {line}")
    if wrong:
        raise StoreError(f"{wrong} of {pluralize(num_files, 'file')} cannot be taken.")
    if not num_files:
        raise UsageError(f"There is no JSON file in {', '.join(map(str, paths))}.")
    print(f"{pluralize(num_files, 'file')}: no problem found.")
