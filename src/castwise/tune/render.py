"""A climb as a terminal table, Markdown, CSV or JSON."""

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from castwise.registry.techniques import join
from castwise.render.console import took_words
from castwise.render.intervals import ENDS, End, end_of, ratio_text
from castwise.render.table import Column, DataTable, csv_grid, markdown_grid, markdown_text, plain, print_data_table
from castwise.render.units import format_bytes, format_number, format_rate, format_ratio, format_seconds
from castwise.spec.trial import TrialSpec
from castwise.tune.bottleneck import sentences_of
from castwise.tune.candidates import PROMISING, TuningResult, loop_name
from castwise.tune.rows import ResultRow, lines_of, search_unit, throughput_of

_ENDINGS = {
    "nothing left": "nothing that is left pays more than its interval",
    "budget": "the next trial would not end within the budget; --budget sets another time",
    "failed": "the plain loop itself could not be measured",
}


def fastest_within(climbed: TuningResult, memory_bytes: float, batch_size: int | None = None) -> ResultRow | None:
    """Return the fastest loop tried whose processes held no more than this; None where each held more.

    That is the fastest loop of all where it does.

    Args:
        climbed: The climb.
        memory_bytes: The limit, for what the allocator reserved, by which a loop fits or not; for tensors on a CPU.
        batch_size: Of loops on this batch; None takes any.
    """
    lines = [
        line
        for line in lines_of(climbed)
        if line.throughput and line.held_bytes is not None and line.held_bytes <= memory_bytes
    ]
    lines = [line for line in lines if batch_size in (None, line.spec.batch_size)]
    best = max(lines, key=lambda line: line.throughput or 0.0, default=None)
    return next((line for line in lines if line.spec.configuration == climbed.winner.configuration), best)


def chosen(climbed: TuningResult, memory_bytes: float | None) -> TrialSpec | None:
    """Return the loop that was asked for: the fastest, or the fastest within a limit; None where none fits."""
    if memory_bytes is None:
        return climbed.winner
    within = fastest_within(climbed, memory_bytes)
    return None if within is None else within.spec


def _end_of(end: End) -> Column[ResultRow]:
    """Return the column of one end of the ratio's interval."""
    return Column(
        f"speedup_{end}", end, lambda line: end_of(line.ratio, end), lambda line: format_number(end_of(line.ratio, end))
    )


COLUMNS: tuple[Column[ResultRow], ...] = (
    Column("rung", "rung", lambda line: line.rung, lambda line: str(line.rung)),
    Column("tried", "tried", lambda line: line.tried, lambda line: line.tried, left=True),
    Column(
        "speedup",
        "over the rung below",
        lambda line: line.ratio and line.ratio.value,
        lambda line: ratio_text(line.ratio),
    ),
    Column("total_speedup", "over the plain loop", lambda line: line.total, lambda line: format_ratio(line.total)),
    Column(
        "throughput_per_second",
        "throughput",
        lambda line: line.throughput,
        lambda line: "–" if line.throughput is None else f"{format_rate(line.throughput)} {line.unit}/s",
    ),
    Column(
        "first_step_seconds",
        "first step",
        lambda line: line.first_step_seconds,
        lambda line: format_seconds(line.first_step_seconds),
    ),
    Column(
        "peak_allocated_bytes", "peak memory", lambda line: line.peak_bytes, lambda line: format_bytes(line.peak_bytes)
    ),
    Column("outcome", "verdict", lambda line: line.outcome, lambda line: line.outcome or "–", left=True),
)
_HELD: Column[ResultRow] = Column(
    "peak_reserved_bytes", "memory held", lambda line: line.held_bytes, lambda line: format_bytes(line.held_bytes)
)
_MORE: tuple[Column[ResultRow], ...] = (
    *map(_end_of, ENDS),
    Column(
        "num_processes", "n", lambda line: line.ratio and line.ratio.n, lambda line: str(line.ratio and line.ratio.n)
    ),
    Column("precision", "precision", lambda line: line.spec.precision, lambda line: line.spec.precision),
    Column(
        "techniques", "techniques", lambda line: join(line.spec.techniques), lambda line: join(line.spec.techniques)
    ),
    Column("batch_size", "batch", lambda line: line.spec.batch_size, lambda line: str(line.spec.batch_size)),
    _HELD,
    Column("reason", "reason", lambda line: line.reason, lambda line: line.reason),
)


