"""A trial as experiment trackers see one: parameters, figures, and series over steps."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from castwise.analysis import steady_metrics, training_metrics
from castwise.records.schema import TelemetrySummary, Trial
from castwise.report.collection import Collection, ComparisonGroup, throughput_of


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


@dataclass(frozen=True)
class TrackedRun:
    """One trial.

    Attributes:
        name: What it is called; no two of a topic share it.
        group: Its topic.
        started: When it began, in seconds since 1970.
        parameters: The question.
        tags: The answer's status, the machine and the file.
        figures: Single figures by name, units as suffixes.
        series: Values over steps by name.
    """

    name: str
    group: str
    started: float
    parameters: dict[str, str | int | float]
    tags: dict[str, str]
    figures: dict[str, float]
    series: dict[str, list[Point]]


def tracked_runs(collection: Collection, file_of: Callable[[Trial], str]) -> Iterator[TrackedRun]:
    """Return all trials, topic by topic."""
    for topic in collection.groups:
        for cell in topic.configurations:
            for trial in cell.trials:
                yield _run(topic, topic.label(cell), trial, file_of)


def _run(topic: ComparisonGroup, label: str, trial: Trial, file_of: Callable[[Trial], str]) -> TrackedRun:
    spec, environment = trial.spec, trial.environment
    repeat = f", round {spec.repeat}" if spec.repeat else ""
    return TrackedRun(
        name=f"{label}{repeat}",
        group=topic.title,
        started=_started(trial),
        parameters={
            "workload": spec.workload,
            "kind": spec.kind,
            "precision": spec.precision,
            "loss_scale": spec.loss_scale,
            "batch_size": spec.batch_size,
            "world_size": spec.world_size,
            "parallelism": spec.parallelism,
            "techniques": " ".join(spec.techniques),
            "data_set": spec.data_set,
            "device": spec.device,
            "seed": spec.seed,
            "repeat": spec.repeat,
        },
        tags={
            "status": trial.status,
            "message": trial.message,
            "key": spec.key,
            "device_name": environment.device_name,
            "driver": environment.driver or "",
            "torch": environment.torch,
            "castwise": environment.castwise,
            "file": file_of(trial),
        },
        figures={name: value for name, value in _figures(trial).items() if value is not None},
        series={name: points for name, points in _series(trial).items() if points},
    )


def _started(trial: Trial) -> float:
    try:
        return datetime.fromisoformat(trial.started_at).astimezone(UTC).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def _figures(trial: Trial) -> dict[str, float | None]:
    parts = training_metrics.split(trial)
    return {
        "throughput_per_second": throughput_of(trial),
        "step_seconds": steady_metrics.step_seconds(trial),
        "spread": steady_metrics.spread(trial),
        "peak_allocated_bytes": steady_metrics.peak_allocated_bytes(trial),
        "peak_reserved_bytes": steady_metrics.peak_reserved_bytes(trial),
        "wall_seconds": parts.total if parts is not None else None,
        "duration_seconds": trial.duration_seconds,
    }


def _series(trial: Trial) -> dict[str, list[Point]]:
    return _of_training(trial) if trial.spec.kind == "training" else _of_blocks(trial)


def _of_blocks(trial: Trial) -> dict[str, list[Point]]:
    blocks = trial.ranks[0].blocks if trial.ranks else ()
    found: dict[str, list[Point]] = {"step_seconds": [], "loss": []}
    found |= {name: [] for name in _watched(None)}
    step, seconds = 0, 0.0
    for index, block in enumerate(blocks):
        # What led to the block was not timed: its steps took as long as the block's.
        step, seconds = step + block.all_steps, seconds + block.seconds * block.all_steps / block.num_steps
        found["step_seconds"].append(Point(step, seconds, block.seconds / block.num_steps))
        found["loss"].append(Point(step, seconds, block.loss))
        reading = trial.readings[index] if index < len(trial.readings) else None
        for name, value in _watched(reading).items():
            if value is not None:
                found[name].append(Point(step, seconds, value))
    return found


def _watched(reading: TelemetrySummary | None) -> dict[str, float | None]:
    """Return what is shown of a reading; the power is one GPU's, as a trial's is."""
    seen = reading or TelemetrySummary(seconds=0.0)
    return {
        "sm_clock_hertz": seen.sm_clock_hertz,
        "power_watts": seen.gpu_power_watts,
        "max_temperature_celsius": seen.max_temperature_celsius,
    }


def _of_training(trial: Trial) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {name: [] for name in ("loss", "accuracy", "validation_loss", "learning_rate")}
    step, seconds = 0, 0.0
    for epoch in training_metrics.epochs_of(trial):
        for number, loss in epoch.losses:
            share = (number + 1) / max(1, epoch.num_steps)
            found["loss"].append(Point(step + number + 1, seconds + share * epoch.seconds, loss))
        step, seconds = step + epoch.num_steps, seconds + epoch.seconds + epoch.validation_seconds
        for name in ("accuracy", "validation_loss", "learning_rate"):
            value = getattr(epoch, name)
            if value is not None:
                found[name].append(Point(step, seconds, value))
    return found


def finite(points: list[Point]) -> list[Point]:
    """Return the points that a tracker without NaN takes."""
    return [point for point in points if math.isfinite(point.value)]
