"""A lock on the device while trials are set up in parallel: one that times kernels needs it for itself.

cuDNN's search and Inductor keep the kernel that was fastest when they tried it, which another trial's work would
change. Compiling, which is most of such a first step, is the host's work and needs no lock.
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
_MAX_WAIT_SECONDS = 120.0  # another trial that hangs must not block this one


def _make_file() -> IO[bytes] | None:
    with contextlib.suppress(OSError):
        return tempfile.TemporaryFile(prefix="castwise-")
    return None


# The server from which trials are forked imports this module: they all share its file, and no other process does.
_FILE = _make_file()


class DeviceLock:
    """A lock on the file: exclusive (`alone`) for a trial that times kernels, shared for the others."""

    def __init__(self, *, alone: bool) -> None:
        self._kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        self._descriptor: int | None = None
        self.waited_seconds = self.compile_seconds = 0.0
        self.compiled_graphs = self.loaded_graphs = 0  # by Inductor, the latter from its cache on disk
        if _FILE is not None:
            with contextlib.suppress(OSError):  # without /proc there is no lock
                # Opened anew: a lock belongs to what was opened, and forked processes share that.
                self._descriptor = os.open(f"/proc/self/fd/{_FILE.fileno()}", os.O_RDWR)

    def acquire(self) -> None:
        """Wait for the lock, for two minutes at most."""
        if self.try_acquire():
            return
        began = time.perf_counter()
        while time.perf_counter() - began < _MAX_WAIT_SECONDS:
            time.sleep(_PAUSE_SECONDS)
            if self.try_acquire():
                break
        self.waited_seconds += time.perf_counter() - began

    def try_acquire(self) -> bool:
        """Return whether the lock was free, or there is no lock file."""
        if self._descriptor is None:
            return True
        try:
            fcntl.flock(self._descriptor, self._kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system that has no locks
            self.close()
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@contextmanager
def device_lock(*, alone: bool, compiles: bool) -> Iterator[DeviceLock]:
    """Hold the device's lock, except while torch compiles; `alone`: no other trial may compute meanwhile."""
    lock = DeviceLock(alone=alone)
    with contextlib.ExitStack() as stack:
        stack.callback(lock.close)
        lock.acquire()
        if compiles:
            # Imported already: by preload.py, and by torch for the first optimizer.
            from torch._dynamo import callback, utils

            before = utils.counters["inductor"].copy()  # torch counts in the whole process

            def start(_: object) -> None:
                lock.release()
                lock.compile_seconds -= time.perf_counter()

            def stop(_: object) -> None:
                lock.compile_seconds += time.perf_counter()
                found = utils.counters["inductor"] - before
                lock.compiled_graphs, lock.loaded_graphs = found["fxgraph_cache_miss"], found["fxgraph_cache_hit"]
                lock.acquire()

            begin = callback.on_compile_start(start)
            stack.callback(callback.callback_handler.remove_start_callback, begin)
            end = callback.on_compile_end(stop)
            stack.callback(callback.callback_handler.remove_end_callback, end)
        yield lock
