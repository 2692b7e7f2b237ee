"""The results of steady trials."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from castwise.analysis.decide import Advice, references_among
from castwise.analysis.energy import Prices, energy_of, power_watts
from castwise.analysis.model_flops import float8_of, fp8_share, model_flops_values
from castwise.analysis.result_table import Row
from castwise.analysis.speedup import speedup_estimate
from castwise.analysis.statistics import Estimate, verdict_of
from castwise.analysis.steady_metrics import cold_start_seconds, data_share
from castwise.analysis.warnings import warnings_of_all
from castwise.registry.precisions import AS_WRITTEN, BASELINE, DEFAULT
from castwise.show.fields import (
    Field,
    FlatRow,
    distinct_precision_text,
    estimate_values,
    find_fields,
    interval_values,
    precision_text,
    trial_values,
    worth_showing,
)
from castwise.show.notes import (
    MORE,
    cost_lines,
    costs,
    headline,
    measured_on,
    note_lines,
    remarks,
    snippet_lines,
)
from castwise.show.presentation import Code, Grid, Lines, Part, Presentation
from castwise.show.table import DataTable, competing_by, json_document, plain, short_table_of

SHOWN = (
    *("workload", "data_set", "precision", "batch_size", "gpus", "parallelism", "loss_scale", "techniques"),
    *("throughput_per_second", "written_speedup", "default_speedup", "speedup", "bf16_speedup"),
    *("verdict", "loop_speedup", "scaling_efficiency"),
    *("data_share", "step_seconds", "spread", "model_flops_per_second", "model_flops_utilization"),
    *("fp8_share", "min_sqnr_db", "max_underflow_share"),
    *("peak_allocated_bytes", "peak_reserved_bytes", "joules_per_unit", "power_watts", "tensor_share", "dram_share"),
    *("final_loss", "skipped_steps", "status"),
)
# The columns of CSV and JSON.
IN_FILES = (
    *(name for name in SHOWN if name != "skipped_steps"),
    *("unit", "processes", "throughput_low", "throughput_high", "default_speedup_low", "default_speedup_high"),
    *("written_speedup_low", "written_speedup_high", "speedup_low", "speedup_high"),
    *("bf16_speedup_low", "bf16_speedup_high"),
    *("memory_low", "memory_high", "verdict_reason", "memory_ratio", "final_step", "skipped_steps"),
    *("joules_per_unit_low", "joules_per_unit_high", "energy_source"),
    *("cold_start_seconds", "ready_seconds", "set_up_seconds", "first_step_seconds", "warm_up_seconds"),
    *("warnings", "telemetry_note", "message", "device", "torch", "key"),
)
# The columns that fit into 80 characters.
_SHORT = {
    "precision": "precision",
    "throughput_per_second": "throughput",
    "default_speedup": "× default",
    "written_speedup": "× written",
    "speedup": "× fp32",
    "bf16_speedup": "× bf16-mixed",
    "loop_speedup": "× plain loop",
    "scaling_efficiency": "scaling",
    "fp8_share": "in FP8",
    "peak_allocated_bytes": "memory",
    "data_share": "waits for data",
    "verdict": "verdict",
}
_SETTING = ("workload", "data_set", "batch_size", "gpus", "parallelism", "techniques")
_COLOURS = {"faster": "green", "slower": "red", "inconclusive": "yellow", "one run": "yellow"}

# Figures of a row under the names of their fields.
_OF_ROW = (
    *("written_speedup", "default_speedup", "speedup", "bf16_speedup", "loop_speedup", "scaling_efficiency"),
    *("step_seconds", "spread"),
    *("peak_allocated_bytes", "peak_reserved_bytes", "memory_ratio", "final_loss", "final_step", "skipped_steps"),
)
_OF_FACTS = ("ready_seconds", "set_up_seconds", "first_step_seconds", "warm_up_seconds")


def flat_row(row: Row) -> dict[str, Any]:
    """Return the values of a steady result by field name."""
    energy, verdict, float8 = energy_of(row.trial), row.verdict, float8_of(row.trials)
    return {
        **trial_values(row.trial),
        **{name: getattr(row, name) for name in _OF_ROW},
        "throughput_per_second": row.throughput,
        **interval_values("throughput", row.throughput_estimate),
        **interval_values("written_speedup", row.written_estimate),
        **interval_values("default_speedup", row.default_estimate),
        **interval_values("speedup", row.speedup_estimate),
        **interval_values("bf16_speedup", row.bf16_estimate),
        **interval_values("memory", row.memory_estimate),
        **model_flops_values(row.trials, row.step_seconds),
        "fp8_share": fp8_share(row.trials),
        **{name: getattr(float8, name, None) for name in ("min_sqnr_db", "max_underflow_share")},
        "verdict": verdict and verdict.kind,
        "verdict_reason": verdict and verdict.reason,
        "joules_per_unit": energy and energy.joules_per_unit,
        "joules_per_unit_low": energy and energy.low,
        "joules_per_unit_high": energy and energy.high,
        "energy_source": energy and energy.source,
        "power_watts": power_watts(row.trial),
        "data_share": data_share(row.trials),
        "processes": len(row.trials),
        "cold_start_seconds": cold_start_seconds(row.trials[0]),
        **{name: getattr(row.trials[0].facts, name, None) for name in _OF_FACTS},
        "warnings": " ".join(warning.name for warning in warnings_of_all(row.trials)),
    }


def data_table(rows: Sequence[Row]) -> DataTable[FlatRow]:
    """Return the table of steady results with all columns worth showing."""
    flat: list[FlatRow] = [flat_row(row) for row in rows]
    # If loss scales differ, nothing else may tell rows apart.
    shown = worth_showing(find_fields(SHOWN), flat, ["loss_scale"] if distinct_precision_text(flat) else [])
    if all(row["processes"] == 1 for row in flat):
        shown = [field for field in shown if field.name != "verdict"]
    return DataTable(shown, flat, competing_by("workload", "data_set", "batch_size", "gpus", "parallelism"))


def short_table(rows: Sequence[Row]) -> DataTable[FlatRow]:
    """Return the table of steady results with the columns that decide: ratios are over the plain loop's, as advice is.

    A configuration that failed has its status in the place of a verdict, and no speed.
    """
    groups: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        spec = row.trial.spec
        groups.setdefault((spec.workload, spec.batch_size, spec.world_size), []).append(row)
    flat: list[FlatRow] = []
    for group in groups.values():
        references = {row.precision: row for row in references_among(group) if row.trial.status == "ok"}
        flat += [_short_row(row, references) for row in group]
    are_scripts = all(any(row.precision == AS_WRITTEN for row in group) for group in groups.values())
    titles = {name: title for name, title in _SHORT.items() if not are_scripts or name != "speedup"}
    return short_table_of(titles, flat, formats={"precision": precision_text})


def _short_row(row: Row, references: Mapping[str, Row]) -> FlatRow:
    is_ok = row.trial.status == "ok"
    over = {name: _over(reference, row) for name, reference in references.items() if is_ok}
    first = next(iter(references.values()), None)
    verdict: str | None = row.verdict.kind if row.verdict else None
    if first is not None and _loop(row) != _loop(first):
        ratio = next(iter(over.values()), None)
        verdict = None if ratio is None or row is first else verdict_of(ratio).kind
    if verdict == "inconclusive" and len(row.trials) == 1:
        verdict = "one run"
    return {
        **trial_values(row.trial),
        "throughput_per_second": row.throughput if is_ok else None,
        **estimate_values("default_speedup", over.get(DEFAULT)),
        **estimate_values("written_speedup", over.get(AS_WRITTEN)),
        **estimate_values("speedup", over.get(BASELINE)),
        **estimate_values("bf16_speedup", row.bf16_estimate),
        "loop_speedup": None if over else row.loop_speedup,  # if there is nothing else to compare with
        "scaling_efficiency": row.scaling_efficiency if is_ok else None,
        "fp8_share": fp8_share(row.trials),
        "peak_allocated_bytes": row.peak_allocated_bytes,
        "verdict": verdict if is_ok else row.trial.status,
    }


def _over(reference: Row, row: Row) -> Estimate | None:
    return (
        Estimate(1.0, 1.0, 1.0, len(row.trials)) if row is reference else speedup_estimate(reference.trials, row.trials)
    )


def _loop(row: Row) -> tuple[object, ...]:
    return row.trial.spec.techniques, row.trial.spec.parallelism


def present(
    rows: Sequence[Row],
    advice: Sequence[Advice],
    prices: Prices | None = None,
    *,
    wide: bool = False,
    verbose: bool = False,
    more: str = MORE,
) -> Presentation:
    """Return the table, where it was measured, what epochs cost at these prices, the advice and notes.

    Args:
        rows: The results.
        advice: What follows from them.
        prices: Of electricity and GPU hours.
        wide: Show all columns.
        verbose: Show all notes in full.
        more: Where the notes are that are not shown.
    """
    parts = [*table_parts(rows, [item.key for item in advice], wide=wide, verbose=verbose)]
    if rows:
        parts.append(Lines(cost_lines(rows, prices)))
        codes = {""}
        for item in advice:
            parts += _advice_parts(item, is_new=item.code not in codes)
            codes.add(item.code)
        parts.append(Lines(remarks(rows) if verbose else note_lines(rows, more), "yellow", gap=True))
    return Presentation(
        parts,
        lambda: DataTable(find_fields(IN_FILES), [flat_row(row) for row in rows]),
        lambda: document(rows, advice, prices),
    )


def table_parts(
    rows: Sequence[Row], taken: Sequence[str | None] = (), *, wide: bool = False, verbose: bool = False
) -> list[Part]:
    """Return what all rows share, the table with those in colour that are taken (by their keys), and the machine."""
    if not rows:
        return [Lines(["no trials"], "bold", is_list=False)]

    def style(row: FlatRow) -> str | None:
        if row["status"] != "ok":
            return "red" if wide else None
        return "bold green" if row["key"] in taken else None

    def cell_style(row: FlatRow, field: Field) -> str:
        if field.name != "verdict" or row["key"] in taken:
            return ""
        return _COLOURS.get(row["verdict"], "") if row["status"] == "ok" else "red"

    grid = Grid(data_table(rows), style) if wide else Grid(short_table(rows), style, cell_style, _SETTING)
    return [Lines([headline(rows)], "bold", is_list=False), grid, place_of(rows, is_brief=not (wide or verbose))]


def place_of(rows: Sequence[Row], *, is_brief: bool = True) -> Lines:
    """Return where rows were measured."""
    trials = [trial for row in rows for trial in row.trials]
    return Lines([measured_on(trials, is_brief=is_brief)], "dim", is_list=False, full=[measured_on(trials)])


def _advice_parts(item: Advice, *, is_new: bool) -> list[Part]:
    """Return the sentence, why, how sure that is, and what to paste, if that is new."""
    colour = {"take": " green", "stay": " green", "undecided": " yellow"}.get(item.decision, "")
    # The command is on a line of its own.
    sentence = item.sentence.removesuffix(f" {item.command}") if item.command else item.sentence
    parts: list[Part] = [Lines([sentence], f"bold{colour}", is_list=False, gap=True)]
    parts += [Code([item.command], "sh")] if item.command else []
    # "stay" names the one that comes closest.
    why = "" if item.decision == "stay" or item.why in item.sentence else f"  Why: {item.why}."
    limit = f"  Why no faster: {item.limit}. `{item.ask}` says more." if item.limit else ""
    sure = f"  How sure: {item.how_sure}." if item.how_sure else ""
    accuracy = f"  Accuracy: {item.accuracy}." if item.accuracy else ""
    parts.append(Lines([line for line in (why, sure, accuracy, limit) if line]))
    return [*parts, *([Code([*item.code.splitlines(), *snippet_lines(item)])] if item.code and is_new else [])]


def document(rows: Sequence[Row], advice: Sequence[Advice], prices: Prices | None = None) -> dict[str, Any]:
    """Return what `castwise run --format json` prints; its test has the schema.

    - `schema_version`: rises if a key goes or changes its meaning.
    - `rows`: one for each configuration, with the columns and types of `--format csv`: SI units, the unit as a suffix;
      null for what is not known; the strings "nan", "inf" and "-inf" for figures that are no finite numbers.
    - `warnings`: what was unusual, with the `key` of the row.
    - `advice`: what to do for each workload, batch size, number of GPUs and set of techniques.
    - `trials`: the whole records, one for each process.
    - `costs`: what an epoch costs, with the `key` of the row; only if there are prices.
    """
    advised = [
        {
            "workload": item.workload,
            "decision": item.decision,
            "precision": item.precision,
            "sentence": item.sentence,
            "accuracy": item.accuracy or None,
            "limit": item.limit or None,
            "command": item.command or None,
            "code": item.code or None,
            "frameworks": {snippet.framework: snippet.code or None for snippet in item.snippets},
        }
        for item in advice
    ]
    found = json_document(
        rows=[plain(find_fields(IN_FILES), flat_row(row)) for row in rows],
        warnings=[{"key": row.trial.spec.key, **asdict(each)} for row in rows for each in warnings_of_all(row.trials)],
        advice=advised,
        trials=[json.loads(trial.model_dump_json()) for row in rows for trial in row.trials],
    )
    return found | {"costs": costs(rows, prices)} if prices else found


def json_estimate(found: Estimate | None) -> dict[str, Any] | None:
    """Return an estimate for JSON, which has no NaN: an interval that there is not is null."""
    if found is None:
        return None
    return {name: value if math.isfinite(value) else None for name, value in asdict(found).items()}
