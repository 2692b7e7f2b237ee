"""What benchmarks share: their GPUs, writing records under benchmarks/records/, reading them, and tables of them."""

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from castwise.records.schema import Trial
from castwise.records.store import load_folder

RECORDS = Path(__file__).resolve().parent / "records"


def visible_gpus(num_gpus: int) -> list[str]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, or else the first ones."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus)))).split(",")


def load(folder: Path) -> list[Trial]:
    """Return all trials under a folder, oldest first; exit where a file is none."""
    trials, problems = load_folder(folder)
    for problem in problems:
        sys.exit(f"{problem.path}: {problem.reason}")
    return trials


def markdown(heading: str, alignment: str, rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table.

    Args:
        heading: The columns' titles, separated by " | ".
        alignment: An "l" or "r" for each column.
        rows: Cells that are Markdown already.
    """
    marks = "|".join("---" if letter == "l" else "---:" for letter in alignment)
    return [f"| {heading} |", f"|{marks}|", *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def write(path: Path | None, document: Mapping[str, Any]) -> None:
    """Write a record, if a file was asked for."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")


def place_of(environment: Mapping[str, Any], date: str) -> str:
    """Return where, with what and when a benchmark was run, for the line above its table."""
    return (
        f"{environment['gpu'] or environment['cpu']}, torch {environment['torch']}, "
        f"driver {environment['driver'] or '–'}, {date}, castwise at {environment['commit']}"
    )


def by_place(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Return rows by where and when they were measured, which names them where there are several such."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["where"], []).append(row)
    return [
        (where if len(found) == 1 else f"{where} ({', '.join(row['name'] for row in own)})", own)
        for where, own in found.items()
    ]


def where_of(trial: Trial) -> str:
    """Return where and when a trial was measured, for a sentence."""
    environment = trial.environment
    parts = (
        environment.device_name,
        f"torch {environment.torch}",
        environment.driver and f"driver {environment.driver}",
    )
    return f"{', '.join(filter(None, parts))}, {trial.started_at[:10]}"
