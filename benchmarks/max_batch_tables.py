"""The tables of memory: largest batches, from the trials of `castwise max-batch`, and bytes a parameter, from rows.

Those of workloads lie under benchmarks/records/fit/. Those of docs/little-memory.md, with the runs of `castwise
accuracy` that judge them, are put into benchmarks/records/little_memory/. What that page predicts lies under
benchmarks/records/predicted_memory/, a file for each model:

    castwise fits gpt2 --gpu "RTX 4090,H100" --precision fp32,bf16-mixed,bf16-sr --optimizer-state fp32,8-bit
        --format json
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from stored import by_place, load, markdown, where_of

from castwise.analysis.steady_metrics import peak_allocated_bytes, throughput
from castwise.fits.predict import ERROR, NUM_ERRORS
from castwise.fits.render import COLUMNS
from castwise.max_batch.render import (
    baseline_of,
    breakdowns_of,
    conclusions,
    part_titles,
    ratio_of,
)
from castwise.max_batch.result import MaxBatch, max_batches_of
from castwise.registry.gpus import short_device_name
from castwise.registry.precisions import DEFAULT, PRECISIONS, find_precision, why_unsupported
from castwise.registry.published import LargestBatch, largest_batches
from castwise.registry.techniques import STATES, parse_techniques, step_config_of
from castwise.registry.workloads import find_workload
from castwise.show.table import markdown_text
from castwise.show.units import format_bytes, format_percent, format_rate, format_ratio

# The workloads of the sources that filled their GPU's memory.
_SOURCED = ("dpn92", *(f"fastai-resnet{depth}" for depth in (18, 34, 50, 101, 152)))
_LOWER = "fp16-master"  # what both sources trained in, and float32

# What docs/little-memory.md compares, by what it saves: a precision, and what Adam's state is kept in.
_CHOICES = (
    ("bf16-master", ""),
    ("fp32", ""),
    ("bf16-mixed", ""),
    ("bf16-sr", ""),
    ("bf16-mixed", "8-bit"),
    ("bf16-mixed", "4-bit"),
    ("bf16-true", ""),
    ("bf16-sr", "8-bit"),
    ("bf16-sr", "4-bit"),
)

_TIMED = ("throughput_per_second", "knee_batch", "knee_throughput")
_NEAR = 0.03  # the project's goal for predictions

# Searches of one workload under one memory limit, side by side.
Measured = Mapping[str, Sequence[Sequence[MaxBatch]]]


def measured_fits(folder: Path) -> dict[str, list[list[MaxBatch]]]:
    """Return the searches on record: by folder, and then by the limit that was set to their memory."""
    found: dict[str, list[list[MaxBatch]]] = {}
    for path in sorted(folder.glob("*")):
        groups: dict[int | None, list[MaxBatch]] = {}
        for fit in max_batches_of(load(path)):
            groups.setdefault(fit.spec.memory_limit_bytes, []).append(fit)
        if groups:
            found[path.name] = list(groups.values())
    return found


def bytes_a_parameter(precision: str, state: str) -> tuple[int, int, int]:
    """Return the bytes a parameter of weights, gradients and Adam's state."""
    row = find_precision(precision)
    own = 4 if row.param_dtype == "float32" else 2
    master = 4 * row.master_weights  # of the weight, and of its gradient
    numbers = int(STATES[state][0]) if state else 2 * (4 if row.steps_copies else own)
    return own + master, own + master, numbers


def parameter_bytes(_: str) -> str:
    """Return the bytes a parameter of each choice, by what castwise's loop keeps."""
    cells = []
    for precision, state in _CHOICES:
        kept = bytes_a_parameter(precision, state)
        cells.append([f"`{precision}`", state or "plain", *kept, f"**{sum(kept)}**"])
    heading = "precision | Adam's state | weights | gradients | state | together"
    return "\n".join(markdown(heading, "llrrrr", cells)) + "\n"


