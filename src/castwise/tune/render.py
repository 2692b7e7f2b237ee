"""The result of a search as a table, sentences, and what to change."""

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from castwise.analysis.code_snippets import loop_patch
from castwise.analysis.decide import doubts_of
from castwise.registry.precisions import AS_WRITTEN, BASELINE, DEFAULT, REFERENCE_WORDS, precision_row
from castwise.show.console import took_words
from castwise.show.fields import Field, FlatRow, column, find_field, short_columns, short_ratio_text
from castwise.show.notes import machine_line
from castwise.show.presentation import Code, Grid, Lines, Part, Presentation
from castwise.show.table import DataTable, json_document, plain, short_table_of
from castwise.show.units import format_bytes, format_ratio, pluralize
from castwise.spec.quantities import truncate_list
from castwise.spec.trial import TrialSpec
from castwise.tune.measurements import DRIFTED, PROMISING, key_of, unique
from castwise.tune.result import SIMPLE, TuningResult

# All columns: those of tables first, then those that only CSV and JSON have.
COLUMNS = (
    Field("stage", "stage", "count"),
    Field("tried", "tried", short="change"),
    column("speedup", short="× before"),
    Field("total_speedup", "over the plain loop", "ratio", short="× start"),
    Field("fp32_speedup", "over fp32", "ratio", short="× fp32"),
    column("throughput_per_second", short="throughput"),
    column("first_step_seconds"),
    column("peak_allocated_bytes", short="memory", title="peak memory"),
    Field("outcome", "verdict"),
    *(Field(f"total_speedup_{end}", unit="number", place="files") for end in ("low", "high")),
    *(column(name, place="files") for name in ("speedup_low", "speedup_high", "num_processes", "precision")),
    *(column(name, place="files") for name in ("techniques", "batch_size")),
    column("peak_reserved_bytes", short="memory held", title="memory held", place="files"),
    Field("reason", "reason", place="files"),
)
MEASURED = "Measured by castwise"  # is in each script that is written
_OPEN = ("second best", "unproven")  # of these the fastest are named
_MOST_OPEN = 5
_MOST_NAMED = 3
_COUNTED = ("unproven", "same", "slower", "too large", "failed", "not tried", "unsupported")
_ENDINGS = {
    "nothing left": "nothing is left to try",
    "budget": "nothing more would end within the budget; a larger --budget continues",
    "failed": "the plain loop could not be measured",
    "interrupted": "it was interrupted",
}


def speedup_words(result: TuningResult, row: FlatRow) -> str:
    """Return a row's speed-up with what it is over, and its interval in the final session; empty if it has none.

    `3.41× PyTorch's default (9.35× fp32), proven: 3.40× to 3.42× in the final session`.
    """
    start, over_fp32 = result.start, row["fp32_speedup"]
    if key_of(row["spec"]) == key_of(start):
        return ""
    if row["total_speedup"] is None:
        return "" if result.measured.agrees(start, row["spec"]) else f"its speed-up is unknown, as {DRIFTED}"
    base = REFERENCE_WORDS.get(start.precision, f"the plain {start.precision} loop's")
    words = f"{format_ratio(row['total_speedup'])} {base}"
    is_over_both = start.precision != BASELINE and over_fp32 is not None
    words += f" ({format_ratio(over_fp32)} fp32)" if is_over_both else ""
    low, high = row["total_speedup_low"], row["total_speedup_high"]
    if low is None:
        return f"{words}, not measured again"
    proven = "proven" if low > 1 else "not proven"
    return f"{words}, {proven}: {format_ratio(low)} to {format_ratio(high)} in the final session"


def patch(result: TuningResult, spec: TrialSpec) -> str:
    """Return what to change in a loop to get a configuration, with what each accepted change bought."""
    gains: dict[str, str] = {}
    for attempt in result.tried:
        if attempt.is_accepted and attempt.ratio is not None:
            parts = [*filter(None, (attempt.change.precision,)), *attempt.change.techniques]
            bought = f"{attempt.change.name}: {format_ratio(attempt.ratio.value)}"
            gains |= {name: bought for name in parts if name in (spec.precision, *spec.techniques)}
    trials = result.measured.of(spec) or result.measured.of(result.start)
    facts = trials[0].facts if trials else None
    # A precision that the plain loop has already is no change.
    is_plain = spec.precision == result.start.precision != AS_WRITTEN
    row = precision_row(DEFAULT if is_plain else spec.precision)
    return loop_patch(row, spec, facts, gains)


