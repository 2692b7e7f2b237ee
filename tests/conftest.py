"""The command line in this process, on the fake engine."""

import os

# One thread a process, before torch is imported: two test processes with two threads each would fight over two cores,
# and sums of several threads are rounded in another way than those of scripts with one, which tests compare.
os.environ["OMP_NUM_THREADS"] = "1"

import gc
import multiprocessing.util
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from hypothesis import settings
from programs import PATIENCE_SECONDS, Program, heed_signals

from castwise.cli import app, measuring
from castwise.max_batch import search
from castwise.orchestrator import machine, processes
from castwise.registry.datasets import DATA_VARIABLE
from castwise.telemetry import sampler
from castwise.telemetry.host import HostSample

# The benchmarks' modules, behind all others: one of them is called as a well-known package is.
sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

# The same examples every time, and no verdict by the clock: CI machines are slow and busy.
settings.register_profile("castwise", derandomize=True, deadline=None)
settings.load_profile("castwise")

# Inductor's code for a CPU without vectors: it compiles in half the time, and needs no trial of the CPU's instructions.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

heed_signals()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """In xdist, start slow tests and groups first, so that no worker waits for them, and keep groups together."""
    yield
    if getattr(config.option, "loadgroup", False):
        items.sort(key=lambda item: "slow" not in item.keywords and "xdist_group" not in item.keywords)
        for item in items:
            # xdist 3.8 writes a test's group where pytest 9.2 does not read it any more.
            if (name := vars(item).get("_nodeid", item.nodeid)) != item.nodeid:
                item._id = type(item._id).parse(name)  # type: ignore[attr-defined]


def pytest_collection_finish() -> None:
    """Keep the garbage collector from searching, in each test, the million objects that imports have made."""
    gc.freeze()


# The fake engine's machine has a driver of GPUs.
search.may_have_gpu = lambda device: device != "cpu"


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    """Forget what earlier tests compiled: torch limits how often a function is compiled in one process."""
    if "torch._dynamo" in sys.modules:
        import torch

        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _quiet_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing else use the CPU, for castwise in this process: other tests do, and would make answers uncertain."""
    quiet = HostSample(pressure_seconds=0.0, steal_ticks=0, total_ticks=1, load=0.0)
    monkeypatch.setattr(sampler, "read_host", lambda: quiet)


@pytest.fixture(autouse=True)
def _late_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the end of a process as long as it takes: on a busy machine it may come seconds after its cause."""
    monkeypatch.setattr(processes, "_EXIT_SECONDS", PATIENCE_SECONDS)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make no code of what is compiled; of each way to compile a test does without."""
    from traced import compile_fx, run_graph

    monkeypatch.setattr(compile_fx, "compile_fx", run_graph)


_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def browser_path() -> str:
    """Return where Chromium is; without one the test is skipped, or fails where CI must not skip it unseen."""
    path = next((found for name in _BROWSERS if (found := shutil.which(name))), None)
    if path is None and os.environ.get("CASTWISE_REQUIRE_BROWSER"):
        pytest.fail("there is no Chromium, and CASTWISE_REQUIRE_BROWSER is set: `make browser` installs one")
    if path is None:
        pytest.skip("there is no Chromium or Chrome on the PATH; `make browser` installs Debian's")
    return path


@dataclass(frozen=True)
class Outcome:
    """What a call of the command line came to."""

    code: int
    out: str
    err: str
    engine: FakeEngine

    @property
    def error_lines(self) -> list[str]:
        return self.err.splitlines()


@dataclass(frozen=True)
class CommandLine:
    """Calls castwise as a user would, with a results folder of the test's own."""

    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]
    results: Path
    moment_seconds: float = 3600.0  # after which a command says what it will measure

    def __call__(self, *arguments: str | Path, engine: FakeEngine | None = None) -> Outcome:
        """Run `castwise ARGUMENTS`."""
        engine = engine or FakeEngine()
        self.monkeypatch.setattr(machine, "ForkserverEngine", lambda data_dir, commit: engine)
        self.monkeypatch.setattr(sys, "argv", ["castwise", *map(str, arguments)])
        self.monkeypatch.setattr(measuring, "MOMENT_SECONDS", self.moment_seconds)
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            app.main()
        out, err = self.capsys.readouterr()
        assert engine.num_open == 0, "a session was left open"
        assert isinstance(stop.value.code, int)
        return Outcome(stop.value.code, out, err, engine)

    def run(self, *arguments: str | Path, engine: FakeEngine | None = None) -> Outcome:
        """Run `castwise run ARGUMENTS --results ...`."""
        engine = engine or FakeEngine()
        engine.exclusive = False  # the configurations of a round share the machine
        return self("run", *arguments, "--results", self.results, engine=engine)

    def suite(self, *arguments: str | Path, engine: FakeEngine | None = None) -> Outcome:
        """Run `castwise suite ARGUMENTS --results ...`."""
        return self("suite", *arguments, "--results", self.results, engine=engine)

    def records(self) -> list[Path]:
        """Return every file under the results folder, hidden ones too."""
        return sorted(path for path in self.results.rglob("*") if path.is_file())


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> CommandLine:
    """Return the command line, cut off from this user's terminal, caches and checkout."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERMINAL_WIDTH", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "no-data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(machine.COMMIT_VARIABLE, "0123456789ab")
    return CommandLine(monkeypatch, capsys, tmp_path / "results")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """Return the engine that functions of the package get."""
    made = FakeEngine(exclusive=False)
    monkeypatch.setattr(machine, "ForkserverEngine", lambda data_dir, commit: made)
    return made


@pytest.fixture
def unwritable(tmp_path: Path) -> Iterator[Path]:
    """Return a path that nobody can make a folder of, root included: it lies below a file."""
    file = tmp_path / "a-file"
    file.write_text("in the way")
    yield file / "results"
    assert file.read_text() == "in the way"


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that trials' logs go to, and nothing else."""
    multiprocessing.util.get_temp_dir()  # multiprocessing's own files stay where the whole test run has them
    folder = tmp_path / "logs"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    # Under the run's own TMPDIR, not under tmp_path: a socket's path is 107 bytes long at the most.
    with tempfile.TemporaryDirectory() as logs:
        program = Program(tmp_path, Path(logs), uuid.uuid4().hex.encode())
        yield program
        program.end()
