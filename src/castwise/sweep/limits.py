"""Find the largest batch that trains and the first that does not, by trials alone: no size is claimed untried."""

from collections.abc import Callable

from castwise.analyze.metrics import peak_reserved_bytes
from castwise.plan import TrialSpec
from castwise.record import Trial

Measure = Callable[[TrialSpec], Trial]

_MOST_TRIALS = 20
# Of the device's memory, what a first guess leaves to the CUDA context and the allocator's slack.
_USABLE = 0.97


def find_limit(measure: Measure, template: TrialSpec, multiple: int, memory_bytes: int) -> list[Trial]:
    """Return the trials of a search; the largest `ok` batch and the smallest `oom` one are its answer.

    Two small batches say what a sample takes; the guess that follows from them is tried, and then what lies
    between the largest batch that fits and the smallest that does not, until they are neighbours.

    Args:
        measure: Runs a trial.
        template: The trial, whatever its batch size.
        multiple: Batch sizes tried are multiples of this.
        memory_bytes: The device's memory.

    Returns:
        Every trial, in the order it was run; the last one tells why where one ended in something else than
        `ok` or `oom`.
    """
    trials: list[Trial] = []
    fits, fails = 0, None  # in multiples
    rises = falls = 0  # how often a batch fitted and did not, beyond the two small ones
    while len(trials) < _MOST_TRIALS and (fails is None or fails - fits > 1):
        foretold = _foretell(trials, memory_bytes) // multiple
        if len(trials) < 2:
            size = 1 + fits
        elif fails is None:
            size = max(foretold or 2 * fits, fits + 2**rises)
        elif fits < foretold < fails:
            size = foretold
        else:  # the guess was too high: by little, if it was any good
            size = max(fails - 2 ** (falls - 1), (fits + fails) // 2)
        trial = measure(template.model_copy(update={"batch_size": size * multiple}))
        trials.append(trial)
        if trial.status == "ok":
            fits, rises = size, rises + (foretold > 0)
        elif trial.status == "oom":
            fails, falls = size, falls + 1
        else:
            break
    return trials


def _foretell(trials: list[Trial], memory_bytes: int) -> int:
    """Return the batch size that the two largest that fit foretell, 0 where they foretell nothing."""
    peaks = sorted(
        (trial.spec.batch_size, peak)
        for trial in trials
        if trial.status == "ok" and (peak := peak_reserved_bytes(trial)) is not None
    )
    if len(peaks) < 2:
        return 0
    (small, little), (large, much) = peaks[-2:]
    if much <= little:
        return 0
    per_sample = (much - little) / (large - small)
    return int((memory_bytes * _USABLE - (little - small * per_sample)) / per_sample)
