"""What killed commands left in TMPDIR: the next one removes it, and nothing else."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import LIGHT, PATIENCE_SECONDS, Program, run_trial, wait_until

from castwise.orchestrator.temporary_files import make_folder, sweep


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as short:  # a socket's path is 107 bytes long at the most
        monkeypatch.setattr(tempfile, "tempdir", short)
        yield Path(short)


def test_killed_command_s_files_are_swept_by_the_next(program: Program) -> None:
    hanging = LIGHT + run_trial('faulty_trial.fail_at("run_block", faulty_trial.hang)')
    process = program.start_script(hanging)
    program.wait_for_line("timing")
    process.kill()
    process.communicate()
    wait_until(lambda: not program.alive(), "the end of every process")
    assert len(list(program.logs.iterdir())) == 2, "the trial's output, and the server's socket"
    process = program.start_script(LIGHT + run_trial("faulty_trial.behave"))
    assert process.wait(PATIENCE_SECONDS) == 0
    assert not list(program.logs.iterdir())


def test_living_commands_keep_their_files(logs: Path) -> None:
    folder = make_folder("log")
    sweep()
    assert (folder.path / "log").is_file()
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()
    assert not list(logs.iterdir())


def test_what_is_others_stays(logs: Path) -> None:
    foreign = logs / "pymp-x"
    foreign.mkdir()
    (foreign / "data").write_text("another program's")
    (logs / "castwise-link.tmp").symlink_to(foreign / "data")
    os.mkfifo(logs / "castwise-pipe.tmp")
    sweep()
    assert (foreign / "data").read_text() == "another program's"


def test_one_that_fails_does_not_keep_the_others(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two commands may sweep at the same time."""
    left = logs / "castwise-left.tmp"
    left.mkdir()
    monkeypatch.setattr(Path, "glob", lambda *_: [logs / "castwise-gone.tmp", left])
    sweep()
    assert not left.exists()