def patch_summary(result: TuningResult, spec: TrialSpec) -> str:
    """Return a comment that says what was found, for the first line of a patch."""
    row, rate = result.row_of(spec), result.measured.rate(spec)
    doubts = _doubts(result, spec)
    found = f"keep your loop ({spec.loop_name}). Nothing was proven faster"
    if key_of(spec) != key_of(result.start):
        found = ", ".join(
            filter(None, [row["name"] if rate is None else _name_and_rate(row), speedup_words(result, row)])
        )
    found += f" ({doubts})" if doubts else ""
    took = took_words(len(result.trials), result.num_recorded, result.seconds)
    return f"# {spec.workload}: {'; '.join(filter(None, [found, took, _not_tried(result.rows)]))}."


def _table(result: TuningResult, *, has_all: bool) -> DataTable[FlatRow]:
    """Return all that was tried, or the accepted rows with the columns that decide.

    With a memory limit the columns have the memory that is compared with it.
    """
    left_out = {"peak_reserved_bytes" if result.memory_bytes is None else "peak_allocated_bytes"}
    left_out |= {"fp32_speedup"} if result.fp32 is None else set()
    start = result.start.precision
    columns = [
        replace(field, title=f"over {start}", short=f"× {start}") if field.name == "total_speedup" else field
        for field in COLUMNS
        if field.name not in left_out
    ]
    if has_all:
        shown = [field for field in columns if field.place != "files" or field.name == "peak_reserved_bytes"]
        return DataTable(shown, result.rows)
    first = ("tried", "speedup", "throughput_per_second")
    return short_table_of(short_columns(columns), accepted_rows(result), first, wraps=("tried",))


def accepted_rows(result: TuningResult) -> list[FlatRow]:
    return [row for row in result.rows if row["outcome"] in (None, "accepted")]


def counts(result: TuningResult, shown: Collection[str] = ()) -> list[str]:
    """Return which changes came to nothing, a line for each outcome, without those that are shown."""
    outcomes = {row["tried"]: row["outcome"] for row in result.rows}  # the last one of each change
    accepted = {row["tried"] for row in accepted_rows(result)}
    lines = []
    for outcome in _COUNTED:
        names = [name for name, each in outcomes.items() if each == outcome and name not in (*accepted, *shown)]
        if outcome == "unsupported":
            names += [name for lacking in result.without_layers.values() for name in lacking]
        if names:
            lines.append(f"{outcome}: {pluralize(len(names), 'change')} ({truncate_list(names, most=_MOST_NAMED)})")
    return lines


def conclusions(result: TuningResult) -> list[str]:
    """Return the answer in sentences: the fastest loop, the fastest within a limit, why it ended, what bounds it."""
    return [*answers(result), *bounds(result)]


def answers(result: TuningResult) -> list[str]:
    """Return the fastest loop, the fastest within a limit, and why the search ended."""
    winner = next(row for row in reversed(result.rows) if key_of(row["spec"]) == key_of(result.winner))
    sentences = _about_the_fastest(result, winner) if winner["throughput_per_second"] is not None else []
    simple = result.simplest if result.was_compared else None
    best = result.chosen
    if simple is not None and best is not None and key_of(simple) != key_of(best):
        row = next(row for row in result.rows if key_of(row["spec"]) == key_of(simple))
        sentences.append(f"The simplest loop within {1 - SIMPLE:.0%} of it: {_name_and_rate(row)}.")
    if result.memory_bytes is not None:
        sentences += _within_limit(result)
    elif winner["batch_size"] != result.start.batch_size:
        sentences.append(f"{_other_training(result, winner)}.")
    sentences += [f"Its accuracy is {result.accuracy}."] if result.accuracy else []
    took = took_words(len(result.trials), result.num_recorded, result.seconds)
    sentences.append(f"{took}: {_ENDINGS[result.ending]}.")
    return sentences


