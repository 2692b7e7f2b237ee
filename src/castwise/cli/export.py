"""`castwise export`."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from castwise.cli.output import format_size, say, say_problems
from castwise.errors import UsageError
from castwise.records.collector import gc_disabled
from castwise.report.files import RecordsOptions, atomic_write, find
from castwise.spec.options import Option

EXAMPLES = """\
Examples:

    castwise export                              a line a trial as CSV, to stdout
    castwise export h200/ --level cells -o cells.parquet
    castwise export h200/ --level blocks -o blocks.json
"""


@dataclass(frozen=True, kw_only=True)
class ExportOptions(RecordsOptions):
    output: Annotated[Path | None, Option("The file to write.", "Output", flags=("--output", "-o"))] = None
    format: Annotated[
        str | None,
        Option("csv, json or parquet. Default: by the file's name.", "Output"),
    ] = None
    level: Annotated[str, Option("What a row is: cells, trials, blocks, epochs, losses or readings.", "Output")] = (
        "trials"
    )


@gc_disabled()  # as it ends, nothing that it read is worth collecting
def export(options: ExportOptions) -> None:
    """Write records for other programs, as flat tables."""
    from castwise.report.export import FILE_FORMATS, choose_format, flat_table

    found, output = find(options.folders("export"), options), options.output
    chosen = choose_format(options.format, output)
    content = FILE_FORMATS[chosen](flat_table(options.level, found.collection, found.file_of))
    if output is not None:
        say(f"{output}: {options.level} as {chosen}, {format_size(atomic_write(output, content))}")
    elif chosen == "parquet":
        raise UsageError("parquet is not for terminals; name a file with --output.")
    else:
        sys.stdout.write(content.decode())
    say_problems(found.problems)
