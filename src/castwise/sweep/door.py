"""The one door into `measure/`: what a freshly forked process runs first."""

import os
from multiprocessing.connection import Connection


def enter(connection: Connection, log_path: str) -> None:
    """Send the process's output to a file and serve trials. Runs in the trial's process only.

    Args:
        connection: The child's end of the pipe.
        log_path: Takes everything the process prints; the parent's stdout carries results.
    """
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)

    from castwise.measure import worker

    worker.serve(connection)
