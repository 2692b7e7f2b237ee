"""Records for other programs, read back with those programs' own packages."""

import csv
import io
import json
import math
from typing import Any

import pytest
from fake_engine import fake_trial
from fake_records import every_kind, profiled, steady

from castwise.records.schema import Block, Epoch, GpuCounters, TelemetrySummary, Trial
from castwise.report.collection import Collection, collect
from castwise.report.export import LEVELS, flat_table, to_csv, to_json, to_parquet

COLLECTION = collect(every_kind())


def file_of(trial: Trial) -> str:
    return f"{trial.spec.key}.json"


def rows(level: str, collection: Collection = COLLECTION) -> list[dict[str, Any]]:
    table = flat_table(level, collection, file_of)
    return [dict(row) for row in table.rows]


def test_each_level_has_a_row_for_each_of_its_things() -> None:
    trials = COLLECTION.trials
    assert len(rows("trials")) == len(trials)
    assert len(rows("cells")) == len(COLLECTION.configurations) < len(trials)
    assert len(rows("blocks")) == sum(len(rank.blocks) for trial in trials for rank in trial.ranks)
    epochs = [epoch for trial in trials for rank in trial.ranks for epoch in rank.epochs]
    assert len(rows("epochs")) == len(epochs) == 40
    assert len(rows("losses")) == sum(len(epoch.losses) for epoch in epochs)
    assert len(rows("readings")) == sum(len(trial.readings) for trial in trials)


@pytest.mark.parametrize("level", LEVELS)
def test_values_have_the_kind_of_their_column(level: str) -> None:
    kinds: dict[str, tuple[type, ...]] = {"text": (str,), "integer": (int,), "number": (int, float), "truth": (bool,)}
    table = flat_table(level, COLLECTION, file_of)
    assert len({field.name for field in table.columns}) == len(table.columns)
    for row in table.rows:
        assert set(row) == {field.name for field in table.columns}
        for field in table.columns:
            assert row[field.name] is None or isinstance(row[field.name], kinds[field.kind]), field.name


@pytest.mark.parametrize(("level", "document"), [("blocks", Block), ("epochs", Epoch), ("readings", TelemetrySummary)])
def test_every_field_of_a_part_is_there(level: str, document: type[Any]) -> None:
    names = {field.name for field in flat_table(level, COLLECTION, file_of).columns}
    assert {info.serialization_alias or name for name, info in document.model_fields.items()} - {
        "losses",
        "missing",
    } <= names


def test_cells_have_their_figures_with_intervals() -> None:
    row = next(row for row in rows("cells") if row["precision"] == "bf16-mixed" and row["processes"] == 3)
    assert row["speedup_low"] < row["speedup"] < row["speedup_high"]
    assert row["throughput_per_second_low"] < row["throughput_per_second"] < row["throughput_per_second_high"]
    assert row["verdict"] == "faster"


def test_csv_reads_back() -> None:
    read = list(csv.DictReader(io.StringIO(to_csv(flat_table("trials", COLLECTION, file_of)).decode())))
    expected = rows("trials")
    assert [row["key"] for row in read] == [row["key"] for row in expected]
    assert [row["step_seconds"] for row in read] == [
        "" if row["step_seconds"] is None else repr(row["step_seconds"]) for row in expected
    ]


def test_json_has_no_nan() -> None:
    lost = collect([fake_trial(losses=(math.nan,), status="diverged")])
    (row,) = json.loads(to_json(flat_table("blocks", lost, file_of)))
    assert row["loss"] == "nan"


@pytest.mark.parametrize("level", LEVELS)
def test_parquet_reads_back_with_types(level: str) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(io.BytesIO(to_parquet(flat_table(level, COLLECTION, file_of))))
    assert [_comparable(row) for row in table.to_pylist()] == [_comparable(row) for row in rows(level)]
    alone = parquet.read_table(io.BytesIO(to_parquet(flat_table(level, collect([fake_trial()]), file_of))))
    assert alone.schema == table.schema, "also where a column holds nothing"


def _comparable(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row where NaN equals itself."""
    return {name: "nan" if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}


def test_hardware_counters_are_in_tables() -> None:
    counted = steady("fp32").model_copy(update={"counters": GpuCounters(num_blocks=8, tensor_share=0.1)})
    collection = collect([counted])
    for level in ("trials", "cells"):
        assert [(row["tensor_share"], row["dram_share"]) for row in rows(level, collection)] == [(0.1, None)]


def test_cells_have_what_a_step_is_spent_on_and_the_first_cause() -> None:
    plain, known = rows("cells", collect([steady("fp32"), profiled("bf16-mixed")]))
    names = ("products_share", "moving_share", "update_share", "idle_share", "cause")
    assert [plain[name] for name in names] == [None] * 5
    assert [known[name] for name in names] == [
        *(pytest.approx(each, abs=0.002) for each in (0.3, 0.6, 0, 0.1)),
        "memory",
    ]
