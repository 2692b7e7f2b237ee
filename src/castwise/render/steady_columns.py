"""The columns of a job's table: one row each, shared by every format."""

from collections.abc import Hashable, Sequence

from castwise.analysis import steady_metrics
from castwise.analysis.energy import energy_of, gpus_read, joules_per_unit, power_watts
from castwise.analysis.result_table import Row
from castwise.analysis.warnings import warnings_of_all
from castwise.registry.precisions import known_precision, why_emulated
from castwise.registry.techniques import join
from castwise.render.disagreements import disagreements
from castwise.render.intervals import ENDS, End, end_of, ratio_text
from castwise.render.provenance import measured_on
from castwise.render.table import Column
from castwise.render.units import format_bytes, format_energy, format_number, format_rate, format_ratio, format_seconds
from castwise.render.warning_lines import warning_lines
from castwise.spec.quantities import format_share
from castwise.spec.types import SYNTHETIC


def _unit(row: Row) -> str:
    return steady_metrics.unit_of(row.trial)


def _rate(row: Row) -> str:
    return format_rate(row.throughput) if row.throughput is None else f"{format_rate(row.throughput)} {_unit(row)}/s"


def _memory(row: Row) -> str:
    ratio = f" ({format_ratio(row.memory_ratio)})" if row.memory_ratio is not None else ""
    return format_bytes(row.peak_allocated_bytes) + ratio


def _loss(row: Row) -> str:
    return "–" if row.final_loss is None else f"{row.final_loss:.4g} @ {row.final_step}"


def _status(row: Row) -> str:
    return row.trial.status + (f", {row.skipped_steps} skipped" if row.skipped_steps else "")


def _spread(row: Row) -> str:
    return "–" if row.spread is None else format_share(row.spread)


def _verdict(row: Row) -> str:
    return "–" if row.verdict is None else row.verdict.kind


def _efficiency(row: Row) -> str:
    return "–" if row.scaling_efficiency is None else f"{100 * row.scaling_efficiency:.0f} %"


def _reason(row: Row) -> str | None:
    return None if row.verdict is None else row.verdict.reason


def _end_of(name: str, end: End) -> Column[Row]:
    """Return the column of one end of a figure's interval; None without an interval."""

    def value(row: Row) -> float | None:
        return end_of(getattr(row, f"{name}_estimate"), end)

    return Column(f"{name}_{end}", f"{name} {end}", value, lambda row: format_number(value(row)))


def _energy(row: Row) -> str:
    return format_energy(joules_per_unit(row.trial), _unit(row))


def _power(row: Row) -> str:
    watts = power_watts(row.trial)
    return "–" if watts is None else f"{watts:.0f} W"


def _interval(row: Row) -> tuple[float | None, float | None]:
    energy = energy_of(row.trial)
    return (energy.low, energy.high) if energy is not None else (None, None)


def _energy_source(row: Row) -> str | None:
    energy = energy_of(row.trial)
    return energy.source if energy is not None else None


def _cold_start(row: Row) -> float | None:
    return steady_metrics.cold_start_seconds(row.trials[0])


def _start_part(name: str) -> Column[Row]:
    """Return the column of one part of what a cell's first process took until its first timed step."""

    def value(row: Row) -> float | None:
        facts = row.trials[0].facts
        return None if facts is None else float(getattr(facts, name))

    return Column(name, name.replace("_", " "), value, lambda row: format_number(value(row)))


def _cold_starts(rows: Sequence[Row]) -> list[str]:
    """Return what users pay before the first timed step, in a line: processes, libraries, searches, compilation."""
    told = [(seconds, row) for row in rows if (seconds := _cold_start(row))]
    if not told:
        return []
    least, most = min(told, key=lambda pair: pair[0]), max(told, key=lambda pair: pair[0])
    words = format_seconds(least[0])
    if least is not most:
        words += f" ({least[1].trial.spec.label}) to {format_seconds(most[0])} ({most[1].trial.spec.label})"
    return [f"cold start, from the request for a process to the first timed step: {words}"]


def _warning_names(row: Row) -> str:
    return " ".join(warning.name for warning in warnings_of_all(row.trials))


