"""What is known about the accuracy of the precision that an answer takes."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from castwise.accuracy.render import compared_text, length_text, verdict_text
from castwise.accuracy.result import Runs, runs_of
from castwise.analysis.advice import Advice
from castwise.errors import UsageError
from castwise.records.schema import Trial
from castwise.registry.precisions import BASELINE, DEFAULT
from castwise.registry.suites import find_recipe

UNTESTED = "untested"


def with_accuracy(advice: Sequence[Advice], trials: Iterable[Trial]) -> list[Advice]:
    """Return advice that says of each precision to take whether it trains as well, or that nobody has tested it.

    Args:
        advice: What to take.
        trials: All records there are; of those of training runs, the longest count, and of as long ones the most.
    """
    training = [trial for trial in trials if trial.spec.kind == "training"]
    return [replace(item, accuracy=_accuracy_of(item, training)) for item in advice]


def _accuracy_of(item: Advice, training: Sequence[Trial]) -> str:
    if item.decision != "take" or item.precision in (None, BASELINE, DEFAULT):
        return ""
    found = _longest_runs(item, training)
    if found is not None:
        baseline = found.baseline[0].spec.precision
        than = {"as good": " as", "worse": " than", "better": " than"}.get(verdict_text(found), ", compared with")
        short = f" in runs of {length_text(found.recipe)}" if found.recipe.is_shortened else ""
        return f"{verdict_text(found)}{than} {baseline}{short}: {compared_text(found)}"
    try:
        find_recipe(item.workload)
    except UsageError:
        return UNTESTED
    return f"{UNTESTED}: `castwise accuracy {item.workload} --precision {BASELINE},{item.precision}` tells"


def _longest_runs(item: Advice, training: Sequence[Trial]) -> Runs | None:
    """Return the runs of the precision to take in the setting, such as a loop or a data set, with the longest runs.

    Whole runs count as longer than shortened ones. Of settings with runs as long, it is the one with most pairs.
    """
    settings: dict[str, list[Trial]] = {}
    for trial in training:
        if trial.spec.workload == item.workload and trial.spec.precision in (BASELINE, item.precision):
            without = {"precision", "loss_scale", "seed", "repeat"}
            key = trial.environment.fingerprint + trial.spec.without_extras.model_dump_json(exclude=without)
            settings.setdefault(key, []).append(trial)
    found = [
        runs
        for own in settings.values()
        for runs in runs_of(own, BASELINE, None)
        if runs.verdict is not None and runs.verdict.difference is not None
    ]

    def rank(runs: Runs) -> tuple[float, ...]:
        recipe = runs.recipe
        return (not recipe.is_shortened, recipe.num_epochs, recipe.max_steps or math.inf, len(runs.trials))

    return max(found, key=rank, default=None)
