"""Flat tables as CSV, JSON and Parquet."""

import csv
import io
import json
import math
from typing import Any

from castwise.errors import UsageError
from castwise.report.export.tables import FlatTable


def to_csv(table: FlatTable) -> bytes:
    """Return a header line and a line a row; None is empty, and NaN is "nan"."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(name for name, _ in table.fields)
    writer.writerows(table.rows)
    return out.getvalue().encode()


def to_json(table: FlatTable) -> bytes:
    """Return a list of objects, one a row; JSON has no NaN, so that a string says what a figure was."""
    names = [name for name, _ in table.fields]
    rows = [dict(zip(names, map(_plain, row), strict=True)) for row in table.rows]
    return json.dumps(rows, indent=1, allow_nan=False, ensure_ascii=False).encode() + b"\n"


def to_parquet(table: FlatTable) -> bytes:
    """Return a Parquet file, with the columns' kinds as its types: also of a column that holds nothing.

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
    schema = pyarrow.schema([(name, types[kind]) for name, kind in table.fields])
    columns = list(zip(*table.rows, strict=True)) or [()] * len(table.fields)
    arrays = [pyarrow.array(column, type=field.type) for column, field in zip(columns, schema, strict=True)]
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(arrays, schema=schema), out)
    return out.getvalue()


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
