"""`castwise export`."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from castwise.cli.output import format_size, say, say_problems
from castwise.errors import StoreError, UsageError
from castwise.records.collector import gc_disabled
from castwise.report.files import RecordsOptions, atomic_write, find
from castwise.show.units import pluralize
from castwise.spec.options import Option

EXAMPLES = """\
Examples:

    castwise export                              a line a trial as CSV, to stdout
    castwise export h200/ --level cells -o cells.parquet
    castwise export h200/ --level blocks -o blocks.json
    castwise export h200/ --format tensorboard -o runs/     also: mlflow, wandb
"""


@dataclass(frozen=True, kw_only=True)
class ExportOptions(RecordsOptions):
    """What `castwise export` writes, and of which records."""

    output: Annotated[
        Path | None, Option("The file to write, or the folder for a tracker.", "Output", flags=("--output", "-o"))
    ] = None
    format: Annotated[
        str | None,
        Option("csv, json, parquet, tensorboard, mlflow or wandb. Default: by the file's name.", "Output"),
    ] = None
    level: Annotated[str, Option("What a row is: cells, trials, blocks, epochs, losses or readings.", "Output")] = (
        "trials"
    )


@gc_disabled()  # as it ends, nothing that it read is worth collecting
def export(options: ExportOptions) -> None:
    """Write records for other programs: flat tables, or runs for an experiment tracker. Nothing is sent anywhere."""
    from castwise.report.export.formats import FILE_FORMATS, TRACKER_FORMATS, choose_format
    from castwise.report.export.tables import flat_table
    from castwise.report.export.trackers import tracked_runs

    found, output = find(options.folders("export"), options), options.output
    chosen = choose_format(options.format, output)
    if chosen in FILE_FORMATS:
        content = FILE_FORMATS[chosen](flat_table(options.level, found.collection, found.file_of))
        if output is not None:
            say(f"{output}: {options.level} as {chosen}, {format_size(atomic_write(output, content))}")
        elif chosen == "parquet":
            raise UsageError("parquet is not for terminals; name a file with --output.")
        else:
            sys.stdout.write(content.decode())
    else:
        if output is None:
            raise UsageError(f"{chosen} needs a folder; name one with --output.")
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise UsageError(f"'{output}' is there already; name a new folder, so that no run is in it twice.")
        write, command = TRACKER_FORMATS[chosen]
        try:
            count = write(tracked_runs(found.collection, found.file_of), output)
        except OSError as error:
            raise StoreError(f"'{output}' cannot be written: {error.strerror or error}.") from None
        say(f"{output}: {pluralize(count, 'run')}. To see them: {command.format(folder=output)}")
    say_problems(found.problems)
