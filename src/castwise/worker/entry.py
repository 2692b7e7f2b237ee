"""The one door into `worker/`: what a freshly forked process runs first."""

import ctypes
import multiprocessing
import os
import signal
from multiprocessing import forkserver
from multiprocessing.connection import Connection

_PR_SET_PDEATHSIG = 1  # Source: Linux, include/uapi/linux/prctl.h


def worker_main(connection: Connection, log_path: str) -> None:
    """Prepare the process and serve its trial through the child's end of a pipe."""
    init_process(log_path)

    from castwise.worker import server

    server.serve(connection)


def init_process(log_path: str) -> None:
    """Send the process's output to a file, make it ignore Ctrl-C, and end it when the parent ends."""
    try:
        log = os.open(log_path, os.O_WRONLY | os.O_APPEND)
    except FileNotFoundError:  # the parent was interrupted and has cleaned up; this process is not needed
        os._exit(1)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # The parent starts trials as daemons, which it ends when it exits. But daemons may not start processes, and a data
    # loader needs some.
    multiprocessing.current_process().daemon = False
    # Ctrl-C reaches the whole process group; the parent decides what becomes of the trial.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What the user's code starts is in this group: `TrialProcess.close` kills it.
    os.setpgid(0, 0)
    # The forkserver gives each child a copy of the pipe that says that it is still needed: a child that hangs would
    # keep the server, and so itself, alive after the command was killed. Source: multiprocessing.forkserver.
    server = forkserver._forkserver
    needed: int | None = getattr(server, "_forkserver_alive_fd", None)
    if needed is not None:
        os.close(needed)
        server._forkserver_alive_fd = None  # type: ignore[attr-defined]
    kill_when_parent_dies(os.getppid())


def kill_when_parent_dies(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent is gone, whatever ended that; does nothing without prctl.

    A killed parent cannot end its children itself. To the kernel the parent is the thread that forked, so it must be
    one that lasts: the main thread.

    Args:
        parent_pid: The parent as it was at the fork; if it has died since, this process ends at once.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "prctl"):
        return
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid or parent_pid == 1:  # it died before the kernel was asked
        os._exit(1)
