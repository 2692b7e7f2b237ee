"""Records for other programs: flat tables, as CSV, JSON, Parquet or a data frame.

A table is at the level asked for: configurations, trials, blocks, epochs, losses or readings.

Names and units of the columns are stable: figures in SI units, with the unit as a suffix. What a record does not have
is None. To add a column: one line here, and its field in `show/fields.py`.
"""

import io
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from castwise.analysis import steady_metrics, training_metrics
from castwise.analysis.energy import joules_per_unit, power_watts
from castwise.analysis.model_flops import model_flops_values
from castwise.errors import UsageError, printable, unknown_name
from castwise.records.schema import Block, Epoch, TelemetrySummary, Trial
from castwise.report.collection import Collection, FileOf, row_values, throughput_of
from castwise.show.fields import Field, Unit, counter_values, find_fields
from castwise.show.table import DataTable, csv_grid, plain
from castwise.show.why_report import share_values

QUESTION = (
    *("key", "cell", "workload", "kind", "precision", "loss_scale", "batch_size", "world_size", "parallelism"),
    *("techniques", "data_set", "device", "seed"),
)
_MACHINE = (
    *("device_name", "fingerprint", "host", "cpu", "gpu_uuid"),
    *("driver", "cuda", "cudnn", "torch", "castwise", "commit"),
)
_FACTS = ("num_parameters", "optimizer", "warm_up_seconds", "warm_up_steps", "settled")
# The figures of a configuration, over all its processes.
_FIGURES = (
    *("unit", "processes", "throughput_per_second", "throughput_per_second_low", "throughput_per_second_high"),
    *("speedup", "speedup_low", "speedup_high", "verdict", "verdict_reason", "scaling_efficiency"),
    *("peak_allocated_bytes", "peak_reserved_bytes", "driver_used_bytes", "tensor_share", "dram_share"),
)


_PART_OF = ("key", "workload", "precision", "batch_size", "fingerprint", "repeat", "rank")  # of a block, an epoch, …


def flat_table(level: str, collection: Collection, file_of: FileOf) -> DataTable[Any]:
    """Return records as a flat table; UsageError if the level is no name of `LEVELS`."""
    if level not in LEVELS:
        raise unknown_name("level", level, LEVELS)
    return LEVELS[level](collection, file_of)


def _question(trial: Trial) -> dict[str, Any]:
    spec = trial.spec
    return {"key": spec.key, "cell": spec.configuration, **{name: _plain(getattr(spec, name)) for name in QUESTION[2:]}}


def _machine(trial: Trial) -> dict[str, Any]:
    return {name: getattr(trial.environment, name) for name in _MACHINE}


def trial_row(trial: Trial) -> dict[str, Any]:
    step_seconds = steady_metrics.step_seconds(trial)
    spec, epochs, final_loss = trial.spec, training_metrics.epochs_of(trial), steady_metrics.final_loss(trial)
    return {
        **_question(trial),
        "repeat": spec.repeat,
        "recipe": spec.recipe and spec.recipe.model_dump_json(),
        "protocol": spec.protocol.model_dump_json(),
        **{name: getattr(trial, name) for name in ("status", "message", "started_at", "duration_seconds")},
        "sitting": trial.session_id,
        "unit": steady_metrics.unit_of(trial),
        "step_seconds": step_seconds,
        "spread": steady_metrics.spread(trial),
        "throughput_per_second": throughput_of(trial),
        **model_flops_values([trial], step_seconds),
        "peak_allocated_bytes": steady_metrics.peak_allocated_bytes(trial),
        "peak_reserved_bytes": steady_metrics.peak_reserved_bytes(trial),
        "driver_used_bytes": training_metrics.driver_used_bytes(trial),
        "final_loss": final_loss and final_loss[0],
        "accuracy": epochs[-1].accuracy if epochs else None,
        "skipped_steps": steady_metrics.skipped_steps(trial) + sum(epoch.skipped_steps for epoch in epochs),
        "joules_per_unit": joules_per_unit(trial),
        "power_watts": power_watts(trial),
        **counter_values(trial),
        **{name: getattr(trial.facts, name, None) for name in _FACTS},
        **_machine(trial),
        "schema_version": trial.schema_version,
    }


def _trials(collection: Collection, file_of: FileOf) -> DataTable[Any]:
    rows = [{**trial_row(trial), "file": file_of(trial)} for trial in collection.trials]
    return DataTable(find_fields(rows[0] if rows else ()), rows)