def little_memory(folder: Path, predicted: Callable[[MaxBatch], int | None]) -> str:
    """Return peak memory, largest batch, what was predicted of it, and speed there of each choice on record."""
    trials, cells, places = load(folder), list[list[object]](), dict[str, None]()
    found: dict[str, dict[str, MaxBatch]] = {}
    # Of two GPUs' searches the one that reached farther counts; one without a largest batch was cut off.
    reached = ((fit.largest.spec.batch_size, fit) for fit in max_batches_of(trials) if fit.largest is not None)
    for _, fit in sorted(reached, key=lambda pair: pair[0]):
        found.setdefault(fit.spec.workload, {})[fit.spec.loop_name] = fit
    for workload, loops in found.items():
        own = list(loops.values())
        sizes = [trial.spec.batch_size for fit in own for trial in fit.trained]
        shared = max(sizes, key=lambda size: (sizes.count(size), size), default=None)
        for fit in own:
            at = next((each for each in fit.trained if each.spec.batch_size == shared), fit.largest)
            peak = "–" if at is None else f"{format_bytes(peak_allocated_bytes(at))} at {at.spec.batch_size:,}"
            speed = None if fit.largest is None else throughput(fit.largest)
            rate = "–" if speed is None else f"{format_rate(speed)} {find_workload(workload).unit}/s"
            state = step_config_of(fit.spec.techniques).optimizer_state
            num_bytes = sum(bytes_a_parameter(fit.spec.precision, state))
            guess = predicted(fit)
            cells.append(
                [workload, fit.spec.loop_name, num_bytes, peak, fit.words, "–" if guess is None else f"{guess:,}", rate]
            )
        places |= dict.fromkeys([where_of(own[0].trials[0])])
    if not cells:
        return "None is on record yet.\n"
    heading = "model | choice | bytes a parameter | peak memory | largest batch | predicted | throughput there"
    return "\n".join(["; ".join(places), "", *markdown(heading, "llrrrrr", cells)]) + "\n"


def predicted_memory(folder: Path) -> str:
    """Return what `castwise fits` predicts of each choice: a step's memory, and the largest batch of each GPU.

    Each figure is followed by that with activation checkpointing.
    """
    (largest,) = (column for column in COLUMNS if column.name == "predicted_batch")
    cells, gpus = list[list[object]](), dict[str, None]()
    for document in (json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))):
        found: dict[tuple[str, str], dict[tuple[str, bool], tuple[str, str]]] = {}
        for row in document["fits"]:
            config = step_config_of(parse_techniques(row["techniques"]))
            at = (row["gpu"], "activation-checkpointing" in row["techniques"])
            batch = largest.text(row).removeprefix("about ")
            found.setdefault((row["precision"], config.optimizer_state), {})[at] = (
                format_bytes(row["needed_bytes"]),
                batch,
            )
            gpus[row["gpu"]] = None
        for (precision, state), each in found.items():
            needed = " / ".join(each[next(iter(gpus)), is_kept][0] for is_kept in (False, True))
            batches = [" / ".join(each[gpu, is_kept][1] for is_kept in (False, True)) for gpu in gpus]
            name = f"{document['workload']}, batch {document['fits'][0]['batch_size']}"
            cells.append([name, f"`{precision}`", state or "plain", needed, *batches])
    heading = f"model | precision | Adam's state | step | {' | '.join(f'largest on {gpu}' for gpu in gpus)}"
    right = f"95 % of {NUM_ERRORS} peaks on record lie within {format_percent(math.expm1(ERROR))} of predictions."
    return "\n".join([right, "", *markdown(heading, "lll" + "r" * (1 + len(gpus)), cells)]) + "\n"


def in_a_sentence(name: str, measured: Measured) -> str:
    """Return the largest batches of a workload in a sentence, with where and when they were found."""
    fits = measured[name][0]
    trial = fits[0].trials[0]
    batches = [f"{fit.largest.spec.batch_size:,} in {fit.spec.loop_name}" for fit in fits if fit.largest is not None]
    errors = [abs(error) for fit in fits if (error := fit.prediction_error) is not None]
    predicted = f"; predicted from two small batches within {format_percent(max(errors))}" if errors else ""
    return (
        f"`{_command(fits)}` ({where_of(trial)}): the largest batch that trains is {', '.join(batches)}{predicted}. "
        + predictions(measured)
    )


def _command(fits: Sequence[MaxBatch]) -> str:
    """Return the command that searched: precisions are named where they are not all that it measures here."""
    spec, hardware = fits[0].spec, fits[0].trials[0].environment.hardware
    own = list(dict.fromkeys(fit.spec.precision for fit in fits))
    every = [row.name for row in PRECISIONS if row.name != DEFAULT and why_unsupported(row, hardware) is None]
    named = "" if set(own) == set(every) else f" --precision {','.join(own)}"
    limit = "" if spec.memory_limit_bytes is None else f" --memory {spec.memory_limit_bytes / 2**30:.3g}GiB"
    return f"castwise max-batch {spec.workload}{named}{limit}"


