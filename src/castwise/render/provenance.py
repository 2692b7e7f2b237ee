"""Where, with what and when trials were measured, in words."""

from collections.abc import Iterable, Sequence

from castwise.records.schema import Trial


def measured_on(trials: Sequence[Trial]) -> str:
    """Return the devices, the software and the dates: `NVIDIA H200 (castwise 0.1.0 at 80a6, torch 2.11.0, 2026-11-21)`.

    Args:
        trials: At least one; where they differ, all that there is among them is named.
    """
    devices = _named(trial.environment.device_name for trial in trials)
    return f"{devices} ({software_of(trials)})"


def software_of(trials: Sequence[Trial]) -> str:
    """Return the software that trials ran with, and their dates."""
    environments = [trial.environment for trial in trials]
    commits = _named(each.commit for each in environments if each.commit)
    drivers = _named(each.driver for each in environments if each.driver)
    dates = sorted({trial.started_at[:10] for trial in trials})
    parts = (
        f"castwise {_named(each.castwise for each in environments)}" + (f" at {commits}" if commits else ""),
        f"torch {_named(each.torch for each in environments)}",
        f"driver {drivers}" if drivers else "",
        " to ".join(dict.fromkeys((dates[0], dates[-1]))),
    )
    return ", ".join(filter(None, parts))


def _named(values: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(values))
