"""Faults of whole commands, each from a seed: it is killed, its disk is full, it is not alone, its environment is odd.

Each function raises AssertionError if castwise did not hold.
"""

import os
import random
import resource
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from programs import LIGHT, PATIENCE_SECONDS, Program, run_trial

from castwise.records.store import load_folder

_TESTS = Path(__file__).resolve().parents[1]
_CODES = {0, 1, 2, 3, 4, 130}
_GONE_SECONDS = 0.5  # after which nothing of a command may run
_LOW_PRIORITY = 9  # times as long a process with `nice` waits. Source: Linux, kernel/sched/core.c (1024 to 110 for 10)

_MEASURING = (
    ("run", "resnet50", "--precision", "fp32,bf16-mixed,fp16-mixed", "--rounds", "3"),
    ("tune", "resnet50", "--budget", "5s"),
    ("max-batch", "resnet50", "--precision", "fp32"),
    ("suite", "tensorcore", "--quick", "--synthetic", "--precision", "fp32,fp16-mixed"),
)
_READING = (
    ("report", "r", "-o", "out.html"),
    ("report", "r", "--format", "table"),
    ("export", "r", "-o", "out.csv"),
    ("compare", "r", "published:T4"),
    ("list", "workloads"),
    ("init", "mine.py"),
)


def _start(
    arguments: tuple[str, ...], folder: Path, before: Callable[[], None] | None = None, **environment: str
) -> "subprocess.Popen[bytes]":
    if arguments[0] in ("run", "tune", "max-batch", "suite"):
        arguments = (*arguments, "--results", "r")
    command = [sys.executable, str(_TESTS / "fake_cli.py"), *arguments]
    own = {"XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(folder), "CASTWISE_DATA": str(folder / "no-data")}
    return subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | own | environment,
        preexec_fn=before,  # noqa: PLW1509
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def _end(process: "subprocess.Popen[bytes]") -> tuple[str, str]:
    try:
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise AssertionError("it hangs") from None
    assert b"Traceback" not in err, err[-2000:]
    return out.decode(errors="replace"), err.decode(errors="replace")


def _end_well(arguments: tuple[str, ...], folder: Path) -> None:
    process = _start(arguments, folder)
    _, err = _end(process)
    well = (0, 1, 2) if arguments[0] == "compare" else (0, 1)  # there may be nothing to compare
    assert process.returncode in well, (process.returncode, arguments, err[-1000:])


def _assert_sound(folder: Path) -> None:
    """Make sure that all records are whole, each is there once, and nothing but records is left."""
    trials, problems = load_folder(folder / "r")
    assert not problems, problems
    keys = [trial.spec.key for trial in trials]
    assert len(keys) == len(set(keys)), "a trial was measured twice"


def kill_command(rng: random.Random, folder: Path) -> None:
    """Kill a command at a random time; the same command then ends well, and goes on from sound records."""
    arguments = rng.choice((*_MEASURING, *_READING))
    if arguments in _READING:
        _end(_start(_MEASURING[0], folder))
    process = _start(arguments, folder)
    time.sleep(rng.uniform(0.0, 1.5))
    process.send_signal(rng.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)))
    process.communicate(timeout=PATIENCE_SECONDS)
    _assert_sound(folder)
    (folder / "mine.py").unlink(missing_ok=True)
    _end_well(arguments, folder)
    _assert_sound(folder)
    assert not list(folder.rglob("*.lock"))


