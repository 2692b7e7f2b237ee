"""Real trial processes: forked from a server that has torch imported and no CUDA context, and called over pipes."""

import contextlib
import importlib.util
import inspect
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing import util as multiprocessing_util
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from pydantic import TypeAdapter
from pydantic_core import PydanticSerializationError, to_jsonable_python

from castwise.errors import EngineError, printable, shortened
from castwise.orchestrator.nodes import MESSAGE_BYTES, Nodes, RemoteProcess, follow, never_stall
from castwise.orchestrator.session import OnProgress, ProcessGoneError, Session, TrialFailedError
from castwise.orchestrator.temporary_files import (
    TemporaryFolder,
    make_folder,
    sweep,
    take_multiprocessing_along,
)
from castwise.records.messages import EVENT, Call, Failed, Progress
from castwise.records.schema import Environment, Epoch, RankSamples
from castwise.spec.trial import TrialSpec, device_of_rank
from castwise.trial import entry
from castwise.trial.lifetime import kill_descendants

_OPEN_TIMEOUT_SECONDS = 300.0  # torch's first import from a cold network disk has been seen to take minutes
_CAUSE_SECONDS = 0.5  # when a process dies, the others lose their connections to it, and may report that first
_EXIT_SECONDS = 5.0  # what a process may take to end once it has closed its pipe or was killed
_LOG_TAIL_BYTES = 4000
_LAST_LINE_CHARACTERS = 200
# What the server imports once for all trials.
_PRELOAD = ["castwise.trial.server_lifetime", "castwise.trial.preload"]
_STOP_SECONDS = 0.3  # what the server, and multiprocessing's tracker, may take to end

_running: set[int] = set()  # processes of trials
_running_lock = threading.Lock()  # of a new process it is not known yet that it runs
_further_imports: list[str] = []  # of the user's model

Target = Callable[[Connection, str], None]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class ForkserverEngine:
    """Starts one process a trial through a `multiprocessing` forkserver.

    Args:
        data_dir: Where real data lies.
        commit: castwise's commit, for the record.
        target: What a process runs; a test may replace it.
        nodes: The other nodes that share each trial of several processes.
        packed: Whether trials on other GPUs of this host may run at the same time, for the record.
    """

    def __init__(
        self,
        data_dir: Path | None = None,
        commit: str | None = None,
        target: Target = entry.trial_main,
        nodes: Nodes | None = None,
        *,
        packed: bool = False,
    ) -> None:
        if importlib.util.find_spec("torch") is None:
            raise EngineError(
                "PyTorch is not installed, and nothing can be measured without it. "
                "Install it with: pip install 'castwise[measure]'"
            )
        self.data_dir = data_dir
        self.commit = commit
        self.nodes = nodes
        self.packed = packed
        self._target = target
        sweep()
        take_multiprocessing_along()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        # The lowest priority: after multiprocessing has waited for children of the caller's own.
        multiprocessing_util.Finalize(None, _stop_server, exitpriority=-100)

    def start(self, timeout_seconds: float, num_processes: int = 1) -> "RpcSession":
        return RpcSession(self, num_processes, timeout_seconds)

    def start_process(self, log: Path) -> "TrialProcess":
        return TrialProcess(self._context, self._target, log)

    def follow(self, rendezvous: str) -> None:
        follow(rendezvous, lambda folder: self.start_process(folder.path / "log"))


def import_once(modules: Sequence[str]) -> None:
    """Import modules of the user's model once for all trials: in the server, unless it runs already."""
    _further_imports[:] = modules


