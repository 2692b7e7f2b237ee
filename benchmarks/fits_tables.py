"""The errors of what `castwise fits` predicts, from the traces of `fits_errors.py` and the records they are of."""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from fits_errors import loop_of, measured
from hero import for_dark_pages
from max_batch_tables import measured_fits
from stored import RECORDS, load, markdown

from castwise.fits.predict import Loop
from castwise.max_batch.result import MaxBatch, available_bytes, held_bytes, max_batches_of
from castwise.records.schema import TracedMemory, Trial
from castwise.registry.precisions import PRECISIONS
from castwise.show.theme import INK, LIGHT, PAGE, SOFT
from castwise.spec.memory_line import largest_batch, needed_bytes

QUANTILE = 0.95
# The loss in chunks got its kernel later, which holds less than what ran then.
_BEFORE_THE_KERNEL = "2026-11-28"


@dataclass(frozen=True)
class Peak:
    """A peak on record, beside what is predicted of it."""

    trial: Trial
    loop: Loop

    @property
    def measured_bytes(self) -> int:
        return held_bytes(self.trial) or 0

    @property
    def predicted_bytes(self) -> float:
        return needed_bytes(self.loop.known, self.trial.spec.batch_size)

    @property
    def log_error(self) -> float:
        return math.log(self.predicted_bytes / self.measured_bytes)


@cache
def loops() -> dict[tuple[str, str, str], Loop]:
    """Return the loops that were traced."""
    specs = {loop_of(trial.spec): trial for trial in measured()}
    layers = {trial.spec.workload: trial.facts.layers for trial in measured() if trial.facts and trial.facts.layers}
    found = {}
    for path in sorted((RECORDS / "fits").glob("*.json")):
        for each in json.loads(path.read_text())["traces"]:
            key = (each["workload"], each["precision"], each["techniques"])
            if "batches" in each and key in specs:
                known = layers.get(each["workload"], ("convolution",) if "resnet" in each["workload"] else ())
                told = {
                    name: each[name] for name in ("largest", "needs_values", "guesses", "compiling") if name in each
                }
                memory = TracedMemory(batches=each["batches"], layers=known, **told)
                found[key] = Loop(specs[key].spec, memory)
    return found