def account(fits: Sequence[MaxBatch]) -> str:
    """Return where a workload's memory goes, at the largest batch that all of its loops have measured.

    Parts are lines here, and loops columns: a page is less wide than a terminal.
    """
    accounts = breakdowns_of(fits)
    batches = sorted({each.trial.spec.batch_size for each in accounts})
    heading = [f"batch {' and '.join(f'{batch:,}' for batch in batches)}"]
    heading += [each.trial.spec.loop_name for each in accounts]
    rows = [
        [title, *(format_bytes(each.bytes_of(part)) for each in accounts)]
        for part, title in part_titles(accounts).items()
    ]
    rows += [
        ["in all", *(format_bytes(each.total_bytes) for each in accounts)],
        ["peak of the timed steps", *(format_bytes(each.peak_bytes) for each in accounts)],
        ["parts beside that peak", *(f"{100 * each.error:z.2f} %" for each in accounts)],
    ]
    return "\n".join(markdown(" | ".join(heading), "l" + "r" * len(accounts), rows)) + "\n"


def sentences(fits: Sequence[MaxBatch]) -> str:
    """Return the conclusions of `castwise max-batch` on a workload."""
    return "\n".join(f"- {markdown_text(line)}" for line in conclusions(fits)) + "\n"


def loops_table(measured: Measured) -> str:
    """Return the largest batches of workloads that were searched in loops which differ in memory, and their speed."""
    heading, rows = (
        "workload | GPU | loop | largest batch | throughput there | over the plain loop's",
        list[list[object]](),
    )
    shown = [fits for name in measured for fits in measured[name] if any(fit.spec.techniques for fit in fits)]
    for fits in shown:
        gpu = short_device_name(fits[0].trials[0].environment.device_name)
        speeds = {fit.spec.techniques: throughput(fit.largest) for fit in fits if fit.largest is not None}
        for fit in fits:
            speed, plain = speeds.get(fit.spec.techniques), speeds.get(())
            if fit.largest is None or speed is None or plain is None:
                continue
            rate = f"{format_rate(speed)} {find_workload(fit.spec.workload).unit}/s"
            batch = f"{fit.largest.spec.batch_size:,}"
            rows.append([fit.spec.workload, gpu, fit.spec.loop_name, batch, rate, format_ratio(speed / plain)])
    measured_at = [{"where": where_of(fits[0].trials[0]), "name": fits[0].spec.workload} for fits in shown]
    places = "\n\n".join(where for where, _ in by_place(measured_at))
    return "\n".join([places, "", *markdown(heading, "lllrrr", rows)]) + "\n"


def beside_sources(measured: Measured) -> str:
    """Return the sources' ratios of largest batches and the measured ones, each of one GPU."""
    heading = f"workload | source | GPU | fp32 | {_LOWER} | ratio | here within | fp32 | {_LOWER} | ratio"
    rows = []
    for workload in _SOURCED:
        own = [_own(fits) for fits in measured[workload]]
        alike: dict[tuple[object, ...], list[LargestBatch]] = {}
        for found in largest_batches(workload, _LOWER):
            alike.setdefault((found.suite, found.batch_size, found.baseline), []).append(found)
        published = [_published(found) for found in alike.values()]
        for theirs, ours in zip_longest(published, own):
            rows.append([workload, *(theirs or "–" * 5), *(ours or "–" * 4)])
    return "\n".join(markdown(heading, "lllrrrlrrr", rows)) + "\n"


def predictions(measured: Measured) -> str:
    """Return in a sentence how far predictions lay from what was verified."""
    fits = [fit for groups in measured.values() for group in groups for fit in group]
    errors = [abs(error) for fit in fits if (error := fit.prediction_error) is not None]
    within = sum(error <= _NEAR for error in errors)
    return (
        f"Of all {len(errors)} predictions on record {within} lie within 3 % of the batches that were verified; the "
        f"farthest lies {format_percent(max(errors))} from them.\n"
    )


def _published(found: Sequence[LargestBatch]) -> list[str]:
    first, gpus = found[0], ", ".join(each.gpu for each in found)
    return [first.suite, gpus, f"{first.baseline:,}", f"{first.batch_size:,}", format_ratio(first.ratio)]


def _own(fits: Sequence[MaxBatch]) -> list[str]:
    limit, environment = fits[0].spec.memory_limit_bytes, fits[0].trials[0].environment
    within = f"{format_bytes(limit or environment.gpu_memory_bytes)} of an {environment.device_name}"
    fit = next((each for each in fits if each.spec.precision == _LOWER and not each.spec.techniques), None)
    base = baseline_of(fit or fits[0], fits)
    cells = [f"{each.largest.spec.batch_size:,}" if each and each.largest else "–" for each in (base, fit)]
    return [within, *cells, format_ratio(None if fit is None else ratio_of(fit, fits))]
