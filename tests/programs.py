"""Programs of their own that use castwise, in which tests see what outlives what."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import castwise

SOURCES = Path(castwise.__file__).parents[1]  # the castwise that is tested, whichever is installed
# For what ought to happen at once. It only ends what hangs: no machine is so busy that it takes as long.
PATIENCE_SECONDS = 900.0
FOR_EVER_SECONDS = 4 * PATIENCE_SECONDS  # what hangs on purpose; a leak ends by itself all the same

LIGHT = """\
import os, signal, sys
from functools import partial
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
import faulty_trial
from castwise.spec.plan import MeasurementProtocol, TrialSpec
from castwise.orchestrator import processes
from castwise.trial import entry
from castwise.orchestrator.session import TrialFailedError
del processes._PRELOAD[1:]  # torch
SPEC = TrialSpec(workload="mnist-cnn", precision="fp32", loss_scale="none", batch_size=8, device="cpu")
"""


FAKE_CLI = str(Path(__file__).with_name("fake_cli.py"))


def run_fake_cli(
    *arguments: str | Path, env: Mapping[str, str] | None = None, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Run castwise on its fake engine in a process that cannot import torch; with `cwd`, its cache is there, too."""
    environment = os.environ | {"PYTHONIOENCODING": "utf-8"}
    environment |= {"XDG_CACHE_HOME": str(options["cwd"] / "cache")} if "cwd" in options else {}
    environment |= env or {}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": environment["PYTHONIOENCODING"]}
    return subprocess.run(
        [sys.executable, FAKE_CLI, *map(str, arguments)],
        env=environment,
        timeout=PATIENCE_SECONDS,
        check=False,
        **(streams | options),
    )


@contextlib.contextmanager
def hanging_fake_cli(
    results: Path, *arguments: str, faults: str, before: tuple[str, ...] = ()
) -> "Iterator[subprocess.Popen[str]]":
    """Yield `castwise run resnet50` on its fake engine, once one of its trials hangs."""
    reader, writer = os.pipe()
    environment = os.environ | {"CASTWISE_FAKE_FAULTS": faults, "CASTWISE_FAKE_READY_FD": str(writer)}
    call = [*before, sys.executable, FAKE_CLI, "run", "resnet50", "--results", str(results), *arguments]
    process = subprocess.Popen(
        call, env=environment, pass_fds=[writer], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    try:
        assert os.read(reader, 1) == b"!", "castwise ended before the trial that hangs"
        yield process
    finally:
        os.close(reader)
        if process.poll() is None:
            process.kill()
        process.wait()


SPEAKING = """
from castwise.orchestrator.runner import NullListener

class Speaking(NullListener):
    def phase(self, name, done):
        print(name, flush=True)
"""


# What castwise is replaced by on each node of a job.
MEETS = """
import sys
from castwise.orchestrator.nodes import Nodes, follow
_, rendezvous, _, rank = sys.argv[-4:]
if rank == "0":
    print("{{}}")
    nodes = Nodes(rendezvous, {count})
    print(nodes.count, "nodes", file=sys.stderr)
    nodes.close()
else:
    follow(rendezvous, None)
"""


def heed_signals() -> None:
    """Undo what `nohup make test &` does: it ignores both, and so would what tests start, which nothing would stop."""
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def run_trial(target: str) -> str:
    """Return the code, after LIGHT, that runs a trial with a target and prints its phases."""
    return f"""{SPEAKING}
from castwise.orchestrator.runner import TrialRunner
engine = processes.ForkserverEngine(target={target})
TrialRunner(engine, None, faulty_trial.ENVIRONMENT, Speaking()).run([SPEC])
"""


@dataclass
class Program:
    """A program that uses castwise, with a mark in the environment that all its processes inherit."""

    folder: Path
    logs: Path
    mark: bytes
    process: subprocess.Popen[str] | None = None

    def start(self, *arguments: str, stdin: int | IO[str] | None = subprocess.DEVNULL) -> "subprocess.Popen[str]":
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.folder,
            env={
                **os.environ,
                "CASTWISE_TEST_MARK": self.mark.decode(),
                "PYTHONPATH": os.pathsep.join([str(SOURCES), str(Path(__file__).parent), str(self.folder)]),
                "TMPDIR": str(self.logs),
            },
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self.process

    def start_script(self, code: str, stdin: int | IO[str] | None = subprocess.DEVNULL) -> "subprocess.Popen[str]":
        script = self.folder / "script.py"
        script.write_text(code)
        return self.start(str(script), stdin=stdin)

    def wait_for_line(self, line: str) -> None:
        """Read stdout up to this line."""
        assert self.process is not None
        assert self.process.stdout is not None
        for text in self.process.stdout:
            if text.strip() == line:
                return
        raise AssertionError(f"it ended without '{line}': {self.process.communicate()[1]}")

    def alive(self) -> dict[int, int]:
        """Return the living processes that carry the mark, each with its parent."""
        return {int(entry): _parent(entry) for entry in os.listdir("/proc") if entry.isdigit() and self._is_ours(entry)}

    def _is_ours(self, pid: str) -> bool:
        try:
            return self.mark in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False

    def end(self) -> None:
        assert self.process is not None
        for pid in (*self.alive(), self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


def _parent(pid: str) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        with contextlib.suppress(FileNotFoundError):  # folders come and go: castwise removes empty ones
            if condition():
                return
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_SECONDS:g} s"
        time.sleep(0.02)
