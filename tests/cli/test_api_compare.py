"""`castwise.compare`, on the fake engine and for real."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_engine import FakeEngine, fake_environment
from rich.console import Console
from torch import nn

import castwise
from castwise.errors import UsageError
from castwise.orchestrator import machine
from castwise.orchestrator.session import TrialFailedError

MODEL, BATCH = nn.Linear(3, 2), torch.ones(4, 3)


def test_a_comparison_is_a_table_and_its_records(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    found = castwise.compare(MODEL, BATCH, precision="fp32,tf32")
    assert [trial.spec.precision for trial in found.trials] == ["fp32"] * 3 + ["tf32"] * 3
    assert {trial.spec.workload for trial in found.trials} == {"own:Linear"}
    assert {trial.spec.batch_size for trial in found.trials} == {16}  # the fake engine's word for it
    assert found.best == "tf32"
    assert [row.speedup for row in found.rows] == [1, pytest.approx(5 / 3)]
    assert repr(found) == "Comparison(own:Linear: 2 rows of 6 trials, best: tf32)"
    assert found.advice[0].decision == "take"
    assert found.rows[1].verdict is not None
    assert found.rows[1].verdict.kind == "faster"
    assert "own:Linear, batch 16: take tf32" in str(found)
    assert "\x1b" not in str(found)
    assert "<table>" in found._repr_html_()
    out, err = capsys.readouterr()
    assert out == ""
    rounds = [line.split(": ")[0] for line in err.splitlines() if line.startswith("round ")]
    assert rounds == [f"round {number}" for number in (1, 1, 2, 2, 3, 3)]


def test_rich_prints_colours_if_the_console_has_them(engine: FakeEngine) -> None:
    found = castwise.compare(MODEL, BATCH, progress=False)
    for color in ("truecolor", None):
        console = Console(width=100, color_system=color, force_terminal=True, record=True, file=io.StringIO())
        console.print(found)
        assert ("\x1b[" in console.export_text(styles=True)) == (color is not None)


def test_in_a_notebook_it_is_shown_once_by_jupyter(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = castwise.compare(MODEL, BATCH, precision="fp32", progress=False)
    shown: list[object] = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *parts: shown.append(parts))
    assert "own:Linear" in repr(found)
    assert "fp32" in str(found)
    assert "<table>" in found._repr_html_()
    assert shown == []
    assert capsys.readouterr().out == ""


def test_the_number_of_rounds_and_the_margin_are_the_users(engine: FakeEngine) -> None:
    once = castwise.compare(MODEL, BATCH, precision="fp32,tf32", rounds=1, progress=False)
    assert (len(once.trials), once.advice[0].decision, once.best) == (2, "undecided", None)
    wide = castwise.compare(MODEL, BATCH, precision="fp32,tf32", rounds=2, margin=0.99, progress=False)
    assert len(wide.trials) == 4
    assert wide.rows[1].verdict is not None
    assert wide.rows[1].verdict.kind == "same"


def test_the_call_that_decides_is_one_that_runs(engine: FakeEngine) -> None:
    once = castwise.compare(MODEL, BATCH, precision="fp32,tf32", rounds=1, progress=False)
    (call,) = (advice.command for advice in once.advice)
    decided = eval(call.replace("...", "MODEL, BATCH, progress=False"))
    assert decided.advice[0].decision == "take"


def test_without_progress_and_records_nothing_is_left_behind(
    engine: FakeEngine, logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    castwise.compare(MODEL, BATCH, progress=False)
    assert list(logs.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_with_records_the_same_objects_are_measured_once(engine: FakeEngine, tmp_path: Path) -> None:
    for _ in range(2):
        found = castwise.compare(MODEL, BATCH, progress=False, results=tmp_path, precision="fp32", rounds=1)
    assert len(engine.measured) == 1
    assert found.trials[0].status == "ok"
    own = found.trials[0].spec.user_model
    assert own is not None
    assert (tmp_path / "objects" / own.path).is_file()


def test_a_name_is_measured_as_it_is(engine: FakeEngine) -> None:
    assert castwise.compare("resnet50", precision="fp32", progress=False).trials[0].spec.user_model is None
    with pytest.raises(UsageError, match=r"The workload 'resnet50' has its own batch\. Leave it out"):
        castwise.compare("resnet50", BATCH)


def test_on_a_cpu_it_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(environment=fake_environment(None), exclusive=False)
    monkeypatch.setattr(machine, "ForkserverEngine", lambda data_dir, commit: engine)
    found = castwise.compare(MODEL, BATCH, progress=False)
    assert [row.trial.spec.precision for row in found.rows] == ["fp32", "bf16-mixed", "fp16-mixed", "bf16-true"]
    assert all(spec.protocol.max_seconds <= 1 for spec in engine.measured)
    castwise.compare(MODEL, BATCH, progress=False, precision="fp16-true", seconds=3.0)
    assert engine.measured[-1].protocol.max_seconds == 3


def test_an_error_of_the_users_code_is_raised_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = TrialFailedError("crashed", "ZeroDivisionError: division by zero (x.py:2, in build)", "Traceback …", True)
    engine = FakeEngine(own=broken)
    monkeypatch.setattr(machine, "ForkserverEngine", lambda data_dir, commit: engine)
    with pytest.raises(UsageError, match="ZeroDivisionError") as refusal:
        castwise.compare(MODEL, BATCH, progress=False)
    assert refusal.value.details == "Traceback …"
    assert engine.num_open == 0


SCRIPT = """\
import castwise
import torch
from castwise.orchestrator import job
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)
    def forward(self, x):
        return helper(self.linear(x))

def helper(x):
    return torch.relu(x)

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

torch.set_num_threads(1)
job.CPU_ROUND = job.CPU_ROUND.model_copy(update={"warm_up_seconds": 0.1})
found = castwise.compare(
    Net(), lambda size: (torch.randn(size, 16), torch.randint(4, (size,))), loss,
    batch_size=8, precision="fp32,bf16-mixed", rounds=1, seconds=0.1, progress=False, device="cpu",
)
print([trial.status for trial in found.trials], found.trials[0].spec.workload)
"""


@pytest.mark.slow
def test_objects_of_a_script_are_pickled_and_the_script_runs_once(tmp_path: Path) -> None:
    """For real: classes, functions and lambdas of `__main__`, without a guard."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(Path(castwise.__file__).parents[1])}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "['ok', 'ok'] own:Net\n", done.stderr
