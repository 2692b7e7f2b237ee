"""The speed-up of a configuration over its baseline, from all processes of both: paired by block within a session."""

import math
import statistics
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
from castwise.analysis.steady_metrics import batch_ratio, block_means, blocks_of, units_per_step, was_at_power_limit
from castwise.records.schema import Trial
from castwise.registry.precisions import BASELINE
from castwise.registry.techniques import for_one_gpu

# At a GPU's power limit intervals are wider by these shares: what a stretch, and what blocks with pauses or other loops
# between them, may differ by from a minute of training. Source: docs/method.md, "At the power limit".
_STRETCH_BIAS, _PAUSES_BIAS = 0.005, 0.02
# A process is in another mode than most if its step time is so far from the middle one, as a share of it, and as many
# times as far as any of the most. Source: chosen here; ten of 130 recorded configurations have one.
_LEAST_STRAY, _TIMES_OTHERS = 0.03, 4
# The fields in which configurations differ whose scaling efficiency is reported: weak scaling, a batch size per GPU.
_GPUS = ("world_size", "num_nodes", "parallelism")
# Likewise, of scripts: the command has the launcher, and the batch of a rank may be the script's to choose.
_RANKS: dict[str, Any] = {"workload": True, "batch_size": True, "user_model": {"launcher": True}}


def speedup_estimate(baselines: Sequence[Trial], trials: Sequence[Trial], *, family: int = 1) -> Estimate | None:
    """Return the speed-up of one configuration over another, None if either was not measured.

    Each session gives one ratio, that of the pseudomedians of the blocks; of scripts whose timed batches differ in
    size, of the seconds for each value of theirs. If the two never shared a session (they do not fit into memory
    together), or only once while both have more processes, it is that of two independent means.
    """
    baselines, trials = _counted(baselines), _counted(trials)
    by_session = {trial.session_id: trial for trial in baselines if trial.session_id is not None}
    paired = []
    for trial in trials:
        if trial.session_id in by_session:
            baseline = by_session[trial.session_id]
            # The blocks of a stretch are not of the same moments as the other side's.
            if _is_in_stretch(baseline) or _is_in_stretch(trial):
                sizes = batch_ratio([trial], [baseline])
                paired.append(sizes * _step_seconds(baseline) / _step_seconds(trial))
            elif (ratio := paired_ratio(block_means(baseline), block_means(trial))) is not None:
                paired.append(ratio)
    fewest = min(len(trials), len(baselines))
    if not fewest:
        return None
    if len(paired) >= min(MIN_PROCESSES, fewest):
        found = estimate(paired, family=family)
    else:
        sides = [_seconds_of_equal_batches(side, baselines) for side in (baselines, trials)]
        found = independent_ratio(*sides, family=family)
    return _widened(found, baselines, trials)


def session_speedup_estimate(baselines: Sequence[Trial], trials: Sequence[Trial]) -> Estimate | None:
    """Return the speed-up within the last session that two configurations share, with the interval of its blocks.

    It rests on one process each, and does not predict another: processes of one configuration differ by more than
    blocks do. None if they share no session.
    """
    by_session = {trial.session_id: trial for trial in baselines if trial.session_id is not None and was_timed(trial)}
    for trial in reversed(trials):
        if was_timed(trial) and trial.session_id in by_session:
            sides = block_means(by_session[trial.session_id]), block_means(trial)
            found = estimate([before / after for before, after in zip(*sides, strict=False)])
            ratio = paired_ratio(*sides)
            if found is None or ratio is None:
                return None
            share = ratio / found.value
            return Estimate(ratio, found.low * share, found.high * share, 1)
    return None


def baselines_among(trials: Sequence[Trial], precision: str = BASELINE) -> list[Trial]:
    """Return the trials of a precision's configuration that others are compared with: the first that ended well."""
    ended = [trial.spec for trial in trials if trial.spec.precision == precision and trial.status == "ok"]
    return [trial for trial in trials if ended and trial.spec.configuration == ended[0].configuration]


def step_estimate(trials: Sequence[Trial]) -> Estimate | None:
    """Return the seconds a step of one configuration from its processes, None if nothing was timed."""
    timed = _counted(trials)
    return _widened(estimate([_step_seconds(trial) for trial in timed]), timed)


