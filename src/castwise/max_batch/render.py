"""The largest batches as tables and sentences."""

from collections.abc import Callable, Sequence
from typing import Any

from castwise.analysis import steady_metrics
from castwise.analysis.energy import joules_per_unit
from castwise.errors import UsageError
from castwise.max_batch.memory_breakdown import (
    BEYOND_THE_PEAK,
    TENSOR_PARTS,
    TOLERANCE,
    MemoryBreakdown,
    breakdown_of,
    why_not_halved,
)
from castwise.max_batch.result import MaxBatch, MaxBatchResult, has_trained, parts_of
from castwise.records.schema import Trial
from castwise.registry.precisions import BASELINE, known_precision
from castwise.registry.published import LargestBatch, largest_batches
from castwise.registry.techniques import join
from castwise.show.console import took_words
from castwise.show.fields import (
    FlatRow,
    column,
    find_field,
    find_fields,
    in_files,
    in_tables,
    short_columns,
    values_of,
    worth_showing,
)
from castwise.show.notes import MORE, first_of, machine_line
from castwise.show.presentation import Grid, Lines, Part, Presentation, paragraph
from castwise.show.table import DataTable, json_document, json_records, plain, short_table_of
from castwise.show.units import format_bytes, format_rate, format_ratio
from castwise.spec.trial import TrialSpec

PARTS = (*TENSOR_PARTS, "workspace_bytes", "outside_bytes")


def _of(trial: str, get: Callable[[Trial], Any]) -> Callable[[MaxBatch], Any]:
    """Return a function for a value of a search's trial, "largest", "failing" or "knee"; None without that trial."""
    return lambda found: None if (own := getattr(found, trial)) is None else get(own)


def _predicted(name: str) -> Callable[[MaxBatch], Any]:
    return lambda found: found.prediction and getattr(found.prediction, name)


def _batch_size(trial: Trial) -> int:
    return trial.spec.batch_size


# Of a loop: its largest batch.
SUMMARY = (
    column("precision", lambda found: found.spec.precision, short="precision"),
    column("techniques", lambda found: join(found.spec.techniques), varies=False, default=("none",)),
    column("gpus", lambda found: found.spec.world_size),
    column("parallelism", lambda found: found.spec.parallelism),
    column("largest_batch", _of("largest", _batch_size), short="largest batch", format=lambda row: row["words"]),
    column("failing_batch", _of("failing", _batch_size), short="first that fails"),
    column("batch_ratio", short="× batch", place="table"),
    column(
        "published",
        lambda found: "; ".join(f"{each.ratio:.2f}× ({each.gpu})" for each in published_of(found)) or None,
        place="table",
    ),
    column("predicted_batch", _predicted("batch_size")),
    column("fixed_bytes", _predicted("fixed_bytes")),
    column("sample_bytes", _predicted("sample_bytes")),
    column("peak_allocated_bytes", _of("largest", steady_metrics.peak_allocated_bytes)),
    column("peak_reserved_bytes", _of("largest", steady_metrics.peak_reserved_bytes), short="memory"),
    column("throughput_per_second", _of("largest", steady_metrics.throughput), short="throughput"),
    column("knee_batch", _of("knee", _batch_size), short="knee"),
    column("knee_throughput", _of("knee", steady_metrics.throughput)),
    column("num_steps", lambda found: num_steps(found.largest)),
    column("num_trials", lambda found: len(found.trials)),
)
# Of a batch; one that did not fit has no speed.
CURVE = (
    column("precision", lambda trial: trial.spec.precision),
    column(
        "techniques",
        lambda trial: join(trial.spec.techniques) if trial.spec.techniques else "",
        varies=False,
        default=("",),
    ),
    column("gpus", lambda trial: trial.spec.world_size),
    column("parallelism", lambda trial: trial.spec.parallelism),
    column("batch_size", _batch_size, varies=False),
    column("throughput_per_second", lambda trial: steady_metrics.throughput(trial) if has_trained(trial) else None),
    column("step_seconds", lambda trial: steady_metrics.step_seconds(trial) if has_trained(trial) else None),
    column("joules_per_unit", joules_per_unit),
    column("peak_allocated_bytes", steady_metrics.peak_allocated_bytes),
    column("peak_reserved_bytes", steady_metrics.peak_reserved_bytes),
    column("status", "status"),
    *(column(name, place="files") for name in PARTS),
)
# Batches of the curve's table differ by this factor at least; CSV and JSON have all that were tried.
_APART = 1.5


# Rows and tables