def fill_disk(rng: random.Random, folder: Path) -> None:
    """Let every file end after a random number of bytes, as on a full disk; later the command ends well."""
    arguments = rng.choice((*_MEASURING, *_READING))
    if arguments in _READING:
        _end(_start(_MEASURING[0], folder))
    limit = int(10 ** rng.uniform(0, 5))
    process = _start(arguments, folder, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    _, err = _end(process)
    assert process.returncode in _CODES, process.returncode
    assert process.returncode in (0, 1) or err.strip()
    _assert_sound(folder)
    (folder / "mine.py").unlink(missing_ok=True)
    _end_well(arguments, folder)
    _assert_sound(folder)


def run_two(rng: random.Random, folder: Path) -> None:
    """Run a command twice at the same time: nothing is measured twice."""
    arguments = rng.choice(_MEASURING)
    processes = [_start(arguments, folder)]
    time.sleep(rng.uniform(0.0, 0.5))
    processes.append(_start(arguments, folder))
    if rng.random() < 0.3:
        time.sleep(rng.uniform(0.0, 0.5))
        processes.pop(0).kill()
    for process in processes:
        _end(process)
        assert process.returncode in (0, 1), process.returncode
    _assert_sound(folder)
    assert not list(folder.rglob("*.lock"))


def odd_environment(rng: random.Random, folder: Path) -> None:
    """Run a command with odd variables and closed or full streams."""
    odd = {
        "PYTHONIOENCODING": ("ascii", "latin-1", "utf-16", "cp1252", "utf-8:strict"),
        "LC_ALL": ("C", "POSIX", "xx_XX.UTF-8", ""),
        "PYTHONUTF8": ("0", "1"),
        "TERM": ("", "dumb", "xterm", "no-such-terminal"),
        "COLUMNS": ("0", "1", "-5", "10", "100000", "x"),
        "HOME": ("", "/no/such/home", str(folder)),
        "XDG_CACHE_HOME": ("", "/dev/null", "/no/such/cache", str(folder / "cache")),
        "FORCE_COLOR": ("1", ""),
        "NO_COLOR": ("1", ""),
        "CASTWISE_DATA": ("", "/dev/null", "\udcff"),
        "TZ": ("", "Nowhere/Never", "UTC"),
    }
    chosen = {name: rng.choice(odd[name]) for name in rng.sample(sorted(odd), rng.randint(1, 5))}
    closed = rng.sample(range(3), rng.choice((0, 0, 0, 1, 2)))
    full = rng.random() < 0.2

    def before() -> None:
        if full:
            os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        for descriptor in closed:
            os.close(descriptor)

    process = _start(rng.choice((*_MEASURING[:2], *_READING)), folder, before, **chosen)
    _end(process)
    assert process.returncode in _CODES, (process.returncode, chosen, closed)


def _assert_gone(program: Program) -> None:
    """Make sure that no process is left after half a second, or as much longer as these processes have to wait."""
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    seconds = _GONE_SECONDS * max(1.0, load) * (_LOW_PRIORITY if load > 1 and os.nice(0) > 0 else 1)
    deadline = time.monotonic() + seconds
    while program.alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    left = program.alive()
    names = [Path(f"/proc/{pid}/cmdline").read_bytes()[-200:] for pid in left if Path(f"/proc/{pid}").exists()]
    assert not left, names


def _program(folder: Path) -> Program:
    logs = folder / "t"
    logs.mkdir(exist_ok=True)
    return Program(folder, logs, uuid.uuid4().hex.encode())


_TRIALS = f"""{LIGHT}
import sys
from pathlib import Path
from castwise.records.store import Store
{run_trial("faulty_trial.TARGET").replace("None, faulty_trial.ENV", "Store(Path('r')), faulty_trial.ENV")}
print("done", flush=True)
"""
_TARGETS = (
    "behave",
    "fail_at('run_block', faulty_trial.hang)",
    "fail_at('set_up', partial(faulty_trial.flood_stdout))",
)


def kill_parent(rng: random.Random, folder: Path) -> None:
    """Kill a program with real processes at a random time: half a second later none of them is left."""
    program = _program(folder)
    process = program.start_script(_TRIALS.replace("TARGET", rng.choice(_TARGETS)))
    try:
        time.sleep(rng.uniform(0.0, 2.0))
        process.send_signal(rng.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)))
        process.wait(PATIENCE_SECONDS)
        _assert_gone(program)
    finally:
        program.end()
    _assert_sound(folder)
    program = _program(folder)
    process = program.start_script(_TRIALS.replace("TARGET", "behave"))
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert out.endswith("done\n"), err
    left = [path.name for path in (folder / "t").iterdir()]
    assert not [name for name in left if name.endswith(".tmp")], left


def kill_below(rng: random.Random, folder: Path) -> None:
    """Kill a worker, the server or the tracker at a random time: the trial fails in words, or does not."""
    program = _program(folder)
    process = program.start_script(_TRIALS.replace("TARGET", "behave"))
    try:
        time.sleep(rng.uniform(0.3, 1.5))
        below = [pid for pid in program.alive() if pid != process.pid]
        if below:
            os.kill(rng.choice(below), signal.SIGKILL)
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
        assert out.endswith("done\n") or "castwise.errors.EngineError: " in err, err
        _assert_gone(program)
    except ProcessLookupError:
        pass
    finally:
        program.end()
    _assert_sound(folder)


FAULTS: dict[str, Callable[[random.Random, Path], None]] = {
    "a command is killed": kill_command,
    "a program with real processes is killed": kill_parent,
    "a worker, the server or the tracker is killed": kill_below,
    "the disk is full": fill_disk,
    "two commands in one folder": run_two,
    "odd environments and streams": odd_environment,
}
