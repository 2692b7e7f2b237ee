"""The one door into `trial/`: what a freshly forked process runs first."""

import multiprocessing
import os
import signal
from multiprocessing import forkserver
from multiprocessing.connection import Connection

from castwise.trial.lifetime import kill_when_parent_dies


def trial_main(connection: Connection, log_path: str) -> None:
    """Prepare the process and serve its trial through the child's end of a pipe."""
    init_process(log_path)

    from castwise.trial import server

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
