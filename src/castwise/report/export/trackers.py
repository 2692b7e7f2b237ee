"""Runs as experiment trackers read them: TensorBoard's event files, MLflow's database, Weights & Biases' offline runs.

Each tracker's own package writes its files; nothing is sent anywhere.
"""

import logging
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path

from castwise.analysis import training_metrics
from castwise.errors import StoreError, UsageError
from castwise.records.schema import TelemetrySummary, Trial
from castwise.report.collection import Collection, FileOf
from castwise.report.export.tables import QUESTION, trial_row
from castwise.report.series import Point, epoch_ends, losses

MLFLOW_DATABASE = "mlflow.db"

_PARAMETERS = (*(name for name in QUESTION if name not in ("key", "cell")), "repeat")
_TAGS = ("status", "message", "key", "device_name", "driver", "torch", "castwise")
_FIGURES = (
    *("throughput_per_second", "step_seconds", "spread"),
    *("peak_allocated_bytes", "peak_reserved_bytes", "duration_seconds", "tensor_share", "dram_share"),
)


@dataclass(frozen=True)
class TrackedRun:
    """One trial as experiment trackers see one."""

    name: str  # no two of a group share it
    group: str  # the title of the trials it is compared with
    started: float  # in seconds since 1970
    parameters: dict[str, str | int | float]  # what was asked for
    tags: dict[str, str]  # its status, the machine and the file
    figures: dict[str, float]
    series: dict[str, list[Point]]  # values over steps

    def finite_points(self) -> Iterator[tuple[str, Point]]:
        """Yield the points of all series that a tracker without NaN takes, each with its series' name."""
        for name, points in self.series.items():
            yield from ((name, point) for point in points if math.isfinite(point.value))


def tracked_runs(collection: Collection, file_of: FileOf) -> Iterator[TrackedRun]:
    """Yield all trials, group by group."""
    for group in collection.groups:
        for config in group.configurations:
            for trial in config.trials:
                name = group.label(config) + (f", round {trial.spec.repeat}" if trial.spec.repeat else "")
                yield _tracked_run(name, group.title, trial, file_of(trial))


def _tracked_run(name: str, group: str, trial: Trial, file: str) -> TrackedRun:
    try:
        started = datetime.fromisoformat(trial.started_at).astimezone(UTC).timestamp()
    except (ValueError, OverflowError):
        started = 0.0
    row, split = trial_row(trial), training_metrics.split(trial)
    figures = {**{figure: row[figure] for figure in _FIGURES}, "wall_seconds": None if split is None else split.total}
    series = _block_series(trial)
    if trial.spec.kind == "training":
        ends = ("accuracy", "validation_loss", "learning_rate")
        series = {"loss": list(losses(trial)), **{name: list(epoch_ends(trial, attrgetter(name))) for name in ends}}
    return TrackedRun(
        name=name,
        group=group,
        started=started,
        parameters={parameter: row[parameter] for parameter in _PARAMETERS},
        tags={**{tag: row[tag] or "" for tag in _TAGS}, "file": file},
        figures={figure: value for figure, value in figures.items() if value is not None},
        series={value: points for value, points in series.items() if points},
    )


def _block_series(trial: Trial) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {}
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
                found.setdefault(name, []).append(Point(step, seconds, value))
    return found


