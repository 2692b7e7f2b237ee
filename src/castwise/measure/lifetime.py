"""Processes that do not outlive the one that started them."""

import ctypes
import multiprocessing
import os
import signal

_PR_SET_PDEATHSIG = 1  # Source: Linux, include/uapi/linux/prctl.h


def die_with_parent() -> None:
    """Ask the kernel to kill this `multiprocessing` child when its parent is gone, whatever ended that.

    A killed parent cannot end its children itself. The kernel counts as the parent the thread that forked, so
    that has to be one that lasts: the main thread. Where the system has no such service, nothing happens.
    """
    started_by = multiprocessing.parent_process()
    assert started_by is not None, "called in a child of multiprocessing only"
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "prctl"):
        return
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != started_by.pid:  # it died before the kernel was asked
        os._exit(1)
