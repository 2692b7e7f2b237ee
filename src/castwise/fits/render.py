"""What fits as tables and sentences."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from castwise.fits.predict import (
    ERROR_FP32_CONVOLUTIONS,
    NUM_ERRORS_FP32_CONVOLUTIONS,
    Loop,
    Prediction,
)
from castwise.records.schema import MemoryParts
from castwise.registry.gpus import CONTEXT_BYTES, short_device_name, total_bytes
from castwise.registry.precisions import Hardware, find_precision, why_emulated
from castwise.registry.techniques import join
from castwise.show.fields import Field, FlatRow, column, find_field, in_files, values_of
from castwise.show.presentation import Grid, Lines, Part, Presentation, paragraph
from castwise.show.table import DataTable, json_document, plain
from castwise.show.units import format_bytes, format_duration, format_percent

_ROUGH = 1.25  # how many times its lower end the interval of a batch is, from which on it is shown itself
_PARTS = tuple(name for name in MemoryParts.model_fields if name not in ("outside_bytes", "missing"))


def _known_batch(row: FlatRow) -> str:
    """Return the largest batch as far as it is known: `about 410`, and `300 to 600` if the error is large."""
    batch, low, high = (row[name] for name in ("predicted_batch", "largest_batch_low", "largest_batch_high"))
    if low is None or high is None or low == high:
        return f"{batch:,}"
    digits = -int(math.log10(high - low))
    low, batch, high = (f"{round(each, digits):,}" for each in (low, batch, high))
    is_rough = row["largest_batch_high"] > _ROUGH * row["largest_batch_low"]
    return f"{low} to {high}" if is_rough else f"about {batch}"


def _part(name: str) -> Field:
    return column(name, lambda fit: fit.loop.parts and getattr(fit.loop.parts, name), place="files")


COLUMNS = (
    Field("gpu", "GPU", get=lambda fit: fit.gpu_name, place="files"),
    column("room", lambda fit: f"{fit.gpu_name}, {format_bytes(fit.room_bytes)} for tensors", place="table"),
    Field("loop", "precision", wraps=True, place="table", get=lambda fit: fit.loop.spec.loop_name.replace("+", " + ")),
    column("precision", lambda fit: fit.loop.spec.precision, place="files"),
    column("techniques", lambda fit: join(fit.loop.spec.techniques), place="files"),
    Field("batch_size", "batch", "count", get=lambda fit: fit.loop.spec.batch_size, place="files"),
    Field("needed_bytes", "needs", "bytes", get=lambda fit: fit.loop.needed_bytes),
    column("saved_bytes", lambda fit: fit.loop.parts and fit.loop.parts.saved_bytes, place="table"),
    Field("room_bytes", "", "bytes", get=lambda fit: fit.room_bytes, place="files"),
    Field("fits", "fits", get=lambda fit: fit.verdict, otherwise="unknown"),
    Field("unknown", get=lambda fit: "unsupported" if fit.unsupported else "not known", place="table"),
    Field("predicted_batch", "largest batch", "count", _known_batch, get=lambda fit: fit.largest()),
    Field("largest_batch_low", "", "count", get=lambda fit: fit.largest(-fit.loop.error), place="files"),
    Field("largest_batch_high", "", "count", get=lambda fit: fit.largest(fit.loop.error), place="files"),
    Field("problem", "", get=lambda fit: fit.problem or None, place="files"),
    *map(_part, _PARTS),
)


_SHOWN = [
    replace(each, title="activations" if each.name == "saved_bytes" else each.title)
    for each in COLUMNS
    if each.place != "files" and each.name not in ("room", "unknown")
]


def present(found: Prediction, *, wide: bool = False) -> Presentation:
    spec = found.loops[0].spec
    rows: list[FlatRow] = [values_of(COLUMNS, fit) for fit in found.fits]
    where = f" on {rows[0]['room']}" if len(found.gpus) == 1 else ""
    # A script has the one batch that it is written for.
    shown = [each for each in _SHOWN if not (spec.is_script and each.name == "predicted_batch")]
    known = [loop for loop in found.loops if loop.parts is not None]
    alike = [loop for loop in known if wide or loop.spec.techniques == spec.techniques]
    where_it_goes: list[Part] = [paragraph("Where it goes", gap=True), Grid(_parts_table(alike))] if alike else []
    return Presentation(
        [
            paragraph(f"Memory of {spec.workload} at batch {spec.batch_size}{where}, predicted without a GPU"),
            Grid(DataTable(shown, rows), setting=("room",), drop_first=("saved_bytes",)),
            *where_it_goes,
            Lines(sentences(found), is_list=False, gap=True),
            Lines(remarks(found), "yellow"),
        ],
        lambda: DataTable(in_files(COLUMNS), rows),
        lambda: document(found),
    )


def document(found: Prediction) -> dict[str, Any]:
    """Return what `--format json` prints."""
    return json_document(
        workload=found.loops[0].spec.workload,
        fits=[plain(in_files(COLUMNS), values_of(COLUMNS, fit)) for fit in found.fits],
        error=math.exp(found.loops[0].error) - 1,
        num_errors=found.loops[0].known_errors[1],
        sentences=sentences(found),
        remarks=remarks(found),
        seconds=found.seconds,
    )


def _parts_table(loops: Sequence[Loop]) -> DataTable[FlatRow]:
    """Return a row for each part that any loop has, and a column for each of these loops, traced at their batch."""
    known = [(f"loop{number}", loop) for number, loop in enumerate(loops)]
    rows: list[FlatRow] = []
    for name in _PARTS:
        values = {key: getattr(loop.parts, name) for key, loop in known}
        if any(values.values()):
            rows.append({"part": find_field(name).title, **values})
    rows.append({"part": "in all", **{key: loop.needed_bytes for key, loop in known}})
    columns = [Field(key, loop.spec.loop_name.replace("+", " + "), "bytes") for key, loop in known]
    return DataTable([Field("part", "held at the peak of a step"), *columns], rows)


def sentences(found: Prediction) -> list[str]:
    """Return what the figures stand for."""
    lines, spec = [], found.loops[0].spec
    if any(loop.memory is not None and not loop.memory.needs_values for loop in found.loops):
        whose = " of scripts" if spec.is_script else " of users' models" if spec.user_model is not None else ""
        lines.append(
            f"Of {found.loops[0].known_errors[1]:,} peaks{whose} on record (H100 and H200) 95 % lie within "
            f"{_percent(found.loops[0].error)} of what this predicts."
            + (" A script has its own batch." if spec.is_script else " Batches are rounded to what that allows.")
            + " `close`: both yes and no are possible." * any(fit.verdict == "close" for fit in found.fits)
        )
    if any(loop.takes_workspace for loop in found.loops):
        lines.append(
            "fp32: while memory is free, cuDNN takes workspace on top for convolutions without TF32: 95 % of "
            f"{NUM_ERRORS_FP32_CONVOLUTIONS} such peaks lie within {_percent(ERROR_FP32_CONVOLUTIONS)}."
        )
    assumed = [short_device_name(gpu.names[0]) for gpu in found.gpus if not total_bytes(gpu)[1]]
    if assumed:
        lines.append(
            f"Assumed: the memory that a driver leaves of {', '.join(assumed)}. On all GPUs "
            f"{format_bytes(CONTEXT_BYTES)} are left for the CUDA context, and 1 % for fragmentation."
            + " Largest batches allow for the gaps that tensors leave."
            * any(loop.memory is not None and bool(loop.memory.largest) for loop in found.loops)
        )
    try_it = f"castwise {'run --' if spec.is_script else 'max-batch'} {found.workload}"
    lines.append(f"Traced in {format_duration(found.seconds)}. To try it on a GPU: {try_it}")
    return lines


def remarks(found: Prediction) -> list[str]:
    """Return what a reader must know of single loops."""
    lines: dict[str, None] = {}
    for loop in found.loops:
        name = loop.spec.loop_name
        if loop.problem:
            lines[f"{name} cannot be traced: {loop.problem}"] = None
        elif loop.memory is not None and loop.memory.needs_values:
            sizes = " and ".join(map(str, sorted(loop.memory.batches)))
            why = loop.memory.needs_values
            lines[f"{name}: from steps of {sizes} samples on the CPU, whose error is not known ({why})"] = None
        if loop.memory is not None and (guesses := loop.memory.guesses):
            verb = "reads a value, which is" if len(guesses) == 1 else "read values, which are"
            lines[f"{', '.join(guesses)} {verb} not known: a number counts as 1, a truth value as False"] = None
        if loop.memory is not None and (compiling := loop.memory.compiling):
            lines[f"{', '.join(compiling)}: traced without torch.compile"] = None
        lines |= dict.fromkeys(() if loop.memory is None else loop.memory.notes)
        if loop.left_out:
            lines[f"{name}: traced without {', '.join(loop.left_out)}"] = None
    for fit in found.fits:
        if fit.unsupported:
            lines[fit.unsupported] = None
        row = find_precision(fit.loop.spec.precision)
        if fit.gpu.capability is not None and why_emulated(row, Hardware(fit.gpu_name, fit.gpu.capability)) is not None:
            lines[f"{row.name} is emulated on {fit.gpu_name}: it runs, without the speed"] = None
    return list(lines)


def _percent(log_error: float) -> str:
    return format_percent(math.exp(log_error) - 1)
