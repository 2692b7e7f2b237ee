"""What trials must share for a figure of one beside another's to mean something."""

from typing import Any

from castwise.records.schema import Trial
from castwise.registry.techniques import for_one_gpu

# In which cells differ whose scaling efficiency is told. The batch size is a GPU's: it is weak scaling.
GPUS = ("world_size", "parallelism")


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
