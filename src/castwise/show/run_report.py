"""The results of steady trials as a terminal table, Markdown, HTML for a notebook, CSV or JSON."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from html import escape
from typing import Any, get_args

from rich.console import Console
from rich.text import Text

from castwise.analysis.advice import Advice, Decision, references_among
from castwise.analysis.energy import Prices, energy_of, power_watts
from castwise.analysis.model_flops import float8_of, fp8_share, model_flops_values
from castwise.analysis.result_table import Row
from castwise.analysis.speedup import speedup_estimate
from castwise.analysis.statistics import Estimate, verdict_of
from castwise.analysis.steady_metrics import cold_start_seconds, data_share
from castwise.analysis.warnings import TrialWarning, warnings_of_all
from castwise.registry.precisions import AS_WRITTEN, BASELINE, DEFAULT
from castwise.registry.techniques import NONE
from castwise.show.console import print_line
from castwise.show.fields import (
    Field,
    FlatRow,
    Kind,
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
    notes_of,
    remarks,
    snippet_lines,
)
from castwise.show.table import (
    SCHEMA_VERSION,
    DataTable,
    competing_by,
    csv_grid,
    json_document,
    json_text,
    markdown_grid,
    markdown_text,
    plain,
    print_data_table,
    short_table_of,
)

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


def _setting(table: DataTable[FlatRow]) -> Callable[[FlatRow], str]:
    """Return a function for the setting of a row in words: what differs between rows besides the precision."""
    varied = [name for name in _SETTING if len({row[name] for row in table.rows}) > 1]

    def text(row: FlatRow) -> str:
        gpus = str(row["gpus"]) + (" GPU" if row["gpus"] == 1 else f" GPUs ({row['parallelism']})")
        words = {
            "batch_size": f"batch {row['batch_size']}",
            "gpus": gpus,
            "parallelism": "" if "gpus" in varied else gpus,
            "techniques": "plain loop" if row["techniques"] == NONE else row["techniques"].replace("+", " + "),
        }
        return ", ".join(filter(None, (words.get(name, row[name]) for name in varied)))

    return text


def print_table(  # noqa: PLR0913  what is printed, by keyword
    rows: Sequence[Row],
    advice: Sequence[Advice],
    console: Console,
    prices: Prices | None = None,
    *,
    wide: bool = False,
    verbose: bool = False,
    more: str = MORE,
) -> None:
    """Print the table, where it was measured, what epochs cost at these prices, the advice and notes to a terminal.

    Args:
        rows: The results.
        advice: What follows from them.
        console: The terminal.
        prices: Of electricity and GPU hours.
        wide: Print all columns.
        verbose: Print all notes in full.
        more: Where the notes are that are not printed.
    """
    if not rows:
        print_line(console, "no trials", "bold")
        return
    print_rows(rows, console, [item.key for item in advice], wide=wide)
    trials = [trial for row in rows for trial in row.trials]
    print_line(console, measured_on(trials, is_brief=not (wide or verbose)), "dim")
    for line in cost_lines(rows, prices):
        print_line(console, line)
    printed = {""}
    for item in advice:
        console.print()
        _print_advice(item, console, is_new=item.code not in printed)
        printed.add(item.code)
    lines = remarks(rows) if verbose else note_lines(rows, more)
    if lines:
        console.print()
    for line in lines:
        print_line(console, line, "yellow")


def print_rows(rows: Sequence[Row], console: Console, taken: Sequence[str | None] = (), *, wide: bool = False) -> None:
    """Print what all rows share, and the table, with those in colour that are taken, by their trials' keys."""
    print_line(console, headline(rows), "bold")

    def style(row: FlatRow) -> str | None:
        if row["status"] != "ok":
            return "red" if wide else None
        return "bold green" if row["key"] in taken else None

    def cell_style(row: FlatRow, field: Field) -> str:
        if field.name != "verdict" or row["key"] in taken:
            return ""
        return _COLOURS.get(row["verdict"], "") if row["status"] == "ok" else "red"

    if wide:
        print_data_table(console, data_table(rows), style=style)
    else:
        table = short_table(rows)
        print_data_table(console, table, style=style, cell_style=cell_style, section=_setting(table))


