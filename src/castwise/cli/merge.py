"""`castwise merge`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from castwise.cli.output import say, say_problems
from castwise.records.collector import gc_disabled
from castwise.show.units import pluralize
from castwise.spec.options import Option

EXAMPLES = """\
Examples:

    castwise merge node1/ node2/ -o all/         each record once
    castwise merge results-*/ -o all/            again, as more of them come
"""


@dataclass(frozen=True, kw_only=True)
class MergeOptions:
    folders: Annotated[tuple[Path, ...], Option("Results folders.", metavar="DIR", is_argument=True, takes_many=True)]
    output: Annotated[
        Path,
        Option(
            "The results folder to write; records that it has stay.", "Output", flags=("--output", "-o"), metavar="DIR"
        ),
    ]


@gc_disabled()  # as it ends, nothing that it read is worth collecting
def merge(options: MergeOptions) -> None:
    """Join results folders, such as those of a plan's shards: each record once, and conflicting ones are refused."""
    from castwise.records.merge import merge as merge_folders

    merged = merge_folders(options.folders, options.output)
    say(f"{options.output}: {pluralize(merged.num_records, 'record')}, {merged.num_written} of them new.")
    say_problems([(str(problem.path), problem.reason) for problem in merged.problems])
