"""The one table of every quantity that castwise shows: name, unit, heading and text.

Terminal, Markdown, HTML, charts, CSV, JSON, Parquet and trackers select their columns from `FIELDS` by name. They read
them from flat rows: dictionaries of plain values in SI units, by field name. Each kind of result has a function that
makes its flat rows (for steady trials `run_report.flat_row`, for training runs `training_table.flat_row`).

A column is one line in the columns of its kind of result (such as `run_report.COLUMNS`): a `Field` of its own, or
`column` with the name of one in `FIELDS`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Literal

from castwise.analysis.statistics import Estimate
from castwise.analysis.steady_metrics import unit_of
from castwise.records.schema import Trial
from castwise.registry.precisions import known_precision
from castwise.registry.techniques import join
from castwise.show.units import (
    format_bytes,
    format_energy,
    format_number,
    format_percent,
    format_rate,
    format_ratio,
    format_seconds,
)
from castwise.spec.quantities import TOO_NOISY, format_interval, format_share, with_interval

FlatRow = Mapping[str, Any]
Unit = Literal["text", "count", "seconds", "bytes", "ratio", "share", "rate", "number", "boolean"]
Kind = Literal["text", "integer", "number", "truth"]

_FORMATS: dict[Unit, Callable[[Any], str]] = {
    "text": str,
    "count": str,
    "seconds": format_seconds,
    "bytes": format_bytes,
    "ratio": format_ratio,
    "share": format_percent,
    "rate": format_rate,
    "number": format_number,
    "boolean": str,
}
_NEARLY_EVEN = 1.5  # times as long as the other may one side of an interval be for ±
_NEAR = 0.1  # ratios that are nearer to 1 have a decimal more, where that matters
_KINDS: dict[Unit, Kind] = {"text": "text", "count": "integer", "bytes": "integer", "boolean": "truth"}


@dataclass(frozen=True)
class Field:
    """A quantity, and how it is shown."""

    name: str  # in CSV, JSON and Parquet, with the unit as a suffix
    title: str = ""  # the heading; empty if only files have the field
    unit: Unit = "text"
    format: Callable[[FlatRow], str] | None = None  # a row with a value as text; None formats it by its unit
    best: Literal["highest", "lowest"] | None = None  # which value of a column is the best
    wraps: bool = False  # whether a narrow terminal may break the text between words
    varies: bool = False  # whether a table shows the field only if its rows have several values
    default: tuple[Any, ...] = ()  # values that are not worth a column if all rows have one of them
    otherwise: str = ""  # the field that says why there is no value
    # As a column of one kind of result:
    get: Callable[[Any], Any] | None = None  # its value of a result; None if the rows have it without that
    short: str = ""  # its heading among the columns that decide; empty if it is none of these
    place: Literal["both", "table", "files"] = "both"  # whether tables have it, or CSV and JSON

    def value(self, row: FlatRow) -> Any:
        return row.get(self.name)

    def text(self, row: FlatRow) -> str:
        """Return the value as people read it; "–" for None, or why there is none."""
        value = row.get(self.name)
        if value is None:
            return str(row.get(self.otherwise) or "–")
        return self.format(row) if self.format is not None else _FORMATS[self.unit](value)

    @property
    def left(self) -> bool:
        return self.unit == "text"

    @property
    def kind(self) -> Kind:
        return _KINDS.get(self.unit, "number")


def interval_text(name: str) -> Callable[[FlatRow], str]:
    """Return the format of a ratio whose row has its interval as `NAME_low` and `NAME_high`: `1.90× [1.88, 1.92]`."""

    def text(row: FlatRow) -> str:
        return with_interval(
            format_ratio(row[name]), format_interval(row[name], row.get(f"{name}_low"), row.get(f"{name}_high"))
        )

    return text


def short_ratio_text(name: str) -> Callable[[FlatRow], str]:
    """Return the format of the same in a narrow column: `1.90 ± 0.02`; `[0.63, 1.91]` for an interval that is uneven.

    No interval is shown narrower than it is, or on the other side of 1.
    """

    def text(row: FlatRow) -> str:
        value, low, high = row[name], row.get(f"{name}_low"), row.get(f"{name}_high")
        interval = format_interval(value, low, high)
        if low is None or high is None or interval in ("", TOO_NOISY):
            return interval or f"{value:.2f}"
        for digits in (2, 3):
            shown = round(value, digits)
            half = max(math.ceil(max(shown - low, high - shown) * 10**digits - 1e-6), 1) / 10**digits
            if (low > 1) == (shown - half > 1) and (high < 1) == (shown + half < 1):
                break
        shorter, longer = sorted((high - value, value - low))
        if longer > _NEARLY_EVEN * shorter + 10.0**-digits:  # less than a digit is not seen
            return interval
        return f"{value:.{digits}f} ± {half:.{digits}f}"

    return text


def precise_ratio(value: float) -> str:
    """Return a ratio, with three decimals within 10 % of 1: `10.78×`, `0.986×`."""
    return f"{value:.3f}×" if abs(value - 1) < _NEAR else f"{value:.2f}×"


def precise_ratio_text(name: str) -> Callable[[FlatRow], str]:
    """Return the format of the same with its interval: `0.986× [0.974, 0.998]`."""

    def text(row: FlatRow) -> str:
        figure, form = precise_ratio(row[name]), "{:.3f}" if abs(row[name] - 1) < _NEAR else "{:.2f}"
        ends = row.get(f"{name}_low"), row.get(f"{name}_high")
        return with_interval(figure, format_interval(row[name], *ends, form.format))

    return text


def precision_text(row: FlatRow) -> str:
    """Return the precision, with the loss scale if it is not the precision's own."""
    known, loss_scale = known_precision(row["precision"]), row.get("loss_scale")
    is_usual = known is None or loss_scale in (None, known.loss_scale)
    return str(row["precision"]) if is_usual else f"{row['precision']} loss scale {row['loss_scale']}"


