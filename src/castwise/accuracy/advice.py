"""What is known about the accuracy of the precision that an answer takes."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from castwise.accuracy.render import compared_text, length_text, verdict_text
from castwise.accuracy.result import Runs, runs_of
from castwise.analysis.decide import Advice, decide
from castwise.analysis.result_table import MARGIN, Row, rows_of_steps
from castwise.errors import UsageError
from castwise.records.schema import Trial
from castwise.registry.precisions import BASELINE, DEFAULT
from castwise.registry.suites import find_recipe
from castwise.registry.techniques import STATE, join, narrowing, precision_name
from castwise.spec.trial import TrialSpec
from castwise.spec.typed import TypedLine, advised_line
from castwise.spec.user_model import is_object

if TYPE_CHECKING:
    from castwise.orchestrator.job import Job

UNTESTED = "untested"


def answer_of(job: "Job", trials: Sequence[Trial], typed: TypedLine | None = None) -> tuple[list[Row], list[Advice]]:
    """Return the rows of the trials that a job ended with, and the advice, by all records of the machine."""
    rows = rows_of_steps(trials, MARGIN if job.rule is None else job.rule.margin)
    store = job.runner.store
    others = [] if store is None else store.load_more(job.runner.environment)[0].values()
    judge = partial(with_accuracy, trials=[*trials, *others], typed=typed)
    return rows, decide(rows, typed, judge)


def accuracy_of(job: "Job", trials: Sequence[Trial], typed: TypedLine | None = None) -> str:
    """Return what is known of the accuracy of one loop with numbers in fewer bits; empty of another loop."""
    return "".join(judged.accuracy for item in answer_of(job, trials, typed)[1] for judged in item.narrow.values())


def with_accuracy(item: Advice, trials: Collection[Trial], typed: TypedLine | None = None) -> Advice:
    """Return advice that says of the precision to take whether it trains as well, or that nobody has tested it.

    Of all training runs on record the longest count, and of as long ones the most. The command that tests is built from
    what the user typed.
    """
    if (
        item.decision != "take"
        or item.row is None
        or (item.precision in (BASELINE, DEFAULT) and not narrowing(item.techniques))
    ):
        return item
    taken = item.row.trial
    same_file = [each for each in trials if each.spec.user_model == taken.spec.user_model]  # an edited one is another
    found = _longest_runs(taken, same_file)
    if found is None:
        return replace(item, accuracy=_untested(taken, typed))
    baseline = precision_name(found.baseline[0].spec)
    than = {"as good": " as", "worse": " than", "better": " than"}.get(verdict_text(found), ", compared with")
    short = f" in runs of {length_text(found.recipe)}" if found.recipe.is_shortened else ""
    is_as_accurate = verdict_text(found) in ("as good", "better")
    parts = f"{verdict_text(found)}{than} {baseline}{short}", compared_text(found)
    accuracy = ": ".join(filter(None, parts))
    return replace(item, accuracy=accuracy, is_less_accurate=found.is_less_accurate, is_as_accurate=is_as_accurate)


def _untested(taken: Trial, typed: TypedLine | None) -> str:
    spec = taken.spec
    if spec.user_model is None or spec.is_script:
        try:
            find_recipe(spec.workload)
        except UsageError:
            return UNTESTED
    elif is_object(spec.workload) or taken.facts is None or taken.facts.higher_is_better is None:
        return f"{UNTESTED}: your function returns no training_set and validate(model)"
    options = {"precision": ",".join(dict.fromkeys((BASELINE, spec.precision)))}
    narrow = narrowing(spec.techniques)
    if states := [name.removeprefix(STATE) for name in narrow if name.startswith(STATE)]:
        options["optimizer_state"] = ",".join(states)
    if others := [name for name in narrow if not name.startswith(STATE)]:
        options["techniques"] = join(others)
    if spec.changed_loss_scale:
        options["loss_scale"] = spec.loss_scale
    line = advised_line("accuracy", spec.workload, options, typed)
    return f"{UNTESTED}: `{line}` tells"


def _judged(spec: TrialSpec) -> tuple[object, ...]:
    return spec.precision, spec.loss_scale, narrowing(spec.techniques)


def _longest_runs(taken: Trial, trials: Collection[Trial]) -> Runs | None:
    """Return the runs of the precision to take in the setting, such as a loop or a data set, with the longest runs.

    Whole runs count as longer than shortened ones. Of settings with runs as long, it is the one with most pairs. Runs
    with another loss scale do not count.
    """
    settings: dict[str, list[Trial]] = {}
    precisions = (BASELINE, DEFAULT, taken.spec.precision)
    for trial in trials:
        spec = trial.spec
        if (spec.kind, spec.workload) == ("training", taken.spec.workload) and spec.precision in precisions:
            own = {"techniques": tuple(name for name in spec.techniques if not narrowing([name]))}
            without = {"precision", "loss_scale", "seed", "repeat"}
            key = spec.model_copy(update=own).without_extras.model_dump_json(exclude=without)
            key = trial.environment.fingerprint + key
            settings.setdefault(key, []).append(trial)
    found = [
        runs
        for own in settings.values()
        for runs in runs_of(own, BASELINE, None) or runs_of(own, DEFAULT, None)
        if _judged(runs.spec) == _judged(taken.spec)
        if not narrowing(runs.baseline[0].spec.techniques)
        if runs.verdict is not None
        if runs.verdict.difference is not None or runs.is_less_accurate
    ]

    def rank(runs: Runs) -> tuple[float, ...]:
        recipe = runs.recipe
        return (not recipe.is_shortened, recipe.num_epochs, recipe.max_steps or math.inf, len(runs.trials))

    return max(found, key=rank, default=None)
