"""The speed-up of a cell over its baseline, from all processes of both: paired by turn where they sat together."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from castwise.analysis.statistics import (
    MIN_PROCESSES,
    Estimate,
    between_process_std,
    estimate,
    independent_ratio,
    paired_ratio,
    pseudomedian,
)
from castwise.analysis.steady_metrics import block_means, units_per_step
from castwise.records.schema import Trial
from castwise.registry.precisions import BASELINE
from castwise.registry.techniques import for_one_gpu

# In which cells differ whose scaling efficiency is told. The batch size is a GPU's: it is weak scaling.
GPUS = ("world_size", "parallelism")
_MEASURED = ("ok", "diverged")


def speedup_estimate(baselines: Sequence[Trial], trials: Sequence[Trial]) -> Estimate | None:
    """Return the speed-up of one cell over another, None where either was not measured.

    Each sitting gives one ratio, the pseudomedian over its turns. Where the two never sat together (they do not fit
    into memory side by side), or but once and more often apart, drift is not cancelled, and the ratio is that of two
    independent means.

    Args:
        baselines: The trials of the baseline's cell.
        trials: The trials of the other.
    """
    own, others = ([trial for trial in side if was_timed(trial)] for side in (trials, baselines))
    by_sitting = {trial.session_id: trial for trial in others if trial.session_id is not None}
    paired = [
        ratio
        for trial in own
        if trial.session_id in by_sitting
        and (ratio := paired_ratio(block_means(by_sitting[trial.session_id]), block_means(trial))) is not None
    ]
    fewest = min(len(own), len(others))
    if len(paired) >= min(MIN_PROCESSES, fewest) > 0:
        return estimate(paired)
    if not fewest:
        return None
    return independent_ratio([_middle(trial) for trial in others], [_middle(trial) for trial in own])


def session_speedup_estimate(baselines: Sequence[Trial], trials: Sequence[Trial]) -> Estimate | None:
    """Return the speed-up within the last sitting that two cells share, with the interval of its turns.

    It rests on one process each, and says nothing of what another would give: processes of one cell differ by
    more than turns do. None where they share no sitting.
    """
    by_sitting = {trial.session_id: trial for trial in baselines if trial.session_id is not None and was_timed(trial)}
    for trial in reversed([each for each in trials if was_timed(each)]):
        other = by_sitting.get(trial.session_id or "")
        if other is None:
            continue
        pairs = zip(block_means(other), block_means(trial), strict=False)
        found = estimate([before / after for before, after in pairs])
        return None if found is None else replace(found, n=1)
    return None


def baselines_among(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials of the float32 cell that the others are compared with: the first that ended well."""
    first = next((t.spec.configuration for t in trials if t.spec.precision == BASELINE and t.status == "ok"), None)
    return [trial for trial in trials if trial.spec.configuration == first]


def step_estimate(trials: Sequence[Trial]) -> Estimate | None:
    """Return the seconds a step of one cell from its processes, None where nothing was timed."""
    return estimate([_middle(trial) for trial in trials if was_timed(trial)])


def rate_estimate(trials: Sequence[Trial], step: Estimate | None) -> Estimate | None:
    """Return the units a second of one cell over its processes, None where nothing was timed.

    Args:
        trials: The cell's trials.
        step: Its seconds a step, as `step_estimate` tells them.
    """
    facts = next((trial.facts for trial in trials if trial.facts is not None), None)
    if step is None or facts is None:
        return None
    units = units_per_step(trials[0].spec, facts)
    return Estimate(units / step.value, units / step.high, units / step.low, step.n)


def process_stds(trials: Sequence[Trial]) -> float:
    """Return by what share the step times of one cell's processes differ, as `between_process_std` tells it."""
    return between_process_std([_middle(trial) for trial in trials if was_timed(trial)])


def was_timed(trial: Trial) -> bool:
    """Return whether a trial has step times that stand for its cell's."""
    return trial.status in _MEASURED and bool(block_means(trial))


def _middle(trial: Trial) -> float:
    return pseudomedian(block_means(trial))  # only trials that were timed are asked


def comparison_key(trial: Trial, *fields: str, **parts: dict[str, Any]) -> tuple[str, str]:
    """Return what a trial shares with those it can be set beside: the machine, and its spec but for some fields.

    The number of its round is never among them, nor is the time limit.

    Args:
        trial: The trial.
        *fields: Fields of the spec in which the others may differ.
        **parts: Parts of fields in which they may, as pydantic's `exclude` has them.
    """
    exclude: dict[str, Any] = {**dict.fromkeys(fields, True), "repeat": True, **parts}
    return (trial.environment.fingerprint, trial.spec.without_timeout.model_dump_json(exclude=exclude))


def as_on_one_gpu(trial: Trial) -> Trial:
    """Return a trial with the techniques that the same loop has on one GPU."""
    spec = trial.spec.model_copy(update={"techniques": for_one_gpu(trial.spec.techniques)})
    return trial.model_copy(update={"spec": spec})
