"""The plain scripts whose time stands beside that of castwise's rounds."""

import json
import math
import subprocess
import sys
from pathlib import Path

import hand_runs
import pytest
import torch
from trust_tables import by_hand


@pytest.mark.parametrize(("precision", "tuned"), [("fp32", False), ("bf16-mixed", True), ("bf16-true", True)])
def test_a_run_by_hand_trains_and_tells_the_seconds_of_a_step(
    precision: str, tuned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_runs, "_WARM_UP_STEPS", 1)
    monkeypatch.setattr(hand_runs, "_TIMED_STEPS", 2)
    kept = torch.backends.cudnn.benchmark
    try:
        seconds = hand_runs.train_one("mnist-cnn", precision, 2, "cpu", tuned=tuned)
    finally:
        torch.backends.cudnn.benchmark = kept
    assert math.isfinite(seconds)
    assert seconds > 0


def test_the_runs_are_kept_with_the_machine_and_make_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"fp32": "0.02", "bf16-mixed": "0.01"}

    def answer(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, stdout=answers[command[-1]])

    monkeypatch.setattr(subprocess, "run", answer)
    monkeypatch.setattr(
        hand_runs, "_environment", lambda device: {"gpu": device, "torch": "2.11", "driver": "580", "commit": "abc"}
    )
    kept = tmp_path / "2026-11-22-x.json"
    monkeypatch.setattr(sys, "argv", ["hand_runs.py", "--precision", "fp32,bf16-mixed", "--out", str(kept)])
    assert hand_runs.main() == 0
    assert [run["step_seconds"] for run in json.loads(kept.read_text())["runs"]] == [0.02, 0.01]
    table = by_hand(kept)
    assert table.startswith("cuda:0, torch 2.11, driver 580, 2026-11-22, castwise at abc")
    assert "| bf16-mixed | 10.00 ms | 2.00× |" in table


def test_the_machine_of_a_record_is_asked_of_castwise() -> None:
    environment = hand_runs._environment("cpu")
    assert environment["gpu"] is None
    assert environment["torch"] == torch.__version__