def _print_advice(item: Advice, console: Console, *, is_new: bool) -> None:
    """Print the sentence, why, how sure that is, and what to paste, if that is new."""
    colour = {"take": " green", "stay": " green", "undecided": " yellow"}.get(item.decision, "")
    # The command is on a line of its own.
    sentence = item.sentence.removesuffix(f" {item.command}") if item.command else item.sentence
    print_line(console, sentence, f"bold{colour}")
    if item.command:
        _print_code([item.command], console)
    for line in _reason_lines(item):
        print_line(console, f"  {line}")
    if item.code and is_new:
        _print_code([*item.code.splitlines(), *snippet_lines(item)], console)


def _print_code(lines: Sequence[str], console: Console) -> None:
    """Print lines that are never wrapped: what is copied from the terminal has to run."""
    for line in lines:
        console.print(Text(f"    {line}"), highlight=False, soft_wrap=True)


def _reason_lines(item: Advice) -> list[str]:
    """Return why this and no other, if the sentence does not say it, and how sure that is.

    The sentence of "stay" names the one that comes closest.
    """
    why = "" if item.decision == "stay" or item.why in item.sentence else f"Why: {item.why}."
    limit = f"Why no faster: {item.limit}. `{item.ask}` says more." if item.limit else ""
    sure = f"How sure: {item.how_sure}." if item.how_sure else ""
    accuracy = f"Accuracy: {item.accuracy}." if item.accuracy else ""
    return list(filter(None, [why, sure, accuracy, limit]))


def to_markdown(
    rows: Sequence[Row],
    advice: Sequence[Advice],
    prices: Prices | None = None,
    *,
    wide: bool = False,
    verbose: bool = False,
    more: str = MORE,
) -> str:
    """Return what `print_table` prints as Markdown."""
    if not rows:
        return "no trials\n"
    lines = _markdown_grid(rows, advice, None if wide else short_table(rows).columns)
    lines += ["", *(f"- {markdown_text(line)}" for line in cost_lines(rows, prices))] if prices else []
    for item in advice:
        lines += ["", f"**{markdown_text(item.sentence)}**"]
        reasons = _reason_lines(item)
        lines += ["", *(f"- {markdown_text(line)}" for line in reasons)] if reasons else []
        if item.code:
            lines += ["", "```python", item.code, *snippet_lines(item), "```"]
    notes = remarks(rows) if verbose else note_lines(rows, more)
    lines += ["", *(f"- {markdown_text(line)}" for line in notes)]
    return "\n".join(lines).rstrip() + "\n"


def markdown_table(rows: Sequence[Row], advice: Sequence[Advice]) -> str:
    """Return the table without verdicts, where it was measured, and all notes in a line each as Markdown."""
    columns = [each for each in short_table(rows).columns if each.name != "verdict"]
    columns = [replace(each, otherwise="status") if each.name == "throughput_per_second" else each for each in columns]
    items = (f"- {markdown_text(note.line)}" for note in notes_of(rows) if not note.is_routine)
    return "\n".join([*_markdown_grid(rows, advice, columns), "", *items]).rstrip() + "\n"


def _markdown_grid(rows: Sequence[Row], advice: Sequence[Advice], columns: Sequence[Field] | None) -> list[str]:
    """Return what all rows share, the table, and where it was measured.

    Columns are all, or these and those that tell settings apart; what is taken is in bold.
    """
    full, taken = data_table(rows), {item.key for item in advice}
    table = full
    if columns is not None:
        columns = [*(each for each in full.columns if each.name in _SETTING), *columns]
        table = DataTable(columns, short_table(rows).rows)
    flat = [{**row, "precision": f"**{row['precision']}**"} if row["key"] in taken else row for row in table.rows]
    place = measured_on([trial for row in rows for trial in row.trials])
    return [markdown_text(headline(rows)), "", *markdown_grid(table.columns, flat), "", markdown_text(place)]


