"""One pass over the training data: the time spent waiting for it, its losses, and whether they have diverged."""

import math
import time
from collections.abc import Callable, Iterator

from torch import Tensor

from castwise.worker.models.task import Batch

OnProgress = Callable[[float], None]

# Non-finite losses in a row before a run is given up: a dynamic loss scale may produce a few at its start.
_MAX_NON_FINITE = 20
_NUM_KEPT_LOSSES = 100  # of an epoch, evenly; enough for a curve
_REPORT_SECONDS = 1.0


class TimedIterator:
    """An iterator that adds up the host's time in `next`."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self.seconds = 0.0

    def __iter__(self) -> "TimedIterator":
        return self

    def __next__(self) -> Batch:
        started = time.perf_counter()
        try:
            return next(self._batches)
        finally:
            self.seconds += time.perf_counter() - started


class Heartbeat:
    """Reports progress now and then, so that the parent knows that the process is alive.

    Args:
        on_progress: Receives the share that is done, 0 to 1, about once a second; may be None.
        total: Steps in all.
    """

    def __init__(self, on_progress: OnProgress | None, total: int) -> None:
        self._on_progress = on_progress
        self._total = max(1, total)
        self._reported = time.perf_counter()

    def done(self, steps: int) -> None:
        """Note the steps done so far."""
        now = time.perf_counter()
        if self._on_progress is not None and now - self._reported > _REPORT_SECONDS:
            self._reported = now
            self._on_progress(min(1.0, steps / self._total))


class Pass:
    """Counts and losses of one pass over the training data.

    Args:
        read_every_step: Whether the loss is read after every step, which is a synchronisation.
        num_steps: Steps that are to come.
    """

    def __init__(self, read_every_step: bool, num_steps: int) -> None:
        self._read_every_step = read_every_step
        self._keep_every = max(1, num_steps // _NUM_KEPT_LOSSES)
        self._kept: dict[int, Tensor | float] = {}
        self._last: tuple[int, Tensor | float] = (0, math.nan)
        self._num_non_finite = 0
        self.num_steps = self.num_samples = 0

    def add_step(self, index: int, loss: Tensor, num_samples: int) -> None:
        """Count a step, and keep its loss."""
        self.num_steps += 1
        self.num_samples += num_samples
        value: Tensor | float = loss.detach()
        if self._read_every_step:
            value = loss.item()  # a synchronisation, as in the published loop
            self._num_non_finite = 0 if math.isfinite(value) else self._num_non_finite + 1
        self._last = (index, value)
        if index % self._keep_every == 0:
            self._kept[index] = value

    @property
    def has_diverged(self) -> bool:
        """Return whether too many losses in a row were not finite."""
        return self._num_non_finite >= _MAX_NON_FINITE

    def losses(self) -> tuple[tuple[int, float], ...]:
        """Return the kept losses and the last, read from the device."""
        return tuple((index, float(value)) for index, value in sorted((self._kept | dict([self._last])).items()))


def why_diverged(losses: tuple[tuple[int, float], ...], num_steps: int) -> str | None:
    """Return why a pass with these losses diverged, or None if its last loss is finite."""
    index, last = losses[-1]
    if math.isfinite(last):
        return None
    first = next((step for step, loss in losses if not math.isfinite(loss)), index)
    return f"the loss was {last} at step {num_steps} of the epoch (seen first at step {first + 1})"