def distinct_precision_text(rows: Sequence[FlatRow]) -> Callable[[FlatRow], str] | None:
    """Return `precision_text` if rows of one precision differ in their loss scale, else None."""
    scales = {(row["precision"], row.get("loss_scale")) for row in rows}
    return precision_text if len(scales) > len({name for name, _ in scales}) else None


def rate_text(name: str) -> Callable[[FlatRow], str]:
    """Return the format of a rate of the row's unit: `2,560 images/s`."""
    return lambda row: f"{format_rate(row[name])} {row['unit']}/s"


def _efficiency_text(row: FlatRow) -> str:
    """Return a scaling efficiency with its interval, if it has one: `97.6 ± 0.4 %`."""
    value: float = row["scaling_efficiency"]
    low, high = row.get("scaling_efficiency_low"), row.get("scaling_efficiency_high")
    if low is None or high is None or format_interval(value, low, high) in ("", TOO_NOISY):
        return format_percent(value)
    half = math.ceil(1000 * max(value - low, high - value) - 1e-6) / 10
    return f"{100 * value:.1f} ± {half:.1f} %"


def _count_text(name: str) -> Callable[[FlatRow], str]:
    return lambda row: f"{row[name]:,}"


def _energy_text(row: FlatRow) -> str:
    ends = row.get("joules_per_unit_low"), row.get("joules_per_unit_high")
    interval = format_interval(row["joules_per_unit"], *ends, "{:.3g}".format)
    return with_interval(format_energy(row["joules_per_unit"], row["unit"]), interval)


def _predicted_batch_text(row: FlatRow) -> str:
    error = row.get("prediction_error")
    return f"{row['predicted_batch']:,}" + ("" if error is None else f" ({100 * error:+z.1f} %)")


def _peak_text(row: FlatRow) -> str:
    return f"{format_bytes(row['peak_bytes'])} ({100 * row['parts_error']:+z.1f} %)"


def _allocated_text(row: FlatRow) -> str:
    ratio = row.get("memory_ratio")
    return format_bytes(row["peak_allocated_bytes"]) + ("" if ratio is None else f" ({format_ratio(ratio)})")


def _loss_text(row: FlatRow) -> str:
    step = row.get("final_step")
    return f"{row['final_loss']:.4g}" + ("" if step is None else f" @ {step}")