def to_html(rows: Sequence[Row], advice: Sequence[Advice]) -> str:
    """Return what `print_table` prints as HTML for a notebook."""
    if not rows:
        return "<p>no trials</p>"
    table, advised = short_table(rows), {item.key for item in advice}
    table = replace(
        table, columns=[*(each for each in data_table(rows).columns if each.name in _SETTING), *table.columns]
    )
    sides = [f' style="text-align:{"left" if column.left else "right"}"' for column in table.columns]
    heads = [f"<th{side}>{escape(column.title)}</th>" for column, side in zip(table.columns, sides, strict=True)]
    parts = [f"<p><b>{escape(headline(rows))}</b></p>", "<table>"]
    parts += [f"<thead><tr>{''.join(heads)}</tr></thead>", "<tbody>"]
    for row in table.rows:
        tag = "b" if row["key"] in advised else "span"
        texts = (escape(column.text(row)) for column in table.columns)
        cells = (f"<td{side}><{tag}>{text}</{tag}></td>" for text, side in zip(texts, sides, strict=True))
        parts.append(f"<tr>{''.join(cells)}</tr>")
    parts += ["</tbody>", "</table>"]
    parts.append(f"<p>{escape(measured_on([trial for row in rows for trial in row.trials]))}</p>")
    for item in advice:
        parts += [f"<p><b>{escape(item.sentence)}</b></p>", *(f"<p>{escape(line)}</p>" for line in _reason_lines(item))]
        code = "\n".join(filter(None, [item.code, *snippet_lines(item)]))
        parts += [f"<pre>{escape(code)}</pre>"] if code else []
    lines = remarks(rows)
    if lines:
        parts += ["<details><summary>Notes</summary><ul>", *(f"<li>{escape(line)}</li>" for line in lines)]
        parts += ["</ul></details>"]
    return "\n".join(parts)


def to_csv(rows: Sequence[Row]) -> str:
    """Return one line a configuration, plain values, a header line first."""
    return csv_grid(find_fields(IN_FILES), [flat_row(row) for row in rows])


def document(rows: Sequence[Row], advice: Sequence[Advice], prices: Prices | None = None) -> dict[str, Any]:
    """Return what `castwise run --format json` prints; `json_schema` describes it.

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


def to_json(rows: Sequence[Row], advice: Sequence[Advice], prices: Prices | None = None) -> str:
    """Return `document` as text."""
    return json_text(document(rows, advice, prices))


_JSON_TYPES: dict[Kind, list[str]] = {
    "text": ["string", "null"],
    "integer": ["integer", "null"],
    "number": ["number", "string", "null"],
    "truth": ["boolean", "null"],
}


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of `document`."""

    def array(properties: dict[str, Any], description: str, **others: Any) -> dict[str, Any]:
        row = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
        return {"type": "array", "description": description, "items": row | others}

    text: dict[str, Any] = {"type": "string"}
    optional_text: dict[str, Any] = {"type": _JSON_TYPES["text"]}
    columns = {
        field.name: {"type": _JSON_TYPES[field.kind], "description": f"{field.title or field.name} ({field.unit})"}
        for field in find_fields(IN_FILES)
    }
    advice = dict.fromkeys(("precision", "accuracy", "limit", "command", "code"), optional_text)
    advice |= {"workload": text, "sentence": text, "decision": {"enum": list(get_args(Decision))}}
    advice |= {"frameworks": {"type": "object", "additionalProperties": optional_text}}
    properties = {
        "schema_version": {"const": SCHEMA_VERSION},
        "rows": array(columns, "One for each configuration, as in CSV."),
        "warnings": array(
            dict.fromkeys(("key", *(field.name for field in fields(TrialWarning))), text),
            "What was unusual, by the key of a row.",
        ),
        "advice": array(advice, "Which precision to take."),
        "trials": {"type": "array", "description": "The whole records.", "items": {"type": "object"}},
        "costs": {"type": "array", "description": "What an epoch costs.", "items": {"type": "object"}},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "castwise run --format json",
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name != "costs"],
        "additionalProperties": False,
    }


def json_estimate(found: Estimate | None) -> dict[str, Any] | None:
    """Return an estimate for JSON, which has no NaN: an interval that there is not is null."""
    if found is None:
        return None
    return {name: value if math.isfinite(value) else None for name, value in asdict(found).items()}
