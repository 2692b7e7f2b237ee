"""Real processes: each way in which one can end, what the parent makes of it, and that none outlives the parent."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import faulty_trial
import pytest
from faulty_trial import (
    BLOCK,
    die_of,
    exit_silently,
    exit_with_traceback,
    fail_at,
    hang_up,
    leave_child_behind,
    raise_memory_error,
    report,
)
from programs import LIGHT, PATIENCE_SECONDS, SPEAKING, Program, run_trial, wait_until

from castwise.errors import EngineError
from castwise.orchestrator import nodes, processes
from castwise.orchestrator.processes import ForkserverEngine, RpcSession, Target
from castwise.orchestrator.session import TrialFailedError
from castwise.records.schema import RankSamples
from castwise.spec.trial import MeasurementProtocol, TrialSpec

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="processes are looked up in /proc")

TINY = MeasurementProtocol(
    warm_up_steps=1, warm_up_seconds=0.05, block_seconds=0.01, num_blocks=2, min_blocks=1, max_seconds=1.0
)
SPEC = TrialSpec(
    workload="mnist-cnn", precision="fp32", loss_scale="none", batch_size=8, device="cpu", protocol=TINY, seed=1
)

Start = Callable[..., RpcSession]


@pytest.fixture
def start(logs: Path) -> Iterator[Start]:
    """Return a function that starts a session with a target, closed at the end of the test."""
    sessions: list[RpcSession] = []

    def start_one(target: Target = faulty_trial.behave, **engine: object) -> RpcSession:
        sessions.append(ForkserverEngine(target=target, **engine).start(PATIENCE_SECONDS))  # type: ignore[arg-type]
        return sessions[-1]

    yield start_one
    for session in sessions:
        session.close()
    assert not list(logs.iterdir())


def drive(session: RpcSession, hurry_at: str = "") -> RankSamples:
    """Measure a trial; the call named has little time."""
    samples: tuple[RankSamples, ...] = ()
    session.open("cpu")
    steps = {
        "set_up": partial(session.set_up, SPEC),
        "warm_up": session.warm_up,
        "run_block": session.run_block,
        "finish": session.finish,
    }
    for name, step in steps.items():
        session.timeout_seconds = 0.25 if name == hurry_at else PATIENCE_SECONDS
        samples = step()  # type: ignore[assignment]
    return samples[0]


def failure_of(session: RpcSession, hurry_at: str = "") -> TrialFailedError:
    """Return how a session failed, after closing it and seeing the next one succeed."""
    with pytest.raises(TrialFailedError) as caught:
        drive(session, hurry_at)
    session.close()
    wait_until(lambda: session.processes[0].process.exitcode is not None, "its end")
    with contextlib.closing(ForkserverEngine(target=faulty_trial.behave).start(PATIENCE_SECONDS)) as good:
        assert drive(good).blocks == (BLOCK,)
    assert len(caught.value.message.splitlines()) == 1
    return caught.value


# A session that goes well


def test_a_real_trial(start: Start, tmp_path: Path) -> None:
    session = ForkserverEngine(tmp_path / "no-data", "0123456789ab").start(PATIENCE_SECONDS)
    try:
        environment = session.open("cpu")
        assert environment.commit == "0123456789ab"
        assert environment.gpu is None
        assert session.ready_seconds > 0
        session.set_up(SPEC)
        facts = session.warm_up()
        assert facts.num_parameters == 1_199_882
        assert facts.warm_up_steps >= 1
        blocks = [session.run_block() for _ in range(2)]
        (samples,) = session.finish()
        assert samples.blocks == tuple(blocks)
        assert all(block.seconds > 0 and 0 < block.loss < 10 for block in blocks)
    finally:
        session.close()
    assert session.processes[0].process.exitcode == 0


def test_a_trial_may_have_processes_of_its_own(start: Start) -> None:
    assert drive(start(fail_at("set_up", faulty_trial.have_children))).blocks == (BLOCK,)


# Each way to fail


@pytest.mark.parametrize(
    ("method", "fault", "status", "message"),
    [
        ("run_block", partial(die_of, signal.SIGSEGV), "crashed", "the process was ended by SIGSEGV"),
        (
            "run_block",
            partial(die_of, signal.SIGKILL),
            "crashed",
            "the process was ended by SIGKILL: the host may be out of memory",
        ),
        ("run_block", partial(die_of, signal.SIGRTMIN + 1), "crashed", "the process was ended by signal 35"),
        ("warm_up", exit_with_traceback, "crashed", "the process ended with exit code 3 (ValueError: no such thing)"),
        ("warm_up", exit_silently, "crashed", "the process ended with exit code 0"),
        ("warm_up", raise_memory_error, "crashed", "the process ended with exit code 1 (MemoryError: no more of it)"),
        ("set_up", leave_child_behind, "crashed", "the process ended with exit code 4"),
        ("set_up", partial(report, "oom", "CUDA out of memory"), "oom", "CUDA out of memory"),
        ("set_up", hang_up, "crashed", "the process closed its pipe but did not end"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_how_a_process_can_fail(
    method: str, fault: Target, status: str, message: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault is hang_up:
        monkeypatch.setattr(processes, "_EXIT_SECONDS", 0.2)
    failure = failure_of(start(fail_at(method, fault)))
    assert (failure.status, failure.message) == (status, message)


@pytest.mark.parametrize(
    "content",
    [
        b"A library wrote its banner to the wrong descriptor.\n",  # its first bytes read as a length of 1.1 GB
        b"\x00\x00\x01\x00 half of an answer",
        b"\x00\x00",
    ],
)
def test_garbage_on_the_pipe(content: bytes, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_EXIT_SECONDS", 0.2)
    monkeypatch.setattr(nodes, "_STALL_SECONDS", 1)
    failure = failure_of(start(fail_at("set_up", partial(faulty_trial.send_raw, content))))
    assert (failure.status, failure.message) == (
        "crashed",
        "the process closed its pipe but did not end",
    )


def progress(done: float) -> bytes:
    return json.dumps({"event": "progress", "done": done}).encode()


def in_epoch(session: RpcSession) -> RpcSession:
    """Return a session whose next command is the epoch."""
    session.open("cpu")
    session.set_up(SPEC)
    session.resume()
    return session


@pytest.mark.parametrize(("num_told", "is_over"), [(4, False), (2, True)])
def test_progress_restarts_the_time_limit(
    num_told: int, is_over: bool, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events come every 0.4 s, by a clock that nothing else moves: four take longer than the limit."""
    now, shares = [0.0], list[float]()
    target = faulty_trial.send_events_and_hang if is_over else faulty_trial.send_events
    session = in_epoch(start(fail_at("run_epoch", partial(target, [progress(0.5)] * num_told))))
    wait = processes.wait

    def wait_by_clock(ends: list[object], timeout: float) -> list[object]:
        will_come = timeout >= 0.4 and (not is_over or len(shares) < num_told)
        now[0] += 0.4 if will_come else timeout
        return wait(ends, PATIENCE_SECONDS) if will_come else []

    with monkeypatch.context() as patch:
        patch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now[0]))
        patch.setattr(processes, "wait", wait_by_clock)
        session.timeout_seconds = 1.0
        if is_over:
            with pytest.raises(TrialFailedError) as caught:
                session.run_epoch(shares.append)
            said = "training and validation gave no sign of life for 1 s: --timeout allows more"
            assert (caught.value.status, caught.value.message) == ("timeout", said)
        else:
            assert session.run_epoch(shares.append) == faulty_trial.EPOCH
    assert shares == [0.5] * num_told