_TEXTS_OF_FILES = (  # a sitting is a session
    *("key", "cell", "recipe", "protocol", "sitting", "suite", "unit", "optimizer", "energy_source", "cause"),
    *("warnings", "device", "device_name", "fingerprint", "host", "cpu", "gpu_uuid", "machine_note", "telemetry_note"),
    *("driver", "cuda", "cudnn", "torch", "castwise", "commit"),
)
_COUNTS_OF_FILES = (
    *("schema_version", "rank", "block", "epoch", "turn", "step_of_epoch", "warm_up_steps", "num_parameters"),
    *("final_step", "pairs_needed"),
)
_TIMES_OF_FILES = ("duration", "cold_start", "ready", "set_up", "first_step", "warm_up")
_WITH_INTERVAL = ("throughput_per_second", "speedup", "joules_per_unit", "difference")
FIELDS: tuple[Field, ...] = (
    # What was asked for.
    Field("workload", "workload", varies=True),
    Field("kind", "kind"),
    Field("data_set", "data", varies=True),
    Field("precision", "precision"),
    Field("batch_size", "batch", "count", varies=True),
    Field("gpus", "GPUs", "count", varies=True),
    Field("world_size", "GPUs", "count", varies=True),
    Field("parallelism", "parallelism", format=lambda row: row["parallelism"].replace("none", "–"), varies=True),
    Field("loss_scale", "loss scale", default=("none", "dynamic")),
    Field("techniques", "techniques", wraps=True, varies=True),
    Field("seed", "seed", "count", varies=True),
    Field("repeat", "round", "count", varies=True),
    # How it ended.
    Field("status", "status"),
    Field("message", "message", default=("",)),
    Field("length", "length", wraps=True),
    Field("started_at", "measured", format=lambda row: row["started_at"][:16].replace("T", " ")),
    Field("file", "file"),
    Field("processes", "processes", "count"),
    # Speed.
    Field("seconds", "time", "seconds"),
    Field("start_seconds", "first step", "seconds"),
    Field("data_share", "waits for data", "share"),
    Field("validation_seconds", "validation", "seconds", default=(0.0,)),
    Field("throughput_per_second", "throughput", "rate", rate_text("throughput_per_second"), best="highest"),
    Field("written_speedup", "over written", "ratio", interval_text("written_speedup"), best="highest"),
    Field("default_speedup", "over default", "ratio", interval_text("default_speedup"), best="highest"),
    Field("speedup", "speed-up", "ratio", interval_text("speedup"), best="highest"),
    Field("bf16_speedup", "over bf16-mixed", "ratio", interval_text("bf16_speedup"), best="highest"),
    Field("verdict", "verdict"),
    Field("verdict_reason", "why"),
    Field("loop_speedup", "over plain loop", "ratio"),
    Field("published_pair_speedup", "at published batches", "ratio"),
    Field("scaling_efficiency", "scaling efficiency", "share", _efficiency_text),
    Field("efficiency", "scaling efficiency", "share"),
    Field("step_seconds", "step time", "seconds", best="lowest"),
    Field(
        "model_flops_per_second",
        "model TFLOP/s",
        "number",
        lambda row: "< 0.001" if (rate := row["model_flops_per_second"] / 1e12) < 0.001 else format_rate(rate),
    ),
    Field("model_flops_utilization", "MFU", "share"),
    Field("fp8_share", "in FP8", "share"),
    Field("min_sqnr_db", "lowest SQNR", "number", lambda row: f"{row['min_sqnr_db']:.1f} dB"),
    Field("max_underflow_share", "cast to 0", "share", lambda row: format_share(row["max_underflow_share"])),
    Field("spread", "spread", "share", lambda row: format_share(row["spread"])),
    # Memory.
    Field("peak_allocated_bytes", "peak allocated", "bytes", _allocated_text, best="lowest"),
    Field("peak_reserved_bytes", "peak reserved", "bytes", best="lowest"),
    Field("driver_used_bytes", "driver's figure", "bytes"),
    Field("memory_ratio", "memory ratio", "ratio"),
    # Energy.
    Field("joules_per_unit", "energy", "number", _energy_text, best="lowest"),
    Field("power_watts", "power", "number", lambda row: f"{row['power_watts']:.0f} W"),
    # The GPU's hardware counters.
    Field("tensor_share", "tensor cores busy", "share"),
    Field("dram_share", "memory busy", "share"),
    # What a step's time is spent on, by a profile; docs/why.md.
    Field("products_share", "products", "share"),
    Field("moving_share", "moving data", "share"),
    Field("update_share", "update", "share"),
    Field("idle_share", "idle", "share"),
    # The largest batch that trains.
    Field("largest_batch", "largest batch", "count", _count_text("largest_batch")),
    Field("failing_batch", "first that fails", "count", _count_text("failing_batch")),
    Field("batch_ratio", "over fp32", "ratio"),
    Field("predicted_batch", "predicted", "count", _predicted_batch_text),
    Field("room", "GPU"),  # and the memory that it has for tensors
    Field("fixed_bytes", "fixed", "bytes"),
    Field("sample_bytes", "per sample", "bytes"),
    Field("knee_batch", "knee", "count", _count_text("knee_batch")),
    Field("knee_throughput", "at the knee", "rate", rate_text("knee_throughput")),
    Field("num_steps", "steps", "count"),
    Field("num_trials", "trials", "count"),
    # Where memory goes.
    Field("weights_bytes", "weights", "bytes"),
    Field("masters_bytes", "float32 masters", "bytes"),
    Field("gradients_bytes", "gradients", "bytes"),
    Field("optimizer_bytes", "optimizer state", "bytes"),
    Field("batches_bytes", "batches on the device", "bytes"),
    Field("saved_bytes", "activations saved for backward", "bytes"),
    Field("weight_casts_bytes", "autocast's weight copies", "bytes"),
    Field("temporaries_bytes", "other tensors", "bytes"),
    Field("workspace_bytes", "workspaces", "bytes"),
    Field("process_bytes", "process besides tensors", "bytes"),
    Field("slack_bytes", "allocator's slack", "bytes"),
    Field("outside_bytes", "CUDA context and others", "bytes"),
    Field("seen_bytes", "held at the peak", "bytes"),
    Field("parts_error", "measured peak", "share", _peak_text),
    Field("total_bytes", "in all", "bytes"),
    # A suite's published figures, and what was measured of the same configuration.
    Field("ratio", "measured / published", "ratio"),
    Field("equal_batch_speedup", "at equal batch", "ratio"),
    Field("published_memory_bytes", "published memory", "bytes"),
    Field("memory_bytes", "measured memory", "bytes"),
    Field("memory", "memory is"),
    Field("published", "published"),
    Field("reserved_bytes", "reserved", "bytes"),
    # The published loop and the tuned one.
    Field("seeds", "seeds", "count", lambda row: row["seeds_text"]),
    Field("settled_speedup", "by the epochs after the first", "ratio", interval_text("settled_speedup")),
    Field("published_bytes", "peak allocated, published", "bytes"),
    Field("tuned_bytes", "tuned", "bytes"),
    Field("published_score", "accuracy or perplexity, published", "number", lambda row: row["published_score_text"]),
    Field("tuned_score", "tuned", "number", lambda row: row["tuned_score_text"]),
    Field("difference", "difference", "number", lambda row: row["difference_text"]),
    Field("loop", "the tuned loop", wraps=True),
    # Whether a precision trains as well.
    Field("score", "score", "number", lambda row: row["score_text"]),
    Field("score_spread", "spread between seeds", "number", lambda row: f"{row['score_spread']:.3g}"),
    Field("area", "mean while training", "number"),
    Field("num_diverged", "diverged", "count", default=(0,)),
    Field("step_efficiency", "step efficiency", "ratio", interval_text("step_efficiency")),
    Field("gain", "× to the score", "ratio", interval_text("gain")),
    # A search for the fastest loop.
    Field("num_processes", "n", "count"),
    # What was trained.
    Field("accuracy", "accuracy", "share"),
    Field("best_accuracy", "best accuracy", "share"),
    Field("perplexity", "perplexity", "number", lambda row: f"{row['perplexity']:.4g}"),
    Field("final_score", "score", "number", lambda row: f"{row['final_score']:.4g}"),
    Field("final_loss", "final loss @ step", "number", _loss_text),
    Field("loss", "loss", "number"),
    Field("loss_curve", "loss over time"),
    Field("skipped_steps", "skipped", "count", default=(0,)),
    # Only files have these.
    *(Field(name) for name in _TEXTS_OF_FILES),
    *(Field(name, unit="count") for name in _COUNTS_OF_FILES),
    *(Field(f"{name}_seconds", unit="seconds") for name in _TIMES_OF_FILES),
    *(Field(f"{name}_{end}", unit="number") for name in _WITH_INTERVAL for end in ("low", "high")),
    Field("settled", unit="boolean"),
)
_BY_NAME = {field.name: field for field in FIELDS}


