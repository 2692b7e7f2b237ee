"""Which records answer what is asked today."""

from castwise.orchestrator.trial import FAILED
from castwise.records.schema import Trial
from castwise.spec.trial import TrialSpec


def matches_configuration(trial: Trial, spec: TrialSpec) -> bool:
    """Return whether a trial is of this cell, whichever its round and its time limit.

    Defaults are not in a key: a record made under other defaults has the key, and answers another question.
    """
    own = trial.spec
    if (own.precision, own.techniques) != (spec.precision, spec.techniques):  # a climb asks this thousands of times
        return False
    return own.without_timeout == spec.without_timeout.model_copy(update={"repeat": own.repeat})


def is_reusable(trial: Trial, timeout_seconds: float, *, retry: bool = False) -> bool:
    """Return whether a record need not be measured again.

    Args:
        trial: The record.
        timeout_seconds: The time limit of today: what ran into a shorter one has not failed yet.
        retry: Whether what failed is to be measured again.
    """
    if trial.status == "timeout" and trial.spec.protocol.timeout_seconds < timeout_seconds:
        return False
    return not (retry and trial.status in FAILED)