COLUMNS: tuple[Column[Row], ...] = (
    Column("workload", "workload", lambda r: r.trial.spec.workload, lambda r: r.trial.spec.workload, left=True),
    Column("data_set", "data", lambda r: r.trial.spec.data_set, lambda r: r.trial.spec.data_set, left=True),
    Column(
        "precision",
        "precision",
        lambda r: r.trial.spec.precision,
        lambda r: r.trial.spec.precision,
        left=True,
    ),
    Column("batch_size", "batch", lambda r: r.trial.spec.batch_size, lambda r: str(r.trial.spec.batch_size)),
    Column("gpus", "GPUs", lambda r: r.trial.spec.world_size, lambda r: str(r.trial.spec.world_size)),
    Column(
        "parallelism",
        "parallelism",
        lambda r: r.trial.spec.parallelism,
        lambda r: "–" if r.trial.spec.parallelism == "none" else r.trial.spec.parallelism,
        left=True,
    ),
    Column(
        "loss_scale",
        "loss scale",
        lambda r: r.trial.spec.loss_scale,
        lambda r: r.trial.spec.loss_scale,
        left=True,
    ),
    Column(
        "techniques",
        "techniques",
        lambda r: join(r.trial.spec.techniques),
        lambda r: join(r.trial.spec.techniques),
        left=True,
        wraps=True,
    ),
    Column("throughput_per_second", "throughput", lambda r: r.throughput, _rate, best="highest"),
    Column("speedup", "speed-up", lambda r: r.speedup, lambda r: ratio_text(r.speedup_estimate), best="highest"),
    Column("verdict", "verdict", lambda r: r.verdict and r.verdict.kind, _verdict, left=True),
    Column("loop_speedup", "over plain loop", lambda r: r.loop_speedup, lambda r: format_ratio(r.loop_speedup)),
    Column("scaling_efficiency", "scaling efficiency", lambda r: r.scaling_efficiency, _efficiency),
    Column(
        "step_seconds", "step time", lambda r: r.step_seconds, lambda r: format_seconds(r.step_seconds), best="lowest"
    ),
    Column("spread", "spread", lambda r: r.spread, _spread),
    Column("peak_allocated_bytes", "peak allocated", lambda r: r.peak_allocated_bytes, _memory, best="lowest"),
    Column(
        "peak_reserved_bytes",
        "peak reserved",
        lambda r: r.peak_reserved_bytes,
        lambda r: format_bytes(r.peak_reserved_bytes),
        best="lowest",
    ),
    Column("joules_per_unit", "energy", lambda r: joules_per_unit(r.trial), _energy, best="lowest"),
    Column("power_watts", "power", lambda r: power_watts(r.trial), _power),
    Column("final_loss", "final loss @ step", lambda r: r.final_loss, _loss),
    Column("status", "status", lambda r: r.trial.status, _status, left=True),
)

# In CSV and JSON only: what a table folds into the cells of others, or leaves to its foot.
EXTRA_COLUMNS: tuple[Column[Row], ...] = (
    Column("unit", "unit", _unit, _unit),
    Column("processes", "processes", lambda r: len(r.trials), lambda r: str(len(r.trials))),
    *(_end_of(name, end) for name in ("throughput", "speedup", "memory") for end in ENDS),
    Column("verdict_reason", "why", _reason, lambda r: _reason(r) or "–"),
    Column("memory_ratio", "memory ratio", lambda r: r.memory_ratio, lambda r: format_ratio(r.memory_ratio)),
    Column("final_step", "step", lambda r: r.final_step, lambda r: str(r.final_step or "–")),
    Column("skipped_steps", "skipped", lambda r: r.skipped_steps, lambda r: str(r.skipped_steps)),
    Column("joules_per_unit_low", "energy, low", lambda r: _interval(r)[0], lambda r: str(_interval(r)[0] or "–")),
    Column("joules_per_unit_high", "energy, high", lambda r: _interval(r)[1], lambda r: str(_interval(r)[1] or "–")),
    Column("energy_source", "energy by", _energy_source, lambda r: _energy_source(r) or "–"),
    Column("cold_start_seconds", "cold start", _cold_start, lambda r: format_seconds(_cold_start(r))),
    *(_start_part(name) for name in ("ready_seconds", "set_up_seconds", "first_step_seconds", "warm_up_seconds")),
    Column("warnings", "warnings", _warning_names, _warning_names),
    Column("telemetry_note", "telemetry", lambda r: r.trial.telemetry_note, lambda r: r.trial.telemetry_note),
    Column("message", "message", lambda r: r.trial.message, lambda r: r.trial.message),
    Column(
        "device",
        "device",
        lambda r: r.trial.environment.device_name,
        lambda r: r.trial.environment.device_name,
    ),
    Column("torch", "torch", lambda r: r.trial.environment.torch, lambda r: r.trial.environment.torch),
    Column("key", "key", lambda r: r.trial.spec.key, lambda r: r.trial.spec.key),
)


_MAY_BE_MISSING = (
    "speedup",
    "loop_speedup",
    "scaling_efficiency",
    "peak_reserved_bytes",
    "spread",
    "joules_per_unit",
    "power_watts",
)


def shown_columns(rows: Sequence[Row]) -> list[Column[Row]]:
    """Return the columns worth showing: those that differ between rows, and the figures that exist."""
    shown = []
    for column in COLUMNS:
        values = {column.value(row) for row in rows}
        if column.name in ("workload", "batch_size", "gpus", "parallelism", "techniques") and len(values) == 1:
            continue
        if column.name == "data_set" and values == {SYNTHETIC}:
            continue
        if column.name == "loss_scale" and values <= {"none", "dynamic"}:
            continue
        if column.name in _MAY_BE_MISSING and values == {None}:
            continue
        if column.name == "verdict" and all(len(row.trials) == 1 for row in rows):
            continue
        shown.append(column)
    return shown


