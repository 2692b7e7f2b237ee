"""Runs in an MLflow database of their own, a file that `mlflow ui` opens; no server is asked."""

import logging
from collections.abc import Iterable
from pathlib import Path

from castwise.errors import UsageError
from castwise.report.export.tracker_runs import TrackedRun, finite

DATABASE = "mlflow.db"
_MOST_IN_A_BATCH = 1000  # metrics that MLflow takes at once
_LONGEST_TAG = 5000
_LONGEST_PARAMETER = 500


def write_mlflow(runs: Iterable[TrackedRun], folder: Path) -> int:
    """Write runs into `mlflow.db` in a folder; an experiment a topic. Return how many.

    Raises:
        UsageError: mlflow is not installed.
    """
    try:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag
    except ImportError:
        raise UsageError("MLflow's database needs mlflow: pip install 'castwise[mlflow]'.") from None

    for name in ("alembic", "mlflow"):  # which tell of each table that they make
        logging.getLogger(name).setLevel(logging.WARNING)
    folder.mkdir(parents=True, exist_ok=True)
    client = MlflowClient(tracking_uri=f"sqlite:///{(folder / DATABASE).absolute()}")
    experiments: dict[str, str] = {}
    count = 0
    for run in runs:
        count += 1
        if run.group not in experiments:
            experiments[run.group] = client.create_experiment(
                run.group, artifact_location=(folder / "artifacts").absolute().as_uri()
            )
        began = _milliseconds(run.started)
        made = client.create_run(experiments[run.group], start_time=began, run_name=run.name).info.run_id
        metrics = [Metric(name, value, began, 0) for name, value in run.figures.items()]
        last = began
        for name, points in run.series.items():
            for point in finite(points):
                last = max(last, _milliseconds(run.started + point.seconds))
                metrics.append(Metric(name, point.value, _milliseconds(run.started + point.seconds), point.step))
        client.log_batch(
            made,
            params=[Param(name, str(value)[:_LONGEST_PARAMETER]) for name, value in run.parameters.items()],
            tags=[RunTag(name, value[:_LONGEST_TAG]) for name, value in run.tags.items()],
        )
        for begin in range(0, len(metrics), _MOST_IN_A_BATCH):
            client.log_batch(made, metrics=metrics[begin : begin + _MOST_IN_A_BATCH])
        ended_well = run.tags["status"] == "ok"
        client.set_terminated(made, status="FINISHED" if ended_well else "FAILED", end_time=last)
    return count


def _milliseconds(seconds: float) -> int:
    return round(1000 * seconds)
