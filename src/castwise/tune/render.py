"""The result of a search as a terminal table, Markdown, CSV or JSON."""

import json
import math
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape

from castwise.analysis import steady_metrics
from castwise.registry.techniques import join
from castwise.render.console import took_words
from castwise.render.fields import FlatRow, estimate_values, find_field, find_fields
from castwise.render.table import DataTable, csv_grid, markdown_grid, markdown_text, plain, print_data_table
from castwise.render.units import format_bytes, format_rate, format_ratio
from castwise.spec.trial import TrialSpec
from castwise.tune.bottleneck import evidence_of, explain
from castwise.tune.candidates import TriedChange
from castwise.tune.measurements import PROMISING, Measurements, key_of, loop_name, unique
from castwise.tune.search import TuningResult
from castwise.tune.time_budget import first_step_seconds

_ENDINGS = {
    "nothing left": "nothing is left to try",
    "budget": "the next measurement would not end within the budget; --budget sets another one",
    "failed": "the plain loop could not be measured",
}


@dataclass(frozen=True)
class ResultRow:
    """A configuration that was tried, as a row of the table.

    Attributes:
        start: The plain loop.
        change: What was tried; None in the plain loop's row.
        measured: What was measured.
    """

    start: TrialSpec
    change: TriedChange | None
    measured: Measurements

    @property
    def spec(self) -> TrialSpec:
        """Return the configuration."""
        return self.start if self.change is None else self.change.spec

    @property
    def stage(self) -> int:
        """Return 0 for the plain loop, 1 for what was tried on it, and one more for each change accepted before."""
        return 0 if self.change is None else self.change.stage + 1

    @property
    def tried(self) -> str:
        """Return what the configuration changes of the one accepted before."""
        if self.change is None:
            return "plain loop"
        return self.change.change.name + (" (within the limit)" if self.change.limited else "")

    @property
    def outcome(self) -> str | None:
        """Return what came of it; None for the plain loop."""
        return None if self.change is None else self.change.outcome

    @property
    def total(self) -> float | None:
        """Return the speed-up over the plain loop."""
        ratio = self.measured.ratio(self.start, self.spec)
        return None if ratio is None else (1.0 if self.change is None else ratio.value)

    @property
    def throughput(self) -> float | None:
        """Return units per second."""
        return self.measured.rate(self.spec)

    @property
    def throughput_text(self) -> str:
        """Return units per second as text."""
        if self.throughput is None:
            return "–"
        return f"{format_rate(self.throughput)} {steady_metrics.unit_of(self.measured.of(self.spec)[0])}/s"

    @property
    def first_step_seconds(self) -> float | None:
        """Return the longest first step, kernel search and compilation included."""
        return max(filter(None, map(first_step_seconds, self.measured.of(self.spec))), default=None)

    @property
    def peak_bytes(self) -> int | None:
        """Return the peak of what tensors held."""
        return steady_metrics.largest(map(steady_metrics.peak_allocated_bytes, self.measured.of(self.spec)))

    @property
    def held_bytes(self) -> int | None:
        """Return the peak of what a memory limit counts: what the allocator reserved; on a CPU what tensors held."""
        held = self.measured.held_bytes(self.spec)
        return int(held) if math.isfinite(held) else None

    @property
    def name(self) -> str:
        """Return the configuration's name, with its batch if that is not the plain loop's."""
        is_same_batch = self.spec.batch_size == self.start.batch_size
        return loop_name(self.spec) + ("" if is_same_batch else f", batch {self.spec.batch_size}")


def rows_of(result: TuningResult) -> list[ResultRow]:
    """Return the plain loop and all that was tried, in order; a change that cannot be had comes once, pairs do not."""
    rows = [ResultRow(result.start, None, result.measured)]
    named = {each.change for each in result.tried if result.measured.of(each.spec)}
    for each in result.tried:
        if each.outcome == "unsupported" and not result.measured.of(each.spec):
            if len(each.change.parts) > 1 or each.change in named:
                continue
            named.add(each.change)
        rows.append(ResultRow(result.start, each, result.measured))
    return rows


def fastest_within(result: TuningResult, memory_bytes: float, batch_size: int | None = None) -> ResultRow | None:
    """Return the fastest configuration whose processes held no more than this; None if each held more.

    Args:
        result: The result.
        memory_bytes: The limit, for what the allocator reserved; on a CPU for what tensors held.
        batch_size: Of configurations with this batch; None takes any.
    """
    rows = [
        row
        for row in rows_of(result)
        if row.throughput and row.held_bytes is not None and row.held_bytes <= memory_bytes
        if batch_size in (None, row.spec.batch_size)
    ]
    best = max(rows, key=lambda row: row.throughput or 0.0, default=None)
    return next((row for row in rows if key_of(row.spec) == key_of(result.winner)), best)