@cache
def peaks() -> tuple[Peak, ...]:
    """Return the median peak of each loop, batch size and GPU, if the loop was traced with fake tensors."""
    groups: dict[tuple[object, ...], list[Trial]] = {}
    for trial in measured():
        is_older = "chunked-loss" in trial.spec.techniques and trial.started_at < _BEFORE_THE_KERNEL
        if loop_of(trial.spec) in loops() and not is_older:
            key = (*loop_of(trial.spec), trial.spec.batch_size, trial.environment.gpu)
            groups.setdefault(key, []).append(trial)
    found = (Peak(sorted(own, key=held)[len(own) // 2], loops()[loop_of(own[0].spec)]) for own in groups.values())
    return tuple(peak for peak in found if peak.loop.memory is not None and not peak.loop.memory.needs_values)


def held(trial: Trial) -> int:
    return held_bytes(trial) or 0


def apart() -> tuple[list[Peak], list[Peak]]:
    """Return the peaks without, and with, float32 convolutions for which cuDNN takes what is free; no scripts'."""
    own = [peak for peak in peaks() if not peak.trial.spec.is_script]
    return [p for p in own if not p.loop.takes_workspace], [p for p in own if p.loop.takes_workspace]


def of_scripts() -> tuple[list[Peak], list[Peak]]:
    """Return the peaks of scripts that compile nothing, and of those that do."""
    own = [(peak, peak.loop.memory) for peak in peaks() if peak.trial.spec.is_script]
    eager = [peak for peak, memory in own if memory is not None and not memory.compiling]
    return eager, [peak for peak, memory in own if memory is not None and memory.compiling]


def quantile(own: Iterable[Peak]) -> float:
    """Return the 95 % quantile of the peaks' absolute log errors."""
    return quantile_of(peak.log_error for peak in own)


def quantile_of(log_errors: Iterable[float]) -> float:
    """Return the conformal quantile of absolute errors: with n of them the ceil(0.95 (n + 1))-th."""
    errors = sorted(map(abs, log_errors))
    return errors[min(len(errors), math.ceil(QUANTILE * (len(errors) + 1))) - 1]


def _percent(log_error: float) -> str:
    return f"{100 * (math.exp(log_error) - 1):.1f} %"


def _signed(log_error: float) -> str:
    return f"{100 * (math.exp(log_error) - 1):+.1f} %"


def errors_by_workload() -> list[str]:
    """Return a table of the errors of each workload: mean, worst, and by precision."""
    found = [peak for group in apart() for peak in group]
    names = [row.name for row in PRECISIONS if any(peak.trial.spec.precision == row.name for peak in found)]
    rows = []
    for workload in dict.fromkeys(sorted(peak.trial.spec.workload for peak in found)):
        own = [peak for peak in found if peak.trial.spec.workload == workload]
        cells = []
        for name in names:
            errors = [peak.log_error for peak in own if peak.trial.spec.precision == name]
            cells.append(_signed(max(errors, key=abs)) if errors else "–")
        rows.append((workload, len(own), _mean(own), *cells))
    heading = f"workload | n | mean | {' | '.join(names)}"
    return markdown(heading, "lrr" + "r" * len(names), rows)


def _mean(own: Sequence[Peak]) -> str:
    return _percent(statistics.mean(abs(peak.log_error) for peak in own))


def summary() -> list[str]:
    """Return the errors in sentences."""
    plain, wide = apart()
    gpus = dict.fromkeys(peak.trial.environment.gpu for peak in peaks())
    lines = [
        errors_of(own, what)
        for own, what in (
            (plain, "All peaks but those of float32 convolutions without TF32"),
            (wide, "Float32 convolutions without TF32"),
            ([p for p in plain if p.trial.environment.gpu == "NVIDIA H200"], "Of the first, those on an H200"),
            ([p for p in plain if "checkpoint" in loop_of(p.trial.spec)[2]], "Of the first, those with checkpoints"),
            ([p for p in plain if p.trial.spec.user_model is not None], "Of the first, models of a user's file"),
        )
    ]
    torch = sorted({peak.trial.environment.torch for peak in peaks()})
    count = len(plain) + len(wide)
    return [f"{count} peaks, {', '.join(map(str, gpus))}, torch {', '.join(torch)}:", "", *lines]


def errors_of(own: Sequence[Peak], what: str) -> str:
    worst = max(own, key=lambda peak: abs(peak.log_error))
    at = f"{' '.join(filter(None, loop_of(worst.trial.spec)))} at batch {worst.trial.spec.batch_size:,}"
    return (
        f"- {what}: n = {len(own)}, mean error {_mean(own)}, worst {_signed(worst.log_error)} ({at}), 95 % within "
        f"{_percent(quantile(own))}."
    )


_FAR = math.log(1.05)


def summary_of_scripts() -> list[str]:
    """Return the errors of scripts in sentences, with those that are far off, and how many could not be traced."""
    eager, compiled = of_scripts()
    traced = {loop_of(peak.trial.spec) for peak in (*eager, *compiled)}
    refused = {loop_of(trial.spec) for trial in measured() if trial.spec.is_script} - traced
    far = sorted((peak for peak in eager if abs(peak.log_error) > _FAR), key=lambda peak: -abs(peak.log_error))
    files = [next(word for word in peak.trial.spec.workload.split() if word.endswith(".py")) for peak in far]
    named = [
        f"{file} {_signed(peak.log_error)} of {peak.measured_bytes / 2**30:.1f} GiB"
        for file, peak in zip(files, far, strict=True)
    ]
    return [
        errors_of(eager, "Eager scripts"),
        errors_of(compiled, "Scripts that compile"),
        f"- Refused: {len(refused)} of {len(traced) + len(refused)}. Eager ones that are off by more than 5 %: "
        f"{', '.join(named)}.",
    ]


def predicted_batch(found: MaxBatch) -> int | None:
    """Return the largest batch that is predicted for a search's loop and GPU; None if its loop was not traced."""
    loop = loops().get(loop_of(found.spec))
    if loop is None or found.largest is None or "chunked-loss" in found.spec.techniques:  # an older one of that name
        return None
    room = available_bytes(found.largest) or 0
    between_gaps = None if loop.memory is None else loop.memory.largest.get(room)
    return between_gaps or largest_batch(loop.known, 0.99 * room)


def errors_of_batches() -> list[float]:
    """Return by what share predicted largest batches are off from those that were verified."""
    errors = []
    searches = [each for groups in measured_fits(RECORDS / "fit").values() for group in groups for each in group]
    for found in [*searches, *max_batches_of(load(RECORDS / "little_memory"))]:
        if found.largest is None or found.failing is None or (predicted := predicted_batch(found)) is None:
            continue
        low, high = found.largest.spec.batch_size, found.failing.spec.batch_size - 1
        errors.append(predicted / min(max(predicted, low), high) - 1)
    return errors


def largest() -> str:
    """Return in a sentence how far the predicted largest batches are from those that were verified."""
    errors = errors_of_batches()
    near = sum(abs(error) <= 0.03 for error in errors)
    return (
        f"Of {len(errors)} predicted largest batches {near} lie within 3 % of those that were verified; the farthest "
        f"is off by {100 * max(errors, key=abs):+.1f} %."
    )


_LEFT, _SIDE, _RIGHT = 60, 360, 16  # pixels
_LOW, _HIGH = 2**26, 2**38  # bytes


def plot() -> str:
    """Return a plot of predicted against measured peaks, both on logarithmic scales, as SVG."""

    def at(count: float) -> float:
        return _SIDE * math.log(count / _LOW) / math.log(_HIGH / _LOW)

    bottom = _RIGHT + _SIDE
    width, height = _LEFT + _SIDE + _RIGHT, bottom + 46
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="12">'
        f'<rect width="{width}" height="{height}" fill="{LIGHT[PAGE]}"/>',
        f'<path d="M{_LEFT} {bottom}L{_LEFT + _SIDE} {_RIGHT}" stroke="{LIGHT[SOFT]}" stroke-dasharray="4"/>',
        f'<path d="M{_LEFT} {_RIGHT}V{bottom}H{_LEFT + _SIDE}" stroke="{LIGHT[INK]}" fill="none"/>',
    ]
    for power, label in ((27, "128 MiB"), (30, "1 GiB"), (33, "8 GiB"), (36, "64 GiB")):
        x, y = _LEFT + at(2**power), bottom - at(2**power)
        lines.append(f'<text fill="{LIGHT[INK]}" x="{x:.0f}" y="{bottom + 16}" text-anchor="middle">{label}</text>')
        lines.append(f'<text fill="{LIGHT[INK]}" x="{_LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{label}</text>')
    for own, color in zip(apart(), ("#1f77b4", "#d62728"), strict=True):
        for peak in own:
            x, y = _LEFT + at(peak.measured_bytes), bottom - at(peak.predicted_bytes)
            lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}" fill-opacity="0.6"/>')
    middle = _LEFT + _SIDE / 2
    title = "measured peak (red: float32 convolutions)"
    lines.append(f'<text fill="{LIGHT[INK]}" x="{middle}" y="{height - 8}" text-anchor="middle">{title}</text>')
    lines.append(f'<text fill="{LIGHT[INK]}" x="{_LEFT + 8}" y="{_RIGHT + 14}">predicted peak</text>')
    return for_dark_pages("\n".join([*lines, "</svg>", ""]))