def _columns(memory_bytes: float | None) -> tuple[Column[ResultRow], ...]:
    """Return what a table shows: of memory, where there is a limit, what is compared with it."""
    if memory_bytes is None:
        return COLUMNS
    return tuple(_HELD if column.name == "peak_allocated_bytes" else column for column in COLUMNS)


def conclusions(climbed: TuningResult, memory_bytes: float | None = None) -> list[str]:
    """Return the answer in sentences: the fastest loop, the fastest within a limit, why it ended, what bounds it."""
    lines = lines_of(climbed)
    rungs = {line.spec.configuration: line for line in lines}
    last = rungs[climbed.winner.configuration]
    unit = search_unit(climbed)
    found: list[str] = []
    if last.throughput is not None:
        found.append(
            f"The fastest loop: {_named(climbed, last)}: {format_rate(last.throughput)} {unit}/s, "
            f"{format_ratio(last.total)} the plain loop's."
        )
        found += _left_unproven(climbed, lines, last.throughput)
    if memory_bytes is not None:
        found += _of_limit(climbed, memory_bytes)
    elif last.spec.batch_size != climbed.start.batch_size:
        found.append(f"{_other_training(climbed, last)}.")
    took = took_words(len(climbed.trials), climbed.num_recorded, climbed.seconds)
    found.append(f"{took}: {_ENDINGS[climbed.ending]}.")
    if climbed.ending != "failed":
        found += sentences_of(climbed)
    return found


def _left_unproven(climbed: TuningResult, lines: Sequence[ResultRow], fastest: float) -> list[str]:
    """Return what was measured faster than the fastest rung, where no time was left to prove it."""
    if climbed.ending != "budget":
        return []
    doubtful = [line for line in lines if line.outcome in ("unproven", "second best") and line.throughput is not None]
    top = max(doubtful, key=lambda line: line.throughput or 0.0, default=None)
    if top is None or (top.throughput or 0.0) <= fastest * PROMISING:
        return []
    return [
        f"Measured faster, but not proven within the time: {_named(climbed, top)}: {format_rate(top.throughput)} "
        f"{search_unit(climbed)}/s; the same command with a longer --budget goes on from there."
    ]


def _of_limit(climbed: TuningResult, memory_bytes: float) -> list[str]:
    """Return what is within a limit, and what another batch changes."""
    within, limit, unit = fastest_within(climbed, memory_bytes), format_bytes(memory_bytes), search_unit(climbed)
    if within is None:
        held = [line for line in lines_of(climbed) if line.held_bytes is not None]
        least = min(held, key=lambda line: line.held_bytes or 0, default=None)
        none = f"No loop that was tried fits into {limit}"
        if least is None:
            return [f"{none}."]
        name = f"{loop_name(least.spec)}, batch {least.spec.batch_size}"
        return [f"{none}; the least is {format_bytes(least.held_bytes)}, by {name}."]

    def told(line: ResultRow) -> str:
        return (
            f"{_named(climbed, line)}: {format_rate(line.throughput)} {unit}/s, holds {format_bytes(line.held_bytes)}"
        )

    found, batch_size = [f"The fastest within {limit}: {told(within)}."], climbed.start.batch_size
    if within.spec.batch_size != batch_size:
        same = fastest_within(climbed, memory_bytes, batch_size)
        first = "no loop that was tried fits" if same is None else f"the fastest that fits is {told(same)}"
        found.append(f"{_other_training(climbed, within)}; on batch {batch_size} {first}.")
    return found


def _named(climbed: TuningResult, line: ResultRow) -> str:
    """Return a loop's name, with its batch where that is not the plain loop's."""
    batch_size = line.spec.batch_size
    return loop_name(line.spec) + ("" if batch_size == climbed.start.batch_size else f", batch {batch_size}")


def _other_training(climbed: TuningResult, line: ResultRow) -> str:
    return (
        f"Batch {line.spec.batch_size} in the place of {climbed.start.batch_size} is another training: "
        "the noise of gradients and the statistics of batch norm differ"
    )


