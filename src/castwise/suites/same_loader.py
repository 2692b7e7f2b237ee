"""Whether a loader sets a loop's pace, told by another model behind the same loader, where no record tells waiting.

Two models of which one has twice the arithmetic and more do not train alike fast by arithmetic: what they share then
sets the pace of both. Where either trains faster, the loader had more to give to the other. How much the one has more
is told by how much longer the source's GPU took for it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from castwise.analysis import training_metrics
from castwise.records.schema import Trial
from castwise.registry.suites import Published, Suite

# Choices: from which factor on a model is heavier, and within which share the larger of two throughputs is alike.
_HEAVIER = 2.0
_ALIKE = 0.10


@dataclass(frozen=True)
class Fellow:
    """A run of another model behind the same loader that trains about as fast, though it should not.

    Attributes:
        trial: The run.
        gpu: The source's GPU that took longer for one of the two models, or less long.
        times_as_long: The time that GPU took for this run's model over what it took for the other's.
    """

    trial: Trial
    gpu: str
    times_as_long: float


def fellow_of(trial: Trial, suite: Suite, trials: Sequence[Trial]) -> Fellow | None:
    """Return the run whose model differs the most in weight and whose throughput shows the loader's; None without one.

    Args:
        trial: The run whose loop is in question.
        suite: The suite, with its published times.
        trials: All of the suite's runs.
    """
    own, loader = training_metrics.throughput(trial), _waited_for(trial)
    if not own or loader is None:
        return None
    found = [
        fellow
        for other in trials
        if other.status == "ok" and _waited_for(other) == loader and (rate := training_metrics.throughput(other))
        for fellow in _weighed(trial, other, suite)
        if _shows_the_loader(fellow.times_as_long, rate / own)
    ]
    return max(found, key=lambda fellow: max(fellow.times_as_long, 1 / fellow.times_as_long), default=None)


def _shows_the_loader(times_as_long: float, rate: float) -> bool:
    """Return whether two models differ in weight and train alike fast: each of the two shows it for the other."""
    return max(times_as_long, 1 / times_as_long) >= _HEAVIER and max(rate, 1 / rate) <= 1 + _ALIKE


def _waited_for(trial: Trial) -> tuple[object, ...] | None:
    """Return what runs share that wait for the same loader on the same machine; None where nothing is loaded."""
    spec, loader = trial.spec, training_metrics.loader_of(trial)
    if spec.recipe is None or loader is None:
        return None
    shared = (spec.precision, spec.data_set, spec.world_size, spec.parallelism, spec.techniques)
    return (trial.environment.fingerprint, loader.model_dump_json(), spec.recipe.transform, *shared)


def _weighed(trial: Trial, other: Trial, suite: Suite) -> Iterator[Fellow]:
    """Yield the other run with each of the source's GPUs that ran both models in this precision."""
    seconds = {(figure.gpu, figure.workload): figure.seconds for figure in suite.published if _is_timed(figure, trial)}
    for gpu in dict.fromkeys(gpu for gpu, _ in seconds):
        own, theirs = seconds.get((gpu, trial.spec.workload)), seconds.get((gpu, other.spec.workload))
        if own and theirs and other.spec.workload != trial.spec.workload:
            yield Fellow(other, gpu, theirs / own)


def _is_timed(figure: Published, trial: Trial) -> bool:
    return figure.seconds is not None and (figure.precision, figure.world_size) == (
        trial.spec.precision,
        trial.spec.world_size,
    )
