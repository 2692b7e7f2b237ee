"""Processes that end with the one that started them."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # Source: Linux, include/uapi/linux/prctl.h


def kill_when_parent_dies(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent is gone, whatever ended that; does nothing without prctl.

    A killed parent cannot end its children itself. To the kernel the parent is the thread that forked, so it must be
    one that lasts: the main thread. If the parent at the fork, `parent_pid`, has died since, this process ends at once.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "prctl"):
        return
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid or parent_pid == 1:  # it died before the kernel was asked
        os._exit(1)
