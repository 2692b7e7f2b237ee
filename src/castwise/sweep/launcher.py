"""Real trial processes: forked from a server that has torch imported and holds no CUDA context."""

import importlib.util
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from castwise.errors import EngineError
from castwise.plan import TrialSpec
from castwise.record import Block, Environment, Facts, RankSamples
from castwise.sweep import door
from castwise.sweep.engine import TrialFailedError

_OPEN_TIMEOUT_SECONDS = 300.0  # torch's first import from a cold network disk has been seen to take minutes
_LOG_TAIL_BYTES = 4000
# What the server imports once for all trials. The worker pulls in torch; torchvision is the next slowest.
_PRELOAD = ["castwise.measure.worker", "castwise.measure.workloads", "torchvision"]

Target = Callable[[Connection, str], None]


class ForkserverEngine:
    """Starts one process a trial through a `multiprocessing` forkserver.

    Args:
        data_dir: Where real data lies.
        commit: castwise's commit, for the record.
        target: What a process runs; the door into `measure/` unless a test says otherwise.
    """

    def __init__(self, data_dir: Path | None = None, commit: str | None = None, target: Target = door.enter) -> None:
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

    def start(self, timeout_seconds: float) -> "ProcessSession":
        """Start a process for one trial."""
        return ProcessSession(self._context, self._target, self._data_dir, self._commit, timeout_seconds)


class ProcessSession:
    """A trial's process seen from the parent: commands out, events in, a deadline on each."""

    def __init__(
        self, context: Any, target: Target, data_dir: Path | None, commit: str | None, timeout_seconds: float
    ) -> None:
        self._data_dir = data_dir
        self._commit = commit
        self._timeout_seconds = timeout_seconds
        self._started = time.perf_counter()
        self.ready_seconds = 0.0
        handle, path = tempfile.mkstemp(prefix="castwise-trial-", suffix=".log")
        os.close(handle)
        self._log = Path(path)
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, path), name="castwise-trial", daemon=True)
        try:
            with _bare_main():
                self._process.start()
        except OSError as error:
            self._log.unlink(missing_ok=True)
            raise EngineError(f"No process could be started for a trial: {error}.") from error
        finally:
            theirs.close()

    def open(self, device: str) -> Environment:
        """Open the device ("auto": the first GPU, else the CPU) and say what it is."""
        answer = self._ask({"command": "open", "device": device, "commit": self._commit}, _OPEN_TIMEOUT_SECONDS)
        self.ready_seconds = time.perf_counter() - self._started
        return Environment.model_validate(answer["environment"])

    def check(self, workloads: Sequence[str]) -> None:
        """Make sure that the zoos named have these models."""
        self._ask({"command": "check", "workloads": list(workloads)})

    def fetch(self, data_set: str, data_dir: Path) -> None:
        """Download a data set into a folder."""
        self._ask({"command": "fetch", "data_set": data_set, "data_dir": str(data_dir)})

    def set_up(self, spec: TrialSpec) -> None:
        """Build model, data and optimizer."""
        data_dir = str(self._data_dir) if self._data_dir else None
        self._ask({"command": "set_up", "spec": spec.model_dump(mode="json"), "data_dir": data_dir})

    def warm_up(self) -> Facts:
        """Run until the step time has settled."""
        return Facts.model_validate(self._ask({"command": "warm_up"})["facts"])

    def run_block(self) -> Block:
        """Time one block of steps."""
        return Block.model_validate(self._ask({"command": "run_block"})["block"])

    def finish(self) -> RankSamples:
        """Return all that was measured and end the process."""
        return RankSamples.model_validate(self._ask({"command": "finish"})["samples"])

    def close(self) -> None:
        """End the process, whatever it is doing, and drop its log."""
        self._connection.close()
        if self._process.is_alive():
            # A finished worker ends by itself within this time; a busy one is killed: it has nothing to save.
            self._process.join(0 if self._busy else 2.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._log.unlink(missing_ok=True)

    _busy = False

    def _ask(self, command: dict[str, Any], timeout_seconds: float | None = None) -> dict[str, Any]:
        limit = timeout_seconds or self._timeout_seconds
        self._busy = True
        try:
            self._connection.send_bytes(json.dumps(command).encode())
            ready = wait([self._connection, self._process.sentinel], timeout=limit)
            if not ready:
                phase = command["command"].replace("_", " ")
                raise TrialFailedError("timeout", f"'{phase}' took longer than {limit:g} s", self._tail())
            answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise TrialFailedError("crashed", self._how_it_ended(), self._tail()) from None
        self._busy = False
        if answer["event"] == "failed":
            raise TrialFailedError(answer["status"], answer["message"], self._tail(), answer["usage"])
        return answer

    def _how_it_ended(self) -> str:
        self._process.join(5.0)
        code = self._process.exitcode
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            hint = ": the host may be out of memory" if name == "SIGKILL" else ""
            return f"the process was ended by {name}{hint}"
        last = self._tail().strip().splitlines()[-1:]  # of a traceback, the line that says what was raised
        return f"the process ended with exit code {code}" + (f" ({last[0].strip()})" if last else "")

    def _tail(self) -> str:
        try:
            return self._log.read_bytes()[-_LOG_TAIL_BYTES:].decode("utf-8", "replace")
        except OSError:
            return ""


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
