"""The table of how models validate with the statistics of training, and with those taken without dropout."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stored import NOT_MEASURED, place_of

from castwise.registry.techniques import join

_COLUMNS = {
    "training loss, last epoch": "training_loss",
    "accuracy": "accuracy",
    "accuracy, statistics without dropout": "accuracy_without_dropout",
}


def dropout_table(path: Path) -> str:
    """Return what `dropout_statistics.py --out` wrote, a row a loop.

    Args:
        path: Its file.
    """
    if not path.is_file():
        return NOT_MEASURED
    document = json.loads(path.read_text())
    loops: dict[str, list[dict[str, Any]]] = {}
    for run in document["runs"]:
        loops.setdefault(join(run["techniques"]), []).append(run)
    heads = ["loop", "seeds", *_COLUMNS, "variances with dropout over those without, by layer"]
    return "\n".join(
        [
            place_of(document["environment"], path.stem[:10]),
            "",
            f"| {' | '.join(heads)} |",
            "|---|" + "---:|" * (len(heads) - 1),
            *(f"| {' | '.join(_cells(name, runs))} |" for name, runs in sorted(loops.items())),
            "",
        ]
    )


def _cells(name: str, runs: Sequence[dict[str, Any]]) -> list[str]:
    figures = [[run[key] for run in runs] for key in _COLUMNS.values()]
    seeds = ", ".join(str(run["seed"]) for run in runs)
    return [name, seeds, *(_told(each, is_share=index > 0) for index, each in enumerate(figures)), _ratios(runs)]


def _told(values: Sequence[float], *, is_share: bool) -> str:
    scaled = [100 * value if is_share else value for value in values]
    digits, unit = (2, " %") if is_share else (4, "")
    spread = f" ± {statistics.stdev(scaled):.{digits}f}" if len(scaled) > 1 else ""
    return f"{statistics.fmean(scaled):.{digits}f}{spread}{unit}"


def _ratios(runs: Sequence[dict[str, Any]]) -> str:
    """Return the least and the largest of the layers' ratios, each the mean over the seeds."""
    known = [run["variance_ratios"] for run in runs if "variance_ratios" in run]
    if not known:
        return "–"
    means = [statistics.fmean(run[layer] for run in known) for layer in known[0]]
    return f"{min(means):.2f} … {max(means):.2f}"
