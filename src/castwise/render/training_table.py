"""The results of training runs as tables."""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from rich.console import Console

from castwise.analysis.training_metrics import Run, data_share, epochs_of, length_in_words
from castwise.render.fields import Field, FlatRow, find_field, trial_values, worth_showing
from castwise.render.table import IN_CSV, DataTable, print_data_table
from castwise.render.units import sparkline
from castwise.spec.trial import TrialSpec

SHOWN = (
    "workload",
    "data_set",
    "precision",
    "loss_scale",
    "techniques",
    "batch_size",
    "gpus",
    "seed",
    "length",
    "seconds",
    "start_seconds",
    "data_share",
    "validation_seconds",
    "throughput_per_second",
    "speedup",
    "published_pair_speedup",
    "efficiency",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "driver_used_bytes",
    "accuracy",
    "perplexity",
    "final_loss",
    "skipped_steps",
    "status",
)
IN_FILES = (*SHOWN, "best_accuracy", "message", "device", "key")
_ALWAYS = ("precision", "batch_size", "length", "status")
_DROP_FIRST = (
    "loss_curve",
    "start_seconds",
    "validation_seconds",
    "driver_used_bytes",
    "peak_reserved_bytes",
    "final_loss",
    "data_set",
    "skipped_steps",
    "throughput_per_second",
    "data_share",
    "peak_allocated_bytes",
    "efficiency",
    "published_pair_speedup",
)


def flat_row(run: Run, pairs: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Return the values of a training run by field name.

    Args:
        run: The run.
        pairs: Speed-ups over float32 at the batch that the source paired a run with, by the trial's key.
    """
    spec, epochs, split = run.trial.spec, epochs_of(run.trial), run.split
    return {
        **trial_values(run.trial),
        "gpus": gpus_text(spec),
        "length": length_in_words(run.trial) or "–",
        "seconds": None if split is None else split.total,
        "start_seconds": None if split is None else split.start,
        "validation_seconds": None if split is None else split.validation,
        "data_share": data_share(run.trial),
        "throughput_per_second": run.throughput,
        "speedup": run.speedup,
        "published_pair_speedup": None if pairs is None else pairs.get(spec.key),
        "efficiency": run.efficiency,
        "peak_allocated_bytes": run.peak_allocated_bytes,
        "peak_reserved_bytes": run.peak_reserved_bytes,
        "driver_used_bytes": run.driver_used_bytes,
        "accuracy": run.accuracy,
        "best_accuracy": run.best_accuracy,
        "perplexity": run.perplexity,
        "final_loss": epochs[-1].losses[-1][1] if epochs else None,
        "loss_curve": _loss_curve(run),
        "skipped_steps": run.skipped_steps,
    }


def gpus_text(spec: TrialSpec) -> str:
    """Return how many GPUs share a step, and how: `4 ddp`."""
    return str(spec.world_size) if spec.parallelism == "none" else f"{spec.world_size} {spec.parallelism}"


def _loss_curve(run: Run) -> str | None:
    """Return the training loss as a small curve between its own extremes; None for a few values."""
    losses = [loss for epoch in epochs_of(run.trial) for _, loss in epoch.losses]
    finite = [loss for loss in losses if math.isfinite(loss)]
    return sparkline(losses, min(finite), max(finite)) if len(finite) > 3 else None


def data_table(
    runs: Sequence[Run], pairs: Mapping[str, float] | None = None, *, with_curve: bool = False
) -> DataTable[FlatRow]:
    """Return the table of training runs, with the columns worth showing.

    Args:
        runs: The runs.
        pairs: Speed-ups over float32 at the batch that the source paired a run with, by the trial's key.
        with_curve: Whether to draw the loss over time in characters.
    """
    *names, status = SHOWN
    fields = [_field(name) for name in (*names, *(["loss_curve"] if with_curve else []), status)]
    rows: list[FlatRow] = [flat_row(run, pairs) for run in runs]
    note = "the best among runs that differ in precision alone"
    return DataTable(worth_showing(fields, rows, _ALWAYS), rows, _competing, note)


def _field(name: str) -> Field:
    return find_field(name, "last loss") if name == "final_loss" else find_field(name)


def _competing(row: FlatRow) -> Hashable:
    names = ("workload", "data_set", "batch_size", "gpus", "seed", "length")
    return tuple(row[name] for name in names) if row["status"] == "ok" else None


def print_runs(
    runs: Sequence[Run], pairs: Mapping[str, float] | None, console: Console, elsewhere: str = IN_CSV
) -> None:
    """Print a table of training runs to a terminal.

    Args:
        runs: The runs.
        pairs: Speed-ups over float32 at the batch that the source paired a run with, by the trial's key.
        console: The terminal.
        elsewhere: Where the columns are that a narrow terminal leaves out.
    """

    def style(row: FlatRow) -> str | None:
        return None if row["status"] == "ok" else "dim"

    table = data_table(runs, pairs, with_curve=True)
    print_data_table(console, table, drop_first=_DROP_FIRST, style=style, elsewhere=elsewhere)
