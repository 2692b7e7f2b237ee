"""Records for other programs, read back with those programs' own packages."""

import csv
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from fake_engine import fake_spec, fake_trial
from fake_records import every_kind, poisoned, profiled, steady

from castwise.records.schema import Block, Epoch, GpuCounters, TelemetrySummary, Trial
from castwise.report.collection import Collection, collect
from castwise.report.export.formats import to_csv, to_json, to_parquet
from castwise.report.export.tables import LEVELS, flat_table
from castwise.report.export.trackers import TrackedRun, tracked_runs

COLLECTION = collect(every_kind())


def file_of(trial: Trial) -> str:
    return f"{trial.spec.key}.json"


def runs(collection: Collection = COLLECTION) -> list[TrackedRun]:
    return list(tracked_runs(collection, file_of))


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


def test_tracked_runs_have_names_of_their_own_and_rising_steps() -> None:
    found = runs()
    assert len(found) == len(COLLECTION.trials)
    assert len({(run.group, run.name) for run in found}) == len(found)
    for run in found:
        for points in run.series.values():
            assert [point.step for point in points] == sorted(point.step for point in points)
            assert [point.seconds for point in points] == sorted(point.seconds for point in points)


def test_hardware_counters_are_in_tables_and_trackers() -> None:
    counted = steady("fp32").model_copy(update={"counters": GpuCounters(num_blocks=8, tensor_share=0.1)})
    collection = collect([counted])
    for level in ("trials", "cells"):
        assert [(row["tensor_share"], row["dram_share"]) for row in rows(level, collection)] == [(0.1, None)]
    (run,) = runs(collection)
    assert run.figures["tensor_share"] == 0.1
    assert "dram_share" not in run.figures


def test_cells_have_what_a_step_is_spent_on_and_the_first_cause() -> None:
    plain, known = rows("cells", collect([steady("fp32"), profiled("bf16-mixed")]))
    names = ("products_share", "moving_share", "update_share", "idle_share", "cause")
    assert [plain[name] for name in names] == [None] * 5
    assert [known[name] for name in names] == [
        *(pytest.approx(each, abs=0.002) for each in (0.3, 0.6, 0, 0.1)),
        "memory",
    ]


def test_series_of_a_trial() -> None:
    (run,) = runs(collect([steady("fp32")]))
    assert [point.step for point in run.series["step_seconds"]] == list(range(1, 9))
    assert run.series["max_temperature_celsius"][-1].value == 57.0
    assert run.figures["peak_allocated_bytes"] == 2**31
    training = next(run for run in runs() if "accuracy" in run.series)
    assert [int(1000 * point.value + 1e-9) / 1000 for point in training.series["accuracy"]] == [0.5, 0.55, 0.595, 0.635]
    assert training.series["loss"][-1].step == training.series["accuracy"][-1].step


def test_tensorboard_reads_them(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from castwise.report.export.trackers import write_tensorboard

    assert write_tensorboard(runs(), tmp_path) == len(COLLECTION.trials)
    folders = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}
    assert len(folders) == len(COLLECTION.trials)
    (folder,) = (path for path in folders if path.name.endswith(steady("fp32").spec.key))
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [event.step for event in events.Scalars("step_seconds")] == list(range(1, 9))
    assert events.Scalars("figures/throughput_per_second")[0].value == pytest.approx(2556, rel=0.01)
    assert "_hparams_/session_start_info" in events.summary_metadata


def test_mlflow_reads_them(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    from castwise.report.export.trackers import MLFLOW_DATABASE, write_mlflow

    some = [run for run in runs() if run.group in ("dpn92", "wrn-28-10 on cifar10: training")]
    assert write_mlflow(some, tmp_path / "out") == len(some) == 5
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'out' / MLFLOW_DATABASE}")
    experiment = client.get_experiment_by_name("wrn-28-10 on cifar10: training")
    found = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(found) == {"fp32", "fp16-mixed", "bf16-mixed"}
    history = client.get_metric_history(found["fp32"].info.run_id, "accuracy")
    assert [int(1000 * metric.value + 1e-9) / 1000 for metric in history] == [0.5, 0.55, 0.595, 0.635]
    assert found["fp32"].data.params["precision"] == "fp32"
    lost = client.search_runs([client.get_experiment_by_name("dpn92").experiment_id])
    assert {(run.info.run_name, run.info.status) for run in lost} == {("fp32", "FINISHED"), ("fp16-true", "FAILED")}


def test_weights_and_biases_has_a_file_for_each_run_and_nothing_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    from castwise.report.export.trackers import write_wandb

    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    assert write_wandb([run for run in runs() if run.group == "dpn92"], tmp_path) == 2
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    contents = [path.read_bytes() for path in files]
    assert len(contents) == 2
    assert all(content.count(b"step_seconds") >= 6 for content in contents)
    assert [sum(name in content for content in contents) for name in (b"fp32", b"fp16-true")] == [1, 1]


def test_hostile_names_stay_in_the_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from castwise.report.export.trackers import write_tensorboard

    strange = fake_trial(fake_spec().model_copy(update={"workload": "../../etc/passwd", "precision": ".."}))
    write_tensorboard(runs(collect([strange, poisoned(steady())])), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    for path in (tmp_path / "out").rglob("*"):
        assert re.fullmatch(r"[A-Za-z0-9._ ,:=+-]+", path.name), path.name