def competing(row: Row) -> Hashable:
    """Return what rows share whose figures compete: workload, data, batch and GPUs; None where a row failed."""
    spec = row.trial.spec
    return (spec.workload, spec.data_set, spec.batch_size, spec.spread) if row.trial.status == "ok" else None


def headline(rows: Sequence[Row]) -> str:
    """Return what all rows share: workload, batch, data, device, software."""
    if not rows:
        return "no trials"
    trial = rows[0].trial
    parts = []
    for name, prefix in (("workload", ""), ("batch_size", "batch "), ("data_set", "")):
        values = {getattr(row.trial.spec, name) for row in rows}
        if len(values) == 1 and not (
            name == "data_set" and trial.spec.user_model is not None
        ):  # their data is the user's
            value = next(iter(values))
            parts.append(f"{prefix}{value}" + (" data" if name == "data_set" else ""))
    spreads = {row.trial.spec.spread for row in rows}
    parts += spreads if len(spreads) == 1 and "" not in spreads else ()
    loops = {row.trial.spec.techniques for row in rows}
    parts += [join(each) for each in loops if each and len(loops) == 1]
    where = measured_on([trial for row in rows for trial in row.trials])
    return f"{', '.join(parts)} on {where}" if parts else f"On {where}"


def remarks(rows: Sequence[Row]) -> list[str]:
    """Return what a reader of the table must know besides its figures, a line each."""
    lines = _failures(rows)
    facts = [row.trial.facts for row in rows if row.trial.facts is not None]
    lines += dict.fromkeys(fact.data_note for fact in facts if fact.data_note)
    lines += dict.fromkeys(note for fact in facts for note in fact.notes)
    lines += _seen_while_timed(rows)
    emulated = {row.trial.spec.precision: why for row in rows if (why := _why_emulated(row)) is not None}
    lines += [f"{precision} is emulated here: {why}" for precision, why in emulated.items()]
    lines += [*warning_lines(rows), *disagreements(rows)]
    lines += dict.fromkeys(_whose(row) for row in rows if row.trial.spec.world_size > 1)
    parts = dict.fromkeys(part for row in rows if (part := _part_read(row)))
    if parts:
        lines.append(f"energy and power were read of {' and '.join(parts)} GPUs here; the others are taken to be alike")
    lines += _undecided(rows)
    if any(row.trial.spec.device == "cpu" for row in rows):
        lines.append("peak allocated on a CPU is the growth of the process's resident set: an upper bound")
    lines += _cold_starts(rows)
    lines += dict.fromkeys(f"telemetry {row.trial.telemetry_note}" for row in rows if row.trial.telemetry_note)
    return lines


def _failures(rows: Sequence[Row]) -> list[str]:
    """Return how each trial failed; where all did in one way, which is then no precision's fault, that once."""
    failures = [(row.trial.status, row.trial.message) for row in rows if row.trial.status != "ok"]
    if len(failures) == len(rows) > 1 and len(set(failures)) == 1:
        return [f"all {len(rows)} trials: {failures[0][0]}: {failures[0][1]}"]
    return [
        f"{row.trial.spec.label}: {row.trial.status}: {row.trial.message}" for row in rows if row.trial.status != "ok"
    ]


def _whose(row: Row) -> str:
    """Return what of a row is all devices' and what is one's."""
    units, unit = ("CPU processes", "process") if row.trial.spec.device_type == "cpu" else ("GPUs", "GPU")
    return f"throughput is that of all {units} together; batch and peak memory are those of one {unit}"


def _part_read(row: Row) -> str:
    """Return of how many of its GPUs a row's energy was read, `1 of 4`; empty where that is all, or none was."""
    read, among = gpus_read(row.trial), row.trial.spec.world_size
    return "" if read is None or read >= among else f"{read} of {among}"


def _seen_while_timed(rows: Sequence[Row]) -> list[str]:
    """Return what the user's own code was seen to do, each with the precisions in which it was."""
    precisions: dict[str, list[str]] = {}
    for row in rows:
        for note in dict.fromkeys(note for trial in row.trials for rank in trial.ranks for note in rank.notes):
            precisions.setdefault(note, []).append(row.trial.spec.precision)
    return [f"{note} ({', '.join(names)})" for note, names in precisions.items()]


def _undecided(rows: Sequence[Row]) -> list[str]:
    """Return why some verdicts are none, where cells were measured in rounds."""
    return [
        f"{row.trial.spec.label}: {row.verdict.kind}: {row.verdict.reason}"
        for row in rows
        if row.verdict is not None
        and (row.verdict.kind == "incomparable" or (row.verdict.kind == "inconclusive" and len(row.trials) > 1))
    ]


def _why_emulated(row: Row) -> str | None:
    precision = known_precision(row.trial.spec.precision)
    return None if precision is None else why_emulated(precision, row.trial.environment.hardware)
