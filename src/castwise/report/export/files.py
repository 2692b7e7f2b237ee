"""Flat tables as CSV, JSON and Parquet."""

import io
import json

from castwise.errors import UsageError
from castwise.render.table import csv_grid, plain
from castwise.report.export.tables import FlatTable


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
