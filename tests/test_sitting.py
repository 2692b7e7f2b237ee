"""Sittings: what the threads and clocks of their residents do."""

import signal
import threading
import time

import pytest
from fake_engine import FakeEngine, FakeSession, fake_spec

from castwise.record import Environment, Facts
from castwise.sweep.engine import TrialFailedError
from castwise.sweep.runner import Silent, Sweep
from castwise.sweep.sitting import Sat, sit

LONG_SECONDS = 20.0


class Engine(FakeEngine):
    """Starts sessions of a class of the test's own, side by side."""

    session: type[FakeSession] = FakeSession

    def start(self, timeout_seconds: float, num_processes: int = 1) -> FakeSession:
        self.sessions.append(self.session(self))
        return self.sessions[-1]


def sit_down(engine: FakeEngine, *, together: bool) -> Sat:
    specs = [fake_spec("fp32"), fake_spec("bf16-mixed")]
    return sit(Sweep(engine, None, engine.environment, Silent()), specs, together=together)


class Slow(FakeSession):
    """Warms up until it is closed."""

    def warm_up(self) -> Facts:
        end = time.monotonic() + LONG_SECONDS
        while not self.closed and time.monotonic() < end:
            time.sleep(0.01)
        raise TrialFailedError("crashed", "the process was ended by SIGKILL (fake)")


def test_an_interrupt_does_not_wait_for_those_that_are_set_up_together() -> None:
    engine = Engine()
    engine.session = Slow
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        sit_down(engine, together=True)
    assert time.monotonic() - started < LONG_SECONDS / 2
    assert engine.num_open == 0


class Timed(FakeSession):
    """Takes a while to be set up, and says when it was asked for and opened."""

    def __init__(self, engine: FakeEngine, num_processes: int = 1) -> None:
        super().__init__(engine, num_processes)
        self.asked = time.perf_counter()

    def open(self, device: str) -> Environment:
        self.ready_seconds = time.perf_counter() - self.asked
        return super().open(device)

    def warm_up(self) -> Facts:
        time.sleep(0.5)
        return super().warm_up()


def test_set_up_one_by_one_a_cell_is_not_charged_for_the_one_before() -> None:
    engine = Engine()
    engine.session = Timed
    trials = sit_down(engine, together=False).trials
    assert all(trial.facts is not None and trial.facts.ready_seconds < 0.25 for trial in trials)