def _about_the_fastest(result: TuningResult, winner: FlatRow) -> list[str]:
    """Return the fastest loop, and what may be faster."""
    left = f" ({not_tried})" if (not_tried := _not_tried(result.rows)) else ""
    if not result.was_compared:
        return [f"No change was compared with the plain loop{left}, {_name_and_rate(winner)}."]
    faster = speedup_words(result, winner)
    early = {"budget": " before the budget ended", "interrupted": " before the interruption"}
    before = early[result.ending] + left if result.ending in early else ""
    found = f" found{before}" if before else ""
    doubts = _doubts(result, result.winner)
    which = f"What looks fastest{found} ({doubts})" if doubts and faster else f"The fastest loop{found}"
    if key_of(result.winner) == key_of(result.start):
        which = f"No change was proven faster{before}. Keep the plain loop"
    disturbed = _disturbed(result)
    sentences = [f"{which}: {_name_and_rate(winner)}{faster and f', {faster}'}.", *disturbed]
    unproven = [row for row in result.rows if row["outcome"] in _OPEN]
    top = max(unproven, key=lambda row: row["throughput_per_second"] or 0.0, default=winner)
    is_faster = (top["throughput_per_second"] or 0.0) > winner["throughput_per_second"] * PROMISING
    if result.ending == "budget" and is_faster and not disturbed:
        sentences.append(
            f"Perhaps faster: {_name_and_rate(top)}. The budget ended before that was certain; the same command with a "
            "longer --budget goes on from there."
        )
    return sentences


def _doubts(result: TuningResult, spec: TrialSpec) -> str:
    """Return what disturbed the machine while a loop and the plain one ran, in a few words."""
    return ", ".join(doubts_of([*result.measured.of(result.start), *result.measured.of(spec)]))


def _disturbed(result: TuningResult) -> list[str]:
    """Return what looked faster and was not proven because something disturbed the machine."""
    unproven = [attempt for attempt in result.tried if attempt.outcome == "unproven"]
    top = max(unproven, key=lambda attempt: attempt.speedup, default=None)
    if top is None or top.speedup <= PROMISING:
        return []
    doubts = _doubts(result, top.spec) or ("" if result.measured.agrees(top.below, top.spec) else DRIFTED)
    if not doubts:
        return []
    return [
        f"Perhaps faster: {top.change.name}. The machine was not steady enough to be certain ({doubts}): give the "
        "command with --again on a quiet one."
    ]


def _not_tried(rows: Sequence[FlatRow]) -> str:
    """Return how many changes were not tried, in words; empty if all were."""
    count = sum(row["outcome"] == "not tried" for row in rows)
    return f"{count} change{' was' if count == 1 else 's were'} not tried" if count else ""


def bounds(result: TuningResult) -> list[str]:
    if result.ending == "failed":
        return []
    loops = (result.start, *filter(None, (result.fp32,)), result.winner)
    measured = unique(spec for spec in loops if result.measured.is_ok(spec))
    return [f"{spec.loop_name}: {said}." for spec in measured if (said := result.measured.what_bounds(spec))]


def _name_and_rate(row: FlatRow) -> str:
    return f"{row['name']}: {find_field('throughput_per_second').text(row)}"


def _within_limit(result: TuningResult) -> list[str]:
    """Return the fastest loop within a limit, and what another batch changes."""
    limit, within = format_bytes(result.memory_bytes), result.fastest_within_memory()
    if within is None:
        ended_well = [row for row in result.rows if row["throughput_per_second"] and result.measured.is_ok(row["spec"])]
        known = [row for row in ended_well if row["peak_reserved_bytes"] is not None]
        if not known:
            return [f"No loop that was tried fits into {limit}."]
        least = min(known, key=lambda row: row["peak_reserved_bytes"])
        name = f"{least['spec'].loop_name}, batch {least['batch_size']}"
        held = format_bytes(least["peak_reserved_bytes"])
        return [f"No loop that was tried fits into {limit}; the least is {held}, by {name}."]

    def described(row: FlatRow) -> str:
        return f"{_name_and_rate(row)}, holds {format_bytes(row['peak_reserved_bytes'])}"

    sentences = [f"The fastest within {limit}: {described(within)}."]
    batch_size = result.start.batch_size
    if within["batch_size"] != batch_size:
        same = result.fastest_within_memory(batch_size)
        fits = "no loop that was tried fits" if same is None else f"the fastest that fits is {described(same)}"
        sentences.append(f"{_other_training(result, within)}; on batch {batch_size} {fits}.")
    return sentences


def _other_training(result: TuningResult, row: FlatRow) -> str:
    return (
        f"Batch {row['batch_size']} instead of {result.start.batch_size} is another training: the noise of gradients "
        "and the statistics of batch norm differ"
    )