def find_field(name: str, title: str = "") -> Field:
    return replace(_BY_NAME[name], title=title) if title else _BY_NAME[name]


def find_fields(names: Iterable[str]) -> list[Field]:
    return [_BY_NAME[name] for name in names]


def column(name: str, get: str | Callable[[Any], Any] | None = None, short: str = "", **changes: Any) -> Field:
    """Return the field with this name as a column; its value is an attribute, or what a function returns."""
    return replace(_BY_NAME[name], get=attrgetter(get) if isinstance(get, str) else get, short=short, **changes)


def interval_columns(name: str, get: str) -> list[Field]:
    """Return the ends of the interval of an estimate, which is an attribute, as columns of files."""

    def end_of(end: str) -> Callable[[Any], Any]:
        return lambda result: interval_values(name, attrgetter(get)(result))[end]

    ends = (f"{name}_low", f"{name}_high")
    return [Field(end, unit="number", get=end_of(end), place="files") for end in ends]


def estimate_columns(name: str, get: str, short: str = "") -> list[Field]:
    """Return an estimate, which is an attribute, and the ends of its interval as columns."""
    return [
        column(name, lambda result: estimate_values(name, attrgetter(get)(result))[name], short),
        *interval_columns(name, get),
    ]


def values_of(columns: Iterable[Field], result: Any) -> dict[str, Any]:
    """Return the values of a result by the names of columns, for those that say how to get them."""
    return {each.name: each.get(result) for each in columns if each.get is not None}