def chosen(result: TuningResult, memory_bytes: float | None) -> TrialSpec | None:
    """Return the configuration that was asked for: the fastest, or the fastest within a limit; None if none fits."""
    if memory_bytes is None:
        return result.winner
    within = fastest_within(result, memory_bytes)
    return None if within is None else within.spec


SHOWN = (
    "stage",
    "tried",
    "speedup",
    "total_speedup",
    "throughput_per_second",
    "first_step_seconds",
    "peak_allocated_bytes",
    "outcome",
)
IN_FILES = (
    *SHOWN,
    "speedup_low",
    "speedup_high",
    "num_processes",
    "precision",
    "techniques",
    "batch_size",
    "peak_reserved_bytes",
    "reason",
)
_TITLES = {"peak_allocated_bytes": "peak memory", "peak_reserved_bytes": "memory held"}
_DROP_FIRST = ("first_step_seconds", "peak_allocated_bytes", "peak_reserved_bytes")


def flat_row(row: ResultRow) -> FlatRow:
    """Return the values of a configuration that was tried, by field name."""
    ratio = None if row.change is None else row.change.ratio
    return {
        "stage": row.stage,
        "tried": row.tried,
        **estimate_values("speedup", ratio),
        "num_processes": None if ratio is None else ratio.n,
        "total_speedup": row.total,
        "throughput_per_second": row.throughput,
        "unit": None if row.throughput is None else steady_metrics.unit_of(row.measured.of(row.spec)[0]),
        "first_step_seconds": row.first_step_seconds,
        "peak_allocated_bytes": row.peak_bytes,
        "peak_reserved_bytes": row.held_bytes,
        "outcome": row.outcome,
        "reason": "" if row.change is None else row.change.reason,
        "precision": row.spec.precision,
        "techniques": join(row.spec.techniques),
        "batch_size": row.spec.batch_size,
    }


def data_table(result: TuningResult, memory_bytes: float | None) -> DataTable[FlatRow]:
    """Return the table of all that was tried; with a limit it shows the memory that is compared with the limit."""
    held = "peak_allocated_bytes" if memory_bytes is None else "peak_reserved_bytes"
    names = [held if name == "peak_allocated_bytes" else name for name in SHOWN]
    fields = [find_field(name, _TITLES.get(name, "")) for name in names]
    return DataTable(fields, [flat_row(row) for row in rows_of(result)])


def conclusions(result: TuningResult, memory_bytes: float | None = None) -> list[str]:
    """Return the answer in sentences: the fastest loop, the fastest within a limit, why it ended, what bounds it."""
    rows = rows_of(result)
    winner = next(row for row in reversed(rows) if key_of(row.spec) == key_of(result.winner))
    sentences: list[str] = []
    if winner.throughput is not None:
        total = "" if winner.total is None else f", {format_ratio(winner.total)} the plain loop's"
        sentences.append(f"The fastest loop: {winner.name}: {winner.throughput_text}{total}.")
        unproven = [row for row in rows if row.outcome in ("unproven", "second best") and row.throughput]
        top = max(unproven, key=lambda row: row.throughput or 0.0, default=None)
        if result.ending == "budget" and top and (top.throughput or 0.0) > winner.throughput * PROMISING:
            sentences.append(
                f"Measured faster, but not proven within the budget: {top.name}: {top.throughput_text}; the same "
                "command with a longer --budget goes on from there."
            )
    if memory_bytes is not None:
        sentences += _within_limit(result, rows, memory_bytes)
    elif winner.spec.batch_size != result.start.batch_size:
        sentences.append(f"{_other_training(winner)}.")
    took = took_words(len(result.trials), result.num_recorded, result.seconds)
    sentences.append(f"{took}: {_ENDINGS[result.ending]}.")
    if result.ending != "failed":
        for spec in unique((result.start, result.winner)):
            sentences.append(f"{loop_name(spec)}: {explain(evidence_of(result.measured, spec))}")
    return sentences


def _within_limit(result: TuningResult, rows: list[ResultRow], memory_bytes: float) -> list[str]:
    """Return the fastest loop within a limit, and what another batch changes."""
    limit, within = format_bytes(memory_bytes), fastest_within(result, memory_bytes)
    if within is None:
        known = [row for row in rows if row.held_bytes is not None]
        least = min(known, key=lambda row: row.held_bytes or 0, default=None)
        if least is None:
            return [f"No loop that was tried fits into {limit}."]
        name = f"{loop_name(least.spec)}, batch {least.spec.batch_size}"
        return [f"No loop that was tried fits into {limit}; the least is {format_bytes(least.held_bytes)}, by {name}."]

    def described(row: ResultRow) -> str:
        return f"{row.name}: {row.throughput_text}, holds {format_bytes(row.held_bytes)}"

    sentences = [f"The fastest within {limit}: {described(within)}."]
    batch_size = result.start.batch_size
    if within.spec.batch_size != batch_size:
        same = fastest_within(result, memory_bytes, batch_size)
        fits = "no loop that was tried fits" if same is None else f"the fastest that fits is {described(same)}"
        sentences.append(f"{_other_training(within)}; on batch {batch_size} {fits}.")
    return sentences