def write_tensorboard(runs: Iterable[TrackedRun], folder: Path) -> int:
    """Write runs into a folder that `tensorboard --logdir` reads, a folder a run; return how many.

    Raises:
        UsageError: tensorboard is not installed.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError:
        raise UsageError("TensorBoard's files need tensorboard: pip install 'castwise[tensorboard]'.") from None

    def safe(name: str) -> str:  # as a folder's name, which TensorBoard shows
        return re.sub(r"[^A-Za-z0-9._ ,:=+-]+", "_", name).strip(" .")[:100] or "run"

    count = 0
    for run in runs:
        count += 1
        own = folder / safe(run.group) / f"{safe(run.name)}-{run.tags['key']}"
        own.mkdir(parents=True, exist_ok=True)
        events = [Event(wall_time=run.started, file_version="brain.Event:2")]
        parameters = {**run.parameters, "device_name": run.tags["device_name"]}
        events.append(Event(wall_time=run.started, summary=hparams_pb(parameters, trial_id=run.tags["key"])))
        points = [(f"figures/{name}", Point(0, 0.0, value)) for name, value in run.figures.items()]
        points += [(name, point) for name, series in run.series.items() for point in series]
        for name, point in points:
            summary = Summary(value=[Summary.Value(tag=name, simple_value=point.value)])
            events.append(Event(wall_time=run.started + point.seconds, step=point.step, summary=summary))
        # Not by EventFileWriter: its thread fails unseen if the disk is full.
        with (own / f"events.out.tfevents.{round(run.started):010d}.castwise").open("wb") as file:
            writer = RecordWriter(file)
            for event in events:
                writer.write(event.SerializeToString())
    return count


def write_mlflow(runs: Iterable[TrackedRun], folder: Path) -> int:
    """Write runs into `mlflow.db` in a folder, an experiment a group; return how many. No server is asked.

    Raises:
        UsageError: mlflow is not installed.
    """
    try:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError
    except ImportError:
        raise UsageError("MLflow's database needs mlflow: pip install 'castwise[mlflow]'.") from None

    for name in ("alembic", "mlflow"):  # they log each table that they make
        logging.getLogger(name).setLevel(logging.WARNING)
    folder.mkdir(parents=True, exist_ok=True)
    experiments: dict[str, str] = {}
    count = 0
    try:
        client = MlflowClient(tracking_uri=f"sqlite:///{(folder / MLFLOW_DATABASE).absolute()}")
        artifacts = (folder / "artifacts").absolute().as_uri()
        for run in runs:
            count += 1
            if run.group not in experiments:
                experiments[run.group] = client.create_experiment(run.group, artifact_location=artifacts)
            began = round(1000 * run.started)
            made = client.create_run(experiments[run.group], start_time=began, run_name=run.name).info.run_id
            metrics = [Metric(name, value, began, 0) for name, value in run.figures.items()]
            metrics += [
                Metric(name, point.value, round(1000 * (run.started + point.seconds)), point.step)
                for name, point in run.finite_points()
            ]
            # MLflow's limits: 500 characters a parameter, 5,000 a tag, 1,000 metrics at once.
            client.log_batch(
                made,
                params=[Param(name, str(value)[:500]) for name, value in run.parameters.items()],
                tags=[RunTag(name, value[:5000]) for name, value in run.tags.items()],
            )
            for begin in range(0, len(metrics), 1000):
                client.log_batch(made, metrics=metrics[begin : begin + 1000])
            client.set_terminated(
                made,
                status="FINISHED" if run.tags["status"] == "ok" else "FAILED",
                end_time=max([began, *(metric.timestamp for metric in metrics)]),
            )
    except (MlflowException, SQLAlchemyError) as error:  # a full disk, for example
        reason = next(iter(str(error).splitlines()), "MLflow failed")
        raise StoreError(f"'{folder}' cannot be written: {reason}") from None
    return count


def write_wandb(runs: Iterable[TrackedRun], folder: Path) -> int:
    """Write offline runs into `wandb/` in a folder; return how many. `wandb sync` uploads them if the user wants that.

    Raises:
        UsageError: wandb is not installed.
    """
    try:
        import wandb
    except ImportError:
        raise UsageError("Runs of Weights & Biases need wandb: pip install 'castwise[wandb]'.") from None

    logging.raiseExceptions = False  # else a full disk prints a traceback for each line of its log
    folder.mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(
        console="off",
        disable_code=True,
        disable_git=True,
        silent=True,
        # The machine that exports is not the machine that measured.
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
    )
    count = 0
    for run in runs:
        count += 1
        made = wandb.init(
            mode="offline",
            project="castwise",
            dir=str(folder),
            name=run.name[:120],  # what Weights & Biases takes
            group=run.group[:64],
            config={**run.parameters, **run.tags},
            settings=settings,
            reinit="finish_previous",
        )
        steps: dict[int, dict[str, float]] = {}
        for name, point in run.finite_points():
            steps.setdefault(point.step, {"seconds": point.seconds})[name] = point.value
        for step in sorted(steps):
            made.log(steps[step], step=step)
        made.summary.update(run.figures)
        made.finish(exit_code=0 if run.tags["status"] == "ok" else 1)
    wandb.teardown()  # waits until all is on disk, which `finish` does not
    return count
