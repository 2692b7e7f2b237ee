"""A search's trials: what is on record stands, and what is not is measured."""

from pathlib import Path

import pytest
from fake_engine import FakeEngine, fake_spec, fake_trial

from castwise.orchestrator.runner import CachedMeasure, NullListener, TrialRunner
from castwise.records.schema import Status, Trial
from castwise.records.store import ResumePolicy, Store
from castwise.spec.trial import TrialSpec

SMALL, LARGE = fake_spec(batch_size=8), fake_spec(batch_size=32)


def measure(engine: FakeEngine, folder: Path, **policy: bool) -> CachedMeasure:
    runner = TrialRunner(engine, Store(folder), engine.environment, NullListener(), policy=ResumePolicy(**policy))
    return CachedMeasure(runner)


def on_record(folder: Path, status: Status = "ok") -> Trial:
    trial = fake_trial(SMALL, status=status)
    Store(folder).save(trial)
    return trial


def test_recorded_trial_is_not_measured(tmp_path: Path) -> None:
    engine, kept = FakeEngine(), on_record(tmp_path)
    ask = measure(engine, tmp_path)
    assert ask(SMALL) == kept
    assert ask(LARGE).spec == LARGE
    assert engine.measured == [LARGE]
    assert list(ask.known.values()) == [kept]


@pytest.mark.parametrize(("status", "policy"), [("ok", "again"), ("crashed", "retry")])
def test_again_and_retry(tmp_path: Path, status: Status, policy: str) -> None:
    engine = FakeEngine()
    on_record(tmp_path, status)
    assert measure(engine, tmp_path)(SMALL).status == status
    assert engine.measured == []
    assert measure(engine, tmp_path, **{policy: True})(SMALL).status == "ok"
    assert len(engine.measured) == 1


def test_progress_without_a_total() -> None:
    started: list[tuple[int, int]] = []

    class Counting(NullListener):
        def started(self, spec: TrialSpec, index: int, count: int) -> None:
            started.append((index, count))

    engine = FakeEngine()
    ask = CachedMeasure(TrialRunner(engine, None, engine.environment, Counting()))
    ask(SMALL)
    ask(LARGE)
    assert started == [(1, 0), (2, 0)]
