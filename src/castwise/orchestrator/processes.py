"""Real trial processes: forked from a server that has torch imported and holds no CUDA context."""

import importlib.util
import json
import multiprocessing
import os
import signal
import socket
import struct
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

from castwise.errors import EngineError
from castwise.orchestrator.ddp_processes import GroupSession
from castwise.orchestrator.rpc import Answer, Command, RpcSession, command_label
from castwise.orchestrator.session import OnProgress, ProcessGoneError, Session, TrialFailedError
from castwise.records.schema import Environment, Shortfall, Status
from castwise.spec.frozen import FrozenModel
from castwise.worker import entry

_EXIT_SECONDS = 5.0  # what a process may take to end once it has closed its pipe or was killed
_LOG_TAIL_BYTES = 4000
_LAST_LINE_CHARACTERS = 200
# What an answer may hold at the most; a block is about 100 bytes. More is not an answer, and is never read in.
_ANSWER_BYTES = 64 * 2**20
_STALL_SECONDS = 10  # between two pieces of one answer
_PRELOAD = ["castwise.worker.preload"]  # what the server imports once for all trials

Target = Callable[[Connection, str], None]


class _Failed(FrozenModel):
    event: Literal["failed"]
    status: Status
    message: str
    usage: bool
    shortfall: Shortfall | None = None