def _configurations(collection: Collection, file_of: FileOf) -> DataTable[Any]:
    rows = []
    why = {id(found.row): found for group in collection.groups for found in group.diagnoses}
    for config in collection.configurations:
        found = why.get(id(config))
        trial, values = config.trial, row_values(config)
        rows.append(
            {
                **_question(trial),
                **{name: values[name] for name in _FIGURES},
                **model_flops_values(config.trials, config.step_seconds),
                **share_values(found),
                "cause": found.causes[0].name if found is not None and found.causes else None,
                "status": trial.status,
                "message": trial.message,
                **_machine(trial),
                "machine_note": " ".join(note.text for note in collection.machine_notes_of([config])) or None,
                "file": file_of(trial),
            }
        )
    return DataTable(find_fields(rows[0] if rows else ()), rows)


def _losses(collection: Collection, file_of: FileOf) -> DataTable[Any]:
    rows = [
        {**_part_row(trial, rank, file_of), "epoch": number, "step_of_epoch": step, "loss": loss}
        for trial in collection.trials
        for rank, samples in enumerate(trial.ranks)
        for number, epoch in enumerate(samples.epochs, start=1)
        for step, loss in epoch.losses
    ]
    return DataTable(find_fields((*_PART_OF, "epoch", "file", "step_of_epoch", "loss")), rows)


def _parts(
    number: str,
    document: type[BaseModel],
    without: str,
    parts_of: Callable[[Trial], Sequence[Sequence[BaseModel]]],
    collection: Collection,
    file_of: FileOf,
) -> DataTable[Any]:
    """Return a table of parts of trials, by rank and counted from 1, with all fields of their document but one."""
    # Columns are called as in the records' JSON, whose names do not change.
    infos = {name: info for name, info in document.model_fields.items() if name != without}
    names = {name: info.serialization_alias or name for name, info in infos.items()}
    rows = [
        {
            **_part_row(trial, rank, file_of),
            number: index,
            **{names[name]: _plain(getattr(part, name)) for name in infos},
        }
        for trial in collection.trials
        for rank, parts in enumerate(parts_of(trial))
        for index, part in enumerate(parts, start=1)
    ]
    fields = [Field(names[name], unit=_unit_of(info.annotation)) for name, info in infos.items()]
    return DataTable([*find_fields((*_PART_OF, number, "file")), *fields], rows)


def _part_row(trial: Trial, rank: int, file_of: FileOf) -> dict[str, Any]:
    of_spec = {name: getattr(trial.spec, name) for name in ("key", "workload", "precision", "batch_size", "repeat")}
    return {**of_spec, "fingerprint": trial.environment.fingerprint, "rank": rank, "file": file_of(trial)}


LEVELS: dict[str, Callable[[Collection, FileOf], DataTable[Any]]] = {
    "cells": _configurations,
    "trials": _trials,
    "blocks": partial(_parts, "block", Block, "", lambda trial: [rank.blocks for rank in trial.ranks]),
    "epochs": partial(_parts, "epoch", Epoch, "losses", lambda trial: [rank.epochs for rank in trial.ranks]),
    "losses": _losses,
    "readings": partial(_parts, "turn", TelemetrySummary, "missing", lambda trial: [trial.readings]),
}


def _unit_of(annotation: Any) -> Unit:
    """Return what values of an annotation are; of a union with None, those that are there."""
    types = {annotation, *get_args(annotation)}
    types |= {inner for each in types for inner in get_args(each)}  # Annotated inside a union
    units: tuple[tuple[type, Unit], ...] = ((bool, "boolean"), (int, "count"), (float, "number"))
    return next((unit for plain, unit in units if plain in types), "text")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return " ".join(f"{key}={','.join(names)}" for key, names in value.items())
    return " ".join(value) if isinstance(value, tuple) else value


def to_csv(table: DataTable[Any]) -> bytes:
    """Return a header line and a line a row; None is empty, and NaN is "nan"."""
    return printable(csv_grid(table.columns, table.rows)).encode()


def to_json(table: DataTable[Any]) -> bytes:
    """Return a list of objects, one a row; JSON has no NaN, so a string says what a figure was."""
    rows = [plain(table.columns, row) for row in table.rows]
    return printable(json.dumps(rows, indent=1, allow_nan=False, ensure_ascii=False)).encode() + b"\n"


def to_parquet(table: DataTable[Any]) -> bytes:
    """Return a Parquet file whose types are the fields', even if a column holds nothing; UsageError without pyarrow."""
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
    """Return a data frame whose types are the fields', even if a column holds nothing; UsageError without pandas."""
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
    """Return the format of this name or of a file's suffix, CSV without both; UsageError if there is none."""
    if name is None and output is not None:
        suffix = output.suffix.lower().removeprefix(".")
        if suffix not in FILE_FORMATS:
            raise UsageError(f"What '{output}' should be is not clear from its name; say --format.")
        return suffix
    chosen = (name or "csv").lower()
    if chosen not in FILE_FORMATS:
        raise unknown_name("format", chosen, FILE_FORMATS)
    return chosen