def measured_words(result: TuningResult, spec: TrialSpec) -> str:
    """Return what was measured of a configuration, and where, in a line."""
    trial = result.measured.of(spec)[0]
    environment, row = trial.environment, result.row_of(spec)
    faster = speedup_words(result, row)
    return (
        f"{MEASURED} {environment.castwise}: {find_field('throughput_per_second').text(row)}"
        f"{faster and f', {faster}'}, on {environment.device_name}, torch {environment.torch}, {trial.started_at[:10]}."
    )


def reasons(result: TuningResult) -> list[str]:
    """Return why changes failed or are unsupported, each reason once and with the change's name once."""
    found: dict[str, None] = {
        f"not tried, as the model has no {layer}: {', '.join(names)}": None
        for layer, names in result.without_layers.items()
    }
    for row in result.rows:
        if row["outcome"] in ("failed", "unsupported"):
            tried, reason = row["tried"], row["reason"]  # a refused technique's reason begins with its name
            found[reason if reason.startswith(f"{tried} ") else f"{tried}: {reason}"] = None
    return list(found)


def headline(result: TuningResult) -> str:
    spec = result.start
    where = result.trials[0].environment.device_name if result.trials else spec.device
    return f"{spec.workload}, batch {spec.batch_size}, on {where}: from {spec.loop_name}"


def present(result: TuningResult, *, wide: bool = False, verbose: bool = False) -> Presentation:
    """Return the accepted changes, what else matters, the answer, what bounds it, and what to change."""

    def style(row: FlatRow) -> str | None:
        return "green" if row["outcome"] == "accepted" else (None if row["outcome"] is None else "dim")

    has_all = wide or verbose
    parts: list[Part] = [
        Lines([headline(result)], "bold", is_list=False),
        Grid(_table(result, has_all=has_all), style),
    ]
    if result.trials:
        parts.append(machine_line([result], is_brief=not has_all))
    answer, *others = answers(result)
    parts += [
        Lines(reasons(result) if has_all else _tried_lines(result), "yellow"),
        Lines([answer], "bold green" if result.was_compared else "bold yellow", is_list=False, gap=True),
        Lines([*others, *(bounds(result) if verbose else bounds(result)[-1:])]),
    ]
    best = result.chosen
    if best is not None and result.was_compared and key_of(best) != key_of(result.start):
        parts.append(Lines(["What to change in your loop:"], "bold", is_list=False, gap=True))
        parts.append(Code(patch(result, best).splitlines()))
    return Presentation(parts, lambda: DataTable(COLUMNS, result.rows), lambda: document(result))


def _tried_lines(result: TuningResult) -> list[str]:
    """Return the changes that may be faster, a line each, and how many of the others there are."""
    last = {row["tried"]: row for row in result.rows}
    found = [row for row in last.values() if row["outcome"] in _OPEN and (row["speedup"] or math.inf) > 1]
    found.sort(key=lambda row: -(row["throughput_per_second"] or 0.0))
    ratio = short_ratio_text("speedup")
    lines = [
        f"{row['outcome']}: {row['tried']}" + ("" if row["speedup"] is None else f" {ratio(row)}")
        for row in found[:_MOST_OPEN]
    ]
    left, shown = len(found) - _MOST_OPEN, {row["tried"] for row in found}
    lines += [f"second best or unproven: {left} more with --verbose"] if left > 0 else []
    return lines + counts(result, shown)


def document(result: TuningResult) -> dict[str, Any]:
    """Return what `--format json` prints: the rows, the fastest configurations, the sentences and the whole records."""

    def configuration(spec: TrialSpec) -> dict[str, Any]:
        return spec.model_dump(mode="json", include={"precision", "loss_scale", "techniques", "batch_size"})

    def within(batch_size: int | None) -> dict[str, Any] | None:
        row = None if result.memory_bytes is None else result.fastest_within_memory(batch_size)
        return None if row is None else configuration(row["spec"])

    return json_document(
        workload=result.start.workload,
        start=configuration(result.start),
        rows=[plain(COLUMNS, row) for row in result.rows],
        fastest=configuration(result.winner) if result.was_compared else None,
        fastest_within_memory=within(None),
        fastest_within_memory_on_this_batch=within(result.start.batch_size),
        memory_limit_bytes=None if result.memory_bytes is None else int(result.memory_bytes),
        without_layers=dict(result.without_layers),
        ending=result.ending,
        budget_seconds=result.budget_seconds,
        seconds=result.seconds,
        num_recorded=result.num_recorded,
        sentences=conclusions(result),
        trials=[json.loads(trial.model_dump_json()) for trial in result.trials],
    )
