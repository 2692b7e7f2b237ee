"""A shard on a node: castwise as a process of its own, which ends with the process that started it."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAM = ("-m", "castwise")  # what Python runs

# Asks the kernel for SIGTERM when the parent is gone, and becomes the program; without such a call it only becomes it.
# Source: Linux, include/uapi/linux/prctl.h: PR_SET_PDEATHSIG is 1.
_BECOME = (
    "import ctypes, os, sys; getattr(ctypes.CDLL(None), 'prctl', lambda *_: 0)(1, 15, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)
_LAST_LINES = 5


def shard_arguments(program: Sequence[str], extra: Sequence[str], plan: str, results: str) -> list[str]:
    """Return the arguments of Python that measure the plan in a file."""
    return [*program, "run", "--plan", plan, "--results", results, "--format", "json", *extra]


@dataclass(frozen=True)
class ShardResult:
    """How a shard ended."""

    code: int  # castwise's exit code; negative for a signal
    is_answered: bool  # whether castwise came to its end: it printed its results
    said: str  # its last lines on stderr
    host: str


class ShardProcess:
    """castwise on a shard.

    Args:
        arguments: Of Python: `PROGRAM` and castwise's own arguments, with `--format json`.
        folder: Where it runs, if there is such a folder on this node.
    """

    def __init__(self, arguments: Sequence[str], folder: str) -> None:
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115  closed by `poll`
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BECOME, str(os.getpid()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=self._said,
            cwd=folder if Path(folder).is_dir() else None,
        )

    def poll(self) -> ShardResult | None:
        """Return how it ended; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        with self._printed, self._said:
            self._said.seek(0)
            lines = self._said.read().decode(errors="replace").splitlines()
            is_answered = code in (0, 1) and self._printed.seek(0, os.SEEK_END) > 0
        return ShardResult(code, is_answered, "\n".join(lines[-_LAST_LINES:]), socket.gethostname())

    def wait(self) -> ShardResult:
        """Return how it ended, when it has."""
        self._process.wait()
        result = self.poll()
        assert result is not None
        return result

    def end(self) -> None:
        """Interrupt it, as Ctrl-C would, and wait for its end."""
        self._process.terminate()
        self._process.wait()


def run_shard(arguments: Sequence[str], folder: str) -> ShardResult:
    """Run castwise on a shard to its end."""
    return ShardProcess(arguments, folder).wait()
