"""One pass over the training data, watched: how long it waits, what its losses are, whether it is hopeless."""

import math
import time
from collections.abc import Callable, Iterator

from torch import Tensor

from castwise.worker.models.task import Batch

OnProgress = Callable[[float], None]

# Losses in a row that are no number before a run is given up: a dynamic loss scale may see a few at its start.
_HOPELESS_LOSSES = 20
_KEPT_LOSSES = 100  # of an epoch, evenly; enough for a curve
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
    """Tells now and then how much of something is done, so that whoever waits knows that it goes on."""

    def __init__(self, on_progress: OnProgress | None, total: int) -> None:
        """Begin.

        Args:
            on_progress: Is called with the share done, 0 to 1, about once a second; None tells nobody.
            total: Steps in all.
        """
        self._on_progress, self._total = on_progress, max(1, total)
        self._told = time.perf_counter()

    def done(self, steps: int) -> None:
        """Take note of the steps done so far."""
        now = time.perf_counter()
        if self._on_progress is not None and now - self._told > _REPORT_SECONDS:
            self._told = now
            self._on_progress(min(1.0, steps / self._total))


class Pass:
    """Counts and losses of one pass over the training data."""

    def __init__(self, read_every_step: bool, num_steps: int) -> None:
        """Begin.

        Args:
            read_every_step: Whether the loss is read after every step, a synchronisation.
            num_steps: Steps that are to come.
        """
        self._read_every_step = read_every_step
        self._keep_every = max(1, num_steps // _KEPT_LOSSES)
        self._kept: dict[int, Tensor | float] = {}
        self._last: tuple[int, Tensor | float] = (0, math.nan)
        self._broken_in_a_row = 0
        self.num_steps = self.num_samples = 0

    def saw(self, index: int, loss: Tensor, num_samples: int) -> None:
        """Take note of a step."""
        self.num_steps += 1
        self.num_samples += num_samples
        value: Tensor | float = loss.detach()
        if self._read_every_step:
            value = loss.item()  # the synchronisation that the source's loop has
            self._broken_in_a_row = 0 if math.isfinite(value) else self._broken_in_a_row + 1
        self._last = (index, value)
        if index % self._keep_every == 0:
            self._kept[index] = value

    @property
    def hopeless(self) -> bool:
        """Return whether the losses say that going on is useless."""
        return self._broken_in_a_row >= _HOPELESS_LOSSES

    def losses(self) -> tuple[tuple[int, float], ...]:
        """Return the kept losses and the last, read from the device."""
        return tuple((index, float(value)) for index, value in sorted((self._kept | dict([self._last])).items()))


def why_diverged(losses: tuple[tuple[int, float], ...], num_steps: int) -> str | None:
    """Return why a pass with these losses was in vain, or None where its last loss is a number."""
    index, last = losses[-1]
    if math.isfinite(last):
        return None
    first_broken = next((step for step, loss in losses if not math.isfinite(loss)), index)
    return f"the loss was {last} at step {num_steps} of the epoch (seen first at step {first_broken + 1})"
