"""Faults of clusters, each from a seed: submitters, jobs, nodes and the head are killed at random times.

Each function raises AssertionError if a trial was lost or doubled, or something is left running.
"""

import os
import random
import signal
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fake_slurm
from programs import PATIENCE_SECONDS, SOURCES, Program, wait_until

from castwise.records.store import load_folder

_TESTS = Path(__file__).resolve().parents[1]
_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_REQUEST = ("run", "resnet50", "--precision", "fp32,bf16-mixed", "--batch-size", "8,16,32", "--rounds", "2")
_NUM_CONFIGURATIONS, _ROUNDS = 6, 2
_MOST_COMMANDS = 8  # until all is measured


@contextmanager
def _marked(folder: Path) -> Iterator[Program]:
    """Yield a program, all of whose processes are found by a mark, and at whose end none may be left."""
    logs = folder / "t"
    logs.mkdir()
    program = Program(folder, logs, uuid.uuid4().hex.encode())
    try:
        yield program
        wait_until(lambda: not program.alive(), "the end of all processes")
    finally:
        for pid in program.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _measure_all(program: Program, engine: str, disturb: Callable[["subprocess.Popen[str]"], None]) -> None:
    """Give the command again and again, disturbed the first times, until it is answered; each trial is there once."""
    for number in range(_MOST_COMMANDS):
        command = [str(_TESTS / "fake_cli.py"), *_REQUEST, "--on", engine, "--nodes", "2", "--results", "r", "--retry"]
        process = program.start(*command)
        if number < 2:
            disturb(process)
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
        trials, problems = load_folder(program.folder / "r")
        assert not problems, problems
        keys = [trial.spec.key for trial in trials if trial.status == "ok"]
        assert len(keys) == len(set(keys)), "a trial was measured twice"
        if process.returncode == 0:
            # A round that was cut short may have been begun again: more of its baseline's trials do no harm.
            counts = Counter(trial.spec.configuration for trial in trials if trial.status == "ok")
            assert len(counts) == _NUM_CONFIGURATIONS, counts
            assert min(counts.values()) >= _ROUNDS, counts
            return
        assert process.returncode in (1, 130, -signal.SIGKILL) or number < 2, f"{process.returncode}\n{out}\n{err}"
    raise AssertionError(f"it does not come to an end\n{err}")


def kill_on_slurm(rng: random.Random, folder: Path) -> None:
    """Kill the submitter, a whole job as a node that is lost, or one of a job's processes."""
    state = folder / "s"
    state.mkdir()
    fake_slurm.install(folder / "bin")

    def disturb(process: "subprocess.Popen[str]") -> None:
        time.sleep(rng.uniform(0.5, 6.0))
        running = [each.read_text().split() for each in state.iterdir() if each.name.replace("_", "").isdigit()]
        jobs = [int(words[1]) for words in running if words[0] == "RUNNING"]
        what = rng.choice(("submitter", "job", "process"))
        with suppress(ProcessLookupError):
            if what == "submitter" or not jobs:
                process.send_signal(rng.choice(_SIGNALS))
            elif what == "job":
                os.killpg(rng.choice(jobs), signal.SIGKILL)
            else:
                group = rng.choice(jobs)
                found = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _group(pid) == group]
                os.kill(rng.choice(found or [group]), rng.choice(_SIGNALS[:3]))

    own = {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "FAKE_SLURM": str(state)}
    with patch.dict(os.environ, own), _marked(folder) as program:
        _measure_all(program, "slurm", disturb)


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1


def kill_on_ray(rng: random.Random, folder: Path) -> None:
    """Kill the submitter, a process of castwise on a node, a node or the head; a lost node comes back, and a head."""
    from ray.cluster_utils import Cluster

    with _marked(folder) as program, patch.dict(os.environ, {"CASTWISE_TEST_MARK": program.mark.decode()}):
        # After so many seconds a driver without a head gives up.
        os.environ["RAY_gcs_rpc_server_reconnect_timeout_s"] = "3"  # noqa: SIM112  its name
        os.environ["PYTHONPATH"] = os.pathsep.join([str(SOURCES), str(_TESTS)])

        def start() -> Any:
            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
            os.environ["RAY_ADDRESS"] = cluster.address
            for _ in range(2):
                cluster.add_node(num_cpus=1, num_gpus=1)
            return cluster

        clusters = [start()]

        def disturb(process: "subprocess.Popen[str]") -> None:
            time.sleep(rng.uniform(1.0, 8.0))
            what = rng.choice(("submitter", "process", "node", "head"))
            if what == "head":
                clusters[-1].shutdown()
                process.wait(timeout=PATIENCE_SECONDS)
                clusters.append(start())
            elif what == "node":
                clusters[-1].remove_node(rng.choice(list(clusters[-1].worker_nodes)), allow_graceful=False)
                clusters[-1].add_node(num_cpus=1, num_gpus=1)
            else:
                found = [pid for pid in program.alive() if pid != process.pid and "--plan" in _command(pid)]
                with suppress(ProcessLookupError):
                    pid = rng.choice(found) if what == "process" and found else process.pid
                    os.kill(pid, rng.choice(_SIGNALS))

        try:
            _measure_all(program, "ray", disturb)
        finally:
            clusters[-1].shutdown()


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


CLUSTER_FAULTS: dict[str, Callable[[random.Random, Path], None]] = {
    "a job of Slurm, one of its processes or its submitter is killed": kill_on_slurm,
    "a node of Ray, castwise on a node, the head or the submitter is killed": kill_on_ray,
}
