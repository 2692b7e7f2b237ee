"""Shards as a job array of Slurm, by submitit: Slurm decides when and where each runs."""

import importlib.util
import os
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from castwise.cluster.dispatch import Ended, Journal, Task
from castwise.cluster.shard import ShardResult, run_shard
from castwise.errors import EngineError, UsageError, shortened

MOST_SHARDS = 1000  # of a job array. Source: Slurm, slurm.conf: MaxArraySize is 1001 by default
_MINUTES = 240  # of a job, unless --sbatch time=… says otherwise
# Seconds from one question to Slurm's accounting to the next: they grow with the wait, to be easy on it.
_LOOK_SECONDS, _MOST_LOOK_SECONDS, _LOOK_SHARE = 1.0, 60.0, 0.1
# What squeue calls a job that is over, where no accounting is; "gone" is one that it does not list any more.
_OVER = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT", "gone")
_LATE_SECONDS = 20.0  # by so much a shared file system may show a job's result after Slurm has called it ended


def check_slurm() -> None:
    """Raise a UsageError if no jobs can be submitted here."""
    if importlib.util.find_spec("submitit") is None:
        raise UsageError("--on slurm needs submitit: pip install 'castwise[slurm]'.")
    if not shutil.which("sbatch"):
        raise UsageError("There is no sbatch here. --on slurm runs where jobs are submitted, as on a login node.")


class SlurmBackend:
    """A plan's job arrays, all of one name; the journal knows the jobs that an earlier process started.

    `folder` is for submitit's files, `arguments` are those of Python for a task, `options` those of sbatch (an empty
    value is a flag), `nodes` is how many nodes may be used at the same time, and `num_nodes` how many a task needs.
    """

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        folder: Path,
        arguments: Callable[[Task], Sequence[str]],
        name: str,
        options: Mapping[str, str],
        nodes: int | None,
        journal: Journal,
        num_nodes: int = 1,
    ) -> None:
        import submitit

        self._folder, self._arguments, self._name, self._journal = folder, arguments, name, journal
        if journal.is_submitting:
            self.cancel()
        self._executor = submitit.AutoExecutor(folder=folder, cluster="slurm")
        self._executor.update_parameters(
            name=name,
            timeout_min=_MINUTES,
            slurm_array_parallelism=(nodes or MOST_SHARDS * num_nodes) // num_nodes,
            slurm_use_srun=False,  # a step of srun would have one CPU of the node
            slurm_additional_parameters={"nodes": num_nodes, **{key: value or True for key, value in options.items()}},
        )
        job_class: Any = submitit.SlurmJob
        self._jobs: dict[Task, submitit.Job[ShardResult]] = {
            task: job_class(folder=folder, job_id=job) for task, job in journal.jobs.items()
        }
        self._num_nodes = num_nodes
        self._began, self._next_look = time.monotonic(), 0.0
        self._gone_since: dict[Task, float] = {}
        # Without accounting sacct is missing or fails. Jobs' states and nodes by squeue; None until it has answered.
        self._has_accounting = _output("sacct", "--noheader", "--jobs=1") is not None
        self._queue: dict[str, list[str]] | None = None

    def start(self, waiting: deque[Task]) -> Mapping[Task, str]:
        """Submit all tasks.

        Raises:
            EngineError: Slurm refuses them.
        """
        tasks = [waiting.popleft() for _ in range(len(waiting))]
        self._journal.write([(Task(0), "submitting", "")])
        try:
            each = [self._arguments(task) for task in tasks], [os.getcwd()] * len(tasks), [self._num_nodes] * len(tasks)
            jobs = self._executor.map_array(run_shard, *each)
        except (RuntimeError, OSError) as error:
            raise EngineError(f"Slurm does not take the jobs: {shortened(' '.join(str(error).split()))}") from None
        self._jobs.update(zip(tasks, jobs, strict=True))
        self._began = time.monotonic()
        return {task: job.job_id for task, job in zip(tasks, jobs, strict=True)}

    def poll(self) -> list[Ended]:
        """Wait a moment, and return the tasks whose results are there, or whose jobs are gone without one."""
        time.sleep(0.2)
        names = set(os.listdir(self._folder))  # unlike a look at one file, this asks a shared file system anew
        ended: list[Ended] = []
        now = time.monotonic()
        if now >= self._next_look and self._jobs:
            self._look()
            self._next_look = now + min(_MOST_LOOK_SECONDS, _LOOK_SECONDS + _LOOK_SHARE * (now - self._began))
        for task, job in list(self._jobs.items()):
            if job.paths.result_pickle.name in names:
                error = job.exception()
                lost = "" if error is None else shortened(str(error).strip())
                ended.append(Ended(task, job.result() if error is None else None, lost))
            elif not self._is_over(job):
                self._gone_since.pop(task, None)
                continue
            elif now - self._gone_since.setdefault(task, now) <= _LATE_SECONDS:
                continue
            else:
                state, where = self._state(job)
                why = f"Slurm calls job {job.job_id} {state}" + (f" on {where}" if where else "")
                if state.startswith("COMPLETED") or state == "gone":
                    why += f", and its result is not in '{self._folder}': do the nodes share this folder?"
                ended.append(Ended(task, None, why))
            del self._jobs[task]
        return ended

    def running(self) -> int:
        """Return how many jobs Slurm calls running."""
        return sum(self._state(job)[0] == "RUNNING" for job in self._jobs.values())

    def _look(self) -> None:
        """Ask Slurm for the states of the jobs; if it does not answer, they stay as they were."""
        if self._has_accounting:
            next(iter(self._jobs.values())).watcher.update()
            return
        user = f"--user={os.getuid()}"
        form = "--format=%i|%T|%N"
        found = _output("squeue", "--noheader", "--array", "--states=all", user, f"--name={self._name}", form)
        if found is not None:
            self._queue = {job: rest for job, *rest in (line.split("|") for line in found.split())}

    def _state(self, job: Any) -> tuple[str, str]:
        """Return what Slurm calls a job, and its nodes."""
        if self._has_accounting:
            where = job.get_info(mode="cache").get("NodeList", "")
            return job.watcher.get_state(job.job_id, mode="cache"), where
        state, where = ("UNKNOWN", "") if self._queue is None else self._queue.get(job.job_id, ("gone", ""))
        return state, where

    def _is_over(self, job: Any) -> bool:
        is_done = self._has_accounting and job.watcher.is_done(job.job_id, mode="cache")
        return is_done or (not self._has_accounting and self._state(job)[0] in _OVER)

    def cancel(self) -> None:
        """Cancel the plan's jobs, also those that were handed in by a process which died before it could note them."""
        subprocess.run(["scancel", "--user", str(os.getuid()), "--name", self._name], check=False)
        self._journal.write((task, "cancelled", "") for task in list(self._journal.jobs))

    def close(self) -> None:
        """Leave the jobs to Slurm."""


def _output(*command: str) -> str | None:
    """Return what a command printed; None if it failed, or is not there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
