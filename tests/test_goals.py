"""The program that measures the speed goals, in its smallest form."""

import json
import subprocess
import sys
from pathlib import Path

import goals as program
import pytest
import torch
from ceilings import measure
from goal_turns import HERE


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(HERE / "goals.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)


@pytest.mark.slow
def test_a_run_on_the_cpu(tmp_path: Path) -> None:
    out = tmp_path / "folder" / "goals.json"
    result = run(
        "--device", "cpu", "--tiny", "--rows", "mnist", "--first", "--rounds", "0", "--no-ceilings", "--out", str(out)
    )
    assert result.returncode == 0, result.stderr
    document = json.loads(out.read_text())
    (row,) = document["rows"]
    assert [turn["side"] for turn in row["turns"]] == ["hand", "castwise"]
    assert all(turn["seconds"] > 0 for turn in row["turns"])
    assert not row["is_whole"]
    assert row["data_set"] == "synthetic:mnist"
    assert row["bounds"]["flops"] > 0
    assert "cut short, which tells nothing of it" in result.stdout


def test_an_unknown_row_is_refused() -> None:
    result = run("--rows", "vgg")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("No row named 'vgg'. Rows: mlp, ")


def test_bounds_alone_measure_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "bounds.json"
    arguments = ["goals.py", "--bounds-only", "NVIDIA L4", "--rows", "mlp", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert program.main() == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["turns"] == []
    assert row["bounds"]["datasheet"]["flops_per_second"] == 121e12


def test_ceilings_of_every_format() -> None:
    found = measure(torch.device("cpu"), side=32, copy_bytes=4096)
    assert set(found) == {"fp32", "tf32", "fp16", "bf16", "bytes_per_second"}
    assert all(rate > 0 for rate in found.values())
