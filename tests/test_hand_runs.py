"""The plain scripts whose time stands beside that of castwise's rounds."""

import math

import hand_runs
import pytest
import torch


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
