"""Whose turn the device is while cells are set up side by side: a cell that times kernels needs it for itself.

cuDNN's search and Inductor keep the kernel that was fastest when they tried it, and a neighbour's work would decide
that. Compiling, which is most of such a first step, is the host's work, and needs no turn.
"""

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

_PAUSE_SECONDS = 0.005
_MOST_SECONDS = 120.0  # a neighbour that hangs must not take this cell along


def _make_file() -> IO[bytes] | None:
    with contextlib.suppress(OSError):
        return tempfile.TemporaryFile(prefix="castwise-")
    return None


# The server from which trials are forked imports this module: its file is that of all of them, and of nobody else.
_FILE = _make_file()


class DeviceLock:
    """A lock on the file: held alone by one that times kernels, together by those that do not.

    Attributes:
        waited_seconds: What waiting took.
    """

    def __init__(self, *, alone: bool) -> None:
        """Open the file anew: a lock belongs to what was opened, and forked processes share that.

        Args:
            alone: Whether nobody else may compute meanwhile.
        """
        self._kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        self._descriptor: int | None = None
        self.waited_seconds = 0.0
        if _FILE is not None:
            with contextlib.suppress(OSError):  # without /proc everybody computes when they like
                self._descriptor = os.open(f"/proc/self/fd/{_FILE.fileno()}", os.O_RDWR)

    def take(self) -> None:
        """Wait for the turn, for two minutes at the most."""
        if self._has_taken():
            return
        began = time.perf_counter()
        while time.perf_counter() - began < _MOST_SECONDS:
            time.sleep(_PAUSE_SECONDS)
            if self._has_taken():
                break
        self.waited_seconds += time.perf_counter() - began

    def give(self) -> None:
        """Let others have it."""
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let others have it for good."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _has_taken(self) -> bool:
        if self._descriptor is None:
            return True
        try:
            fcntl.flock(self._descriptor, self._kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system that has no locks
            self.close()
        return True


@contextmanager
def device_lock(*, alone: bool, compiles: bool) -> Iterator[DeviceLock]:
    """Hold the device's turn, but while torch compiles.

    Args:
        alone: Whether kernels are timed, so that nobody else may compute.
        compiles: Whether something is compiled within.
    """
    turn = DeviceLock(alone=alone)
    try:
        turn.take()
        with _without_while_compiling(turn) if compiles else contextlib.nullcontext():
            yield turn
    finally:
        turn.close()


@contextmanager
def _without_while_compiling(turn: DeviceLock) -> Iterator[None]:
    from torch._dynamo import callback  # there already: preload.py imports it, and torch itself for the first optimizer

    begin = callback.on_compile_start(lambda _: turn.give())
    end = callback.on_compile_end(lambda _: turn.take())
    try:
        yield
    finally:
        callback.callback_handler.remove_start_callback(begin)
        callback.callback_handler.remove_end_callback(end)