class ForkserverEngine:
    """Starts one process a trial through a `multiprocessing` forkserver.

    Args:
        data_dir: Where real data lies.
        commit: castwise's commit, for the record.
        target: What a process runs; the door into `worker/` unless a test says otherwise.
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

    def start(self, timeout_seconds: float, num_processes: int = 1) -> Session:
        """Start the process of one trial, or its processes, one a rank."""

        def start_one() -> ProcessSession:
            return ProcessSession(self._context, self._target, self._data_dir, self._commit, timeout_seconds)

        if num_processes == 1:
            return start_one()
        return GroupSession(start_one, num_processes, timeout_seconds, self._data_dir, self._commit)


class ProcessSession(RpcSession):
    """A trial's process seen from the parent: commands out, events in, a deadline on each."""

    def __init__(
        self, context: Any, target: Target, data_dir: Path | None, commit: str | None, timeout_seconds: float
    ) -> None:
        super().__init__(timeout_seconds, data_dir, commit)
        self._started = time.perf_counter()
        self.ready_seconds = 0.0
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
        self._group: int | None = self._process.pid  # the door makes it a group of its own
        _limit_stalls(self._connection)

    def open(self, device: str) -> Environment:
        """Open the device ("auto": the first GPU, else the CPU) and say what it is."""
        environment = self._open(device)[0]
        self.ready_seconds = time.perf_counter() - self._started
        return environment

    @property
    def ends(self) -> list[Any]:
        """Return what becomes ready when there is an event to take: the pipe, and the end of the process."""
        return [self._connection, self._process.sentinel]

    def close(self) -> None:
        """End the process, whatever it is doing, and drop its log."""
        if self.is_busy:
            self.kill()
        self._connection.close()
        self._process.join(_EXIT_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            # Not for ever: a process in the middle of a broken driver's system call cannot even be killed.
            self._process.join(_EXIT_SECONDS)
        self._end_group()
        self._log.unlink(missing_ok=True)

    def _end_group(self) -> None:
        """End what the trial's process has started and left behind, once."""
        pid, self._group = self._group, None
        if pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def kill(self) -> None:
        """End the process at once; `close` still has to be called."""
        if self._process.is_alive():
            self._process.kill()  # it has nothing to save

    def _ask(
        self, command: Command, timeout_seconds: float | None = None, on_progress: OnProgress | None = None
    ) -> list[Answer]:
        limit = timeout_seconds or self._timeout_seconds
        self.send(command)
        while True:
            if not wait(self.ends, timeout=limit):
                raise self.too_slow(command, limit)
            answer = self.take(command, on_progress or _ignore)
            if answer is not None:
                return [answer]

    def send(self, command: Command) -> None:
        """Send a command.

        Raises:
            ProcessGoneError: Nobody is left to take it.
        """
        self.is_busy = True
        try:
            self._connection.send_bytes(json.dumps(command).encode())
        except OSError:
            raise self._gone() from None

    def take(self, command: Command, on_progress: OnProgress) -> Answer | None:
        """Take the event that has come (`ends` say when); return the answer, None where it was a sign of life.

        Args:
            command: What was sent last.
            on_progress: Is called with the share done, where the event says how much.

        Raises:
            TrialFailedError: The event is a failure, is none at all, or is the process's end (ProcessGoneError).
        """
        event = self._receive(command)
        try:
            if event["event"] == "progress":
                on_progress(float(event["done"]))
                return None
            failed = _Failed.model_validate(event) if event["event"] == "failed" else None
        except (KeyError, TypeError, ValueError):
            raise self.no_answer(command) from None
        self.is_busy = False
        if failed is not None:
            raise TrialFailedError(failed.status, failed.message, self._tail(), failed.usage, failed.shortfall)
        return dict(event)

    def too_slow(self, command: Command, limit: float) -> TrialFailedError:
        """Return the failure of a command that was not answered within so many seconds."""
        # An epoch may take as long as it likes, as long as it gives signs of life.
        words = "gave no sign of life for" if command["command"] == "run_epoch" else "took longer than"
        return TrialFailedError("timeout", f"{command_label(command)} {words} {limit:g} s", self._tail())

    def no_answer(self, command: Command) -> TrialFailedError:
        """Return the failure of a command whose answer is none."""
        self.is_busy = True  # with what, nobody knows
        return TrialFailedError(
            "crashed", f"{command_label(command)} was answered with what is no answer", self._tail()
        )

    def _receive(self, command: Command) -> Any:
        try:
            if not self._connection.poll():
                raise EOFError  # it is gone, and a process that it started holds its end of the pipe
            return json.loads(self._connection.recv_bytes(_ANSWER_BYTES))
        except (EOFError, OSError):
            raise self._gone() from None
        except ValueError:
            raise self.no_answer(command) from None

    def _no_answer(self, command: Command, rank: int) -> TrialFailedError:
        del rank
        return self.no_answer(command)

    def _gone(self) -> ProcessGoneError:
        return ProcessGoneError("crashed", self._how_it_ended(), self._tail())

    def _how_it_ended(self) -> str:
        self._process.join(_EXIT_SECONDS)
        code = self._process.exitcode
        if code is None:
            return "the process broke off the conversation but did not end"
        if code < 0:
            hint = ": the host may be out of memory" if -code == signal.SIGKILL else ""
            return f"the process was ended by {_signal_name(-code)}{hint}"
        last = self._tail().strip().splitlines()[-1:]  # of a traceback, the line that says what was raised
        return f"the process ended with exit code {code}" + (f" ({_shortened(last[0].strip())})" if last else "")

    def _tail(self) -> str:
        try:
            with self._log.open("rb") as log:
                log.seek(max(0, self._log.stat().st_size - _LOG_TAIL_BYTES))
                return _without_folders(log.read(_LOG_TAIL_BYTES).decode("utf-8", "replace"))
        except OSError:
            return ""


def _without_folders(text: str) -> str:
    """Return a log whose tracebacks name modules' files from their package on: records are shared, homes are not."""
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
    """Start the forkserver, if need be, deaf to Ctrl-C: a user does not want a traceback of its imports.

    Without its parent it ends, at the latest after its imports. multiprocessing makes it ignore SIGINT only then.
    """
    resource_tracker.ensure_running()  # it unblocks SIGINT when it starts, so it goes first
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _limit_stalls(connection: Connection) -> None:
    """Let a read of a half-sent answer fail after a while, where it would block for ever."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _STALL_SECONDS, 0))


def _ignore(_: float) -> None:
    """Do nothing."""


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
