"""A shard on a node: castwise as a process of its own, which ends with the process that started it."""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from castwise.orchestrator.nodes import SECRET, free_port

PROGRAM = ("-m", "castwise")  # what Python runs

# Asks the kernel for SIGTERM when the parent is gone, and becomes the program; without such a call it only becomes it.
# Source: Linux, include/uapi/linux/prctl.h: PR_SET_PDEATHSIG is 1.
_BECOME = (
    "import ctypes, os, sys; getattr(ctypes.CDLL(None), 'prctl', lambda *_: 0)(1, 15, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)
_LAST_LINES = 5


class ShardResult(NamedTuple):
    code: int  # castwise's exit code; negative for a signal
    is_answered: bool  # whether castwise came to its end: it printed its results
    said: str  # its last lines on stderr
    host: str


class ShardProcess:
    """castwise on a shard, started by the arguments of Python, in a folder if this node has it.

    `secret` is that of the nodes that share its trials.
    """

    def __init__(self, arguments: Sequence[str], folder: str, secret: str = "") -> None:
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115  closed by `poll`
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BECOME, str(os.getpid()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=self._said,
            env={**os.environ, SECRET: secret} if secret else None,
            cwd=folder if Path(folder).is_dir() else None,
        )

    def poll(self, *, waits: bool = False) -> ShardResult | None:
        """Return how it ended; None while it runs, unless this waits for its end."""
        code = self._process.wait() if waits else self._process.poll()
        if code is None:
            return None
        with self._printed, self._said:
            self._said.seek(0)
            lines = self._said.read().decode(errors="replace").splitlines()
            is_answered = code in (0, 1) and self._printed.seek(0, os.SEEK_END) > 0
        return ShardResult(code, is_answered, "\n".join(lines[-_LAST_LINES:]), socket.gethostname())

    def end(self) -> None:
        """Interrupt it, as Ctrl-C would, and wait for its end."""
        self._process.terminate()
        self._process.wait()


def rendezvous_arguments(address: str, node_rank: int) -> list[str]:
    """Return the arguments of castwise on a node of several that share trials."""
    return ["--rendezvous", address, "--node-rank", str(node_rank)]


def run_shard(arguments: Sequence[str], folder: str, num_nodes: int = 1) -> ShardResult:
    """Run castwise on a shard to its end; if several nodes share trials, on the first of them, in a job of Slurm."""
    followers: subprocess.Popen[bytes] | None = None
    secret = ""
    if num_nodes > 1:
        address, secret = f"{socket.gethostname()}:{free_port()}", secrets.token_hex(32)
        step = ["srun", "--relative=1", f"--nodes={num_nodes - 1}", f"--ntasks={num_nodes - 1}"]
        step.append(f"--cpus-per-task={os.environ.get('SLURM_CPUS_ON_NODE', '1')}")  # else it would have one
        command = [*step, sys.executable, *arguments, *rendezvous_arguments(address, 1)]
        followers = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env={**os.environ, SECRET: secret},  # srun gives it to its steps
            cwd=folder if Path(folder).is_dir() else None,
        )
        arguments = [*arguments, *rendezvous_arguments(address, 0)]
    result = ShardProcess(arguments, folder, secret).poll(waits=True)
    if followers is not None:
        followers.terminate()
        followers.wait()
    assert result is not None
    return result
