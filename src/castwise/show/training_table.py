"""The results of training runs as tables."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from castwise.analysis.result_table import Row
from castwise.analysis.training_metrics import best_accuracy, data_share, epochs_of, length_in_words, perplexity, split
from castwise.show.fields import (
    FlatRow,
    column,
    find_fields,
    in_tables,
    short_columns,
    trial_values,
    values_of,
    worth_showing,
)
from castwise.show.presentation import Grid, Part
from castwise.show.table import DataTable, competing_by, short_table_of
from castwise.show.units import sparkline
from castwise.spec.trial import TrialSpec

# All columns: those of tables first, then those that only CSV and JSON have.
COLUMNS = (
    *find_fields(("workload", "data_set")),
    column("precision", short="precision"),
    *find_fields(("loss_scale", "techniques")),
    column("batch_size", short="batch"),
    column("gpus", lambda run: gpus_text(run.trial.spec)),
    column("seed"),
    column("length", lambda run: length_in_words(run.trial) or "–", short="length"),
    column("seconds", short="time"),
    column("start_seconds"),
    column("data_share", lambda run: data_share(run.trial), short="waits for data"),
    column("validation_seconds"),
    column("throughput_per_second", "throughput"),
    column("speedup", "speedup", short="× fp32"),
    column("published_pair_speedup"),
    column("efficiency", "scaling_efficiency"),
    column("peak_allocated_bytes", "peak_allocated_bytes", short="memory"),
    column("peak_reserved_bytes", "peak_reserved_bytes"),
    column("driver_used_bytes", "driver_used_bytes"),
    column("accuracy", short="accuracy"),
    column("perplexity", short="perplexity"),
    column("final_score", short="score"),
    column("final_loss", title="last loss"),
    column("loss_curve", place="table"),
    column("skipped_steps", "skipped_steps"),
    column("status", short="status"),
    column("best_accuracy", lambda run: best_accuracy(run.trial), place="files"),
    *(column(name, place="files") for name in ("message", "device", "key")),
)
_ALWAYS = ("precision", "batch_size", "length", "status")
_SETTING = ("workload", "data_set", "gpus", "seed", "techniques")
_WAITS = 0.1  # of the time; a smaller share is not worth a column


def flat_row(run: Row, pairs: Mapping[str, float] | None = None) -> dict[str, Any]:
    epochs, parts = epochs_of(run.trial), split(run.trial)
    last = epochs[-1] if epochs else None
    losses = [loss for epoch in epochs for _, loss in epoch.losses]
    finite = [loss for loss in losses if math.isfinite(loss)]
    return {
        **trial_values(run.trial),
        **values_of(COLUMNS, run),
        "seconds": parts and parts.total,
        "start_seconds": parts and parts.start,
        "validation_seconds": parts and parts.validation,
        "accuracy": last and last.accuracy,
        "perplexity": last and perplexity(last),
        "final_score": last and last.score,
        "published_pair_speedup": (pairs or {}).get(run.trial.spec.key),
        "final_loss": last and last.losses[-1][1],
        # Between its own extremes; a few values are no curve.
        "loss_curve": sparkline(losses, min(finite), max(finite)) if len(finite) > 3 else None,
    }


def gpus_text(spec: TrialSpec) -> str:
    """Return how many GPUs share a step, and how: `4 ddp`."""
    return str(spec.world_size) if spec.parallelism == "none" else f"{spec.world_size} {spec.parallelism}"


def data_table(
    runs: Sequence[Row], pairs: Mapping[str, float] | None = None, *, with_curve: bool = False
) -> DataTable[FlatRow]:
    fields = [each for each in in_tables(COLUMNS) if with_curve or each.name != "loss_curve"]
    rows: list[FlatRow] = [flat_row(run, pairs) for run in runs]
    group = competing_by("workload", "data_set", "batch_size", "gpus", "seed", "length")
    return DataTable(worth_showing(fields, rows, _ALWAYS), rows, group)


def short_table(runs: Sequence[Row]) -> DataTable[FlatRow]:
    """Return the table of training runs with the columns that decide; one that failed is not as fast as any."""
    rows = [flat_row(run) for run in runs]
    rows = [row if row["status"] == "ok" else {**row, "speedup": None} for row in rows]
    if all((row["data_share"] or 0.0) < _WAITS for row in rows):
        rows = [{**row, "data_share": None} for row in rows]
    are_ok = all(row["status"] == "ok" for row in rows)
    columns = [each for each in short_columns(COLUMNS) if each.name != "status" or not are_ok]
    return short_table_of(columns, rows, ("seconds",), wraps=("precision", "length"))


def failure_lines(runs: Sequence[Row]) -> list[str]:
    failed = (run.trial for run in runs if run.trial.status != "ok")
    return [f"{trial.spec.label}: {trial.status}: {trial.message}" for trial in failed]


def parts(runs: Sequence[Row], pairs: Mapping[str, float] | None = None, *, wide: bool = False) -> list[Part]:
    def style(row: FlatRow) -> str | None:
        return None if row["status"] == "ok" else "red"

    if wide:
        return [Grid(data_table(runs, pairs, with_curve=True), style)]
    return [Grid(short_table(runs), style, setting=_SETTING)]