def _counted(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that were timed; if some were at the power limit in stretches, without those in blocks."""
    timed = [trial for trial in trials if was_timed(trial)]
    exact = [trial for trial in timed if _power_limit_bias(trial) < _PAUSES_BIAS]
    return exact if sum(map(_is_in_stretch, exact)) >= MIN_PROCESSES else timed


def _widened(found: Estimate | None, *sides: Sequence[Trial]) -> Estimate | None:
    """Return an estimate whose interval holds what the power limit may change, too."""
    if found is None:
        return None
    share = 1 + max(statistics.fmean(map(_power_limit_bias, side)) for side in sides)
    return replace(found, low=found.low / share, high=found.high * share)


def _power_limit_bias(trial: Trial) -> float:
    is_in_stretch = _is_in_stretch(trial)
    # A loop of castwise's is in a stretch because it was at the limit in warm-up; a script always is.
    is_at_limit = was_at_power_limit(trial) or (is_in_stretch and not trial.spec.is_script)
    if not is_at_limit or trial.spec.recipe is not None:
        return 0.0
    return _STRETCH_BIAS if is_in_stretch else _PAUSES_BIAS


def _is_in_stretch(trial: Trial) -> bool:
    return any(block.in_stretch for block in blocks_of(trial))


def rate_estimate(trials: Sequence[Trial], step: Estimate | None) -> Estimate | None:
    """Return the units a second of one configuration, from its `step_estimate`; None if nothing was timed."""
    facts = next((trial.facts for trial in trials if trial.facts is not None), None)
    if step is None or facts is None:
        return None
    units = units_per_step(trials[0].spec, facts, [block for trial in trials for block in blocks_of(trial)])
    return Estimate(units / step.value, units / step.high, units / step.low, step.n)


def process_stds(trials: Sequence[Trial]) -> float:
    """Return the standard deviation of the step times of one configuration's processes, as a share of them."""
    return between_process_std([_step_seconds(trial) for trial in trials if was_timed(trial)])


def strays_among(trials: Sequence[Trial]) -> list[tuple[Trial, float]]:
    """Return the processes that are far off while most of the configuration's agree, and how long their steps take.

    They are in another mode, slow or fast from first to last step. The time is a share of the others'.
    """
    timed = [trial for trial in trials if was_timed(trial)]
    seconds = _seconds_of_equal_batches(timed, timed)
    middle = statistics.median(seconds or [1.0])
    off = [abs(math.log(each / middle)) for each in seconds]
    ranked = sorted(range(len(off)), key=off.__getitem__)
    for count in range(len(off) // 2 + 1, len(off)):
        if off[ranked[count]] > max(_LEAST_STRAY, _TIMES_OTHERS * off[ranked[count - 1]]):
            usual = statistics.fmean(seconds[index] for index in ranked[:count])
            return [(timed[index], seconds[index] / usual) for index in ranked[count:]]
    return []


def _seconds_of_equal_batches(trials: Sequence[Trial], first: Sequence[Trial]) -> list[float]:
    return [_step_seconds(trial) / batch_ratio([trial], first[:1]) for trial in trials]


def was_timed(trial: Trial) -> bool:
    """Return whether a trial has step times that count for its configuration."""
    return trial.status in ("ok", "diverged") and bool(block_means(trial))


def comparison_key(trial: Trial, *fields: str, **parts: Any) -> tuple[str, str]:
    """Return what a trial shares with those it can be compared with: the machine, and its spec but for some fields.

    The number of its repeat and the time limit never enter. Parts of fields are in the form of pydantic's `exclude`.
    """
    exclude: dict[str, Any] = {**dict.fromkeys(fields, True), "repeat": True, **parts}
    return (trial.environment.fingerprint, trial.spec.without_extras.model_dump_json(exclude=exclude))


def key_on_one_gpu(trial: Trial, **parts: Any) -> tuple[str, str]:
    """Return what a trial shares with that of the same loop on one GPU, in the form of `comparison_key`."""
    spec = trial.spec.model_copy(update={"techniques": for_one_gpu(trial.spec.techniques)})
    of_script = _RANKS if spec.is_script else {}
    return comparison_key(trial.model_copy(update={"spec": spec}), *_GPUS, **of_script, **parts)


def _step_seconds(trial: Trial) -> float:
    return pseudomedian(block_means(trial))  # of trials that were timed