def test_the_first_phase_has_a_limit_of_its_own(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_OPEN_TIMEOUT_SECONDS", 0.2)
    with pytest.raises(TrialFailedError) as caught:
        start(faulty_trial.ignore_everything).open("cpu")
    assert (caught.value.status, caught.value.message) == ("timeout", "'open' took longer than 0.2 s")


def test_a_failed_process_that_stays_is_killed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_EXIT_SECONDS", 0.2)
    session = start(fail_at("set_up", faulty_trial.stay_after_failing))
    failure = failure_of(session)
    assert (failure.status, failure.message) == ("crashed", "RuntimeError: it broke")
    assert session.processes[0].process.exitcode == -signal.SIGKILL


def test_of_a_flood_the_end_is_kept(start: Start) -> None:
    failure = failure_of(start(fail_at("warm_up", faulty_trial.flood_stdout)))
    assert failure.status == "crashed"
    assert failure.message == f"the process ended with exit code 3 ({'y' * 199}…)"
    assert len(failure.log) == 4000
    assert failure.log.endswith("x\n" + "y" * 1000 + "\n")


# The log, and closing


@pytest.mark.parametrize("phase", ["started", "open", "running", "finished", "hanging"])
def test_closing_ends_the_process_and_drops_its_log(phase: str, logs: Path, start: Start) -> None:
    session = start(faulty_trial.ignore_everything if phase == "hanging" else faulty_trial.behave)
    (folder,) = logs.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    if phase == "finished":
        drive(session)
    elif phase in ("open", "running"):
        session.open("cpu")
        if phase == "running":
            session.set_up(SPEC)
    elif phase == "hanging":
        session.processes[0].is_busy = True  # as after a timeout
    for _ in range(3):
        session.close()
        assert not folder.exists()
        assert session.processes[0].process.exitcode is not None


def test_an_interrupted_wait_leaves_nothing(start: Start, monkeypatch: pytest.MonkeyPatch, logs: Path) -> None:
    session = start(fail_at("set_up", faulty_trial.hang))
    session.open("cpu")

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(processes, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.set_up(SPEC)
    monkeypatch.setattr(processes, "_EXIT_SECONDS", PATIENCE_SECONDS)
    started = time.monotonic()
    session.close()
    assert time.monotonic() - started < PATIENCE_SECONDS / 2, "a busy process was waited for"
    assert session.processes[0].process.exitcode == -signal.SIGKILL
    assert not list(logs.iterdir())


# Processes that cannot be started


@pytest.mark.parametrize(
    ("error", "seen", "message"),
    [
        (OSError(11, "Resource temporarily unavailable"), EngineError, "^No process could be .* trial: .*unavailable"),
        (EOFError("unexpected EOF"), EngineError, "^No process could be started for a trial: .*import torch"),
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_no_process_to_be_had(
    error: BaseException, seen: type[BaseException], message: str, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, main = ForkserverEngine(target=faulty_trial.behave), sys.modules["__main__"]

    def refuse(_: object) -> None:
        raise error

    monkeypatch.setattr(multiprocessing.get_context("forkserver").Process, "start", refuse)
    with pytest.raises(seen, match=message):
        engine.start(1.0)
    assert not list(logs.iterdir())
    assert sys.modules["__main__"] is main


def test_no_room_for_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(EngineError, match=r"No folder could be made for a trial: .*TMPDIR"):
        ForkserverEngine(target=faulty_trial.behave).start(1.0)


# As a process of its own: what the caller's program is, and who survives it

ONE_TRIAL = """\
print("top")
session = processes.ForkserverEngine(target=faulty_trial.TARGET).start(900.0)
print(session.open("cpu").cpu)
session.set_up(SPEC)
session.close()
print("bottom")
"""


@pytest.mark.parametrize("way", ["script", "-c", "stdin", "-m"])
def test_the_caller_s_program_runs_once(way: str, program: Program) -> None:
    code = LIGHT + ONE_TRIAL.replace("TARGET", "behave")
    script = program.folder / "own_program.py"
    script.write_text(code)
    with script.open() as text:
        arguments = {"script": [str(script)], "-c": ["-c", code], "stdin": ["-"], "-m": ["-m", "own_program"]}
        process = program.start(*arguments[way], stdin=text)
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (out, err, process.returncode) == ("top\nFake CPU\nbottom\n", "", 0)


def test_what_a_worker_prints_reaches_neither_stdout_nor_stderr(program: Program) -> None:
    process = program.start_script(LIGHT + ONE_TRIAL.replace("TARGET", 'fail_at("set_up", faulty_trial.chat)'))
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (out, err, process.returncode) == ("top\nFake CPU\nbottom\n", "", 0)


# What `castwise.run` does of a script without an `if __name__ == "__main__"` guard, and then a trial of an hour.
UNGUARDED = """\
import sys
print("top", flush=True)
import castwise
(trial,) = castwise.run("mnist-cnn", precision="fp32", batch_size=8, device="cpu", seconds=0.2, rounds=1)
print(trial.status, "torch" in sys.modules, flush=True)
sys.stdin.readline()

from castwise.spec.options import RunOptions
from castwise.orchestrator.job import prepare
SPEAKING
grid = {"workloads": ("mnist-cnn",), "precisions": ("fp32",), "batch_sizes": (8,)}
prepare(RunOptions(**grid, device="cpu", seconds=3600.0, rounds=1), Speaking()).run()
""".replace("SPEAKING", SPEAKING)
HANGING = run_trial('faulty_trial.fail_at("run_block", faulty_trial.hang)')


@pytest.mark.slow
def test_unguarded_script_and_its_sudden_end(program: Program) -> None:
    process = program.start_script(UNGUARDED, stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "top\n"
    assert process.stdout.readline() == "ok False\n"
    # The server may stay with the program, but the trials' processes have gone.
    alive = program.alive()
    assert sorted(parent for parent in alive.values() if parent in alive) == [process.pid] * 2, "server and tracker"
    assert not list(program.logs.glob("castwise-*/*.log"))

    process.stdin.write("go on\n")
    process.stdin.flush()
    program.wait_for_line("round 1: timing")
    wait_until(lambda: len(program.alive()) == 4, "program, tracker, server and worker")
    process.kill()
    wait_until(lambda: not program.alive(), "the end of every process")
    assert process.stdout.read() == ""


@pytest.mark.parametrize(
    ("number", "to_group"),
    [
        (signal.SIGKILL, False),
        (signal.SIGTERM, False),
        (signal.SIGINT, False),
        (signal.SIGINT, True),
        (signal.SIGHUP, True),
    ],
)
def test_no_process_outlives_the_program(number: signal.Signals, to_group: bool, program: Program) -> None:
    process = program.start_script(LIGHT + HANGING)
    program.wait_for_line("timing")
    wait_until(lambda: len(program.alive()) == 4, "program, tracker, server and worker")
    (os.killpg if to_group else os.kill)(process.pid, number)
    wait_until(lambda: not program.alive(), "the end of every process")
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == -number
    assert err.count("Traceback") == (1 if number == signal.SIGINT else 0)
    if number == signal.SIGINT:
        assert err.rstrip().endswith("KeyboardInterrupt")
        assert not list(program.logs.glob("castwise-*"))


_WAYS = {"normal": "", "exception": "1 / 0", "SIGINT": "wait()", "SIGTERM": "wait()", "SIGKILL": "wait()"}


@pytest.mark.parametrize(
    ("phase", "way"),
    [
        *(("running", way) for way in _WAYS),
        *(("importing", way) for way in list(_WAYS)[2:]),
        ("starting", "SIGKILL"),
    ],
)
def test_nothing_is_left_after_the_end(phase: str, way: str, program: Program) -> None:
    """Neither workers nor the server, the tracker, or what a user's code started in a session of its own."""
    note = program.folder / "note"
    (program.folder / "slow_import.py").write_text(f"import time\nopen({str(note)!r}, 'w').close()\ntime.sleep(3600)\n")
    program.start_script(f"""{LIGHT}
import time
def wait():
    time.sleep(3600)
processes._PRELOAD += {["slow_import"] if phase != "running" else []}
target = faulty_trial.fail_at("set_up", partial(faulty_trial.leave_a_daemon, {str(note)!r}))
session = processes.ForkserverEngine(target=target).start(900.0)
session.open("cpu")
session.set_up(SPEC)
{_WAYS[way]}
""")
    assert program.process is not None
    if way.startswith("SIG"):
        if phase != "starting":
            wait_until(note.exists, "the import, or the user's process")
        wait_until(lambda: len(program.alive()) == (5 if phase == "running" else 3), "server and all below it")
        program.process.send_signal(signal.Signals[way])
    program.process.wait(PATIENCE_SECONDS)
    wait_until(lambda: not program.alive(), "the end of all processes")  # how soon is checked by `make faults`


def test_ctrl_c_while_the_server_imports(program: Program) -> None:
    (program.folder / "slow_import.py").write_text(
        "import os, time\nopen('importing', 'w').close()\nwhile not os.path.exists('go on'):\n    time.sleep(0.02)\n"
    )
    process = program.start_script(LIGHT + "processes._PRELOAD += ['slow_import']\n" + HANGING)
    wait_until((program.folder / "importing").exists, "the import")
    os.killpg(process.pid, signal.SIGINT)
    process.wait(timeout=PATIENCE_SECONDS)
    (program.folder / "go on").touch()
    wait_until(lambda: not program.alive(), "the end of every process")
    _, err = process.communicate()
    assert process.returncode == -signal.SIGINT
    assert err.count("Traceback") == 1, err
    assert "slow_import" not in err
    assert not list(program.logs.glob("castwise-*"))


def test_a_server_that_dies_of_its_imports(program: Program) -> None:
    (program.folder / "broken_import.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    code = (
        "processes._PRELOAD += ['broken_import']\n"
        "from castwise.errors import EngineError\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        processes.ForkserverEngine().start(900.0)\n"
        "    except EngineError as error:\n"
        "        print(error)\n"
    )
    out, _ = program.start_script(LIGHT + code).communicate(timeout=PATIENCE_SECONDS)
    first, second = out.splitlines()
    assert first == second
    assert first.startswith("No process could be started for a trial: the server that imports PyTorch")
    assert not list(program.logs.glob("castwise-*"))


def test_a_log_names_files_from_their_package_on(start: Start) -> None:
    log = failure_of(start(fail_at("warm_up", exit_with_traceback))).log
    assert 'File "faulty_trial.py", line' in log
    assert str(Path(faulty_trial.__file__).parent) not in log


# What a trial's process leaves behind


@pytest.mark.parametrize("own_session", [False, True])
@pytest.mark.parametrize("last", ["", "hang", "die"])
def test_processes_started_by_the_users_code_end(last: str, own_session: bool, logs: Path, tmp_path: Path) -> None:
    note = tmp_path / "helper"
    target = fail_at("run_block", partial(faulty_trial.leave_a_helper, str(note), last, own_session))
    session = ForkserverEngine(target=target).start(PATIENCE_SECONDS)
    with contextlib.suppress(TrialFailedError):
        drive(session, hurry_at="run_block" if last == "hang" else "")
    wait_until(lambda: note.exists() and note.read_text(), "a process that the user's code starts")
    helper = int(note.read_text())
    assert Path(f"/proc/{helper}").exists()
    session.close()
    wait_until(lambda: not is_running(helper), "the end of what a trial had started")


def is_running(pid: int) -> bool:
    """Return whether a process runs; one that has ended may wait for whoever inherited it to take note."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_server_ends_though_nobody_has_waited_for_its_killed_parent() -> None:
    child = "import sys; sys.stdin.read(); from castwise.trial import server_lifetime; print('lives', flush=True)"
    start = "import os, subprocess, sys, time; os.environ['CASTWISE_PARENT'] = str(os.getpid()); "
    start += f"subprocess.Popen([sys.executable, '-c', {child!r}]); print('up', flush=True); time.sleep(3600)"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    parent = subprocess.Popen([sys.executable, "-c", start], text=True, **pipes)  # type: ignore[call-overload]
    assert parent.stdout.readline() == "up\n"
    parent.kill()  # it stays a zombie, whose children the kernel gave to another
    os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)
    parent.stdin.close()  # the child goes on
    assert parent.stdout.read() == "", "the child has the pipe until it ends"
    parent.wait()
