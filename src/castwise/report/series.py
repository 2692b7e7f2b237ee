"""The values of a training run over its steps, seconds and epochs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from castwise.analysis.training_metrics import epochs_of
from castwise.records.schema import Epoch, Trial


@dataclass(frozen=True)
class Point:
    """A value, and how many steps, seconds and epochs had gone by."""

    step: int
    seconds: float
    value: float
    epoch: float = 0.0


def losses(trial: Trial) -> Iterator[Point]:
    """Yield the recorded losses; the steps of an epoch are taken to be equally long."""
    step, began = 0, 0.0
    for number, epoch in enumerate(epochs_of(trial)):
        for index, loss in epoch.losses:
            done = (index + 1) / max(1, epoch.num_steps)
            yield Point(step + index + 1, began + done * epoch.seconds, loss, number + done)
        step += epoch.num_steps
        began += epoch.seconds + epoch.validation_seconds


def epoch_ends(trial: Trial, value_of: Callable[[Epoch], float | None]) -> Iterator[Point]:
    """Yield a value at the end of each epoch that has it."""
    step, seconds = 0, 0.0
    for number, epoch in enumerate(epochs_of(trial), start=1):
        step += epoch.num_steps
        seconds += epoch.seconds + epoch.validation_seconds
        value = value_of(epoch)
        if value is not None:
            yield Point(step, seconds, value, number)
