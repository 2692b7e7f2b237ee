"""`castwise run`, `why` and `tune` of a script, from the command line to the table and the record, on the CPU."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from castwise.cli import app
from castwise.records.schema import Trial
from castwise.records.store import load_folder

_SCRIPT = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader
model = nn.Linear(32, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[2]))
open("log.txt", "w").close()
while True:
    for batch in DataLoader([torch.randn(32) for _ in range(40)], batch_size=8):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
"""
_ENDS_IN_16_BITS = """model = nn.Sequential(nn.Linear(32, 2))
model[0].register_forward_hook(lambda _, given, out: sys.exit() if out.dtype != torch.float32 else None)
"""
_SHORT = ("--device", "cpu", "--steps", "8", "--warm-up", "2", "--precision", "bf16-mixed")


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Return a function that runs a command of castwise on a script: its exit code, stdout and stderr."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(_SCRIPT)

    def call(*arguments: str, start: Sequence[str] = ("python", "train.py")) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["castwise", *arguments, "--", *start, "--lr", "0.1", "--token", "abc"])
        with pytest.raises(SystemExit) as stop:
            app.main()
        assert isinstance(stop.value.code, int)
        return stop.value.code, *capsys.readouterr()

    return call


def records() -> list[Trial]:
    return load_folder(Path("castwise-results"))[0]


def test_a_script_is_measured_from_the_command_line_to_the_record(run: Run) -> None:
    code, out, err = run("run", *_SHORT, "--rounds", "1", "--unit", "tokens", "--scratch", "out/here")
    assert code == 0, err
    assert [line.split()[0] for line in out.splitlines()[2:4]] == ["as-written", "bf16-mixed"]
    assert {trial.spec.precision for trial in records()} == {"as-written", "bf16-mixed"}
    assert "tokens/s  × written" in out
    assert "the others paused" in out
    written = [path.name for path in Path("out/here").glob("*/*")]
    assert written == ["log.txt"] * 2, "of each trial: one of them has looked at the script"
    assert "log.txt" not in {path.name for path in Path().iterdir()}
    for trial in records():
        assert trial.spec.workload == "python train.py --lr 0.1 --token HIDDEN"
        assert "abc" not in trial.spec.model_dump_json()
        assert trial.spec.batch_size == 8
        assert sum(block.num_steps for block in trial.ranks[0].blocks) == 8


def test_a_script_s_own_error_is_shown(run: Run) -> None:
    Path("train.py").write_text("import argparse; argparse.ArgumentParser().parse_args()")
    code, _, err = run("run", *_SHORT)
    assert "train.py ended with sys.exit(2) before an optimizer took a step" in err
    assert (code, err.rpartition(": error: ")[2]) == (2, "unrecognized arguments: --lr 0.1 --token abc\n")


def test_a_module_is_run_as_python_does(run: Run) -> None:
    Path("package").mkdir()
    Path("package/sizes.py").write_text("WIDTH = 32")
    text = "from package import sizes as found\nfrom . import sizes\nassert found is sizes and __package__\n"
    Path("package/train.py").write_text(text + _SCRIPT)
    code, _, err = run("run", *_SHORT, "--rounds", "1", start=("python", "-u", "-m", "package.train"))
    assert code == 0, err
    assert {trial.spec.workload for trial in records()} == {"python -m package.train --lr 0.1 --token HIDDEN"}


def test_a_script_that_ends_early_in_one_precision_is_measured_in_the_others(run: Run) -> None:
    Path("train.py").write_text(_SCRIPT.replace("model = nn.Linear(32, 2)\n", _ENDS_IN_16_BITS))
    code, out, err = run("run", *_SHORT, "--rounds", "1")
    assert code == 0, err
    assert {trial.spec.precision: trial.status for trial in records()} == {
        "as-written": "ok",
        "bf16-mixed": "unsupported",
    }
    assert "unsupported: bf16-mixed (train.py ended before an optimizer took a step" in out


@pytest.mark.slow
def test_a_script_that_compiles_its_model_is_measured(run: Run) -> None:
    Path("train.py").write_text(_SCRIPT.replace("optimizer =", "model.compile()\noptimizer ="))
    code, _, err = run("run", *_SHORT[:-1], "as-written", "--rounds", "1")
    assert code == 0, err
    assert [trial.spec.batch_size for trial in records()] == [8]


def test_why_says_what_a_step_of_a_script_takes(run: Run) -> None:
    code, out, err = run("why", *_SHORT, "--kernels")
    assert code == 0, err
    for trial in records():
        assert trial.profile is not None
        assert not trial.profile.missing
        assert trial.profile.class_seconds["optimizer"] > 0
    assert "waits for" in out
    assert "the operators that take longest" in " ".join(out.split())


def test_tune_tries_what_can_be_applied_from_outside(run: Run) -> None:
    code, out, err = run("tune", *_SHORT, "--budget", "3s", "--allow", "rounding", "--wide")
    assert code == 0, err
    tried = {name for trial in records() for name in trial.spec.techniques}
    assert tried <= {"foreach-optimizer", "fused-optimizer", "channels-last"}
    assert "from as-written" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "--techniques", "cuda-graph"), "A script cannot be given cuda-graph from outside. It takes: loader-"),
        (("tune", "--emit", "fast.py"), "Your script stays as it is: --emit patch prints what to change in it."),
        (("tune", "--memory", "1GiB"), "A script has its own batch"),
        (("run", "--scratch", "train.py"), "No file can be written to 'train.py'"),
    ],
)
def test_what_a_script_cannot_be_given_is_refused(run: Run, arguments: tuple[str, ...], words: str) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert words in err


def test_a_script_has_to_follow(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["castwise", "run", "--"])
    with pytest.raises(SystemExit) as stop:
        app.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("castwise: Nothing follows '--'.")


def test_what_is_advised_can_be_pasted(run: Run) -> None:
    """Records name no folder."""
    folder = Path("sub").absolute()
    folder.mkdir()
    Path("train.py").rename("sub/train.py")
    _, out, err = run(
        "run",
        *_SHORT,
        "--precision",
        "bf16-mixed",
        "--rounds",
        "1",
        start=("python", "sub/train.py", str(folder), "0.1"),
    )
    advised = [line for line in out.splitlines() if "castwise " in line and " -- python" in line]
    assert advised, err
    assert all(f"-- python sub/train.py {folder} 0.1 --lr 0.1 --token HIDDEN" in line for line in advised)
    assert {trial.spec.workload for trial in records()} == {"python train.py sub 0.1 --lr 0.1 --token HIDDEN"}
