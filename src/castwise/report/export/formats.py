"""All formats of an export: one row each."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from castwise.errors import unknown_name
from castwise.report.export import files, mlflow, tensorboard, wandb
from castwise.report.export.tables import FlatTable
from castwise.report.export.tracker_runs import TrackedRun


@dataclass(frozen=True)
class FileFormat:
    """A format that is one file.

    Attributes:
        name: What users call it.
        suffix: What its files end in.
        encode: Returns a table in it.
        is_text: Whether a terminal can show it.
    """

    name: str
    suffix: str
    encode: Callable[[FlatTable], bytes]
    is_text: bool = True


@dataclass(frozen=True)
class TrackerFormat:
    """A format of an experiment tracker, which is a folder.

    Attributes:
        name: What users call it.
        write: Writes runs into a folder and returns how many.
        then: What to do with the folder.
    """

    name: str
    write: Callable[[Iterable[TrackedRun], Path], int]
    then: str


FILE_FORMATS: tuple[FileFormat, ...] = (
    FileFormat("csv", ".csv", files.to_csv),
    FileFormat("json", ".json", files.to_json),
    FileFormat("parquet", ".parquet", files.to_parquet, is_text=False),
)

TRACKER_FORMATS: tuple[TrackerFormat, ...] = (
    TrackerFormat("tensorboard", tensorboard.write_tensorboard, "tensorboard --logdir {folder}"),
    TrackerFormat("mlflow", mlflow.write_mlflow, "mlflow ui --backend-store-uri sqlite:///{folder}/mlflow.db"),
    TrackerFormat("wandb", wandb.write_wandb, "wandb sync {folder}/wandb/offline-run-*"),
)


def find_format(name: str) -> FileFormat | TrackerFormat:
    """Return the row with this name.

    Raises:
        UsageError: No row has it; the message offers the nearest.
    """
    rows: tuple[FileFormat | TrackerFormat, ...] = (*FILE_FORMATS, *TRACKER_FORMATS)
    for row in rows:
        if row.name == name.lower():
            return row
    raise unknown_name("format", name, [row.name for row in rows])


def format_of(path: Path) -> FileFormat | None:
    """Return the format that a file's suffix stands for; None where it stands for none."""
    return next((row for row in FILE_FORMATS if row.suffix == path.suffix.lower()), None)
