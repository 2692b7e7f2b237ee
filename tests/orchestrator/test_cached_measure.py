"""A search's trials: what is on record stands, and what is not is measured."""

from pathlib import Path

import pytest
from fake_engine import FakeEngine, fake_spec, fake_trial

from castwise.orchestrator.resume import CachedMeasure, ResumePolicy
from castwise.orchestrator.runner import TrialRunner
from castwise.orchestrator.trial import NullListener
from castwise.records.schema import Trial
from castwise.records.store import Store
from castwise.spec.trial import TrialSpec

SMALL, LARGE = fake_spec(batch_size=8), fake_spec(batch_size=32)


class Counting(NullListener):
    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def started(self, spec: TrialSpec, index: int, count: int) -> None:
        self.told.append((index, count))


def runner(engine: FakeEngine, folder: Path | None, listener: NullListener | None = None) -> TrialRunner:
    store = None if folder is None else Store(folder)
    return TrialRunner(engine, store, engine.environment, listener or NullListener())


def on_record(folder: Path, engine: FakeEngine, status: str = "ok") -> Trial:
    trial = fake_trial(SMALL, environment=engine.environment, status=status)  # type: ignore[arg-type]
    Store(folder).save(trial)
    return trial


def test_recorded_trial_is_not_measured(tmp_path: Path) -> None:
    engine = FakeEngine()
    kept = on_record(tmp_path, engine)
    ask = CachedMeasure(runner(engine, tmp_path), ResumePolicy())
    assert ask(SMALL) == kept
    assert ask(LARGE).spec == LARGE
    assert [spec.batch_size for spec in engine.measured] == [32]
    assert list(ask.known.values()) == [kept]


@pytest.mark.parametrize(("status", "going"), [("ok", ResumePolicy(again=True)), ("crashed", ResumePolicy(retry=True))])
def test_again_and_retry(tmp_path: Path, status: str, going: ResumePolicy) -> None:
    engine = FakeEngine()
    on_record(tmp_path, engine, status)
    assert CachedMeasure(runner(engine, tmp_path), ResumePolicy())(SMALL).status == status
    assert engine.measured == []
    assert CachedMeasure(runner(engine, tmp_path), going)(SMALL).status == "ok"
    assert len(engine.measured) == 1


def test_progress_without_a_total() -> None:
    listener = Counting()
    ask = CachedMeasure(runner(FakeEngine(), None, listener), ResumePolicy())
    ask(SMALL)
    ask(LARGE)
    assert listener.told == [(1, 0), (2, 0)]
    assert ask.known == {}
