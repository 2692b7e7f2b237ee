"""A session with real processes: each call goes to every rank's process, and all are listened to at once."""

import inspect
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from castwise.errors import EngineError
from castwise.orchestrator.session import OnProgress, ProcessGoneError, Session, TrialFailedError
from castwise.records.messages import EVENT, Call, Failed, Progress
from castwise.records.schema import Environment, Epoch, RankSamples
from castwise.spec.trial import TrialSpec, device_of_rank

_OPEN_TIMEOUT_SECONDS = 300.0  # torch's first import from a cold network disk has been seen to take minutes
# When a process dies, the others lose their connections to it, and may report that first.
_CAUSE_SECONDS = 0.5

_P = ParamSpec("_P")
_R = TypeVar("_R")


class RankProcess(Protocol):
    """One rank's process and the pipe to it: `processes.TrialProcess`.

    Attributes:
        is_busy: Whether it has a call to answer; set by the session.
    """

    is_busy: bool

    @property
    def pid(self) -> int:
        """The process's number."""

    @property
    def ends(self) -> Sequence[Any]:
        """What becomes ready when there is an event to receive: the pipe, and the end of the process."""

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""

    def send(self, message: bytes) -> None:
        """Send a message.

        Raises:
            ProcessGoneError: The process has ended.
        """

    def receive(self) -> bytes:
        """Return the message that has come (`ends` say when).

        Raises:
            ProcessGoneError: The process has ended.
        """

    def log_tail(self) -> str:
        """Return the end of what the process printed."""

    def kill(self) -> None:
        """End the process at once; `close` must still be called."""

    def close(self) -> None:
        """End the process and remove its log."""


