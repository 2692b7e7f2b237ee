"""The results of steady trials as a terminal table, Markdown, HTML for a notebook, CSV or JSON."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from html import escape
from typing import Any, get_args

from rich.console import Console
from rich.text import Text

from castwise.analysis.advice import Advice, Decision
from castwise.analysis.energy import Prices, energy_of, power_watts
from castwise.analysis.result_table import Row
from castwise.analysis.statistics import Estimate
from castwise.analysis.steady_metrics import cold_start_seconds, step_times
from castwise.analysis.warnings import TrialWarning, warnings_of_all
from castwise.render.console import print_line
from castwise.render.fields import Field, FlatRow, Kind, find_fields, interval_values, trial_values, worth_showing
from castwise.render.notes import cost_lines, costs, headline, remarks, snippet_lines
from castwise.render.table import (
    IN_CSV,
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
)
from castwise.render.units import sparkline
from castwise.spec.quantities import format_share

SHOWN = (
    *("workload", "data_set", "precision", "batch_size", "gpus", "parallelism", "loss_scale", "techniques"),
    *("throughput_per_second", "default_speedup", "speedup", "verdict", "loop_speedup", "scaling_efficiency"),
    *("step_seconds", "spread"),
    *("peak_allocated_bytes", "peak_reserved_bytes", "joules_per_unit", "power_watts", "final_loss", "skipped_steps"),
    "status",
)
# The columns of CSV and JSON.
IN_FILES = (
    *(name for name in SHOWN if name != "skipped_steps"),
    *("unit", "processes", "throughput_low", "throughput_high", "default_speedup_low", "default_speedup_high"),
    *("speedup_low", "speedup_high"),
    *("memory_low", "memory_high", "verdict_reason", "memory_ratio", "final_step", "skipped_steps"),
    *("joules_per_unit_low", "joules_per_unit_high", "energy_source"),
    *("cold_start_seconds", "ready_seconds", "set_up_seconds", "first_step_seconds", "warm_up_seconds"),
    *("warnings", "telemetry_note", "message", "device", "torch", "key"),
)
_DROP_FIRST = (
    *("blocks", "power_watts", "peak_reserved_bytes", "spread", "step_seconds", "data_set", "joules_per_unit"),
    *("final_loss", "verdict"),
)
_VISIBLE = 0.01  # block times are drawn if one differs from the median by this share
_FEWEST_BLOCKS = 4

# Figures of a row under the names of their fields.
_OF_ROW = (
    *("default_speedup", "speedup", "loop_speedup", "scaling_efficiency", "step_seconds", "spread"),
    *("peak_allocated_bytes", "peak_reserved_bytes", "memory_ratio", "final_loss", "final_step", "skipped_steps"),
)
_OF_FACTS = ("ready_seconds", "set_up_seconds", "first_step_seconds", "warm_up_seconds")


def flat_row(row: Row) -> dict[str, Any]:
    """Return the values of a steady result by field name."""
    energy, verdict = energy_of(row.trial), row.verdict
    return {
        **trial_values(row.trial),
        **{name: getattr(row, name) for name in _OF_ROW},
        "throughput_per_second": row.throughput,
        **interval_values("throughput", row.throughput_estimate),
        **interval_values("default_speedup", row.default_estimate),
        **interval_values("speedup", row.speedup_estimate),
        **interval_values("memory", row.memory_estimate),
        "verdict": verdict and verdict.kind,
        "verdict_reason": verdict and verdict.reason,
        "joules_per_unit": energy and energy.joules_per_unit,
        "joules_per_unit_low": energy and energy.low,
        "joules_per_unit_high": energy and energy.high,
        "energy_source": energy and energy.source,
        "power_watts": power_watts(row.trial),
        "processes": len(row.trials),
        "cold_start_seconds": cold_start_seconds(row.trials[0]),
        **{name: getattr(row.trials[0].facts, name, None) for name in _OF_FACTS},
        "warnings": " ".join(warning.name for warning in warnings_of_all(row.trials)),
    }


def data_table(rows: Sequence[Row]) -> DataTable[FlatRow]:
    """Return the table of steady results, with the columns worth showing."""
    flat: list[FlatRow] = [flat_row(row) for row in rows]
    scales = {(row["precision"], row["loss_scale"]) for row in flat}
    has_several = len(scales) > len({precision for precision, _ in scales})  # then nothing else may tell rows apart
    shown = worth_showing(find_fields(SHOWN), flat, ["loss_scale"] if has_several else [])
    if all(row["processes"] == 1 for row in flat):
        shown = [field for field in shown if field.name != "verdict"]
    group = competing_by("workload", "data_set", "batch_size", "gpus", "parallelism")
    return DataTable(shown, flat, group, "the best at its batch size")


def print_table(
    rows: Sequence[Row],
    advice: Sequence[Advice],
    console: Console,
    prices: Prices | None = None,
    elsewhere: str = IN_CSV,
) -> None:
    """Print the table, its remarks, what epochs cost at these prices, and the advice to a terminal.

    `elsewhere` names the place of the columns that a narrow terminal leaves out.
    """
    advised = {item.key for item in advice}

    def style(row: FlatRow) -> str | None:
        if row["status"] != "ok":
            return "dim"
        return "bold green" if row["key"] in advised else None

    print_line(console, headline(rows), "bold")
    table = _with_block_times(data_table(rows), rows)
    print_data_table(console, table, drop_first=_DROP_FIRST, style=style, elsewhere=elsewhere)
    for line in [*remarks(rows), *cost_lines(rows, prices)]:
        print_line(console, f"  {line}", "yellow")
    printed = {""}
    for item in advice:
        console.print()
        print_line(console, item.sentence, "bold")
        if item.code not in printed:
            printed.add(item.code)
            for line in [*item.code.splitlines(), *snippet_lines(item)]:
                # Never wrapped: what is copied from the terminal has to run.
                console.print(Text(f"    {line}"), highlight=False, soft_wrap=True)


def _with_block_times(table: DataTable[FlatRow], rows: Sequence[Row]) -> DataTable[FlatRow]:
    """Return the table with a small curve of each row's block times, if the differences are large enough to see.

    All curves have one scale, so that a quiet configuration looks quiet next to a noisy one.
    """
    deviations: list[list[float]] = []  # of each block from its row's median, as a share of it
    for row in rows:
        times = step_times(row.trial)
        if len(times) >= _FEWEST_BLOCKS:
            median = statistics.median(times)
            deviations.append([value / median - 1 for value in times])
        else:
            deviations.append([])
    reach = max((abs(value) for values in deviations for value in values), default=0.0)
    if reach < _VISIBLE:
        return table
    curves = [sparkline(values, -reach, reach) or None for values in deviations]
    flat = [{**row, "blocks": curve} for row, curve in zip(table.rows, curves, strict=True)]
    *columns, status = table.columns
    blocks = Field("blocks", f"blocks, ±{format_share(reach)}")
    return replace(table, columns=[*columns, blocks, status], rows=flat)


def to_markdown(rows: Sequence[Row], advice: Sequence[Advice], prices: Prices | None = None) -> str:
    """Return the table, its remarks, what epochs cost at these prices, and the advice as Markdown."""
    lines = [markdown_table(rows).rstrip("\n"), *(f"- {markdown_text(line)}" for line in cost_lines(rows, prices))]
    for item in advice:
        lines += ["", markdown_text(item.sentence)]
        if item.code:
            lines += ["", "```python", "\n".join([item.code, *snippet_lines(item)]), "```"]
    return "\n".join(lines).rstrip() + "\n"


def markdown_table(rows: Sequence[Row]) -> str:
    """Return the headline, the table and its remarks as Markdown."""
    table = data_table(rows)
    items = (f"- {markdown_text(line)}" for line in remarks(rows))
    lines = [markdown_text(headline(rows)), "", *markdown_grid(table.columns, table.rows), "", *items]
    return "\n".join(lines).rstrip() + "\n"


def to_html(rows: Sequence[Row], advice: Sequence[Advice]) -> str:
    """Return the headline, the table, its remarks, the advice and the code to paste as HTML for a notebook."""
    table, advised = data_table(rows), {item.key for item in advice}
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
    lines = remarks(rows)
    if lines:
        parts += ["<ul>", *(f"<li>{escape(line)}</li>" for line in lines), "</ul>"]
    for item in advice:
        parts.append(f"<p><b>{escape(item.sentence)}</b></p>")
        code = "\n".join(filter(None, [item.code, *snippet_lines(item)]))
        parts += [f"<pre>{escape(code)}</pre>"] if code else []
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
    advice = dict.fromkeys(("precision", "command", "code"), optional_text)
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
