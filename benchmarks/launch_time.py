"""How long the ranks of a trial take to start: castwise's group of processes beside elastic torchrun.

    python benchmarks/launch_time.py [--ranks N] [--repeats N]

A start lasts from the request until every rank has torch imported and all have met in a gloo process group on the CPU.
Then each launcher's own process is ended by SIGKILL, and its ranks that still live are counted.
"""

import argparse
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import castwise
from castwise.orchestrator.processes import ForkserverEngine
from castwise.spec.plan import TrialSpec

_PATIENCE_SECONDS = 120.0
_SETTLE_SECONDS = 3.0  # what a kill may take to be felt by all
_MARK = "CASTWISE_LAUNCH_TIME"

# What torchrun starts: meets the others, says so, and hangs, as in a collective whose other end is gone.
_WORKER = """
import os, pathlib, time
from torch import distributed
distributed.init_process_group("gloo")
distributed.barrier()
pathlib.Path(os.environ["READY"], os.environ["RANK"]).touch()
time.sleep(600)
"""

# castwise's side of the same: ranks that have met, and one that hangs.
_PARENT = """
import os, pathlib, signal
from castwise.orchestrator.processes import ForkserverEngine
from benchmark_launch import SPEC
session = ForkserverEngine().start(600.0, SPEC.world_size)
session.open("cpu")
session.set_up(SPEC)
for rank, member in enumerate(session._members):
    pathlib.Path(os.environ["READY"], str(rank)).touch()
os.kill(member._process.pid, signal.SIGSTOP)
session.warm_up()
"""


def main() -> int:
    """Measure both, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    spec = TrialSpec(
        workload="mnist-cnn",
        precision="fp32",
        loss_scale="none",
        batch_size=2,
        device="cpu",
        world_size=arguments.ranks,
        parallelism="ddp",
    )
    engine = ForkserverEngine()
    first, *others = [_start_group(engine, spec) for _ in range(arguments.repeats + 1)]
    elastic = [_start_torchrun(arguments.ranks) for _ in range(arguments.repeats)]
    software = f"torch {version('torch')}, Python {platform.python_version()}"
    print(f"{os.cpu_count()} CPU cores, {software}, {spec.world_size} ranks")
    print(f"castwise, the sweep's first trial (its server imports torch): {first:.2f} s")
    print(f"castwise, later trials, model built: {_summary(others)}")
    print(f"torchrun: {_summary(elastic)}")
    print(f"alive {_SETTLE_SECONDS:g} s after SIGKILL of castwise's process: {_survivors_of_castwise(spec)}")
    print(f"alive {_SETTLE_SECONDS:g} s after SIGKILL of torchrun's agent: {_survivors_of_torchrun(spec.world_size)}")
    return 0


def _start_group(engine: ForkserverEngine, spec: TrialSpec) -> float:
    started = time.perf_counter()
    session = engine.start(_PATIENCE_SECONDS, spec.world_size)
    try:
        session.open("cpu")
        session.set_up(spec)  # the ranks meet, and the model is built and wrapped
        return time.perf_counter() - started
    finally:
        session.close()


def _start_torchrun(ranks: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        process = _torchrun(Path(folder), ranks)
        _wait_for_ranks(Path(folder), ranks)
        seconds = time.perf_counter() - started
        process.send_signal(signal.SIGTERM)
        process.wait()
        return seconds


def _survivors_of_torchrun(ranks: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        return _survivors(_torchrun(Path(folder), ranks), Path(folder), ranks)


def _survivors_of_castwise(spec: TrialSpec) -> int:
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        load = "from castwise.spec.plan import TrialSpec"
        literal = f"{load}\nSPEC = TrialSpec.model_validate_json({spec.model_dump_json()!r})\n"
        (where / "benchmark_launch.py").write_text(literal)
        return _survivors(_run(where, [sys.executable, "-c", _PARENT]), where, spec.world_size)


def _survivors(process: "subprocess.Popen[bytes]", folder: Path, ranks: int) -> int:
    """Kill a launcher once its ranks have met; return how many processes of its live on, and end them."""
    _wait_for_ranks(folder, ranks)
    process.kill()
    process.wait()
    time.sleep(_SETTLE_SECONDS)
    alive = _marked(str(folder))
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    return len(alive)


def _torchrun(folder: Path, ranks: int) -> "subprocess.Popen[bytes]":
    script = folder / "worker.py"
    script.write_text(_WORKER)
    return _run(folder, [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), str(script)])


def _run(folder: Path, command: list[str]) -> "subprocess.Popen[bytes]":
    paths = [str(Path(castwise.__file__).parents[1]), str(folder), os.environ.get("PYTHONPATH", "")]
    environment = dict.fromkeys(("READY", "TMPDIR", _MARK), str(folder)) | {"PYTHONPATH": os.pathsep.join(paths)}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, env={**os.environ, **environment}, **quiet)


def _wait_for_ranks(folder: Path, ranks: int) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not all((folder / str(rank)).exists() for rank in range(ranks)):
        if time.monotonic() > deadline:
            raise SystemExit("the ranks have not met")
        time.sleep(0.01)


def _marked(value: str) -> list[int]:
    mark, found = f"{_MARK}={value}".encode(), []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and mark in Path(f"/proc/{entry}/environ").read_bytes():
                found.append(int(entry))
        except OSError:
            continue
    return found


def _summary(seconds: list[float]) -> str:
    low, high = min(seconds), max(seconds)
    return f"median {statistics.median(seconds):.2f} s ({low:.2f} to {high:.2f}, n = {len(seconds)})"


if __name__ == "__main__":
    sys.exit(main())
