"""The shards of a plan on an engine of any kind: each is measured once, retried once if it was lost, then given up.

All that must outlive this process is in a journal next to the records, so that the same command goes on.
"""

import json
import os
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Protocol

from castwise._version import __version__
from castwise.cluster.shard import ShardResult
from castwise.errors import StoreError, UsageError
from castwise.records.schema import Environment, Trial
from castwise.records.store import NO_LOCKS, Store, lock_all, remove_empty
from castwise.spec.trial import TrialSpec

UNKNOWN = "unknown"  # the host of trials whose jobs were lost
MOST_TRIES = 2  # of a shard whose job was lost
_REFUSED = (2, 3)  # exit codes that another try would not change
_ENDINGS = ("done", "refused", "crashed")


class Task(NamedTuple):
    """A shard, and the kind of node that measures it; empty if any does."""

    shard: int
    kind: str = ""

    @property
    def label(self) -> str:
        return f"shard {self.shard}" + (f" on {self.kind}" if self.kind else "")


class Backend(Protocol):
    def start(self, waiting: deque[Task]) -> Mapping[Task, str]:
        """Take as many tasks off the queue as there is room for, start them, and return their jobs' names."""

    def poll(self) -> list[tuple[Task, ShardResult | str]]:
        """Wait for a moment; return what has ended since the last call: its result, or why its job was lost."""

    def running(self) -> int:
        """Return how many of the started tasks do not wait for a node."""

    def close(self) -> None:
        """Leave the engine."""


class Journal:
    """What became of each task, in a file that is only appended to, and that one process at a time has open.

    Attributes:
        tries: How often each task was started.
        jobs: Of the tasks that were started, and have not ended yet.
        endings: One of `_ENDINGS`, with host or reason.
        is_submitting: A process died while it handed tasks in: jobs may exist that nothing names.

    Raises:
        UsageError: Another process has it open.
        StoreError: The folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.tries: Counter[Task] = Counter()
        self.jobs: dict[Task, str] = {}
        self.endings: dict[Task, tuple[str, str]] = {}
        self.is_submitting = False
        self._file, self._lock = folder / "journal", ExitStack()
        self._lock.callback(remove_empty, folder, *folder.parents[:2])  # after a refusal
        try:
            if owner := lock_all([folder / "lock"], self._lock):
                raise UsageError(f"{owner}, with its journal in '{folder}'.")
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise StoreError(f"'{folder}' cannot be used: {error.strerror or error}.") from None
        for line in self._file.read_text().splitlines() if self._file.exists() else []:
            try:
                entry = json.loads(line)
            except ValueError:  # cut off when its writer was killed
                continue
            self._apply(Task(*entry["task"]), entry["event"], entry["detail"])

    def write(self, *entries: tuple[Task, str, str]) -> None:
        """Append what became of tasks: one of `_ENDINGS`, submitting, started, lost or cancelled; and job or reason."""
        if not entries:
            return
        for entry in entries:  # first, as Ctrl-C may interrupt the rest
            self._apply(*entry)
        lines = [json.dumps({"task": task, "event": event, "detail": detail}) for task, event, detail in entries]
        with self._file.open("a") as file:
            file.write("".join(f"\n{line}" for line in lines))  # behind a line that may have been cut off
            file.flush()
            os.fsync(file.fileno())

    def _apply(self, task: Task, event: str, detail: str) -> None:
        if event == "submitting":
            self.is_submitting = True
        elif event == "started":
            self.is_submitting = False
            if self.endings.pop(task, None):  # it was forgotten
                self.tries[task] = 0
            self.tries[task] += 1
            self.jobs[task] = detail
        else:
            self.jobs.pop(task, None)
            self.tries[task] -= event == "cancelled"
            if event in _ENDINGS:
                self.endings[task] = (event, detail)

    def cancelled(self) -> None:
        self.write(*((task, "cancelled", "") for task in self.jobs))

    def forget(self, endings: Collection[str]) -> None:
        """Let tasks that ended in one of these ways be tried anew."""
        for task in [task for task, (ending, _) in self.endings.items() if ending in endings]:
            del self.endings[task], self.tries[task]

    def close(self) -> None:
        self._lock.close()


def dispatch(
    tasks: Iterable[Task],
    journal: Journal,
    backend: Backend,
    give_up: Callable[[Task, str], None],
    show: Callable[[int, int, int], None],
    remark: Callable[[str], None],
) -> None:
    """Have every task measured that has no ending yet: the first ones first, each on the next node that is free.

    Args:
        tasks: The tasks, the longest first.
        journal: Knows what became of them before; what it calls started is with the backend already.
        backend: Runs them.
        give_up: Records that a task was lost too often, with the reason.
        show: Receives how many tasks wait for a node, run, and have ended.
        remark: Receives what is worth a line.
    """
    waiting = deque(task for task in tasks if task not in journal.endings and task not in journal.jobs)
    while waiting or journal.jobs:
        if waiting:
            journal.write(*((task, "started", job) for task, job in backend.start(waiting).items()))
        for task, result in backend.poll():
            if isinstance(result, str):
                why = result
            elif result.is_answered:
                journal.write((task, "done", result.host))
                continue
            elif result.code in _REFUSED:
                journal.write((task, "refused", result.said))
                remark(f"{task.label} was refused on {result.host}: {result.said}")
                continue
            else:
                why = f"castwise ended with {result.code} on {result.host}: {result.said}"
            if journal.tries[task] < MOST_TRIES:
                journal.write((task, "lost", why))
                waiting.append(task)
                remark(f"{task.label} was lost and is tried again: {why}")
            else:
                give_up(task, why)
                journal.write((task, "crashed", why))
                remark(f"{task.label} was lost twice and is recorded as crashed: {why}")
        running = backend.running()
        show(len(waiting) + len(journal.jobs) - running, running, len(journal.endings))


def save_crashed(store: Store, specs: Iterable[TrialSpec], why: str) -> None:
    """Record trials as crashed whose machine is not known, as it was lost."""
    no = UNKNOWN
    environment = Environment(castwise=__version__, python=no, torch=no, host=no, system=no, cpu=no, num_threads=0)
    message = f"its job was lost {MOST_TRIES} times: {why}"
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    for spec in specs:
        trial = Trial(
            spec=spec, status="crashed", message=message, environment=environment, started_at=now, duration_seconds=0
        )
        store.save(trial)
