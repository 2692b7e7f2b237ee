"""Processes that end while something else begins: each takes tenths of a second to let go of its device."""

import threading
from collections.abc import Iterable

from castwise.orchestrator.session import Session

THREAD_NAME = "castwise leaving"


class BackgroundCloser:
    """Trials' processes on their way out."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def close(self, sessions: Iterable[Session]) -> None:
        """End these processes, and do not wait for it."""
        threads = [threading.Thread(target=session.close, name=THREAD_NAME) for session in sessions]
        for thread in threads:
            thread.start()
        self._threads += threads

    def wait(self) -> None:
        """Return when all have ended: what they held is free. May be called again."""
        for thread in self._threads:
            thread.join()
        self._threads.clear()
