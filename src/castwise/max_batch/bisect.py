"""Find the largest batch that trains and the first that does not; both are tried, not computed."""

from collections.abc import Callable
from dataclasses import dataclass, field

from castwise.max_batch.result import START, USABLE, has_trained, is_too_large, next_small, predict
from castwise.records.schema import Trial
from castwise.spec.trial import TrialSpec

Measure = Callable[[TrialSpec], Trial]

MOST_TRIALS = 32
# How far above a guess that fits the next size is, as a share of it. Source: chosen here; what fails does so at once.
# Below a guess that fails the next size is its neighbour, since what fits costs all its steps.
_STEP = 0.01


@dataclass(frozen=True)
class BatchGrid:
    """Which batch sizes are tried.

    Attributes:
        multiple: Sizes are multiples of this, as long as one fits.
        finest: If the smallest does not fit, multiples of this.
        start: The first size tried.
    """

    multiple: int
    finest: int = 1
    start: int = START

    def aligned(self, size: int) -> int:
        """Return the largest multiple up to a size; the smallest multiple if the size is below it."""
        return max(self.multiple, size // self.multiple * self.multiple)


@dataclass
class _Search:
    """A running search: what fits, what does not, and how often a guess was too low or too high."""

    measure: Measure
    template: TrialSpec
    grid: BatchGrid
    usable: float
    trials: list[Trial] = field(default_factory=list)
    fits: int = 0
    fails: int | None = None
    rises: int = 0
    falls: int = 0

    def measure_size(self, size: int) -> bool:
        """Try a size; return whether the search can go on."""
        trial = self.measure(self.template.model_copy(update={"batch_size": size}))
        self.trials.append(trial)
        if has_trained(trial):
            self.fits = max(self.fits, size)
        elif is_too_large(trial, self.fits):
            self.fails = size if self.fails is None else min(self.fails, size)
        else:
            return False
        return len(self.trials) < MOST_TRIALS

    @property
    def step(self) -> int:
        """Return the distance of neighbours."""
        return self.grid.finest if self.fails is not None and self.fails <= self.grid.multiple else self.grid.multiple

    @property
    def is_done(self) -> bool:
        """Return whether what fits and what does not are neighbours."""
        return self.fails is not None and self.fails - self.fits <= self.step

    def guess(self) -> int | None:
        """Return what the two largest batches that fit predict; None if they predict nothing."""
        prediction = predict(self.trials, self.usable)
        predicted = None if prediction is None else prediction.batch_size
        return None if predicted is None else self.grid.aligned(predicted)

    def next_size(self, guess: int | None) -> int:
        """Return the next size between, or beyond, what is known."""
        if guess is not None and self.fits < guess and (self.fails is None or guess < self.fails):
            return guess
        stride = max(self.step, self.grid.aligned(round(_STEP * (guess or self.fits))))
        if self.fails is None:
            size = self.fits + stride * 2**self.rises if guess else 2 * self.fits
            # The guess that fitted predicts better than the small batches did.
            better_guess = self.guess() if guess and not self.rises else None
            self.rises += 1
            return max(size, better_guess or 0)
        middle = (self.fits + self.fails) // 2 // self.step * self.step
        low = self.fails - self.step * 4**self.falls if guess and not self.rises else 0
        self.falls += 1
        return max(low, middle, self.fits + self.step)


def find_limit(measure: Measure, template: TrialSpec, grid: BatchGrid, usable: float = USABLE) -> list[Trial]:
    """Return the trials of a search; the largest that trained and the smallest `oom` one are its answer.

    A few small batches tell what a sample takes. The prediction from them is tried, and then sizes between the largest
    batch that fits and the smallest that does not, until they are neighbours. If the smallest does not fit, smaller
    ones are tried, down to one sample.

    Args:
        measure: Runs a trial.
        template: The trial, whatever its batch size.
        grid: Which sizes may be tried.
        usable: The share of a GPU's memory that tensors are expected to fill.

    Returns:
        Every trial, in the order it was run; if the search failed, the last one tells why.
    """
    search = _Search(measure, template, grid, usable)
    size = next_small([], grid.aligned(grid.start))
    while size is not None:
        if not search.measure_size(size):
            return search.trials
        size = next_small(search.trials, size)
    guess = search.guess()
    while not search.is_done:
        if not search.measure_size(search.next_size(guess)):
            break
    return search.trials