def _remote(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate["RpcSession", _P], _R]:
    """Return a method that calls the processes' method of this name, and returns rank 0's answer.

    The signature of `Session`'s method says what is sent and what must come back.
    """
    signature = inspect.signature(method)
    returns: TypeAdapter[_R] = TypeAdapter(signature.return_annotation)

    def call(self: "RpcSession", /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        arguments = signature.bind(self, *args, **kwargs).arguments
        del arguments["self"]
        on_note = arguments.pop("on_note", None)
        report = None if on_note is None else lambda progress: on_note(progress.note)
        return self._call(method.__name__, arguments, returns, on_progress=report)[0]

    return call


class RpcSession:
    """The processes of one trial, one a rank: each call goes to all of them, and all are listened to at once.

    Ranks are not started by elastic torchrun: it has an agent process that imports torch a second time, and its workers
    live on, with their GPU memory, when it is killed (docs/architecture.md has the figures).

    Attributes:
        ready_seconds: From the request for the processes until their devices were open.
        processes: The processes, by rank.
        timeout_seconds: How long one call may take.
    """

    def __init__(self, engine: ForkserverEngine, num_processes: int, timeout_seconds: float) -> None:
        self.ready_seconds = 0.0
        self.timeout_seconds = timeout_seconds
        self.processes: list[TrialProcess | RemoteProcess] = []
        self._engine = engine
        self._started = time.perf_counter()
        self._nodes = nodes = engine.nodes if num_processes > 1 else None
        self._per_node = num_processes // (1 if nodes is None else nodes.count)
        self._folder: TemporaryFolder | None = None  # where the processes print to, and meet if they are several
        with ExitStack() as undo:
            undo.callback(self.close)
            logs = [f"rank{rank}.log" for rank in range(self._per_node)]
            self._folder = make_folder(*logs)
            if nodes is not None:
                nodes.ask(self._per_node)
            for log in logs:
                self.processes.append(engine.start_process(self._folder.path / log))
            if nodes is not None:
                self.processes += nodes.take(self._per_node)
            undo.pop_all()

    def open(self, device: str) -> Environment:
        """Open each rank's device, and describe the first.

        Raises:
            TrialFailedError: As for any call; also if the ranks' devices differ, since a figure is of one device.
        """
        devices = [device_of_rank(device, rank % self._per_node) for rank in self._ranks]
        arguments = [{"device": name, "commit": self._engine.commit} for name in devices]
        environments = self._call("open", arguments, TypeAdapter(Environment), timeout_seconds=_OPEN_TIMEOUT_SECONDS)
        names = list(dict.fromkeys(environment.device_name for environment in environments))
        if len(names) > 1:
            raise TrialFailedError("unsupported", f"the ranks' devices differ: {', '.join(names)}")
        for name in ("castwise", "torch", "cuda", "driver"):
            found = list(dict.fromkeys(str(getattr(environment, name)) for environment in environments))
            if len(found) > 1:
                raise TrialFailedError("unsupported", f"the nodes differ in {name}: {', '.join(found)}")
        self.ready_seconds = time.perf_counter() - self._started
        # Of trials on one node, too: they are compared with the others.
        hosts = () if self._engine.nodes is None else self._engine.nodes.hosts
        return environments[0].model_copy(update={"other_hosts": hosts, "packed": self._engine.packed})

    def set_up(self, spec: TrialSpec, checkpoint: Path | None = None) -> None:
        assert self._folder is not None, "it is open"
        if spec.num_nodes != (1 if self._nodes is None else self._nodes.count):
            why = f"{spec.label} needs its other nodes: --rendezvous and --node-rank on each, or --on slurm or ray"
            raise TrialFailedError("unsupported", why, refused=True)
        file = (self._folder.path / "rendezvous").as_uri()
        rendezvous = file if self._nodes is None else self._nodes.free_rendezvous()
        arguments = [
            {
                "spec": spec.model_copy(update={"device": device_of_rank(spec.device, rank % self._per_node)}),
                "checkpoint": checkpoint,
                "data_dir": self._engine.data_dir,
                "rank": rank,
                "rendezvous": rendezvous if len(self.processes) > 1 else None,
            }
            for rank in self._ranks
        ]
        self._call("set_up", arguments, TypeAdapter(None))

    check = _remote(Session.check)
    inspect = _remote(Session.inspect)
    fetch = _remote(Session.fetch)
    find_weights = _remote(Session.find_weights)
    trace_memory = _remote(Session.trace_memory)
    warm_up = _remote(Session.warm_up)
    lead_in = _remote(Session.lead_in)
    run_block = _remote(Session.run_block)
    run_stretch = _remote(Session.run_stretch)
    run_sustained = _remote(Session.run_sustained)
    resume = _remote(Session.resume)
    profile = _remote(Session.profile)

    def run_epoch(self, on_progress: OnProgress | None = None) -> Epoch:
        report = None if on_progress is None else lambda progress: on_progress(progress.done)
        return self._call("run_epoch", {}, TypeAdapter(Epoch), on_progress=report)[0]

    def finish(self, weights: Path | None = None) -> tuple[RankSamples, ...]:
        return tuple(self._call("finish", {"weights": weights}, TypeAdapter(RankSamples)))

    def close(self) -> None:
        """End the processes, whatever they are doing, and remove their folder."""
        for process in self.processes:
            if process.is_busy:  # an idle process may be waiting for a busy one, so all of these go first
                process.kill()
        for process in self.processes:
            process.close()
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.remove()

    @property
    def _ranks(self) -> range:
        return range(len(self.processes))

    def _call(
        self,
        method: str,
        arguments: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        returns: TypeAdapter[_R],
        *,
        timeout_seconds: float | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> list[_R]:
        """Call a method of every rank's process, with the same arguments or those of each, and return all answers.

        Raises:
            TrialFailedError: A process failed, or did not answer in time.
        """
        each = [arguments] * len(self.processes) if isinstance(arguments, Mapping) else arguments
        try:
            for rank, process in enumerate(self.processes):
                call = Call(method=method, arguments=to_jsonable_python(each[rank]))
                try:
                    message = call.model_dump_json().encode()
                except PydanticSerializationError:  # JSON holds no other text
                    names = re.findall(r"'[^']*\\udc[^']*'", repr(call.arguments))
                    why = f"The name of a file or folder is not in UTF-8: {names[0]}. Rename it."
                    raise TrialFailedError("unsupported", why, refused=True) from None
                process.is_busy = True
                try:
                    process.send(message)
                except ProcessGoneError as failure:
                    raise self._with_ranks([rank], failure) from None
            return self._listen(method, returns, timeout_seconds or self.timeout_seconds, on_progress)
        except TrialFailedError:
            if len(self.processes) > 1:
                for process in self.processes:
                    process.is_busy = True  # none has anything left to do: closing kills them all
            raise

    def _listen(
        self, method: str, returns: TypeAdapter[_R], limit: float, on_progress: Callable[[Progress], None] | None
    ) -> list[_R]:
        """Return every rank's answer, received in the order in which they come.

        Raises:
            TrialFailedError: A rank failed, however many others wait for it; or the time is up.
        """
        answers: dict[int, _R] = {}
        deadline = time.monotonic() + limit
        while len(answers) < len(self.processes):
            waiting = [rank for rank in self._ranks if rank not in answers]
            ready = self._ready(waiting, deadline)
            if not ready:
                words = f"{_label(method)} took longer than {limit:g} s"
                if method == "run_epoch":  # it may take as long as it likes, as long as it reports progress
                    words = f"training and validation gave no sign of life for {limit:g} s: --timeout allows more"
                log = self.processes[waiting[0]].log_tail()
                failure = TrialFailedError("timeout", words, log)
                raise self._with_ranks(waiting, failure)
            for rank in ready:
                try:
                    event = self._receive(rank, method, returns)
                except TrialFailedError as failure:
                    waiting.remove(rank)
                    raise self._cause(method, returns, rank, failure, waiting) from None
                if isinstance(event, Progress):
                    deadline = time.monotonic() + limit
                    if rank == 0 and on_progress is not None:
                        on_progress(event)
                else:
                    answers[rank] = event
                    waiting.remove(rank)
        return [answers[rank] for rank in self._ranks]

    def _ready(self, ranks: Sequence[int], deadline: float) -> list[int]:
        """Return the ranks that have an event to receive; none if there is none until the deadline."""
        rank_of = {end: rank for rank in ranks for end in self.processes[rank].ends}
        ready = wait(list(rank_of), timeout=max(0.0, deadline - time.monotonic()))
        return sorted({rank_of[end] for end in ready})

    def _receive(self, rank: int, method: str, returns: TypeAdapter[Any]) -> Any:
        """Return a rank's progress, or else what its method returned.

        Raises:
            TrialFailedError: The method failed, the process has ended (ProcessGoneError), or the message is not an
                answer to the call.
        """
        process = self.processes[rank]
        message = process.receive()
        try:
            event = EVENT.validate_json(message)
            if isinstance(event, Progress):
                return event
            if isinstance(event, Failed):
                process.is_busy = False
                raise TrialFailedError(
                    event.status, shortened(event.message), process.log_tail(), event.refused, event.shortfall
                )
            if event.method != method:
                raise ValueError(f"an answer to '{event.method}'")
            result = returns.validate_python(event.result)
        except ValueError:
            # What the process is doing is not known: it stays busy, and is killed.
            why = f"{_label(method)} got an answer that cannot be read"
            raise TrialFailedError("crashed", why, process.log_tail()) from None
        process.is_busy = False
        return result

    def _cause(
        self, method: str, returns: TypeAdapter[Any], rank: int, failure: TrialFailedError, waiting: list[int]
    ) -> TrialFailedError:
        """Return what ended the trial: the first failure, or the process whose silent end caused it."""
        deadline = time.monotonic() + _CAUSE_SECONDS
        while waiting and not isinstance(failure, ProcessGoneError):
            ready = self._ready(waiting, deadline)
            if not ready:
                break
            for other in ready:
                try:
                    is_over = not isinstance(self._receive(other, method, returns), Progress)
                except TrialFailedError as its_failure:
                    is_over = True
                    if isinstance(its_failure, ProcessGoneError):
                        rank, failure = other, its_failure
                if is_over:
                    waiting.remove(other)
        return self._with_ranks([rank], failure)

    def _with_ranks(self, ranks: Sequence[int], failure: TrialFailedError) -> TrialFailedError:
        """Return a failure with the ranks that it is of; a refusal by castwise itself is of none."""
        if failure.refused or len(self.processes) == 1:
            return failure
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        return TrialFailedError(failure.status, f"{who}: {failure.message}", failure.log)


def _label(method: str) -> str:
    return f"'{method.replace('_', ' ')}'"


class TrialProcess:
    """One process of a trial, seen from the parent: messages out and in, and its end."""

    def __init__(self, context: Any, target: Target, log: Path) -> None:
        self.is_busy = False  # whether it has a call to answer; set by the session
        self._log = log
        with ExitStack() as undo:
            self._connection, theirs = context.Pipe()
            undo.callback(self._connection.close)
            self.process = context.Process(target=target, args=(theirs, str(log)), name="castwise-trial", daemon=True)
            with theirs, _running_lock:
                _start(self.process)
                _running.add(self.process.pid)
            undo.pop_all()
        self._group: int | None = self.process.pid  # trial_main makes it a group of its own
        # A read of a half-sent message fails after a while: it would block for ever.
        never_stall(self._connection)

    @property
    def ends(self) -> list[Any]:
        return [self._connection, self.process.sentinel]

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
            message: bytes = self._connection.recv_bytes(MESSAGE_BYTES)
        except (EOFError, OSError):
            raise self._gone() from None
        return message

    def log_tail(self) -> str:
        """Return the end of what the process printed.

        Tracebacks name files from their package on: records are shared, home folders are not.
        """
        try:
            with self._log.open("rb") as log:
                log.seek(max(0, self._log.stat().st_size - _LOG_TAIL_BYTES))
                text = log.read(_LOG_TAIL_BYTES).decode("utf-8", "replace")
        except OSError:
            return ""
        for folder in sorted(filter(os.path.isabs, sys.path), key=len, reverse=True):
            text = text.replace(folder.rstrip("/") + "/", "")
        return printable(text)

    def kill(self) -> None:
        """End the process at once; `close` must still be called."""
        if self.process.is_alive():
            kill_descendants(self.process.pid)
            self.process.kill()  # it has nothing to save

    def close(self) -> None:
        """End the process and all that it started. May be called again."""
        with contextlib.suppress(OSError):  # another thread has just closed it, after Ctrl-C
            self._connection.close()
        self.process.join(_EXIT_SECONDS)
        if self.process.is_alive():
            self.kill()
            # Not for ever: a process in the middle of a broken driver's system call cannot even be killed.
            self.process.join(_EXIT_SECONDS)
        pid, self._group = self._group, None  # once: the number may be given to another group later
        if pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            with _running_lock:
                _running.discard(pid)
                _kill_orphans()

    def _gone(self) -> ProcessGoneError:
        self.process.join(_EXIT_SECONDS)
        code, log = self.process.exitcode, self.log_tail()
        if code is None:
            how = "the process closed its pipe but did not end"
        elif code < 0:
            hint = ": the host may be out of memory" if -code == signal.SIGKILL else ""
            names = {known.value: known.name for known in signal.Signals}  # most real-time signals have no name
            how = f"the process was ended by {names.get(-code, f'signal {-code}')}{hint}"
        else:
            last = "".join(log.strip().splitlines()[-1:]).strip()  # of a traceback, the line that says what was raised
            if len(last) > _LAST_LINE_CHARACTERS:
                last = last[: _LAST_LINE_CHARACTERS - 1] + "…"
            how = f"the process ended with exit code {code}" + (f" ({last})" if last else "")
        return ProcessGoneError("crashed", how, log)


def _kill_orphans() -> None:
    """Kill what trials that have ended left behind in sessions of its own: the server has adopted it.

    Which trial an orphan is of is not known, so this waits for the last one that runs. Children of the caller's own,
    which may have the same server, are spared.
    """
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if server is not None and not _running:
        # `active_children` would ask each for its end, at the same time as other threads do.
        own = [child.pid for child in list(getattr(multiprocessing.process, "_children", ()))]
        kill_descendants(server, [pid for pid in own if pid is not None])


def _stop_server() -> None:
    """End the forkserver, which ends all below it, and multiprocessing's tracker; they would outlive this process."""
    server, tracker = forkserver._forkserver, resource_tracker._resource_tracker
    for owner, pipe, pid in ((server, "_forkserver_alive_fd", "_forkserver_pid"), (tracker, "_fd", "_pid")):
        descriptor, number = getattr(owner, pipe, None), getattr(owner, pid, None)
        if descriptor is None or number is None:
            continue
        os.close(descriptor)
        setattr(owner, pipe, None)
        setattr(owner, pid, None)
        deadline = time.monotonic() + _STOP_SECONDS
        with suppress(ChildProcessError):
            while not os.waitpid(number, os.WNOHANG)[0]:
                if time.monotonic() > deadline:
                    kill_descendants(number)
                    os.kill(number, signal.SIGKILL)
                    os.waitpid(number, 0)
                    break
                time.sleep(0.002)


def _start(process: Any) -> None:
    try:
        with _bare_main():
            resource_tracker.ensure_running()  # it unblocks SIGINT when it starts, so it goes first
            # Ctrl-C in the server would print a traceback of its imports. If its parent is gone it ends, at the latest
            # after its imports; only then multiprocessing makes it ignore SIGINT.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            variables = {"CASTWISE_PARENT": str(os.getpid()), "CASTWISE_IMPORTS": " ".join(_further_imports)}
            os.environ.update(variables)
            try:
                forkserver.ensure_running()
            finally:
                for name in variables:
                    del os.environ[name]
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            process.start()
    except (EOFError, ConnectionError):
        raise EngineError(
            "No process could be started for a trial: the server that imports PyTorch for all of them died. "
            "See what this says: python -c 'import torch, torchvision'"
        ) from None
    except OSError as error:
        hint = " Set TMPDIR to a folder with a shorter path." if "too long" in str(error) else ""
        raise EngineError(f"No process could be started for a trial: {error}.{hint}") from error


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
