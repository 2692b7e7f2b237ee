"""The trials under benchmarks/records/, and what every table of them says."""

import sys
from pathlib import Path

from castwise.record import Trial
from castwise.sweep.store import load_folder

RECORDS = Path(__file__).resolve().parent / "records"
IMAGES = RECORDS.parent.parent / "docs" / "images"
NOT_MEASURED = "Not measured yet.\n"


def load(folder: Path) -> list[Trial]:
    """Return all trials under a folder, oldest first; exit where a file is none."""
    trials, problems = load_folder(folder)
    for problem in problems:
        sys.exit(f"{problem.path}: {problem.reason}")
    return trials


def where_of(trial: Trial) -> str:
    """Return where and when a trial was measured, for a sentence."""
    environment = trial.environment
    parts = (
        environment.device_name,
        f"torch {environment.torch}",
        environment.driver and f"driver {environment.driver}",
    )
    return f"{', '.join(filter(None, parts))}, {trial.started_at[:10]}"