def in_files(columns: Iterable[Field]) -> list[Field]:
    return [each for each in columns if each.place != "table"]


def in_tables(columns: Iterable[Field]) -> list[Field]:
    """Return the columns of a table with all that is worth showing."""
    return [each for each in columns if each.place != "files"]


def short_columns(columns: Iterable[Field], titles: Mapping[str, str] = MappingProxyType({})) -> list[Field]:
    """Return the columns that decide, under their short headings or these."""
    return [replace(each, title=titles.get(each.name, each.short)) for each in columns if each.short]


def worth_showing(fields: Sequence[Field], rows: Sequence[FlatRow], always: Iterable[str] = ()) -> list[Field]:
    """Return the fields with values that exist, that are unusual, or that differ, and those that are always shown."""

    def is_worth_it(field: Field) -> bool:
        values = {field.value(row) for row in rows}
        return len(values) > 1 if field.varies else not values <= {None, *field.default}

    return [field for field in fields if field.name in always or is_worth_it(field)]


def trial_values(trial: Trial) -> dict[str, Any]:
    """Return what the flat rows of all kinds of results have in common: the question, the outcome and the machine."""
    spec = trial.spec
    return {
        **{name: getattr(spec, name) for name in ("workload", "precision", "batch_size", "parallelism", "loss_scale")},
        "data_set": spec.data_set if spec.user_model is None else "own",
        "gpus": spec.num_gpus,
        "techniques": join(spec.techniques),
        **{name: getattr(spec, name) for name in ("seed", "repeat", "key")},
        "unit": unit_of(trial),
        **{name: getattr(trial, name) for name in ("status", "message", "telemetry_note")},
        **counter_values(trial),
        "device": trial.environment.device_name,
        "torch": trial.environment.torch,
    }


def counter_values(trial: Trial) -> dict[str, float | None]:
    return {name: getattr(trial.counters, name, None) for name in ("tensor_share", "dram_share")}


def interval_values(name: str, found: Estimate | None) -> dict[str, float | None]:
    """Return the ends of an interval as `NAME_low` and `NAME_high`; None for an end that is no finite number."""
    low, high = (None, None) if found is None else (found.low, found.high)
    return {
        f"{name}_low": low if low is not None and math.isfinite(low) else None,
        f"{name}_high": high if high is not None and math.isfinite(high) else None,
    }


def estimate_values(name: str, found: Estimate | None) -> dict[str, float | None]:
    """Return a figure and the ends of its interval as `NAME`, `NAME_low` and `NAME_high`."""
    return {name: None if found is None else found.value, **interval_values(name, found)}


def ratio_text(found: Estimate | None) -> str:
    """Return a ratio with its interval, if that says something, as `precise_ratio_text` does; "–" for None."""
    return "–" if found is None else precise_ratio_text("ratio")(estimate_values("ratio", found))
