"""Every Python file of docs/own-model.md, and the one that `castwise init` writes, run for real as they say."""

import re
import runpy
import sys
from functools import partial
from pathlib import Path

import pytest

import castwise
from castwise.cli import app
from castwise.cli.init_template import write_starter
from castwise.orchestrator import job

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "own-model.md").read_text()
BLOCKS = re.findall(r"<!-- run: ([^\n]+) -->\n```python\n# (\S+)\n(.*?)```", TEXT, re.DOTALL)
QUICK = ("--device", "cpu", "--seconds", "0.05", "--rounds", "1")
# Each trial imports the file's libraries anew, and these take their seconds.
HEAVY = ("lightning_bench.py",)


def run(call: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what a call prints; the command line runs in this process, so that torch is imported once for all."""
    program, *arguments = call.split()
    monkeypatch.setattr(job, "CPU_ROUND", job.CPU_ROUND.model_copy(update={"warm_up_seconds": 0.1}))
    if program == "python":
        quick = partial(castwise.compare, device="cpu", seconds=0.05, rounds=1)
        monkeypatch.setattr(castwise, "compare", quick)
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        precisions = "bf16-mixed" if arguments[-1] in HEAVY else "fp32,bf16-mixed"
        monkeypatch.setattr(sys, "argv", [program, *arguments, *QUICK, "--precision", precisions])
        with pytest.raises(SystemExit) as stop:
            app.main()
        assert stop.value.code == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_every_python_file_of_the_document_is_run() -> None:
    assert len(BLOCKS) == TEXT.count("```python") >= 4


@pytest.mark.slow
@pytest.mark.parametrize(("call", "name", "code"), BLOCKS, ids=[name for _, name, _ in BLOCKS])
def test_it_runs_as_the_document_says(
    call: str,
    name: str,
    code: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    printed = run(call, capsys, monkeypatch)
    for precision in ("bf16-mixed",) if name in HEAVY else ("fp32", "bf16-mixed"):
        assert re.search(rf"^{precision} +[\d,.]+ ", printed, re.MULTILINE), printed


def test_what_init_writes_runs_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_starter(Path("my_bench.py"))
    printed = run("castwise run my_bench.py", capsys, monkeypatch)
    assert re.search(r"^bf16-mixed +[\d,.]+ ", printed, re.MULTILINE), printed