def _remote(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate["RpcSession", _P], _R]:
    """Return a method that calls the worker's method of the same name with its arguments, and returns rank 0's answer.

    Args:
        method: The method of `Session`, whose signature says what is sent and what must come back.
    """
    signature = inspect.signature(method)
    returns: TypeAdapter[_R] = TypeAdapter(signature.return_annotation)

    def call(self: "RpcSession", /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        arguments = signature.bind(self, *args, **kwargs).arguments
        del arguments["self"]
        return self._call(method.__name__, arguments, returns)[0]

    call.__doc__ = method.__doc__
    return call


class RpcSession:
    """The processes of one trial, one a rank, seen from the parent.

    Ranks are not started by elastic torchrun: it has an agent process that imports torch a second time, and its workers
    live on, with their GPU memory, when it is killed (docs/architecture.md has the figures).

    Args:
        start_process: Starts one rank's process.
        num_processes: How many.
        timeout_seconds: How long one call may take.
        data_dir: Where real data lies.
        commit: castwise's commit, for the record.

    Attributes:
        ready_seconds: From the request for the processes until their devices were open.
        processes: The processes, by rank.
        timeout_seconds: How long one call may take.
    """

    def __init__(
        self,
        start_process: Callable[[], RankProcess],
        num_processes: int,
        timeout_seconds: float,
        data_dir: Path | None,
        commit: str | None,
    ) -> None:
        self.ready_seconds = 0.0
        self._started = time.perf_counter()
        self.timeout_seconds = timeout_seconds
        self._data_dir = data_dir
        self._commit = commit
        self.processes: list[RankProcess] = []
        self._folder: Path | None = None  # where several ranks meet
        with ExitStack() as undo:
            undo.callback(self.close)
            if num_processes > 1:
                self._folder = _make_folder()
            for _ in range(num_processes):
                self.processes.append(start_process())
            undo.pop_all()

    def open(self, device: str) -> Environment:
        """Open each rank's device, and describe the first.

        Raises:
            TrialFailedError: As for any call; also if the ranks' devices differ, since a figure is of one device.
        """
        arguments = [{"device": device_of_rank(device, rank), "commit": self._commit} for rank in self._ranks]
        environments = self._call("open", arguments, TypeAdapter(Environment), timeout_seconds=_OPEN_TIMEOUT_SECONDS)
        names = list(dict.fromkeys(environment.device_name for environment in environments))
        if len(names) > 1:
            raise TrialFailedError("unsupported", f"the ranks' devices differ: {', '.join(names)}")
        self.ready_seconds = time.perf_counter() - self._started
        return environments[0]

    def set_up(self, spec: TrialSpec, checkpoint: Path | None = None) -> None:
        """Build model, data and optimizer in every rank; a training trial resumes from an existing checkpoint."""
        arguments = [
            {
                "spec": spec.model_copy(update={"device": device_of_rank(spec.device, rank)}),
                "checkpoint": checkpoint,
                "data_dir": self._data_dir,
                "rank": rank,
                "rendezvous": None if self._folder is None else (self._folder / "rendezvous").as_uri(),
            }
            for rank in self._ranks
        ]
        self._call("set_up", arguments, TypeAdapter(None))

    check = _remote(Session.check)
    inspect = _remote(Session.inspect)
    fetch = _remote(Session.fetch)
    find_weights = _remote(Session.find_weights)
    warm_up = _remote(Session.warm_up)
    lead_in = _remote(Session.lead_in)
    run_block = _remote(Session.run_block)
    run_sustained = _remote(Session.run_sustained)
    resume = _remote(Session.resume)

    def run_epoch(self, on_progress: OnProgress | None = None) -> Epoch:
        """Train one epoch, validate, and write the checkpoint; the time limit starts again with each progress event."""
        return self._call("run_epoch", {}, TypeAdapter(Epoch), on_progress=on_progress)[0]

    def finish(self, weights: Path | None = None) -> tuple[RankSamples, ...]:
        """Return all that was measured, by rank, and end the processes."""
        return tuple(self._call("finish", {"weights": weights}, TypeAdapter(RankSamples)))

    def close(self) -> None:
        """End the processes, whatever they are doing, and remove the folder in which they met."""
        for process in self.processes:
            if process.is_busy:  # an idle process may be waiting for a busy one, so all of these go first
                process.kill()
        for process in self.processes:
            process.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

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
        on_progress: OnProgress | None = None,
    ) -> list[_R]:
        """Call a method of every rank's worker, and return what each returned.

        Args:
            method: Its name.
            arguments: Its arguments by name: the same for all ranks, or one mapping a rank.
            returns: Validates what it returns.
            timeout_seconds: How long it may take; None takes the session's limit.
            on_progress: Receives the share that rank 0 has done.

        Raises:
            TrialFailedError: A process failed, or did not answer in time.
        """
        each = [arguments] * len(self.processes) if isinstance(arguments, Mapping) else arguments
        try:
            for rank, process in enumerate(self.processes):
                process.is_busy = True
                try:
                    call = Call(method=method, arguments=to_jsonable_python(each[rank]))
                    process.send(call.model_dump_json().encode())
                except TrialFailedError as failure:
                    raise self._named([rank], failure) from None
            return self._listen(method, returns, timeout_seconds or self.timeout_seconds, on_progress)
        except TrialFailedError:
            if len(self.processes) > 1:
                for process in self.processes:
                    process.is_busy = True  # none has anything left to do: closing kills them all
            raise

    def _listen(self, method: str, returns: TypeAdapter[_R], limit: float, on_progress: OnProgress | None) -> list[_R]:
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
                # An epoch may take as long as it likes, as long as it reports progress.
                words = "gave no sign of life for" if method == "run_epoch" else "took longer than"
                log = self.processes[waiting[0]].log_tail()
                failure = TrialFailedError("timeout", f"{_label(method)} {words} {limit:g} s", log)
                raise self._named(waiting, failure)
            for rank in ready:
                try:
                    event = self._receive(rank, method)
                    if isinstance(event, Progress):
                        deadline = time.monotonic() + limit
                        if rank == 0 and on_progress is not None:
                            on_progress(event.done)
                        continue
                    try:
                        answers[rank] = returns.validate_python(event)
                    except ValueError:
                        raise self._no_answer(rank, method) from None
                except TrialFailedError as failure:
                    waiting.remove(rank)
                    raise self._cause(method, rank, failure, waiting) from None
                waiting.remove(rank)
        return [answers[rank] for rank in self._ranks]

    def _ready(self, ranks: Sequence[int], deadline: float) -> list[int]:
        """Return the ranks that have an event to receive; none if there is none until the deadline."""
        ends = {id(end): (rank, end) for rank in ranks for end in self.processes[rank].ends}
        ready = wait([end for _, end in ends.values()], timeout=max(0.0, deadline - time.monotonic()))
        return sorted({ends[id(end)][0] for end in ready})

    def _receive(self, rank: int, method: str) -> Any:
        """Return a rank's progress, or else what its method returned.

        Raises:
            TrialFailedError: The method failed, the process has ended (ProcessGoneError), or the message is not an
                answer to the call.
        """
        process = self.processes[rank]
        message = process.receive()
        try:
            event = EVENT.validate_json(message)
        except ValueError:
            raise self._no_answer(rank, method) from None
        if isinstance(event, Progress):
            return event
        if isinstance(event, Failed):
            process.is_busy = False
            raise TrialFailedError(event.status, event.message, process.log_tail(), event.refused, event.shortfall)
        if event.method != method:
            raise self._no_answer(rank, method)
        process.is_busy = False
        return event.result

    def _no_answer(self, rank: int, method: str) -> TrialFailedError:
        process = self.processes[rank]
        process.is_busy = True  # what it is doing is not known
        return TrialFailedError("crashed", f"{_label(method)} was answered with what is no answer", process.log_tail())

    def _cause(self, method: str, rank: int, failure: TrialFailedError, waiting: list[int]) -> TrialFailedError:
        """Return what ended the trial: the first failure, or the process whose silent end caused it."""
        deadline = time.monotonic() + _CAUSE_SECONDS
        while waiting and not isinstance(failure, ProcessGoneError):
            ready = self._ready(waiting, deadline)
            if not ready:
                break
            for other in ready:
                try:
                    is_over = not isinstance(self._receive(other, method), Progress)
                except TrialFailedError as its_failure:
                    is_over = True
                    if isinstance(its_failure, ProcessGoneError):
                        rank, failure = other, its_failure
                if is_over:
                    waiting.remove(other)
        return self._named([rank], failure)

    def _named(self, ranks: Sequence[int], failure: TrialFailedError) -> TrialFailedError:
        """Return a failure with the ranks that it is of; a refusal by castwise itself is of none."""
        if failure.refused or len(self.processes) == 1:
            return failure
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        return TrialFailedError(failure.status, f"{who}: {failure.message}", failure.log)


def _label(method: str) -> str:
    """Return what a method is called in messages."""
    return f"'{method.replace('_', ' ')}'"


def _make_folder() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="castwise-ranks-"))
    except OSError as error:
        raise EngineError(f"No folder could be made for a trial's ranks: {error}. TMPDIR names its place.") from None
