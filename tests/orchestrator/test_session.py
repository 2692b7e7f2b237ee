"""Processes that end while something else begins."""

import threading

from fake_engine import FakeEngine, FakeSession

from castwise.orchestrator.session import BackgroundCloser


class Held(FakeSession):
    """Ends when it may."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__(engine)
        self.may_end = threading.Event()

    def close(self) -> None:
        self.may_end.wait(20)
        super().close()


def test_background_closer_waits_only_when_asked() -> None:
    closer, sessions = BackgroundCloser(), [Held(FakeEngine()) for _ in range(2)]
    closer.close(sessions)
    assert not any(session.closed for session in sessions)
    for session in sessions:
        session.may_end.set()
    closer.wait()
    assert all(session.closed for session in sessions)
    closer.wait()
