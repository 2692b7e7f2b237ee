"""What the options of several commands have in common: their help, how names are completed, lists are split."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from castwise.errors import UsageError


class Format(StrEnum):
    """How results are printed."""

    TABLE = "table"
    JSON = "json"
    MARKDOWN = "markdown"
    CSV = "csv"


def complete_workloads(incomplete: str) -> list[str]:
    """Return the workloads that a started name may become."""
    from castwise.registry.workloads import WORKLOADS

    return _complete(incomplete, [row.name for row in WORKLOADS])


def complete_precisions(incomplete: str) -> list[str]:
    """Return the precisions that a started list may become."""
    from castwise.registry.precisions import PRECISIONS

    return _complete(incomplete, [row.name for row in PRECISIONS])


def complete_techniques(incomplete: str) -> list[str]:
    """Return the techniques that a started list may become."""
    from castwise.registry.techniques import NONE, SETS, TECHNIQUES

    names = [NONE, *SETS, *(row.name for row in TECHNIQUES)]
    before, plus, last = incomplete.rpartition("+")
    return [before + plus + name for name in _complete(last, names)]


def complete_suites(incomplete: str) -> list[str]:
    """Return the suites that a started list may become."""
    from castwise.registry.suites import SUITE_NAMES

    return _complete(incomplete, list(SUITE_NAMES))


def _complete(incomplete: str, names: list[str]) -> list[str]:
    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in names if name.startswith(last)]


# What a workload's name may be, in the help of every command that takes one.
WORKLOAD_NAMES = (
    "(`castwise list workloads`), or torchvision:NAME, timm:NAME, transformers:CONFIG, FILE.py:FUNCTION, "
    "module.path:FUNCTION"
)


def check_single(command: str, workload: str) -> str:
    """Return the workload of a command that takes one.

    Raises:
        UsageError: It is a list.
    """
    if "," in workload:
        raise UsageError(f"{command} takes one workload at a time, and '{workload}' is a list.")
    return workload.strip()


OneWorkload = Annotated[
    str,
    typer.Argument(help=f"A workload {WORKLOAD_NAMES}.", metavar="WORKLOAD", autocompletion=complete_workloads),
]
_LOOPS = (
    "Loops, comma-separated: none, the plain one, or changes to it (`castwise list techniques`) joined by '+'; tuned "
    "is short for {}. Without it: the plain loop."
)
Techniques = Annotated[
    str | None,
    typer.Option(help=_LOOPS.format("those that most models gain from"), autocompletion=complete_techniques),
]
SuiteTechniques = Annotated[
    str | None,
    typer.Option(
        help=_LOOPS.format("the fastest loop known, which the suite's file names"),
        autocompletion=complete_techniques,
    ),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. Without it: the first GPU, else cpu.")]
Data = Annotated[Path | None, typer.Option(help="The folder real data lies in.", envvar="CASTWISE_DATA", metavar="DIR")]
Results = Annotated[
    Path,
    typer.Option(
        help="The folder for records; a job goes on where it was cut off, a run after its last epoch.", metavar="DIR"
    ),
]
Output = Annotated[Format, typer.Option("--format", help="How results are printed on stdout.")]
Timeout = Annotated[
    str | None, typer.Option(help="How long one phase of a trial may take before it is given up.", metavar="TIME")
]
Seed = Annotated[int, typer.Option(help="Seeds weights, data and dropout.")]
Retry = Annotated[bool, typer.Option("--retry", help="Measure crashed and timed-out trials again.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Print what failed trials printed, tracebacks of your code included.")
]
Again = Annotated[bool, typer.Option("--again", help="Measure everything again, whatever is recorded.")]
