"""A lock on the devices while trials are set up in parallel: one that times kernels needs them for itself.

cuDNN's search and Inductor keep the kernel that was fastest when they tried it, which another trial's work would
change. Compiling, which is most of such a first step, is the host's work and needs no lock.
"""

import contextlib
import fcntl
import random
import tempfile
import time
import zlib
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
    """A lock that all ranks of a trial hold together, or else all trials that do not time kernels.

    Ranks wait for each other in a step. If each had a lock of its own device, two trials could wait forever, each for
    a device of the other.
    """

    def __init__(self, trial: str | None) -> None:
        """Take no lock yet: `trial` names one that times kernels."""
        self._byte = 1 if trial is None else 2 + zlib.crc32(trial.encode())  # of the file, that its processes lock
        self.waited_seconds = self.compile_seconds = 0.0
        self.compiled_graphs = self.loaded_graphs = 0  # by Inductor, the latter from its cache on disk

    def acquire(self) -> None:
        """Wait for the lock, for two minutes at most."""
        if self.try_acquire():
            return
        began = time.perf_counter()
        while time.perf_counter() - began < _MAX_WAIT_SECONDS:
            time.sleep(_PAUSE_SECONDS * (1 + random.random()))  # two that try at once both fail
            if self.try_acquire():
                break
        self.waited_seconds += time.perf_counter() - began

    def try_acquire(self) -> bool:
        """Return whether the lock was free, or there is no lock file."""
        if _FILE is None:
            return True
        others = (self._byte, 0), (0, self._byte + 1)  # length and start of what is before its byte, and after
        try:
            fcntl.lockf(_FILE, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, self._byte)
            for length, start in others:
                fcntl.lockf(_FILE, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
        except (BlockingIOError, PermissionError):
            self.release()
            return False
        except OSError:  # a file system that has no locks
            return True
        for length, start in others:  # nobody is there
            fcntl.lockf(_FILE, fcntl.LOCK_UN, length, start)
        return True

    def release(self) -> None:
        if _FILE is not None:
            with contextlib.suppress(OSError):
                fcntl.lockf(_FILE, fcntl.LOCK_UN)


@contextmanager
def device_lock(trial: str | None, *, compiles: bool) -> Iterator[DeviceLock]:
    """Hold the lock, except while torch compiles; beside a `trial` that is named no other may compute."""
    lock = DeviceLock(trial)
    with contextlib.ExitStack() as stack:
        stack.callback(lock.release)
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
