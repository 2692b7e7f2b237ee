"""Two commands with one results folder: the second waits for what the first measures, and takes it over."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from fake_engine import FakeEngine, fake_spec
from programs import FAKE_CLI, PATIENCE_SECONDS, hanging_fake_cli, wait_until

from castwise.orchestrator.rounds import Rounds, StopRule
from castwise.orchestrator.runner import CachedMeasure, NullListener, TrialRunner
from castwise.records.schema import Trial
from castwise.records.store import ResumePolicy, Store, load_folder
from castwise.spec.recipe import Recipe

SPECS = (fake_spec("fp32"), fake_spec("bf16-mixed"))
TRAINING = fake_spec(kind="training", recipe=Recipe(epochs=3))
Measure = Callable[[TrialRunner], Sequence[Trial]]


class Listener(NullListener):
    """Waits in the first trial's first phase for a signal, and keeps remarks."""

    def __init__(self, may_go_on: threading.Event) -> None:
        self.may_go_on, self.is_there, self.remarks = may_go_on, threading.Event(), list[str]()

    def phase(self, name: str, done: float) -> None:
        self.is_there.set()
        assert self.may_go_on.wait(PATIENCE_SECONDS)

    def remark(self, line: str) -> None:
        self.remarks.append(line)


def in_rounds(runner: TrialRunner) -> Sequence[Trial]:
    return Rounds(runner, SPECS, StopRule(max_rounds=2, min_rounds=2, half_width=1.0)).run()


def once(runner: TrialRunner) -> Sequence[Trial]:
    return Rounds(runner, SPECS, StopRule()).run_once()


def alone(runner: TrialRunner) -> Sequence[Trial]:
    return runner.run(SPECS)


def as_training(runner: TrialRunner) -> Sequence[Trial]:
    return runner.run([TRAINING])


def in_search(runner: TrialRunner) -> Sequence[Trial]:
    return [CachedMeasure(runner)(SPECS[0])]


class Command(threading.Thread):
    """A command of its own: an engine, a store and a listener."""

    def __init__(self, measure: Measure, folder: Path, *, waits: bool = False, **policy: bool) -> None:
        super().__init__(daemon=True)
        self.may_go_on = threading.Event()
        if not waits:
            self.may_go_on.set()
        self.engine, self.listener, self.trials = FakeEngine(exclusive=False), Listener(self.may_go_on), list[Trial]()
        store = Store(folder)
        store.load(self.engine.environment)
        policy_of = ResumePolicy(**policy)
        self.runner = TrialRunner(self.engine, store, self.engine.environment, self.listener, policy=policy_of)
        self.measure = measure
        self.start()
        if waits:
            assert self.listener.is_there.wait(PATIENCE_SECONDS)

    def run(self) -> None:
        self.trials += self.measure(self.runner)


@pytest.mark.parametrize("measure", [in_rounds, once, alone, as_training, in_search])
def test_the_second_takes_over_what_the_first_measures(measure: Measure, tmp_path: Path) -> None:
    first = Command(measure, tmp_path / "r", waits=True)
    second = Command(measure, tmp_path / "r")
    wait_until(lambda: second.listener.remarks, "the remark")
    assert not second.engine.sessions
    first.may_go_on.set()
    for each in (first, second):
        each.join(PATIENCE_SECONDS)
    measured = len(first.engine.sessions) + len(second.engine.sessions)
    assert {t.spec.key for t in second.trials} == {t.spec.key for t in first.trials} != set()
    (line,) = [line for line in second.listener.remarks if "waiting" in line]
    assert f"Process {os.getpid()} on " in line
    assert str(tmp_path / "r") in line
    trials, problems = load_folder(tmp_path / "r")
    assert len(trials) == len(first.trials) == measured
    assert not problems
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".lock"]


def test_again_measures_again_but_not_at_the_same_time(tmp_path: Path) -> None:
    first = Command(alone, tmp_path, waits=True)
    checkpoint = first.runner.store.checkpoint(SPECS[0], first.engine.environment)  # type: ignore[union-attr]
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_text("of the first")
    second = Command(alone, tmp_path, again=True)
    wait_until(lambda: second.listener.remarks, "the remark")
    assert checkpoint.exists(), "it is of a trial that runs"
    first.may_go_on.set()
    for each in (first, second):
        each.join(PATIENCE_SECONDS)
    assert len(second.engine.sessions) == 2
    assert not checkpoint.exists()


def test_other_configurations_are_not_waited_for(tmp_path: Path) -> None:
    first = Command(as_training, tmp_path, waits=True)
    second = Command(alone, tmp_path)
    second.join(PATIENCE_SECONDS)
    assert len(second.trials) == 2
    assert not second.listener.remarks
    first.may_go_on.set()
    first.join(PATIENCE_SECONDS)


def test_without_locks_there_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process might resume from it while the first runs."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    engine, given = FakeEngine(), list[object]()
    runner = TrialRunner(engine, Store(tmp_path), engine.environment, NullListener())
    start = engine.start

    def noting(*arguments: float) -> object:
        session = start(*arguments)  # type: ignore[arg-type]
        set_up = session.set_up
        session.set_up = lambda spec, checkpoint=None: (given.append(checkpoint), set_up(spec, checkpoint))  # type: ignore[method-assign, assignment, func-returns-value]
        return session

    engine.start = noting  # type: ignore[assignment, method-assign]
    (trial,) = runner.run([TRAINING])
    assert trial.status == "ok"
    assert given == [None]


def test_a_killed_command_holds_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two processes the first is killed while it measures; the second then measures."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = ("--precision", "fp32,bf16-mixed", "--rounds", "1")
    with hanging_fake_cli(tmp_path / "r", *options, faults="fp32=hang@set_up") as first:
        arguments = [sys.executable, FAKE_CLI, "run", "resnet50", *options, "--results", str(tmp_path / "r")]
        second = subprocess.Popen(arguments, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert second.stderr is not None
        line = next(line for line in second.stderr if "waiting" in line)
        assert line.startswith(f"Process {first.pid} on "), line
        first.kill()
    out, err = second.communicate(timeout=PATIENCE_SECONDS)
    assert second.returncode == 0, err
    assert "bf16-mixed" in out
    assert len(load_folder(tmp_path / "r")[0]) == 2


def test_a_lock_that_cannot_be_made_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    store = Store(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(Exception, match="No space left on device") as caught:
        TrialRunner(engine, store, engine.environment, NullListener()).run(SPECS[:1])
    assert type(caught.value).__name__ == "StoreError"
