"""Runs as TensorBoard's event files: a folder a run, with its hyperparameters for the HParams tab."""

import re
from collections.abc import Iterable
from pathlib import Path

from castwise.errors import UsageError
from castwise.report.export.tracker_runs import TrackedRun

_NAME_LENGTH = 100


def write_tensorboard(runs: Iterable[TrackedRun], folder: Path) -> int:
    """Write runs into a folder that `tensorboard --logdir` reads; return how many.

    Raises:
        UsageError: tensorboard is not installed.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        raise UsageError("TensorBoard's files need tensorboard: pip install 'castwise[tensorboard]'.") from None

    count = 0
    for run in runs:
        count += 1
        writer = EventFileWriter(str(folder / _folder(run.group) / f"{_folder(run.name)}-{run.tags['key']}"))
        parameters = {**run.parameters, "device_name": run.tags["device_name"]}
        writer.add_event(Event(wall_time=run.started, summary=hparams_pb(parameters, trial_id=run.tags["key"])))
        for name, value in run.figures.items():
            summary = Summary(value=[Summary.Value(tag=f"figures/{name}", simple_value=value)])
            writer.add_event(Event(wall_time=run.started, step=0, summary=summary))
        for name, points in run.series.items():
            for point in points:
                summary = Summary(value=[Summary.Value(tag=name, simple_value=point.value)])
                writer.add_event(Event(wall_time=run.started + point.seconds, step=point.step, summary=summary))
        writer.close()
    return count


def _folder(name: str) -> str:
    """Return a name that is safe as a folder's: TensorBoard shows it."""
    return re.sub(r"[^A-Za-z0-9._ ,:=+-]+", "_", name).strip(" .")[:_NAME_LENGTH] or "run"
