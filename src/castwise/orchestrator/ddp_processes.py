"""The processes of one trial on several GPUs, driven as one: the first to fail ends all."""

import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol

from castwise.errors import EngineError
from castwise.orchestrator.rpc import Answer, Command, RpcSession
from castwise.orchestrator.session import OnProgress, ProcessGoneError, TrialFailedError
from castwise.records.schema import Environment
from castwise.spec.trial import device_of_rank

# A process that dies takes the others' connections with it, and they may be the first to say so.
_CAUSE_SECONDS = 0.5


class Member(Protocol):
    """One rank's process: `launcher.ProcessSession`."""

    is_busy: bool

    @property
    def ends(self) -> list[Any]:
        """What becomes ready when there is an event to take."""

    def send(self, command: Command) -> None:
        """Send a command."""

    def take(self, command: Command, on_progress: OnProgress) -> Answer | None:
        """Take the event that has come; return the answer, None where it was a sign of life."""

    def too_slow(self, command: Command, limit: float) -> TrialFailedError:
        """Return the failure of a command that was not answered in time."""

    def no_answer(self, command: Command) -> TrialFailedError:
        """Return the failure of a command whose answer is none."""

    def kill(self) -> None:
        """End the process at once."""

    def close(self) -> None:
        """End the process and clear up."""


class GroupSession(RpcSession):
    """The processes of one trial seen from the parent: every command goes to all, and all are listened to at once.

    Elastic torchrun has an agent process that imports torch a second time, and whose workers live on, with their GPU
    memory, where it is killed; docs/architecture.md has the figures.
    """

    def __init__(
        self,
        start_one: Callable[[], Member],
        num_processes: int,
        timeout_seconds: float,
        data_dir: Path | None,
        commit: str | None,
    ) -> None:
        super().__init__(timeout_seconds, data_dir, commit)
        self._started = time.perf_counter()
        self.ready_seconds = 0.0
        self._members: list[Member] = []
        with ExitStack() as undo:
            self._folder = _make_folder()
            undo.callback(self.close)
            for _ in range(num_processes):
                self._members.append(start_one())
            undo.pop_all()

    def open(self, device: str) -> Environment:
        """Open each rank's device, and say what the first is.

        Raises:
            TrialFailedError: As for any command; also where the devices differ, since a figure is one device's.
        """
        environments = self._open(device)
        names = list(dict.fromkeys(environment.device_name for environment in environments))
        if len(names) > 1:
            raise TrialFailedError("unsupported", f"the ranks' devices differ: {', '.join(names)}")
        self.ready_seconds = time.perf_counter() - self._started
        return environments[0]

    def close(self) -> None:
        """End the processes, whatever they are doing, and remove where they meet."""
        for member in self._members:
            if member.is_busy:  # one that is not may wait for one that is: first all of these
                member.kill()
        for member in self._members:
            member.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ask(
        self, command: Command, timeout_seconds: float | None = None, on_progress: OnProgress | None = None
    ) -> list[Answer]:
        try:
            for rank, member in enumerate(self._members):
                try:
                    member.send(self._for_rank(command, rank))
                except TrialFailedError as failure:
                    raise _named([rank], failure) from None
            return self._listen(command, timeout_seconds or self._timeout_seconds, on_progress or _ignore)
        except TrialFailedError:
            for member in self._members:
                member.is_busy = True  # none has anything left to do: closing kills them all
            raise

    def _for_rank(self, command: Command, rank: int) -> Command:
        if command["command"] == "open":
            return command | {"device": device_of_rank(command["device"], rank)}
        if command["command"] == "set_up":
            spec = command["spec"] | {"device": device_of_rank(command["spec"]["device"], rank)}
            return command | {"spec": spec, "rank": rank, "rendezvous": (self._folder / "rendezvous").as_uri()}
        return command

    def _listen(self, command: Command, limit: float, on_progress: OnProgress) -> list[Answer]:
        """Return every rank's answer, taken in the order in which they come.

        Raises:
            TrialFailedError: A rank failed, however many others wait for it; or time is up.
        """
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + limit
        while len(answers) < len(self._members):
            waiting = [rank for rank in range(len(self._members)) if rank not in answers]
            ready = self._ready(waiting, deadline)
            if not ready:
                raise _named(waiting, self._members[waiting[0]].too_slow(command, limit))
            for rank in ready:
                try:
                    answer = self._members[rank].take(command, on_progress if rank == 0 else _ignore)
                except TrialFailedError as failure:
                    waiting.remove(rank)
                    raise self._cause(command, rank, failure, waiting) from None
                if answer is None:
                    deadline = time.monotonic() + limit
                else:
                    answers[rank] = answer
                    waiting.remove(rank)
        return [answers[rank] for rank in range(len(self._members))]

    def _ready(self, ranks: list[int], deadline: float) -> list[int]:
        """Return those of the ranks that have an event to take, none where there is none until the deadline."""
        ends = {id(end): (rank, end) for rank in ranks for end in self._members[rank].ends}
        ready = wait([end for _, end in ends.values()], timeout=max(0.0, deadline - time.monotonic()))
        return sorted({ends[id(end)][0] for end in ready})

    def _cause(self, command: Command, rank: int, failure: TrialFailedError, waiting: list[int]) -> TrialFailedError:
        """Return what ended the trial: the first failure, or the silent end of a process that caused it."""
        deadline = time.monotonic() + _CAUSE_SECONDS
        while waiting and not isinstance(failure, ProcessGoneError):
            ready = self._ready(waiting, deadline)
            if not ready:
                break
            for other in ready:
                try:
                    if self._members[other].take(command, _ignore) is not None:
                        waiting.remove(other)
                except TrialFailedError as its:
                    waiting.remove(other)
                    if isinstance(its, ProcessGoneError):
                        rank, failure = other, its
        return _named([rank], failure)

    def _no_answer(self, command: Command, rank: int) -> TrialFailedError:
        return _named([rank], self._members[rank].no_answer(command))


def _named(ranks: list[int], failure: TrialFailedError) -> TrialFailedError:
    """Return a failure with the ranks it is of; what castwise itself refused is nobody's."""
    if failure.refused:
        return failure
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return TrialFailedError(failure.status, f"{who}: {failure.message}", failure.log)


def _make_folder() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="castwise-ranks-"))
    except OSError as error:
        raise EngineError(f"No folder could be made for a trial's ranks: {error}. TMPDIR names its place.") from None


def _ignore(_: float) -> None:
    """Do nothing."""
