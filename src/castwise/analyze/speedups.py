"""The speed-up of a cell over its baseline, from all processes of both: paired by turn where they sat together."""

import math
import statistics
from collections.abc import Sequence

from scipy.special import stdtrit

from castwise.analyze.estimates import LEVEL, Estimate, estimate, paired_ratio
from castwise.plan import TrialSpec
from castwise.precisions import BASELINE
from castwise.record import Trial

_MEASURED = ("ok", "diverged")


def speedup_estimate(trials: Sequence[Trial], spec: TrialSpec) -> Estimate | None:
    """Return the speed-up of a cell over float32 in the trials, None where either was not measured.

    Each sitting gives one ratio, the median over its turns. Where the two never sat together (they do not fit into
    memory side by side), drift is not cancelled, and the ratio is that of two independent means.

    Args:
        trials: Trials of one comparison.
        spec: The cell.
    """
    own = [trial for trial in trials if trial.spec.cell == spec.cell and _was_timed(trial)]
    baselines = [trial for trial in trials if trial.spec.precision == BASELINE and _was_timed(trial)]
    by_sitting = {trial.sitting: trial for trial in baselines if trial.sitting is not None}
    paired = [
        ratio
        for trial in own
        if trial.sitting in by_sitting
        and (ratio := paired_ratio(step_times(by_sitting[trial.sitting]), step_times(trial))) is not None
    ]
    if paired:
        return estimate(paired)
    if not own or not baselines:
        return None
    return _of_independent([_middle(trial) for trial in baselines], [_middle(trial) for trial in own])


def step_times(trial: Trial) -> list[float]:
    """Return the seconds a step of each block, in order."""
    return [block.seconds / block.num_steps for block in trial.ranks[0].blocks] if trial.ranks else []


def step_estimate(trials: Sequence[Trial]) -> Estimate | None:
    """Return the seconds a step of one cell from its processes, None where nothing was timed."""
    return estimate([_middle(trial) for trial in trials if _was_timed(trial)])


def _was_timed(trial: Trial) -> bool:
    return trial.status in _MEASURED and bool(step_times(trial))


def _middle(trial: Trial) -> float:
    return statistics.median(step_times(trial))


def _of_independent(baselines: Sequence[float], own: Sequence[float]) -> Estimate:
    """Return the ratio of two means of logarithms, with Welch's interval.

    Source: B. L. Welch, "The generalization of 'Student's' problem ...", Biometrika 34 (1947).
    """
    sides = [[math.log(value) for value in side] for side in (baselines, own)]
    middle = statistics.fmean(sides[0]) - statistics.fmean(sides[1])
    n = min(len(side) for side in sides)
    if n < 2:
        return Estimate(math.exp(middle), math.nan, math.nan, n)
    terms = [statistics.variance(side) / len(side) for side in sides]
    error = sum(terms)
    if error == 0:
        return Estimate(math.exp(middle), math.exp(middle), math.exp(middle), n)
    freedom = error**2 / sum(term**2 / (len(side) - 1) for term, side in zip(terms, sides, strict=True))
    reach = float(stdtrit(freedom, 0.5 + LEVEL / 2)) * math.sqrt(error)
    return Estimate(math.exp(middle), math.exp(middle - reach), math.exp(middle + reach), n)
