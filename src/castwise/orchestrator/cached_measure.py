"""The trials of a search, one at a time: their number is not known beforehand."""

from dataclasses import replace

from castwise.orchestrator.job import ResumePolicy, load_cached
from castwise.orchestrator.runner import TrialRunner
from castwise.orchestrator.trial import UnboundedProgress
from castwise.records.schema import Trial
from castwise.spec.trial import TrialSpec


class CachedMeasure:
    """Returns the trial of a spec: its record if there is one, else measured.

    Args:
        runner: Measures; its listener receives each trial without the number of trials.
        policy: Which records are measured again.

    Attributes:
        known: What was on record when the search began, by spec key.
    """

    def __init__(self, runner: TrialRunner, policy: ResumePolicy) -> None:
        self._runner = replace(runner, listener=UnboundedProgress(runner.listener))
        self._policy = policy
        self.known: dict[str, Trial] = {} if runner.store is None else runner.store.load(runner.environment)[0]

    def __call__(self, spec: TrialSpec) -> Trial:
        """Return the trial of a spec."""
        return load_cached([spec], self.known, self._policy).get(spec.key) or self._runner.run([spec])[0]
