"""The results of training runs as tables."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from castwise.analysis.result_table import Row
from castwise.analysis.training_metrics import best_accuracy, data_share, epochs_of, length_in_words, perplexity, split
from castwise.show.fields import FlatRow, find_field, trial_values, worth_showing
from castwise.show.presentation import Grid, Part
from castwise.show.table import DataTable, competing_by, short_table_of
from castwise.show.units import sparkline
from castwise.spec.trial import TrialSpec

SHOWN = (
    *("workload", "data_set", "precision", "loss_scale", "techniques", "batch_size", "gpus", "seed", "length"),
    *("seconds", "start_seconds", "data_share", "validation_seconds", "throughput_per_second", "speedup"),
    *("published_pair_speedup", "efficiency", "peak_allocated_bytes", "peak_reserved_bytes", "driver_used_bytes"),
    *("accuracy", "perplexity", "final_score", "final_loss", "skipped_steps", "status"),
)
IN_FILES = (*SHOWN, "best_accuracy", "message", "device", "key")
_ALWAYS = ("precision", "batch_size", "length", "status")
# The columns that fit into 80 characters, with their titles there.
_SHORT = {
    "precision": "precision",
    "batch_size": "batch",
    "length": "length",
    "seconds": "time",
    "speedup": "× fp32",
    "data_share": "waits for data",
    "peak_allocated_bytes": "memory",
    "accuracy": "accuracy",
    "perplexity": "perplexity",
    "final_score": "score",
    "status": "status",
}
_SETTING = ("workload", "data_set", "gpus", "seed", "techniques")
_WAITS = 0.1  # of the time; a smaller share is not worth a column
# Figures of a run under the names of their fields.
_OF_RUN = ("speedup", "peak_allocated_bytes", "peak_reserved_bytes", "driver_used_bytes", "skipped_steps")


def flat_row(run: Row, pairs: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Return the values of a training run by field name.

    Args:
        run: The run.
        pairs: Speed-ups over float32 at the batch that the source paired a run with, by the trial's key.
    """
    epochs, parts = epochs_of(run.trial), split(run.trial)
    last = epochs[-1] if epochs else None
    losses = [loss for epoch in epochs for _, loss in epoch.losses]
    finite = [loss for loss in losses if math.isfinite(loss)]
    return {
        **trial_values(run.trial),
        **{name: getattr(run, name) for name in _OF_RUN},
        "gpus": gpus_text(run.trial.spec),
        "length": length_in_words(run.trial) or "–",
        "seconds": parts and parts.total,
        "start_seconds": parts and parts.start,
        "validation_seconds": parts and parts.validation,
        "data_share": data_share(run.trial),
        "throughput_per_second": run.throughput,
        "efficiency": run.scaling_efficiency,
        "accuracy": last and last.accuracy,
        "best_accuracy": best_accuracy(run.trial),
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
    """Return the table of training runs, with the columns worth showing, on demand with the loss as a small curve."""
    *names, status = SHOWN
    fields = [
        find_field(name, "last loss" if name == "final_loss" else "")
        for name in (*names, *(["loss_curve"] if with_curve else []), status)
    ]
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
    titles = {name: title for name, title in _SHORT.items() if name != "status" or not are_ok}
    return short_table_of(titles, rows, ("seconds",), wraps=("precision", "length"))


def parts(runs: Sequence[Row], pairs: Mapping[str, float] | None = None, *, wide: bool = False) -> list[Part]:
    """Return the table of training runs."""

    def style(row: FlatRow) -> str | None:
        return None if row["status"] == "ok" else "red"

    if wide:
        return [Grid(data_table(runs, pairs, with_curve=True), style)]
    return [Grid(short_table(runs), style, setting=_SETTING)]