def measured_words(climbed: TuningResult, spec: TrialSpec) -> str:
    """Return what was measured of a loop, where, in a line."""
    own = climbed.of(spec)
    environment = own[0].environment
    return (
        f"Measured by castwise {environment.castwise}: {format_rate(throughput_of(own))} {search_unit(climbed)}/s on "
        f"{environment.device_name}, torch {environment.torch}, {own[0].started_at[:10]}."
    )


def reasons(climbed: TuningResult) -> list[str]:
    """Return why moves failed, or could not be had."""
    found = [why_of(line) for line in lines_of(climbed) if line.outcome in ("failed", "unsupported")]
    return list(dict.fromkeys(found))


def why_of(line: ResultRow) -> str:
    """Return why a move failed, or could not be had, with its name once."""
    # What a technique is refused for begins with its name.
    return line.reason if line.reason.startswith(f"{line.tried} ") else f"{line.tried}: {line.reason}"


def headline(climbed: TuningResult) -> str:
    """Return what was tuned, where."""
    spec = climbed.start
    where = climbed.trials[0].environment.device_name if climbed.trials else spec.device
    return f"{spec.workload}, batch {spec.batch_size}, on {where}: from {loop_name(spec)}"


# Columns that narrow terminals go without.
_LEFT_OUT_FIRST = ("first_step_seconds", "peak_allocated_bytes", "peak_reserved_bytes")


def print_tuning(climbed: TuningResult, console: Console, memory_bytes: float | None = None) -> None:
    """Print a climb to a terminal."""
    soft = not console.is_terminal
    console.print(escape(headline(climbed)), style="bold", soft_wrap=soft)
    lines = lines_of(climbed)

    def style(line: ResultRow) -> str | None:
        return "bold green" if line.outcome == "taken" else (None if line.outcome is None else "dim")

    print_data_table(console, DataTable(_columns(memory_bytes), lines), drop_first=_LEFT_OUT_FIRST, style=style)
    for line in reasons(climbed):
        console.print(f"  {escape(line)}", style="yellow", soft_wrap=soft)
    console.print()
    for line in conclusions(climbed, memory_bytes):
        console.print(escape(line), soft_wrap=soft)


def markdown_tuning(climbed: TuningResult, memory_bytes: float | None = None) -> str:
    """Return a climb as Markdown."""
    remarks = [f"- {markdown_text(line)}" for line in reasons(climbed)]
    said = [f"- {markdown_text(line)}" for line in conclusions(climbed, memory_bytes)]
    grid = markdown_grid(_columns(memory_bytes), lines_of(climbed))
    return "\n".join([markdown_text(headline(climbed)), "", *grid, "", *remarks, *said]) + "\n"


def csv_tuning(climbed: TuningResult) -> str:
    """Return a line a loop that was tried, plain values."""
    return csv_grid((*COLUMNS, *_MORE), lines_of(climbed))


def json_tuning(climbed: TuningResult, memory_bytes: float | None = None) -> str:
    """Return the lines, the winner, the sentences and the whole records as JSON."""
    within, same = (
        None if memory_bytes is None else fastest_within(climbed, memory_bytes, batch_size)
        for batch_size in (None, climbed.start.batch_size)
    )
    document: dict[str, Any] = {
        "workload": climbed.start.workload,
        "rows": [plain((*COLUMNS, *_MORE), line) for line in lines_of(climbed)],
        "fastest": _loop(climbed.winner),
        "fastest_within_memory": None if within is None else _loop(within.spec),
        "fastest_within_memory_on_this_batch": None if same is None else _loop(same.spec),
        "memory_limit_bytes": None if memory_bytes is None else int(memory_bytes),
        "ending": climbed.ending,
        "budget_seconds": climbed.budget_seconds,
        "seconds": climbed.seconds,
        "num_recorded": climbed.num_recorded,
        "sentences": conclusions(climbed, memory_bytes),
        "trials": [json.loads(trial.model_dump_json()) for trial in climbed.trials],
    }
    return json.dumps(document, indent=2, allow_nan=False)


def _loop(spec: TrialSpec) -> dict[str, Any]:
    return {
        "precision": spec.precision,
        "loss_scale": spec.loss_scale,
        "techniques": list(spec.techniques),
        "batch_size": spec.batch_size,
    }
