"""Accounts of climbs: climbing again over trials on record comes to what the climb came to."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import climbs
import pytest
from climbs import OtherClimbError, account_of, replay, without_trials
from fake_engine import FakeEngine

from castwise.orchestrator.trial import NullListener
from castwise.records.schema import Trial
from castwise.spec.plan import TrialSpec
from castwise.tune.candidates import TuningResult
from castwise.tune.render import json_tuning
from castwise.tune.request import TuneRequest, prepare_tuning
from castwise.tune.rows import lines_of

GAINS = {"channels-last": 1.4, "cudnn-search": 1.1, "fused-optimizer": 1.03, "compile": 1.2, "cuda-graph": 1.05}
GIB = 2.0**30


def gain(spec: TrialSpec) -> float:
    product = 1.0
    for name in spec.techniques:
        product *= GAINS.get(name, 1.0)
    # Processes of one cell differ a little, each cell's in its own way, so that ratios have intervals.
    return product * (1 + 1e-5 * spec.repeat * (len(spec.precision) + len(spec.techniques)))


class Keeping(NullListener):
    """Keeps trials in the order in which they ended, a second apart: a fake engine's all start at once."""

    def __init__(self) -> None:
        self.trials: list[Trial] = []

    def ended(self, trial: Trial) -> None:
        at = datetime(2026, 11, 21, tzinfo=UTC) + timedelta(seconds=len(self.trials))
        self.trials.append(trial.model_copy(update={"started_at": at.isoformat()}))


def climb(**request: object) -> tuple[TuningResult, list[Trial]]:
    made, kept = FakeEngine(exclusive=False, gain=gain), Keeping()
    asked = TuneRequest("resnet50", **request)  # type: ignore[arg-type]
    return prepare_tuning(asked, kept, lambda *_: made).run(), kept.trials


@pytest.mark.parametrize(
    ("request_", "memory"),
    [
        ({}, None),
        ({"memory_bytes": 1.5 * GIB}, 1.5 * GIB),
        ({"memory_bytes": GIB}, GIB),
        ({"larger_batches": True}, None),
    ],
)
def test_a_replay_comes_to_what_the_climb_came_to(request_: dict[str, object], memory: float | None) -> None:
    climbed, trials = climb(**request_)
    found = replay(trials, memory)
    assert repr(lines_of(found)) == repr(lines_of(climbed)), "ends that are not known are NaN, which equals nothing"
    assert found.ending == climbed.ending == "nothing left"
    assert found.winner == climbed.winner != climbed.start
    account, said = account_of(found, memory), json.loads(json_tuning(climbed, memory))
    assert account["rows"] == said["rows"]
    assert account["fastest_within_memory"] == said["fastest_within_memory"]
    assert "trials" not in account


def test_trials_of_another_climb_are_refused() -> None:
    _, trials = climb()
    first = trials[0].sitting
    later = [trial for trial in trials if trial.sitting == trials[-1].sitting]
    assert later[0].sitting != first
    with pytest.raises(OtherClimbError, match="would try today"):
        replay([*(trial for trial in trials if trial.sitting == first), *later])


def test_an_account_that_is_kept_stands_whatever_castwise_decides_today(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(climbs, "RECORDS", tmp_path)
    climbs.names.cache_clear()
    climbed, trials = climb()
    folder = tmp_path / "tune" / "a-name"
    folder.mkdir(parents=True)
    for number, trial in enumerate(trials):
        (folder / f"{number}.json").write_text(trial.model_dump_json())
    climbs.keep_all()
    path = tmp_path / "climbs" / "a-name.json"
    kept = json.loads(path.read_text())
    assert kept == account_of(replay(trials))
    path.write_text(json_tuning(climbed) + "\n")
    climbs.keep_all()
    assert json.loads(path.read_text()) == without_trials(json.loads(json_tuning(climbed)))
    capsys.readouterr()
    path.unlink()
    monkeypatch.setattr(climbs, "replay", refuse)
    climbs.keep_all()
    assert not path.exists()
    assert "a-name: no account" in capsys.readouterr().err
    climbs.names.cache_clear()


def refuse(*_: object) -> TuningResult:
    raise OtherClimbError
