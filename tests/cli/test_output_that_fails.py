"""Standard output that is closed, full or not in UTF-8; texts that would command the terminal; limits of the system."""

import csv
import errno
import io
import os
import resource
import subprocess
import sys
import threading
import unicodedata
from importlib import resources
from pathlib import Path

import pytest
from conftest import CommandLine
from fake_engine import fake_spec, fake_trial
from programs import FAKE_CLI, run_fake_cli

from castwise.cli import app
from castwise.errors import UsageError
from castwise.records.schema import Trial
from castwise.records.store import Store, load_folder
from castwise.registry.suites import find_suite, parse_suite

HOSTILE = "\x1b]0;owned\x07\x1b[2Jgone\x9b31mred\u202eevil"


RUN = ("run", "resnet50", "--precision", "fp32,bf16-mixed", "--rounds", "1")


def test_a_full_stdout_is_one_line_and_an_exit_code_of_its_own(tmp_path: Path) -> None:
    for arguments in (RUN, RUN, ("list", "precisions"), ("--help",), (*RUN, "--format", "json")):
        with open("/dev/full", "w") as full:
            done = run_fake_cli(*arguments, cwd=tmp_path, stdout=full)
        assert done.returncode == 4, done.stderr
        assert "Traceback" not in done.stderr
        assert done.stderr.splitlines()[-1].startswith("castwise: Standard output cannot be written: No space left")
        assert "Exception ignored" not in done.stderr
    assert len(load_folder(tmp_path)[0]) == 2


def test_a_closed_stdout_is_one_line(tmp_path: Path) -> None:
    for arguments in (RUN, ("list", "precisions"), (*RUN, "--format", "csv")):
        done = run_fake_cli(*arguments, cwd=tmp_path, preexec_fn=lambda: os.close(1))
        assert done.returncode == 4, done.stderr
        assert done.stderr.splitlines()[-1].startswith("castwise: Standard output cannot be written: it is closed")
    assert run_fake_cli("report", cwd=tmp_path, preexec_fn=lambda: os.close(1)).returncode == 0, "it prints nothing"


@pytest.mark.parametrize("how", ["full", "closed"])
def test_a_stderr_that_fails_does_not_matter(how: str, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        before = (lambda: os.close(2)) if how == "closed" else None
        done = run_fake_cli(*RUN, cwd=tmp_path, stderr=full, preexec_fn=before)
    assert done.returncode == 0
    assert "bf16-mixed" in done.stdout


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_stdout_in_another_encoding(encoding: str, tmp_path: Path) -> None:
    for arguments in (RUN, (*RUN, "--format", "markdown"), ("list", "workloads"), ("--help",)):
        done = run_fake_cli(*arguments, cwd=tmp_path, env={"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"})
        assert done.returncode == 0, done.stderr
        assert ("2.50x" if encoding == "ascii" else "2.50×") in done.stdout or arguments != RUN
        assert done.stdout.strip()


def limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # a write beyond it fails as on a full disk


def test_init_on_a_full_disk_leaves_no_file(tmp_path: Path) -> None:
    done = run_fake_cli("init", "mine.py", cwd=tmp_path, preexec_fn=limit_files)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "mine.py").exists()


# Texts that command a terminal


def is_harmless(text: str) -> bool:
    return not any(unicodedata.category(each) in ("Cc", "Cf", "Cs") and each not in "\n\t" for each in text)


def hostile(trial: Trial) -> Trial:
    environment = trial.environment.model_copy(update={"gpu": f"GPU {HOSTILE}", "host": HOSTILE, "driver": HOSTILE})
    update = {"environment": environment, "message": HOSTILE, "log": HOSTILE, "status": "crashed"}
    return trial.model_copy(update=update)


