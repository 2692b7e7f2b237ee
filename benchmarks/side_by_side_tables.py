"""The table of one loop on each GPU of a host, all at once and none waiting for another."""

import math
from collections.abc import Sequence

from stored import place_of

from castwise.analysis import steady_metrics
from castwise.records.schema import Trial
from castwise.render.units import format_seconds


def side_by_side_table(trials: Sequence[Trial]) -> str:
    """Return the step of each trial, and how much longer it is than the shortest.

    Args:
        trials: Those of one cell, one a GPU, measured at once; all ended well.
    """
    steps = [steady_metrics.step_seconds(trial) or math.inf for trial in trials]
    lines = [
        place_of(trials[0].environment.model_dump(), trials[0].started_at[:10]),
        "",
        "| GPU | step | over the shortest |",
        "|---|---:|---:|",
    ]
    for trial, step in zip(trials, steps, strict=True):
        longer = 100 * (step / min(steps) - 1)
        lines.append(f"| {trial.environment.gpu_uuid} | {format_seconds(step)} | {longer:+.1f} % |")
    return "\n".join([*lines, ""])
