"""Where, with what and when trials were measured, in words."""

from fake_engine import fake_trial

from castwise.records.schema import Trial
from castwise.render.provenance import measured_on


def measured(commit: str | None, date: str, **environment: object) -> Trial:
    trial = fake_trial()
    update = {"commit": commit, "gpu": "NVIDIA X", "castwise": "0.1.0", "torch": "2.11.0", "driver": "580"}
    found = trial.environment.model_copy(update=update | environment)
    return trial.model_copy(update={"environment": found, "started_at": f"{date}T10:00:00+00:00"})


def test_what_all_share_is_said_once() -> None:
    trials = [measured("80a6", "2026-11-21"), measured("80a6", "2026-11-21")]
    assert measured_on(trials) == "NVIDIA X (castwise 0.1.0 at 80a6, torch 2.11.0, driver 580, 2026-11-21)"


def test_where_they_differ_all_are_named() -> None:
    trials = [measured("e7fc", "2026-11-22"), measured("80a6", "2026-11-21"), measured("80a6", "2026-11-22")]
    assert measured_on(trials) == (
        "NVIDIA X (castwise 0.1.0 at e7fc and 80a6, torch 2.11.0, driver 580, 2026-11-21 to 2026-11-22)"
    )
    other = measured(None, "2026-11-21", gpu="NVIDIA Y", torch="2.12.0", driver=None)
    assert measured_on([trials[0], other]) == (
        "NVIDIA X and NVIDIA Y (castwise 0.1.0 at e7fc, torch 2.11.0 and 2.12.0, driver 580, 2026-11-21 to 2026-11-22)"
    )
    assert measured_on([other]) == "NVIDIA Y (castwise 0.1.0, torch 2.12.0, 2026-11-21)"
