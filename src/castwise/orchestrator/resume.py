"""Use records in place of new measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from castwise.orchestrator.runner import TrialRunner
from castwise.orchestrator.trial import UnboundedProgress
from castwise.records.schema import Trial
from castwise.spec.trial import TrialSpec


@dataclass(frozen=True)
class ResumePolicy:
    """What is measured although it is on record: crashed and timed-out trials, or everything."""

    retry: bool = False
    again: bool = False


def is_reusable(trial: Trial, timeout_seconds: float, *, retry: bool = False) -> bool:
    """Return whether a record need not be measured again; a timeout counts if the limit was not shorter than now."""
    if trial.status == "timeout" and trial.spec.protocol.timeout_seconds < timeout_seconds:
        return False
    return not (retry and trial.status in ("crashed", "timeout"))


def reusable_trials(specs: Sequence[TrialSpec], known: Mapping[str, Trial], policy: ResumePolicy) -> dict[str, Trial]:
    """Return the recorded trials of the specs' configurations, whatever their repeats, by the key of their own spec."""
    if policy.again:
        return {}
    asked = {spec.configuration: spec for spec in specs}
    found: dict[str, Trial] = {}
    for key, trial in known.items():
        spec = asked.get(trial.spec.configuration)
        # A key leaves defaults out: a record made with other defaults has the same key, and another configuration.
        if (
            spec is not None
            and trial.spec.without_timeout == spec.without_timeout.model_copy(update={"repeat": trial.spec.repeat})
            and is_reusable(trial, spec.protocol.timeout_seconds, retry=policy.retry)
        ):
            found[key] = trial
    return found


class CachedMeasure:
    """Returns the trial of a spec: its record if there is one, else measured; for searches of unknown length.

    Attributes:
        known: What was on record when the search began, by spec key.
    """

    def __init__(self, runner: TrialRunner, policy: ResumePolicy) -> None:
        self._runner = replace(runner, listener=UnboundedProgress(runner.listener))
        self._policy = policy
        self.known: dict[str, Trial] = {} if runner.store is None else runner.store.load(runner.environment)[0]

    def __call__(self, spec: TrialSpec) -> Trial:
        """Return the trial of a spec."""
        return reusable_trials([spec], self.known, self._policy).get(spec.key) or self._runner.run([spec])[0]
