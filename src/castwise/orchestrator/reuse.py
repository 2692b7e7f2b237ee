"""Which records can be used in place of a new measurement."""

from castwise.orchestrator.trial import FAILED
from castwise.records.schema import Trial
from castwise.spec.trial import TrialSpec


def matches_configuration(trial: Trial, spec: TrialSpec) -> bool:
    """Return whether a trial is of this configuration, whatever its repeat and its time limit.

    Defaults are not in a key: a record made with other defaults has the same key, and is of another configuration.
    """
    own = trial.spec
    if (own.precision, own.techniques) != (spec.precision, spec.techniques):  # the cheap comparison first
        return False
    return own.without_timeout == spec.without_timeout.model_copy(update={"repeat": own.repeat})


def is_reusable(trial: Trial, timeout_seconds: float, *, retry: bool = False) -> bool:
    """Return whether a record need not be measured again.

    Args:
        trial: The record.
        timeout_seconds: The present time limit: a trial that exceeded a shorter one may not exceed this one.
        retry: Whether failed trials are measured again.
    """
    if trial.status == "timeout" and trial.spec.protocol.timeout_seconds < timeout_seconds:
        return False
    return not (retry and trial.status in FAILED)
