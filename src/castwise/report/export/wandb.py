"""Runs of Weights & Biases, written offline; `wandb sync` uploads them where a user wants that."""

from collections.abc import Iterable
from pathlib import Path

from castwise.errors import UsageError
from castwise.report.export.tracker_runs import TrackedRun, finite

PROJECT = "castwise"
_LONGEST_NAME = 120
_LONGEST_GROUP = 64


def write_wandb(runs: Iterable[TrackedRun], folder: Path) -> int:
    """Write runs into `wandb/` in a folder; return how many. Nothing is sent anywhere.

    Raises:
        UsageError: wandb is not installed.
    """
    try:
        import wandb
    except ImportError:
        raise UsageError("Runs of Weights & Biases need wandb: pip install 'castwise[wandb]'.") from None

    folder.mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(
        console="off",
        disable_code=True,
        disable_git=True,
        silent=True,
        # What it would tell of the machine that exports is not the machine that measured.
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
    )
    count = 0
    for run in runs:
        count += 1
        made = wandb.init(
            mode="offline",
            project=PROJECT,
            dir=str(folder),
            name=run.name[:_LONGEST_NAME],
            group=run.group[:_LONGEST_GROUP],
            config={**run.parameters, **run.tags},
            settings=settings,
            reinit="finish_previous",
        )
        steps: dict[int, dict[str, float]] = {}
        for name, points in run.series.items():
            for point in finite(points):
                steps.setdefault(point.step, {"seconds": point.seconds})[name] = point.value
        for step in sorted(steps):
            made.log(steps[step], step=step)
        made.summary.update(run.figures)
        made.finish(exit_code=0 if run.tags["status"] == "ok" else 1)
    wandb.teardown()  # which waits until all is on disk: `finish` comes back before that
    return count
