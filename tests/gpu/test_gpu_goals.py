"""The speed goals' program on a GPU, in its smallest form: every loop compiles, is captured, and is timed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from goal_turns import HERE

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(900)
@pytest.mark.parametrize("row", ["mlp", "mnist", "wrn-run", "lstm-200", "lstm-1500", "resnet50"])
def test_every_loop_of_a_row_is_measured(row: str, tmp_path: Path) -> None:
    out = tmp_path / "goals.json"
    command = [sys.executable, str(HERE / "goals.py"), "--tiny", "--rounds", "0", "--rows", row, "--out", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=850)
    assert result.returncode == 0, result.stderr
    (found,) = json.loads(out.read_text())["rows"]
    assert not [turn for turn in found["turns"] if "seconds" not in turn]
