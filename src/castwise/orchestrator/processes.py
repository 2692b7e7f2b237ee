"""Real trial processes: forked from a server that has torch imported and holds no CUDA context."""

import importlib.util
import multiprocessing
import os
import signal
import socket
import struct
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from castwise.errors import EngineError
from castwise.orchestrator.rpc import RpcSession
from castwise.orchestrator.session import ProcessGoneError
from castwise.worker import entry

_EXIT_SECONDS = 5.0  # what a process may take to end once it has closed its pipe or was killed
_LOG_TAIL_BYTES = 4000
_LAST_LINE_CHARACTERS = 200
# The largest message that is read; a block is about 100 bytes.
_MESSAGE_BYTES = 64 * 2**20
_STALL_SECONDS = 10  # between two pieces of one message
_PRELOAD = ["castwise.worker.preload"]  # what the server imports once for all trials

Target = Callable[[Connection, str], None]


class ForkserverEngine:
    """Starts one process a trial through a `multiprocessing` forkserver.

    Args:
        data_dir: Where real data lies.
        commit: castwise's commit, for the record.
        target: What a process runs; a test may replace it.
    """

    def __init__(
        self, data_dir: Path | None = None, commit: str | None = None, target: Target = entry.worker_main
    ) -> None:
        if importlib.util.find_spec("torch") is None:
            raise EngineError(
                "PyTorch is not installed, and nothing can be measured without it. "
                "Install it with: pip install 'castwise[measure]'"
            )
        self._data_dir = data_dir
        self._commit = commit
        self._target = target
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)

    def start(self, timeout_seconds: float, num_processes: int = 1) -> RpcSession:
        """Start the processes of one trial, one a rank."""

        def start_process() -> TrialProcess:
            return TrialProcess(self._context, self._target)

        return RpcSession(start_process, num_processes, timeout_seconds, self._data_dir, self._commit)


class TrialProcess:
    """One process of a trial, seen from the parent: messages out and in, and its end."""

    def __init__(self, context: Any, target: Target) -> None:
        self.is_busy = False
        with ExitStack() as undo:
            self._log = _make_log()
            undo.callback(self._log.unlink, missing_ok=True)
            self._connection, theirs = context.Pipe()
            undo.callback(self._connection.close)
            arguments = (theirs, str(self._log))
            self._process = context.Process(target=target, args=arguments, name="castwise-trial", daemon=True)
            with theirs:
                _start(self._process)
            undo.pop_all()
        self._group: int | None = self._process.pid  # worker_main makes it a group of its own
        _limit_stalls(self._connection)

    @property
    def ends(self) -> list[Any]:
        """Return what becomes ready when there is an event to receive: the pipe, and the end of the process."""
        return [self._connection, self._process.sentinel]

    @property
    def pid(self) -> int:
        """Return the process's number."""
        number: int = self._process.pid
        return number

    @property
    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        code: int | None = self._process.exitcode
        return code

    def send(self, message: bytes) -> None:
        """Send a message.

        Raises:
            ProcessGoneError: The process has ended.
        """
        try:
            self._connection.send_bytes(message)
        except OSError:
            raise self._gone() from None

    def receive(self) -> bytes:
        """Return the message that has come (`ends` say when).

        Raises:
            ProcessGoneError: The process has ended.
        """
        try:
            if not self._connection.poll():
                raise EOFError  # it is gone, and a process that it started holds its end of the pipe
            message: bytes = self._connection.recv_bytes(_MESSAGE_BYTES)
        except (EOFError, OSError):
            raise self._gone() from None
        return message

    def log_tail(self) -> str:
        """Return the end of what the process printed."""
        try:
            with self._log.open("rb") as log:
                log.seek(max(0, self._log.stat().st_size - _LOG_TAIL_BYTES))
                return _without_folders(log.read(_LOG_TAIL_BYTES).decode("utf-8", "replace"))
        except OSError:
            return ""

    def kill(self) -> None:
        """End the process at once; `close` must still be called."""
        if self._process.is_alive():
            self._process.kill()  # it has nothing to save

    def close(self) -> None:
        """End the process and all that it started, and remove its log. May be called again."""
        self._connection.close()
        self._process.join(_EXIT_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            # Not for ever: a process in the middle of a broken driver's system call cannot even be killed.
            self._process.join(_EXIT_SECONDS)
        pid, self._group = self._group, None  # once: the number may be given to another group later
        if pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        self._log.unlink(missing_ok=True)

    def _gone(self) -> ProcessGoneError:
        return ProcessGoneError("crashed", self._how_it_ended(), self.log_tail())

    def _how_it_ended(self) -> str:
        self._process.join(_EXIT_SECONDS)
        code = self._process.exitcode
        if code is None:
            return "the process broke off the conversation but did not end"
        if code < 0:
            hint = ": the host may be out of memory" if -code == signal.SIGKILL else ""
            return f"the process was ended by {_signal_name(-code)}{hint}"
        last = self.log_tail().strip().splitlines()[-1:]  # of a traceback, the line that says what was raised
        return f"the process ended with exit code {code}" + (f" ({_shortened(last[0].strip())})" if last else "")


def _without_folders(text: str) -> str:
    """Return a log whose tracebacks name files from their package on: records are shared, home folders are not."""
    for folder in sorted(filter(os.path.isabs, sys.path), key=len, reverse=True):
        text = text.replace(folder.rstrip("/") + "/", "")
    return text


def _make_log() -> Path:
    try:
        handle, path = tempfile.mkstemp(prefix="castwise-trial-", suffix=".log")
    except OSError as error:
        raise EngineError(f"No file could be made for a trial's output: {error}. TMPDIR names its folder.") from None
    os.close(handle)
    return Path(path)


def _start(process: Any) -> None:
    try:
        with _bare_main():
            _start_server()
            process.start()
    except (EOFError, ConnectionError):
        raise EngineError(
            "No process could be started for a trial: the server that imports PyTorch for all of them died. "
            "See what this says: python -c 'import torch, torchvision'"
        ) from None
    except OSError as error:
        hint = " Set TMPDIR to a folder with a shorter path." if "too long" in str(error) else ""
        raise EngineError(f"No process could be started for a trial: {error}.{hint}") from error


def _start_server() -> None:
    """Start the forkserver if needed, with Ctrl-C blocked, which would print a traceback of its imports.

    Without its parent it ends, at the latest after its imports; only then multiprocessing makes it ignore SIGINT.
    """
    resource_tracker.ensure_running()  # it unblocks SIGINT when it starts, so it goes first
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _limit_stalls(connection: Connection) -> None:
    """Let a read of a half-sent message fail after a while: it would block for ever."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _STALL_SECONDS, 0))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return f"signal {number}"


def _shortened(line: str) -> str:
    return line if len(line) <= _LAST_LINE_CHARACTERS else line[: _LAST_LINE_CHARACTERS - 1] + "…"


@contextmanager
def _bare_main() -> Iterator[None]:
    """Hide `__main__` while a process starts, so that the child does not run the caller's script again.

    Source: multiprocessing.spawn.get_preparation_data sends the path of `__main__`, and the child imports it:
    the command line's modules for nothing, or a user's script without a `__name__` guard from its top.
    """
    real = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = real