def _setting(spec: TrialSpec) -> tuple[object, ...]:
    """Return what loops share that differ in their precision alone."""
    return spec.techniques, spec.world_size, spec.parallelism


def num_steps(trial: Trial | None) -> int | None:
    """Return the steps that a trial has trained, warm-up and timed ones."""
    if trial is None or trial.facts is None or not trial.ranks:
        return None
    return trial.facts.warm_up_steps + sum(block.all_steps for block in trial.ranks[0].blocks)


def published_of(found: MaxBatch) -> list[LargestBatch]:
    """Return what sources published of the same workload in the same precision; nothing for other loops."""
    spec = found.spec
    is_other = spec.techniques or spec.precision == BASELINE or spec.world_size > 1
    return [] if is_other else largest_batches(spec.workload, spec.precision)


def baseline_of(found: MaxBatch, others: Sequence[MaxBatch]) -> MaxBatch | None:
    """Return the result of the same loop in float32; None if there is none."""
    wanted = (BASELINE, _setting(found.spec))
    return next((each for each in others if (each.spec.precision, _setting(each.spec)) == wanted), None)


def ratio_of(found: MaxBatch, others: Sequence[MaxBatch]) -> float | None:
    """Return how many times float32's largest batch a loop's is; None without either."""
    base = baseline_of(found, others)
    if base is None or base.largest is None or found.largest is None or base.failing is None or found.failing is None:
        return None
    return found.largest.spec.batch_size / base.largest.spec.batch_size


def summary_row(found: MaxBatch, others: Sequence[MaxBatch] = ()) -> FlatRow:
    return {
        **values_of(SUMMARY, found),
        "words": found.words,
        "batch_ratio": ratio_of(found, others),
        "prediction_error": found.prediction_error,
        "unit": steady_metrics.unit_of(found.trials[0]),
    }


def curve_row(trial: Trial) -> FlatRow:
    parts = {name: getattr(parts_of(trial), name, None) for name in PARTS}
    return {**values_of(CURVE, trial), **parts, "unit": steady_metrics.unit_of(trial)}


def summary_table(max_batches: Sequence[MaxBatch]) -> DataTable[FlatRow]:
    """Return the largest batches, with the columns that have anything to say."""
    rows = [summary_row(found, max_batches) for found in max_batches]
    return DataTable(worth_showing(SUMMARY, rows, ("largest_batch", "failing_batch")), rows)


def short_table(max_batches: Sequence[MaxBatch]) -> DataTable[FlatRow]:
    """Return the largest batches, with the columns that decide."""
    rows: list[FlatRow] = [
        {**summary_row(found, max_batches), "precision": found.spec.loop_name.replace("+", " + ")}
        for found in max_batches
    ]
    rows = [{**row, "peak_reserved_bytes": row["peak_reserved_bytes"] or row["peak_allocated_bytes"]} for row in rows]
    return short_table_of(short_columns(SUMMARY), rows, ("largest_batch", "failing_batch"))


def curve_table(max_batches: Sequence[MaxBatch]) -> DataTable[FlatRow]:
    """Return the curves: batches that are far apart, the knee, the largest that trained, the first that did not."""
    rows = []
    for found in max_batches:
        most = found.largest.spec.batch_size / _APART if found.largest is not None else 0.0
        least = 0.0
        for trial in found.trials:
            size = trial.spec.batch_size
            is_apart = has_trained(trial) and least <= size <= most
            if is_apart or trial in (found.knee, found.largest, found.failing):
                rows.append(curve_row(trial))
                least = _APART * size
    return DataTable(worth_showing(in_tables(CURVE), rows), rows)


def breakdowns_of(max_batches: Sequence[MaxBatch]) -> list[MemoryBreakdown]:
    """Return where memory goes at the largest batch that all loops have measured; else at each one's largest."""
    known = [[each for trial in found.trained if (each := breakdown_of(trial)) is not None] for found in max_batches]
    known = [each for each in known if each]
    if not known:
        return []
    common = set.intersection(*({each.trial.spec.batch_size for each in own} for own in known))
    if not common:
        return [own[-1] for own in known]
    return [next(each for each in own if each.trial.spec.batch_size == max(common)) for own in known]


def part_titles(breakdowns: Sequence[MemoryBreakdown]) -> dict[str, str]:
    """Return the parts that any of some trials has, by name, as people read them."""
    names = dict.fromkeys(name for each in breakdowns for name in each.parts)
    return {name: find_field(name).title for name in names if any(each.bytes_of(name) for each in breakdowns)}


