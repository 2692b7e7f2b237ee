"""All formats of an export: a row each, and how flat tables become CSV, JSON and Parquet."""

import io
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from castwise.errors import UsageError, unknown_name
from castwise.render.table import csv_grid, plain
from castwise.report.export.tables import FlatTable
from castwise.report.export.trackers import TrackedRun, write_mlflow, write_tensorboard, write_wandb


def to_csv(table: FlatTable) -> bytes:
    """Return a header line and a line a row; None is empty, and NaN is "nan"."""
    return csv_grid(table.fields, table.rows).encode()


def to_json(table: FlatTable) -> bytes:
    """Return a list of objects, one a row; JSON has no NaN, so a string says what a figure was."""
    rows = [plain(table.fields, row) for row in table.rows]
    return json.dumps(rows, indent=1, allow_nan=False, ensure_ascii=False).encode() + b"\n"


def to_parquet(table: FlatTable) -> bytes:
    """Return a Parquet file whose types are the fields', even if a column holds nothing.

    Raises:
        UsageError: pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UsageError("Parquet needs pyarrow: pip install 'castwise[parquet]'.") from None
    types = {
        "text": pyarrow.string(),
        "integer": pyarrow.int64(),
        "number": pyarrow.float64(),
        "truth": pyarrow.bool_(),
    }
    arrays = {
        field.name: pyarrow.array([field.value(row) for row in table.rows], type=types[field.kind])
        for field in table.fields
    }
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(arrays), out)
    return out.getvalue()


@dataclass(frozen=True)
class FileFormat:
    """A format that is one file; `is_text` says whether a terminal can show it."""

    name: str
    suffix: str
    encode: Callable[[FlatTable], bytes]
    is_text: bool = True


@dataclass(frozen=True)
class TrackerFormat:
    """A format of an experiment tracker: `write` fills a folder and returns the number of runs, `then` opens it."""

    name: str
    write: Callable[[Iterable[TrackedRun], Path], int]
    then: str


FILE_FORMATS: tuple[FileFormat, ...] = (
    FileFormat("csv", ".csv", to_csv),
    FileFormat("json", ".json", to_json),
    FileFormat("parquet", ".parquet", to_parquet, is_text=False),
)
TRACKER_FORMATS: tuple[TrackerFormat, ...] = (
    TrackerFormat("tensorboard", write_tensorboard, "tensorboard --logdir {folder}"),
    TrackerFormat("mlflow", write_mlflow, "mlflow ui --backend-store-uri sqlite:///{folder}/mlflow.db"),
    TrackerFormat("wandb", write_wandb, "wandb sync {folder}/wandb/offline-run-*"),
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
    """Return the format that a file's suffix stands for, if any."""
    return next((row for row in FILE_FORMATS if row.suffix == path.suffix.lower()), None)
