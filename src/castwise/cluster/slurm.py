"""Shards as a job array of Slurm, by submitit: Slurm decides when and where each runs."""

import os
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from castwise.cluster.dispatch import Journal, Task
from castwise.cluster.options import ManyMachinesOptions
from castwise.cluster.shard import ShardResult, run_shard
from castwise.errors import EngineError, UsageError, shortened
from castwise.spec.plan_file import PlanFile

MOST_SHARDS = 1000  # of a job array. Source: Slurm, slurm.conf: MaxArraySize is 1001 by default
_MINUTES = 240  # of a job, unless --sbatch time=… says otherwise
# Seconds from one question to Slurm to the next: they grow with the wait, to be easy on it.
_LOOK_SECONDS, _MOST_LOOK_SECONDS, _LOOK_SHARE = 1.0, 60.0, 0.1
# What squeue calls a job that is over; "gone" is one that it does not list any more.
_OVER = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT", "gone")
_LATE_SECONDS = 20.0  # by so much a shared file system may show a job's result after Slurm has called it ended


class SlurmBackend:
    """A plan's job arrays, all of one name; the journal knows the jobs that an earlier process started.

    `folder` is for submitit's files, `arguments` are those of Python for a task.
    """

    def __init__(
        self,
        machines: ManyMachinesOptions,
        plan: PlanFile,
        folder: Path,
        name: str,
        arguments: Callable[[Task], Sequence[str]],
        journal: Journal,
    ) -> None:
        try:
            import submitit
        except ImportError:
            raise UsageError("--on slurm needs submitit: pip install 'castwise[slurm]'.") from None
        if not shutil.which("sbatch"):
            raise UsageError("There is no sbatch here. --on slurm runs where jobs are submitted, as on a login node.")
        self._folder, self._arguments, self._name, self._journal = folder, arguments, name, journal
        self._num_nodes = plan.num_nodes
        if journal.is_submitting:
            self.cancel()
        self._executor = submitit.AutoExecutor(folder=folder, cluster="slurm")
        self._executor.update_parameters(
            name=name,
            timeout_min=_MINUTES,
            slurm_array_parallelism=(machines.nodes or MOST_SHARDS * plan.num_nodes) // plan.num_nodes,
            slurm_use_srun=False,  # a step of srun would have one CPU of the node
            slurm_additional_parameters=_sbatch_options(machines, plan),
        )
        job_class: Any = submitit.SlurmJob
        self._jobs: dict[Task, submitit.Job[ShardResult]] = {
            task: job_class(folder=folder, job_id=job) for task, job in journal.jobs.items()
        }
        self._began, self._next_look = time.monotonic(), 0.0
        self._gone_since: dict[Task, float] = {}
        self._queue: dict[str, tuple[str, str]] | None = None  # jobs' states and nodes; None until squeue has answered

    def start(self, waiting: deque[Task]) -> Mapping[Task, str]:
        """Submit all tasks.

        Raises:
            EngineError: Slurm refuses them.
        """
        tasks = [waiting.popleft() for _ in range(len(waiting))]
        self._journal.write((Task(0), "submitting", ""))
        try:
            each = [self._arguments(task) for task in tasks], [os.getcwd()] * len(tasks), [self._num_nodes] * len(tasks)
            jobs = self._executor.map_array(run_shard, *each)
        except (RuntimeError, OSError) as error:
            raise EngineError(f"Slurm does not take the jobs: {shortened(' '.join(str(error).split()))}") from None
        self._jobs.update(zip(tasks, jobs, strict=True))
        self._began, self._next_look, self._queue = time.monotonic(), 0.0, None
        return {task: job.job_id for task, job in zip(tasks, jobs, strict=True)}

    def poll(self) -> list[tuple[Task, ShardResult | str]]:
        """Wait a moment, and return the tasks whose results are there, or whose jobs are gone without one."""
        time.sleep(0.2)
        names = set(os.listdir(self._folder))  # unlike a look at one file, this asks a shared file system anew
        ended: list[tuple[Task, ShardResult | str]] = []
        now = time.monotonic()
        if now >= self._next_look:
            self._look()
            self._next_look = now + min(_MOST_LOOK_SECONDS, _LOOK_SECONDS + _LOOK_SHARE * (now - self._began))
        for task, job in list(self._jobs.items()):
            state, where = self._state(job.job_id)
            if job.paths.result_pickle.name in names:
                error = job.exception()
                ended.append((task, job.result() if error is None else shortened(str(error).strip())))
            elif state not in _OVER:
                self._gone_since.pop(task, None)
                continue
            elif now - self._gone_since.setdefault(task, now) <= _LATE_SECONDS:
                continue
            else:
                why = f"Slurm calls job {job.job_id} {state}" + (f" on {where}" if where else "")
                if state in ("COMPLETED", "gone"):
                    why += f", and its result is not in '{self._folder}': do the nodes share this folder?"
                ended.append((task, why))
            del self._jobs[task]
            self._gone_since.pop(task, None)
        return ended

    def running(self) -> int:
        return sum(self._state(job.job_id)[0] == "RUNNING" for job in self._jobs.values())

    def _look(self) -> None:
        """Ask Slurm for the states of the jobs; if it does not answer, they stay as they were.

        Unlike sacct, squeue needs no accounting.
        """
        user, form = f"--user={os.getuid()}", "--format=%i|%T|%N"
        command = ["squeue", "--noheader", "--array", "--states=all", user, f"--name={self._name}", form]
        with suppress(OSError, subprocess.SubprocessError):
            found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
            rows = (line.split("|") for line in found.split())
            self._queue = {job: (state, where) for job, state, where in rows}

    def _state(self, job: str) -> tuple[str, str]:
        return ("UNKNOWN", "") if self._queue is None else self._queue.get(job, ("gone", ""))

    def cancel(self) -> None:
        """Cancel the plan's jobs, also those that were handed in by a process which died before it could note them."""
        subprocess.run(["scancel", "--user", str(os.getuid()), "--name", self._name], check=False)
        self._journal.cancelled()

    def close(self) -> None:
        """Leave the jobs to Slurm."""


def _sbatch_options(machines: ManyMachinesOptions, plan: PlanFile) -> dict[str, Any]:
    """Return the options of sbatch: a whole node for each job, as trials on one host disturb each other."""
    options: dict[str, Any] = {"nodes": plan.num_nodes} | ({} if machines.pack else {"exclusive": True})
    if machines.partition is not None:
        options["partition"] = machines.partition
    if plan.num_gpus or machines.gres is not None:
        options["gres"] = machines.gres or f"gpu:{plan.num_gpus}"
    for pair in machines.sbatch or ():
        key, _, value = pair.lstrip("-").partition("=")
        options[key] = value or True
    return options