@pytest.mark.parametrize(
    "arguments",
    [
        ("report", "--format", "table"),
        ("report", "--format", "markdown"),
        ("export",),
        ("export", "--format", "json"),
        ("compare",),
        ("report", "-o", f"out-{HOSTILE.replace('/', '')}.md"),
    ],
)
def test_records_and_file_names_command_no_terminal(
    arguments: tuple[str, ...], command: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / f"r{HOSTILE}\udcff"
    folder.mkdir()
    store = Store(folder)
    store.save(fake_trial(fake_spec()))
    store.save(hostile(fake_trial(fake_spec("bf16-mixed"))))
    (folder / f"x{HOSTILE}.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    called = command(arguments[0], folder, *([folder] if arguments == ("compare",) else []), *arguments[1:])
    assert is_harmless(called.out), repr(called.out)
    assert is_harmless(called.err), repr(called.err)


def test_errors_and_exceptions_command_no_terminal(command: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (("run", HOSTILE), ("report", HOSTILE), ("suite", f"{HOSTILE}.toml"), (f"--{HOSTILE}",)):
        called = command(*arguments)
        assert called.code
        assert len(called.error_lines) == 1
        assert is_harmless(called.err), repr(called.err)


def test_a_colour_is_still_a_colour(command: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in command.run("resnet50", "--precision", "fp32,bf16-mixed").out


def test_a_cell_is_no_formula(tmp_path: Path, command: CommandLine) -> None:
    for number, start in enumerate("=+-@"):
        trial = fake_trial(fake_spec(batch_size=2 + number))
        Store(tmp_path / "r").save(trial.model_copy(update={"message": f"{start}1+cmd|' /C calc'!A0", "status": "oom"}))
    rows = list(csv.DictReader(io.StringIO(command("export", tmp_path / "r").out)))
    assert len(rows) == 4
    assert all(row["message"].startswith("'") for row in rows)
    assert not any(cell[:1] in ("=", "+", "-", "@") for row in rows for cell in row.values())


def test_a_long_exception_is_cut(command: CommandLine, tmp_path: Path) -> None:
    trial = fake_trial(fake_spec()).model_copy(update={"message": "x" * 100_000, "status": "crashed"})
    Store(tmp_path / "r").save(trial)
    for arguments in (("report", tmp_path / "r", "--format", "table"), ("export", tmp_path / "r")):
        assert len(command(*arguments).out) < 20_000


# Limits


def test_a_suite_file_that_is_nested_too_deep_is_refused() -> None:
    with pytest.raises(UsageError, match="nested too deep"):
        parse_suite("x = " + "[" * 3000 + "]" * 3000, "mine.toml")


def test_infinite_seconds_are_refused() -> None:
    figure = next(each for each in find_suite("tensorcore").published if each.seconds is not None)
    with pytest.raises(ValueError, match="finite"):
        type(figure).model_validate(figure.model_dump() | {"seconds": float("inf")})


def test_a_suite_of_a_pickle_is_refused(command: CommandLine, tmp_path: Path) -> None:
    workload = find_suite("tensorcore").cells[0].workloads[0]
    (tmp_path / "m.pickle").write_bytes(b"")
    text = resources.files("castwise").joinpath("suites", "tensorcore.toml").read_text(encoding="utf-8")
    (tmp_path / "mine.toml").write_text(text.replace(f'"{workload}"', f'"pickle:{tmp_path}/m.pickle"'))
    called = command.suite(tmp_path / "mine.toml", "--quick", "--synthetic")
    assert called.code == 2
    assert "a model of a user's own" in called.err
    assert len(called.error_lines) == 1


def test_too_many_seeds(command: CommandLine) -> None:
    called = command.suite("tensorcore", "--quick", "--synthetic", "--seeds", "1000000000")
    assert called.code == 2
    assert "at most 1000" in called.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("report", "x" * 300),
        ("report", "-o", "x" * 300 + ".html"),
        ("run", "x" * 300 + ".py"),
        ("run", "resnet50", "--results", "x" * 300),
        ("suite", "x" * 300 + ".toml"),
        ("init", "x" * 300 + ".py"),
        ("export", "y", "-o", "x" * 300 + "/y.csv"),
        ("compare", "x" * 300, "y"),
        ("run", "mnist-cnn", "--data-set", "mnist", "--data", "x" * 300),
    ],
    ids=str,
)
def test_names_that_are_too_long(
    arguments: tuple[str, ...], command: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Store(tmp_path / "y").save(fake_trial(fake_spec()))
    called = command(*arguments)
    assert called.code in (2, 3), called.err
    assert len(called.error_lines) == 1, called.err


@pytest.mark.parametrize("arguments", [RUN, ("report",), ("run", "mine.py"), ("init", "mine.py"), ("export",)])
def test_a_present_folder_that_is_gone(arguments: tuple[str, ...], tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"import os, sys, runpy; os.rmdir(os.getcwd()); sys.argv = {[FAKE_CLI, *arguments]!r}; "
    code += f"sys.path.insert(0, {str(Path(FAKE_CLI).parent)!r}); runpy.run_path({FAKE_CLI!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=gone, capture_output=True, text=True, check=False)
    assert done.returncode in (2, 3), done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_no_more_threads(command: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    called = command.run("resnet50", "--precision", "fp32")
    assert called.code == 1
    assert called.error_lines[-1].startswith("castwise: No further thread can be started")
    assert "Traceback" not in called.err


def test_timeout_holds_for_the_user_s_import(command: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("while True: pass\ndef build(): ...\n")
    done = command.run(tmp_path / "mine.py", "--precision", "fp32", "--timeout", "8s")
    assert done.engine.limits == [8.0]


def test_an_error_of_the_system_is_one_line(command: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error", "some/file")

    monkeypatch.setattr(app.export, "find", fail, raising=True)
    called = command("export", "x")
    assert (called.code, called.err) == (3, "castwise: 'some/file': Input/output error.\n")


def test_a_terminal_breaks_an_error_between_words_but_not_in_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "`castwise run resnet50 --precision fp32,bf16-mixed`"
    monkeypatch.setenv("COLUMNS", "60")

    def shown(*, is_terminal: bool) -> str:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
        with pytest.raises(SystemExit):
            app._exit(
                f"No precision is named so, and here are a few more words: {command} does that. " + "Word " * 20, 2
            )
        return capsys.readouterr().err

    lines = shown(is_terminal=True).splitlines()
    assert any(command in line for line in lines)
    assert all(len(line) <= 60 for line in lines)
    assert set(" ".join(lines).split()) == set(shown(is_terminal=False).split())
    assert len(shown(is_terminal=False).splitlines()) == 1