def breakdown_table(breakdowns: Sequence[MemoryBreakdown]) -> DataTable[FlatRow]:
    """Return the parts that any of some trials has, their sums, and the measured peak.

    On a GPU there are two sums: what the peak is made of, and all, with what the allocator and the driver hold on top.
    """
    parts = list(part_titles(breakdowns))
    within = [name for name in parts if name not in BEYOND_THE_PEAK]
    beyond = [name for name in parts if name in BEYOND_THE_PEAK]
    names = ["precision", *within, "seen_bytes", "parts_error", *beyond, *(["total_bytes"] if beyond else [])]
    rows = [
        {
            "precision": each.trial.spec.loop_name,
            **each.parts,
            "seen_bytes": each.seen_bytes,
            "parts_error": each.error,
            "peak_bytes": each.peak_bytes,
            "total_bytes": each.total_bytes,
        }
        for each in breakdowns
    ]
    return DataTable(find_fields(names), rows)


# Formats


def headline(max_batches: Sequence[MaxBatch]) -> str:
    spec = max_batches[0].trials[0].spec
    limit = "" if spec.memory_limit_bytes is None else f" within {format_bytes(spec.memory_limit_bytes)}"
    return f"Largest batch of {spec.workload}{limit}"


def present(result: MaxBatchResult, *, wide: bool = False, verbose: bool = False) -> Presentation:
    left = f"Not searched to the end: {', '.join(spec.loop_name for spec in result.left)}."
    ending = {
        "done": [],
        "interrupted": [f"Interrupted. {left}"],
        "budget": [f"The budget ended. {left} A longer --budget goes on from here."],
    }[result.ending]
    took = f"{took_words(len(result.trials), result.num_recorded, result.seconds)}."
    return Presentation(
        [*parts(result.max_batches, wide=wide, verbose=verbose), Lines(ending, "yellow"), Lines([took], "dim")],
        lambda: DataTable(CURVE, [curve_row(trial) for trial in result.trials]),
        lambda: document(result),
    )


def parts(
    max_batches: Sequence[MaxBatch], *, wide: bool = False, verbose: bool = False, more: str = MORE
) -> list[Part]:
    """Return the largest batches, what follows from them, and notes."""
    found: list[Part] = [
        paragraph(headline(max_batches)),
        Grid(summary_table(max_batches) if wide else short_table(max_batches)),
        machine_line(max_batches, is_brief=not (wide or verbose)),
    ]
    breakdowns = breakdowns_of(max_batches)
    batch = f", batch {breakdowns[0].trial.spec.batch_size}" if breakdowns else ""
    for title, table in (
        ("Throughput, memory and energy over the batch size", curve_table(max_batches)),
        (f"Where the memory goes{batch}", breakdown_table(breakdowns)),
    ):
        if wide and table.rows:
            found += [paragraph(title, gap=True), Grid(table)]
    notes = remarks(max_batches)
    return [
        *found,
        Lines(conclusions(max_batches), gap=True),
        Lines(notes if verbose else first_of(notes, more), "yellow"),
    ]


def document(result: MaxBatchResult) -> dict[str, Any]:
    """Return what `--format json` prints: largest batches, curves, parts of memory, sentences and whole records."""
    max_batches = result.max_batches
    return json_document(
        workload=max_batches[0].spec.workload,
        fits=[plain(in_files(SUMMARY), summary_row(found)) for found in max_batches],
        curve=[plain(CURVE, curve_row(trial)) for trial in result.trials],
        sentences=conclusions(max_batches),
        remarks=remarks(max_batches),
        seconds=result.seconds,
        num_recorded=result.num_recorded,
        ending=result.ending,
        trials=json_records(result.trials),
    )


# Sentences


def conclusions(max_batches: Sequence[MaxBatch]) -> list[str]:
    lines = [
        _limit_sentence(found, found.largest, found.failing)
        for found in max_batches
        if found.largest is not None and found.failing is not None
    ]
    for found in max_batches:
        ratio, published = ratio_of(found, max_batches), published_of(found)
        if ratio is not None and published:
            sources = "; ".join(
                f"{each.suite} had {format_ratio(each.ratio)} on a {each.gpu} ({each.baseline} and {each.batch_size})"
                for each in published
            )
            lines.append(f"{found.spec.loop_name}: {format_ratio(ratio)} fp32's largest batch; {sources}.")
    breakdowns = breakdowns_of(max_batches)
    bases = {_setting(each.trial.spec): each for each in breakdowns if each.trial.spec.precision == BASELINE}
    for each in breakdowns:
        spec, base = each.trial.spec, bases.get(_setting(each.trial.spec))
        row = known_precision(spec.precision)
        # TF32 holds everything in 32 bits, as float32 does.
        is_narrower = row is None or row.param_dtype != "float32" or row.autocast_dtype is not None
        if base is not None and base.trial.spec.batch_size == spec.batch_size and is_narrower:
            lines.append(why_not_halved(base, each))
    return lines


