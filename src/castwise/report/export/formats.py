"""How flat tables become CSV, JSON, Parquet and data frames."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from castwise.errors import UsageError, printable, unknown_name
from castwise.show.table import DataTable, csv_grid, plain


def to_csv(table: DataTable[Any]) -> bytes:
    """Return a header line and a line a row; None is empty, and NaN is "nan"."""
    return printable(csv_grid(table.columns, table.rows)).encode()


def to_json(table: DataTable[Any]) -> bytes:
    """Return a list of objects, one a row; JSON has no NaN, so a string says what a figure was."""
    rows = [plain(table.columns, row) for row in table.rows]
    return printable(json.dumps(rows, indent=1, allow_nan=False, ensure_ascii=False)).encode() + b"\n"


def to_parquet(table: DataTable[Any]) -> bytes:
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
        column.name: pyarrow.array([column.value(row) for row in table.rows], type=types[column.kind])
        for column in table.columns
    }
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(arrays), out)
    return out.getvalue()


def to_pandas(table: DataTable[Any]) -> Any:
    """Return a pandas data frame whose types are the fields', even if a column holds nothing.

    Raises:
        UsageError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise UsageError("A data frame needs pandas: pip install 'castwise[pandas]'.") from None
    types = {"text": "string", "integer": "Int64", "number": "float64", "truth": "boolean"}
    return pandas.DataFrame(
        {
            column.name: pandas.Series([column.value(row) for row in table.rows], dtype=types[column.kind])
            for column in table.columns
        }
    )


FILE_FORMATS: dict[str, Callable[[DataTable[Any]], bytes]] = {"csv": to_csv, "json": to_json, "parquet": to_parquet}


def choose_format(name: str | None, output: Path | None) -> str:
    """Return the format that is named, or the one of a file's suffix; without both it is CSV.

    Raises:
        UsageError: No format has the name or the suffix.
    """
    if name is None and output is not None:
        suffix = output.suffix.lower().removeprefix(".")
        if suffix not in FILE_FORMATS:
            raise UsageError(f"What '{output}' should be is not clear from its name; say --format.")
        return suffix
    chosen = (name or "csv").lower()
    if chosen not in FILE_FORMATS:
        raise unknown_name("format", chosen, FILE_FORMATS)
    return chosen