def _other_training(row: ResultRow) -> str:
    return (
        f"Batch {row.spec.batch_size} instead of {row.start.batch_size} is another training: the noise of gradients "
        "and the statistics of batch norm differ"
    )


def measured_words(result: TuningResult, spec: TrialSpec) -> str:
    """Return what was measured of a configuration, and where, in a line."""
    trial = result.measured.of(spec)[0]
    environment, rate = trial.environment, result.measured.rate(spec)
    return (
        f"Measured by castwise {environment.castwise}: {format_rate(rate)} {steady_metrics.unit_of(trial)}/s on "
        f"{environment.device_name}, torch {environment.torch}, {trial.started_at[:10]}."
    )


def reasons(result: TuningResult) -> list[str]:
    """Return why changes failed or could not be had, each reason once and with the change's name once."""
    found: dict[str, None] = {}
    for row in rows_of(result):
        if row.change is not None and row.outcome in ("failed", "unsupported"):
            reason = row.change.reason  # of a technique that is refused it begins with the name
            found[reason if reason.startswith(f"{row.tried} ") else f"{row.tried}: {reason}"] = None
    return list(found)


def headline(result: TuningResult) -> str:
    """Return what was tuned, and where."""
    spec = result.start
    where = result.trials[0].environment.device_name if result.trials else spec.device
    return f"{spec.workload}, batch {spec.batch_size}, on {where}: from {loop_name(spec)}"


def print_tuning(result: TuningResult, console: Console, memory_bytes: float | None = None) -> None:
    """Print a result to a terminal."""
    soft = not console.is_terminal
    console.print(escape(headline(result)), style="bold", soft_wrap=soft)

    def style(row: FlatRow) -> str | None:
        return "bold green" if row["outcome"] == "taken" else (None if row["outcome"] is None else "dim")

    print_data_table(console, data_table(result, memory_bytes), drop_first=_DROP_FIRST, style=style)
    for line in reasons(result):
        console.print(f"  {escape(line)}", style="yellow", soft_wrap=soft)
    console.print()
    for line in conclusions(result, memory_bytes):
        console.print(escape(line), soft_wrap=soft)


def markdown_tuning(result: TuningResult, memory_bytes: float | None = None) -> str:
    """Return a result as Markdown."""
    lines = [f"- {markdown_text(line)}" for line in (*reasons(result), *conclusions(result, memory_bytes))]
    table = data_table(result, memory_bytes)
    grid = markdown_grid(table.columns, table.rows)
    return "\n".join([markdown_text(headline(result)), "", *grid, "", *lines]) + "\n"


def csv_tuning(result: TuningResult) -> str:
    """Return a line for each configuration that was tried, with plain values."""
    return csv_grid(find_fields(IN_FILES), [flat_row(row) for row in rows_of(result)])


def json_tuning(result: TuningResult, memory_bytes: float | None = None) -> str:
    """Return the rows, the fastest configurations, the sentences and the whole records as JSON."""

    def configuration(spec: TrialSpec | None) -> dict[str, Any] | None:
        if spec is None:
            return None
        return {
            "precision": spec.precision,
            "loss_scale": spec.loss_scale,
            "techniques": list(spec.techniques),
            "batch_size": spec.batch_size,
        }

    def within(batch_size: int | None) -> dict[str, Any] | None:
        row = None if memory_bytes is None else fastest_within(result, memory_bytes, batch_size)
        return configuration(None if row is None else row.spec)

    document: dict[str, Any] = {
        "workload": result.start.workload,
        "rows": [plain(find_fields(IN_FILES), flat_row(row)) for row in rows_of(result)],
        "fastest": configuration(result.winner),
        "fastest_within_memory": within(None),
        "fastest_within_memory_on_this_batch": within(result.start.batch_size),
        "memory_limit_bytes": None if memory_bytes is None else int(memory_bytes),
        "ending": result.ending,
        "budget_seconds": result.budget_seconds,
        "seconds": result.seconds,
        "num_recorded": result.num_recorded,
        "sentences": conclusions(result, memory_bytes),
        "trials": [json.loads(trial.model_dump_json()) for trial in result.trials],
    }
    return json.dumps(document, indent=2, allow_nan=False)
