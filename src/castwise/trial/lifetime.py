"""Processes that end with the one that started them."""

import ctypes
import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

# Options of prctl. Source: Linux, include/uapi/linux/prctl.h
PR_SET_PDEATHSIG = 1  # the signal that the kernel sends a process when its parent is gone; 0 for none
PR_SET_CHILD_SUBREAPER = 36  # whether a process adopts those below it whose own parent ends

_MOST_ROUNDS = 20  # of killing what was forked since the last look
_PAUSE_SECONDS = 0.005


def kill_when_parent_dies(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent is gone, whatever ended that; does nothing without prctl.

    A killed parent cannot end its children itself. To the kernel the parent is the thread that forked, so it must be
    one that lasts: the main thread. If the parent at the fork, `parent_pid`, has died since, this process ends at once.
    """
    if not prctl(PR_SET_PDEATHSIG, signal.SIGKILL):
        return
    if os.getppid() != parent_pid or parent_pid == 1:  # it died before the kernel was asked
        os._exit(1)


def prctl(option: int, value: int) -> bool:
    """Set an option of this process; return whether the system has such a call."""
    libc = ctypes.CDLL(None, use_errno=True)
    return hasattr(libc, "prctl") and libc.prctl(option, value, 0, 0, 0) == 0


def kill_descendants(root: int, spared: Collection[int] = ()) -> None:
    """Kill all processes below one, whatever group or session they have moved to; does nothing without /proc.

    Those that are spared live on, with all below them.
    """
    was_empty = False
    for _ in range(_MOST_ROUNDS):
        found = _descendants(root, spared)
        # A look may miss a process that was forked during it and whose parent has ended: the next one finds it.
        if not found and was_empty:
            return
        was_empty = not found
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if found:
            time.sleep(_PAUSE_SECONDS)


def _descendants(root: int, spared: Collection[int]) -> list[int]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent, *_ = (folder / "stat").read_text().rpartition(")")[2].split()  # Source: man 5 proc
            if state != "Z":
                children.setdefault(int(parent), []).append(int(folder.name))
    found, below = [], [root]
    while below:
        own = [pid for pid in children.get(below.pop(), ()) if pid not in spared]
        found += own
        below += own
    return found
