"""The results of steady trials."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from castwise.analysis.code_snippets import framework_lines
from castwise.analysis.decide import Advice, doubts_of, references_among
from castwise.analysis.energy import Prices, energy_of, power_watts
from castwise.analysis.model_flops import float8_of, fp8_share, model_flops_values
from castwise.analysis.result_table import Row
from castwise.analysis.statistics import Estimate, verdict_of
from castwise.analysis.steady_metrics import cold_start_seconds, data_share
from castwise.analysis.warnings import warnings_of_all
from castwise.registry.precisions import AS_WRITTEN, BASELINE, DEFAULT, precision_row, why_emulated
from castwise.show.fields import (
    Field,
    FlatRow,
    column,
    distinct_precision_text,
    estimate_values,
    find_fields,
    in_files,
    in_tables,
    interval_columns,
    interval_values,
    precision_text,
    short_columns,
    trial_values,
    values_of,
    worth_showing,
)
from castwise.show.notes import MORE, cost_lines, costs, headline, machine_line, note_lines, remarks, warning_values
from castwise.show.presentation import Code, Grid, Lines, Part, Presentation, paragraph
from castwise.show.table import DataTable, competing_by, json_document, json_records, plain, short_table_of


def _of_facts(name: str) -> Field:
    return column(name, lambda row: getattr(row.trials[0].facts, name, None), place="files")


# All columns: those of tables first, then those that only CSV and JSON have.
COLUMNS = (
    *find_fields(("workload", "data_set")),
    column("precision", short="precision"),
    *find_fields(("batch_size", "gpus", "parallelism", "loss_scale", "techniques")),
    column("throughput_per_second", "throughput", short="throughput"),
    column("written_speedup", "written_speedup", short="× written"),
    column("default_speedup", "default_speedup", short="× default"),
    column("speedup", "speedup", short="× fp32"),
    column("bf16_speedup", "bf16_speedup", short="× bf16-mixed"),
    column("verdict", lambda row: row.verdict and row.verdict.kind, short="verdict", otherwise="marks"),
    column("loop_speedup", "loop_speedup", short="× plain loop"),
    column("scaling_efficiency", "scaling_efficiency", short="scaling"),
    column("data_share", lambda row: data_share(row.trials)),
    column("step_seconds", "step_seconds"),
    column("spread", "spread"),
    *find_fields(("model_flops_per_second", "model_flops_utilization")),
    column("fp8_share", lambda row: fp8_share(row.trials), short="in FP8"),
    *find_fields(("min_sqnr_db", "max_underflow_share")),
    column("peak_allocated_bytes", "peak_allocated_bytes", short="memory"),
    column("peak_reserved_bytes", "peak_reserved_bytes"),
    column("joules_per_unit"),
    column("power_watts", lambda row: power_watts(row.trial)),
    *find_fields(("tensor_share", "dram_share")),
    column("final_loss", "final_loss"),
    column("skipped_steps", "skipped_steps"),
    column("status"),
    column("unit", place="files"),
    column("processes", lambda row: len(row.trials), place="files"),
    *interval_columns("throughput", "throughput_estimate"),
    *interval_columns("default_speedup", "default_estimate"),
    *interval_columns("written_speedup", "written_estimate"),
    *interval_columns("speedup", "speedup_estimate"),
    *interval_columns("bf16_speedup", "bf16_estimate"),
    *interval_columns("memory", "memory_estimate"),
    *interval_columns("scaling_efficiency", "scaling_estimate"),
    column("verdict_reason", lambda row: row.verdict and row.verdict.reason, place="files"),
    column("memory_ratio", "memory_ratio", place="files"),
    column("final_step", "final_step", place="files"),
    *(column(name, place="files") for name in ("joules_per_unit_low", "joules_per_unit_high", "energy_source")),
    column("cold_start_seconds", lambda row: cold_start_seconds(row.trials[0]), place="files"),
    *map(_of_facts, ("ready_seconds", "set_up_seconds", "first_step_seconds", "warm_up_seconds")),
    column("warnings", lambda row: " ".join(each.name for each in warnings_of_all(row.trials)), place="files"),
    *(column(name, place="files") for name in ("telemetry_note", "message", "device", "torch", "key")),
)
_SETTING = ("workload", "data_set", "batch_size", "gpus", "parallelism", "techniques")
_COLOURS = {"faster": "green", "slower": "red", "inconclusive": "yellow", "one run": "yellow"}


def flat_row(row: Row) -> dict[str, Any]:
    (joules, energy_source), float8 = energy_of(row.trials) or (None, None), float8_of(row.trials)
    return {
        **trial_values(row.trial),
        **model_flops_values(row.trials, row.step_seconds),
        **{name: getattr(float8, name, None) for name in ("min_sqnr_db", "max_underflow_share")},
        **estimate_values("joules_per_unit", joules),
        "energy_source": energy_source,
        **values_of(COLUMNS, row),
    }


def data_table(rows: Sequence[Row]) -> DataTable[FlatRow]:
    flat: list[FlatRow] = [flat_row(row) for row in rows]
    # If loss scales differ, nothing else may tell rows apart.
    shown = worth_showing(in_tables(COLUMNS), flat, ["loss_scale"] if distinct_precision_text(flat) else [])
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
    marks = {row: _marks(row) for row in rows}
    shared = set.intersection(*map(set, marks.values())) if len(rows) > 1 else set()  # which a note says once
    for group in groups.values():
        references = {row.precision: row for row in references_among(group) if row.trial.status == "ok"}
        flat += [
            {**_short_row(row, references), "marks": ", ".join(n for n in marks[row] if n not in shared)}
            for row in group
        ]
    are_scripts = all(any(row.precision == AS_WRITTEN for row in group) for group in groups.values())
    columns = [each for each in short_columns(COLUMNS) if each.name != "speedup" or not are_scripts]
    columns.sort(key=lambda each: each.name == "verdict")  # it comes last
    texts = {
        "precision": precision_text,
        "verdict": lambda row: ", ".join(filter(None, (row["verdict"], row.get("marks")))),
    }
    return short_table_of(columns, flat, formats=texts, wraps=("precision", "verdict"))


def _marks(row: Row) -> list[str]:
    """Return what makes a row slow, or its figures doubtful, in a word each."""
    is_ok, hardware = row.trial.status == "ok", row.trial.environment.hardware
    is_emulated = is_ok and why_emulated(precision_row(row.precision), hardware) is not None
    return ["emulated"] * is_emulated + doubts_of(row.trials) * is_ok


def _short_row(row: Row, references: Mapping[str, Row]) -> FlatRow:
    is_ok = row.trial.status == "ok"
    over = {name: row.over(reference) for name, reference in references.items() if is_ok}
    first = next(iter(references.values()), None)
    verdict: str | None = row.verdict.kind if row.verdict else None
    if first is not None and _loop(row) != _loop(first):
        ratio = next(iter(over.values()), None)
        verdict = None if ratio is None or row is first else verdict_of(ratio).kind
    if verdict == "inconclusive" and len(row.trials) == 1:
        verdict = "one run"
    return {
        **trial_values(row.trial),
        **values_of((each for each in COLUMNS if each.short), row),
        "throughput_per_second": row.throughput if is_ok else None,
        **estimate_values("default_speedup", over.get(DEFAULT)),
        **estimate_values("written_speedup", over.get(AS_WRITTEN)),
        **estimate_values("speedup", over.get(BASELINE)),
        **estimate_values("bf16_speedup", row.bf16_estimate),
        "loop_speedup": None if over else row.loop_speedup,  # if there is nothing else to compare with
        "scaling_efficiency": row.scaling_efficiency if is_ok else None,
        **interval_values("scaling_efficiency", row.scaling_estimate if is_ok else None),
        "verdict": verdict if is_ok else row.trial.status,
    }


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
    """Return the table, where it was measured, what epochs cost at these prices, the advice and notes."""
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
        lambda: DataTable(in_files(COLUMNS), [flat_row(row) for row in rows]),
        lambda: document(rows, advice, prices),
    )


def table_parts(
    rows: Sequence[Row], taken: Sequence[str | None] = (), *, wide: bool = False, verbose: bool = False
) -> list[Part]:
    """Return what all rows share, the table with those in colour that are taken (by their keys), and the machine."""
    if not rows:
        return [paragraph("no trials")]

    def style(row: FlatRow) -> str | None:
        if row["status"] != "ok":
            return "red" if wide else None
        return "bold green" if row["key"] in taken else None

    def cell_style(row: FlatRow, field: Field) -> str:
        if field.name != "verdict" or row["key"] in taken:
            return ""
        return _COLOURS.get(row["verdict"], "") if row["status"] == "ok" else "red"

    grid = Grid(data_table(rows), style) if wide else Grid(short_table(rows), style, cell_style, _SETTING)
    return [paragraph(headline(rows)), grid, machine_line(rows, is_brief=not (wide or verbose))]


def _advice_parts(item: Advice, *, is_new: bool) -> list[Part]:
    """Return the sentence, why, how sure that is, and what to paste, if that is new."""
    colour = {"take": " green", "stay": " green", "undecided": " yellow"}.get(item.decision, "")
    # The command is on a line of its own.
    sentence = item.sentence.removesuffix(f" {item.command}") if item.command else item.sentence
    parts: list[Part] = [paragraph(sentence, f"bold{colour}", gap=True)]
    parts += [Code([item.command], "sh")] if item.command else []
    parts += [paragraph(item.written)] if item.written else []
    # "stay" names the one that comes closest.
    why = "" if item.decision == "stay" or item.why in item.sentence else f"  Why: {item.why}."
    limit = f"  Limited by: {item.limit}. `{item.ask}` says more." if item.limit else ""
    sure = f"  How sure: {item.how_sure}." if item.how_sure else ""
    accuracy = f"  Accuracy: {item.accuracy}." if item.accuracy else ""
    parts.append(Lines([line for line in (why, sure, accuracy, limit) if line]))
    if item.code and is_new:
        parts.append(Code([*item.code.splitlines(), *framework_lines(item.snippets)]))
    return parts


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
            **{name: getattr(item, name) for name in ("workload", "decision", "precision", "sentence")},
            **{name: getattr(item, name) or None for name in ("written", "accuracy", "limit", "command", "code")},
            "frameworks": {snippet.framework: snippet.code or None for snippet in item.snippets},
        }
        for item in advice
    ]
    found = json_document(
        rows=[plain(in_files(COLUMNS), flat_row(row)) for row in rows],
        warnings=warning_values(rows),
        advice=advised,
        trials=json_records(trial for row in rows for trial in row.trials),
    )
    return found | {"costs": costs(rows, prices)} if prices else found


def json_estimate(found: Estimate | None) -> dict[str, Any] | None:
    """Return an estimate for JSON, which has no NaN: an interval that there is not is null."""
    if found is None:
        return None
    return {name: value if math.isfinite(value) else None for name, value in asdict(found).items()}
