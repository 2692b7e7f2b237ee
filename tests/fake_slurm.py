"""A Slurm of one machine: `python fake_slurm.py sbatch SCRIPT`, and squeue, scancel, srun.

FAKE_SLURM   the folder of its state: for each task of a job a file JOB_TASK with its state, or its process and node.
It holds `halt` if jobs are to do nothing, and `forgets` if squeue lists no job that is over.
"""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

STATE = Path(os.environ.get("FAKE_SLURM", "."))
NAMES = ("sbatch", "squeue", "scancel", "srun")


def install(folder: Path) -> None:
    """Write the commands into a folder."""
    folder.mkdir()
    for name in NAMES:
        file = folder / name
        file.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {name} "$@"\n')
        file.chmod(0o755)


def sbatch(script: str) -> None:
    text = Path(script).read_text()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", text, re.MULTILINE))
    if options.get("partition") == "none":
        sys.exit("sbatch: error: invalid partition specified: none")
    job = 100 + len(list(STATE.glob("*.sh")))
    (STATE / f"{job}.sh").write_text(text)
    (STATE / f"{job}.name").write_text(options["job-name"])
    array = re.fullmatch(r"0-(\d+)%(\d+)", options.get("array", "").strip("'"))
    tasks = [f"{job}_{number}" for number in range(int(array[1]) + 1)] if array else [str(job)]
    for task in tasks:
        (STATE / task).write_text("PENDING")
    most = int(array[2]) if array else 1
    subprocess.Popen(
        [sys.executable, __file__, "serve", str(job), str(most), *tasks],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    print(f"Submitted batch job {job}")


def serve(job: str, most: str, *tasks: str) -> None:
    waiting, running = list(tasks), dict[str, subprocess.Popen[bytes]]()
    while waiting or running:
        while waiting and len(running) < int(most):
            task = waiting.pop(0)
            if (STATE / task).read_text() != "PENDING":
                continue
            _, _, number = task.partition("_")
            names = {"SLURM_JOB_ID": task.replace("_", ""), "SLURM_JOB_NODELIST": f"node{task}"}
            names |= {"SLURM_ARRAY_JOB_ID": job, "SLURM_ARRAY_TASK_ID": number} if number else {}
            log = (STATE / f"{task}.log").open("wb")
            running[task] = subprocess.Popen(
                ["sleep", "3600"] if (STATE / "halt").exists() else ["bash", STATE / f"{job}.sh"],
                env={**os.environ, **names},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            (STATE / task).write_text(f"RUNNING {running[task].pid}")
        for task, process in list(running.items()):
            code = process.poll()
            if code is not None:
                del running[task]
                if (STATE / task).read_text().startswith("RUNNING"):
                    (STATE / task).write_text("NODE_FAIL" if code < 0 else "FAILED" if code else "COMPLETED")
        time.sleep(0.05)


def tasks_of(jobs: list[str]) -> list[Path]:
    return sorted(each for each in STATE.iterdir() if re.fullmatch(r"\d+(_\d+)?", each.name) and _is_of(each, jobs))


def _is_of(task: Path, jobs: list[str]) -> bool:
    return task.name in jobs or task.name.partition("_")[0] in jobs


def squeue(*arguments: str) -> None:
    (name,) = (each.partition("=")[2] for each in arguments if each.startswith("--name="))
    jobs = [each.stem for each in STATE.glob("*.name") if each.read_text() == name]
    for task in tasks_of(jobs):
        state = task.read_text().partition(" ")[0]
        if state in ("PENDING", "RUNNING") or not (STATE / "forgets").exists():
            print(f"{task.name}|{state}|{f'node{task.name}' * (state != 'PENDING')}")


def srun(*arguments: str) -> None:
    flags = [each for each in arguments if each.startswith("--")]
    count = next(int(flag.partition("=")[2]) for flag in flags if flag.startswith("--ntasks="))
    command = arguments[next(i for i, each in enumerate(arguments) if not each.startswith("--")) :]
    for process in [subprocess.Popen(command) for _ in range(count)]:
        process.wait()


def scancel(*arguments: str) -> None:
    names = [arguments[-1]] if "--name" in arguments else []
    jobs = [each.stem for each in STATE.glob("*.name") if each.read_text() in names] or list(arguments)
    for task in tasks_of(jobs):
        state, _, process = task.read_text().partition(" ")
        if state in ("PENDING", "RUNNING"):
            task.write_text("CANCELLED")
        if process:
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(int(process), signal.SIGTERM)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
