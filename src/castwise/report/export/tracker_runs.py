"""A trial as experiment trackers see one: parameters, figures, and series over steps."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from castwise.analysis import training_metrics
from castwise.records.schema import TelemetrySummary, Trial
from castwise.report.collection import Collection
from castwise.report.export.tables import QUESTION, TRIAL

_PARAMETERS = (*(name for name in QUESTION if name not in ("key", "cell")), "repeat")
_TAGS = ("status", "message", "key", "device_name", "driver", "torch", "castwise")
_FIGURES = (
    "throughput_per_second",
    "step_seconds",
    "spread",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "duration_seconds",
)


@dataclass(frozen=True)
class Point:
    """One value of a series.

    Attributes:
        step: Optimizer steps since timing or training began; the value is that after it.
        seconds: Since then, by the trial's own clock.
        value: The value.
    """

    step: int
    seconds: float
    value: float


Series = dict[str, list[Point]]


@dataclass(frozen=True)
class TrackedRun:
    """One trial.

    Attributes:
        name: What it is called; no two of a group share it.
        group: The title of the trials it is compared with.
        started: When it began, in seconds since 1970.
        parameters: What was asked for.
        tags: Its status, the machine and the file.
        figures: Single figures by name, units as suffixes.
        series: Values over steps by name.
    """

    name: str
    group: str
    started: float
    parameters: dict[str, str | int | float]
    tags: dict[str, str]
    figures: dict[str, float]
    series: Series


def tracked_runs(collection: Collection, file_of: Callable[[Trial], str]) -> Iterator[TrackedRun]:
    """Yield all trials, group by group."""
    for group in collection.groups:
        for configuration in group.configurations:
            for trial in configuration.trials:
                label = group.label(configuration)
                name = f"{label}, round {trial.spec.repeat}" if trial.spec.repeat else label
                yield _tracked_run(name, group.title, trial, file_of(trial))


def _tracked_run(name: str, group: str, trial: Trial, file: str) -> TrackedRun:
    try:
        started = datetime.fromisoformat(trial.started_at).astimezone(UTC).timestamp()
    except (ValueError, OverflowError):
        started = 0.0
    figures = {figure: TRIAL[figure](trial) for figure in _FIGURES}
    split = training_metrics.split(trial)
    figures["wall_seconds"] = None if split is None else split.total
    series = _training_series(trial) if trial.spec.kind == "training" else _block_series(trial)
    return TrackedRun(
        name=name,
        group=group,
        started=started,
        parameters={parameter: TRIAL[parameter](trial) for parameter in _PARAMETERS},
        tags={**{tag: TRIAL[tag](trial) or "" for tag in _TAGS}, "file": file},
        figures={figure: value for figure, value in figures.items() if value is not None},
        series={value: points for value, points in series.items() if points},
    )


def _block_series(trial: Trial) -> Series:
    names = ("step_seconds", "loss", "sm_clock_hertz", "power_watts", "max_temperature_celsius")
    found: Series = {name: [] for name in names}
    step, seconds = 0, 0.0
    for index, block in enumerate(trial.ranks[0].blocks if trial.ranks else ()):
        # The lead-in steps were not timed: they took as long as the block's.
        step += block.all_steps
        seconds += block.seconds * block.all_steps / block.num_steps
        reading = trial.readings[index] if index < len(trial.readings) else TelemetrySummary(seconds=0.0)
        values = {
            "step_seconds": block.seconds / block.num_steps,
            "loss": block.loss,
            "sm_clock_hertz": reading.sm_clock_hertz,
            "power_watts": reading.gpu_power_watts,  # of one GPU, as a trial's is
            "max_temperature_celsius": reading.max_temperature_celsius,
        }
        for name, value in values.items():
            if value is not None:
                found[name].append(Point(step, seconds, value))
    return found


def _training_series(trial: Trial) -> Series:
    found: Series = {name: [] for name in ("loss", "accuracy", "validation_loss", "learning_rate")}
    step, seconds = 0, 0.0
    for epoch in training_metrics.epochs_of(trial):
        for number, loss in epoch.losses:
            share = (number + 1) / max(1, epoch.num_steps)
            found["loss"].append(Point(step + number + 1, seconds + share * epoch.seconds, loss))
        step += epoch.num_steps
        seconds += epoch.seconds + epoch.validation_seconds
        for name in ("accuracy", "validation_loss", "learning_rate"):
            value = getattr(epoch, name)
            if value is not None:
                found[name].append(Point(step, seconds, value))
    return found


def finite(points: list[Point]) -> list[Point]:
    """Return the points that a tracker without NaN takes."""
    return [point for point in points if math.isfinite(point.value)]
