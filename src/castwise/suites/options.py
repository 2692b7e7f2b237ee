"""The options of `castwise suite`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from castwise.spec.options import DURATION, Option, SharedOptions, SuiteFilter


@dataclass(frozen=True, kw_only=True)
class SuiteOptions(SuiteFilter, SharedOptions):
    """Which suites `castwise suite` runs, what of them, and how."""

    suites: Annotated[
        tuple[str, ...] | None,
        Option(
            "Suites (`castwise list suites`), or TOML files of your own; several apart by spaces or commas.",
            keyword="suite",
            completion="suites",
            is_argument=True,
            takes_many=True,
        ),
    ] = None
    every_suite: Annotated[bool, Option("Run every suite.", keyword="all")] = False
    tuned: Annotated[
        bool,
        Option(
            "The published loop and the fastest one known, which the suite's file names, side by side: "
            "--techniques none,tuned."
        ),
    ] = False
    weights: Annotated[
        Path | None, Option("Pretrained weights: a file, or a folder of torchvision's files.", metavar="PATH")
    ] = None
    keep_weights: Annotated[
        Path | None,
        Option(
            "Keep the weights of each run that is trained now, as a state_dict, in this folder, under its record's "
            "folder and name; runs on record have none.",
            "Output",
            metavar="DIR",
        ),
    ] = None
    timeout_seconds: Annotated[
        float | None,
        Option(
            "Give a run up after this wall time without a sign of life.", "How long", flags=("--timeout",), **DURATION
        ),
    ] = None