def _limit_sentence(found: MaxBatch, largest: Trial, failing: Trial) -> str:
    """Return what trained and what did not, and the knee below it."""
    each = "a process " if largest.spec.device_type == "cpu" else "a GPU "
    line = (
        f"{found.spec.loop_name}: batch {largest.spec.batch_size:,} {each * (largest.spec.world_size > 1)}trained "
        f"{num_steps(largest)} steps in a fresh process, batch {failing.spec.batch_size:,} "
        f"{'ran out of memory' if failing.status == 'oom' else failing.status}."
    )
    knee = found.knee
    if knee is None or knee is largest:
        return line
    rate = f"{format_rate(steady_metrics.throughput(knee))} {steady_metrics.unit_of(knee)}/s"
    held, most = steady_metrics.peak_allocated_bytes(knee), steady_metrics.peak_allocated_bytes(largest)
    line += f" The smallest within 2 % of the best throughput is batch {knee.spec.batch_size:,}: {rate}"
    share = f" in {100 * held / most:.0f} % of batch {largest.spec.batch_size:,}'s memory" if held and most else ""
    return f"{line}{share}."


def remarks(max_batches: Sequence[MaxBatch]) -> list[str]:
    """Return what a reader must know of the figures, a line each."""
    lines = [line for found in max_batches for line in _problems(found)]
    num_foreign = max((found.num_foreign for found in max_batches), default=0)
    if num_foreign:
        others = "another process" if num_foreign == 1 else f"up to {num_foreign} other processes"
        lines.append(
            f"{others} computed on the GPU while steps were timed, which distorts throughput, energy and knees"
        )
    diverged = [each for each in max_batches if each.largest is not None and each.largest.status == "diverged"]
    if diverged:
        names = ", ".join(found.spec.loop_name for found in diverged)
        lines.append(f"the loss of {names} was NaN at the largest batch; memory use is the same")
    unknown: dict[str, None] = {}
    for found in max_batches:
        parts = found.largest.ranks[0].memory_parts if found.largest is not None and found.largest.ranks else None
        if parts is not None and parts.missing:
            unknown[f"{found.spec.loop_name}: where its memory goes is not known: {parts.missing}"] = None
    lines += unknown
    lines += [
        f"{each.trial.spec.label}: the parts of memory add up to {100 * each.error:+.1f} % more than the measured peak"
        for each in breakdowns_of(max_batches)
        if abs(each.error) > TOLERANCE
    ]
    if any(found.spec.device_type == "cpu" for found in max_batches):
        lines.append("memory on a CPU is the growth of the process, an upper bound of what tensors hold")
    return lines


def raise_if_nothing_fits(max_batches: Sequence[MaxBatch]) -> None:
    """Raise UsageError, which says what they need, if memory is too small for the smallest batch of every loop."""
    if max_batches and all(found.largest is None and found.failing is not None for found in max_batches):
        lines = [line for found in max_batches for line in _problems(found)]
        raise UsageError(f"{'; '.join(lines)}.")


def _problems(found: MaxBatch) -> list[str]:
    """Return why no batch fits, what the smallest one needs, and how a search ended that found no limit."""
    lines = []
    smallest = next((trial for trial in found.trials if trial.status == "oom"), None)
    if found.largest is None and smallest is not None:
        shortfall = smallest.shortfall
        if shortfall is not None:
            # A CPU's process has run a step when it is found too large; a GPU's ends at the tensor that does not fit.
            least = "" if smallest.spec.device_type == "cpu" else "at least "
            need = f"needs {least}{format_bytes(shortfall.needed_bytes)}, {format_bytes(shortfall.free_bytes)} free"
        else:
            limit = smallest.spec.memory_limit_bytes or smallest.environment.gpu_memory_bytes
            need = f"it ran out of {format_bytes(limit)}" if limit else smallest.message
        lines.append(f"batch {smallest.spec.batch_size} does not fit in {found.spec.loop_name}: {need}")
    if found.problem is not None:
        lines.append(f"{found.problem.spec.label}: {found.problem.status}: {found.problem.message}")
    elif found.largest is not None and found.failing is None:
        lines.append(f"{found.spec.loop_name}: the search ended before any batch ran out of memory")
    return lines
