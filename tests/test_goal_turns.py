"""Turns: who goes when, what of a failure, and a whole row of small processes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from goal_rows import GoalRow, HandLoop, OurLoop
from goal_specs import Setting
from goal_summary import HAND, OURS, Turn
from goal_turns import ChildFailedError, Referee, run_child

from castwise.orchestrator.machine import detect_machine

ROW = GoalRow(
    name="small",
    workload="mnist-cnn",
    batch_size=4,
    measure="rate",
    goal=1.0,
    hand=(HandLoop("tf32"), HandLoop("bf16-mixed")),
    ours=(OurLoop("fp32", "none"), OurLoop("fp32", "channels-last")),
    block_seconds=0.01,
)
# Seconds a step of each loop of ROW, by its label.
SECONDS = {"tf32, tuned": 3.0, "bf16-mixed, tuned": 2.0, "fp32, none": 1.5, "fp32, channels-last": 1.0}


def referee(rounds: int = 1, limit: float = 60.0, sides: tuple[str, ...] = (HAND, OURS), **more: Any) -> Referee:
    setting = Setting("cpu", Path("nowhere"), seconds=0.05, is_tiny=True)
    bench = more.get("bench")
    return Referee(bench, setting, None, sides, rounds, limit, lambda row, turn: None)  # type: ignore[arg-type]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Replace the processes; each turn is noted by its loop and number."""
    turns: list[tuple[str, int]] = []

    def fake(self: Referee, row: Any, loop: Any, turn: Turn, *rest: Any) -> Turn:
        _, world_size, number = rest
        turns.append((turn.loop, number))
        if SECONDS[turn.loop] < 0:
            raise ChildFailedError("ended with 1")
        return Turn(turn.side, turn.loop, turn.precision, SECONDS[turn.loop] / world_size, start_seconds=9.0)

    monkeypatch.setattr(Referee, "_measured", fake)
    return turns


def test_every_loop_has_a_turn_and_the_fastest_by_hand_another(measured: list[tuple[str, int]]) -> None:
    found = referee().turns(ROW)
    assert measured == [(name, 0) for name in SECONDS] + [("bf16-mixed, tuned", 1)]
    assert [turn.side for turn in found] == [HAND, HAND, OURS, OURS, HAND]


def test_warming_runs_every_loop_briefly_and_leaves_no_start(measured: list[tuple[str, int]]) -> None:
    warmed = referee(rounds=0).warm([ROW])
    assert sorted(measured) == sorted((name, 0) for name in SECONDS)
    assert all(turn.start_seconds is None and turn.seconds for turn in warmed.turns(ROW))
    measured.clear()
    replace(referee(rounds=0), only_first=True).warm([ROW, replace(ROW, world_size=4)])
    assert sorted(name for name, _ in measured) == ["fp32, none", "tf32, tuned"]


def test_more_rounds_take_turns(measured: list[tuple[str, int]]) -> None:
    found = referee(rounds=2).turns(ROW)
    assert [turn.side for turn in found[4:]] == [HAND, OURS, HAND]
    assert len({number for _, number in measured[4:]}) == 3  # no trial is taken for another


def test_only_the_first_loop_that_can_be_measured(
    measured: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [turn.loop for turn in replace(referee(), only_first=True).turns(ROW)] == [
        "tf32, tuned",
        "fp32, none",
        "tf32, tuned",
    ]
    monkeypatch.setitem(SECONDS, "fp32, none", -1.0)
    found = replace(referee(rounds=0), only_first=True).turns(ROW)
    assert [turn.loop for turn in found] == ["tf32, tuned", "fp32, none", "fp32, channels-last"]


def test_without_rounds_each_loop_has_one_turn(measured: list[tuple[str, int]]) -> None:
    assert [turn.side for turn in referee(rounds=0).turns(ROW)] == [HAND, HAND, OURS, OURS]


@pytest.mark.parametrize("side", [HAND, OURS])
def test_one_side_alone_has_one_turn_a_loop(measured: list[tuple[str, int]], side: str) -> None:
    assert [turn.side for turn in referee(sides=(side,)).turns(ROW)] == [side, side]


def test_a_failure_is_noted_and_the_others_go_on(
    measured: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SECONDS, "bf16-mixed, tuned", -1.0)
    found = referee().turns(ROW)
    assert found[1].message == "ended with 1"
    assert found[-1].loop == "tf32, tuned"


def test_no_turn_begins_after_the_time_limit(measured: list[tuple[str, int]]) -> None:
    found = referee(limit=0.0).turns(ROW)
    assert {turn.message for turn in found} == {"no time was left"}
    assert not measured


def test_several_gpus_are_measured_alone_too(measured: list[tuple[str, int]]) -> None:
    (turn,) = referee(sides=(OURS,)).turns(replace(ROW, world_size=4, ours=ROW.ours[:1]))
    assert (turn.seconds, turn.alone_seconds) == (1.5 / 4, 1.5)


def test_a_child_that_takes_too_long_is_ended_with_all_it_started(tmp_path: Path) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text("import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(77)'])")
    with pytest.raises(ChildFailedError, match="took longer than 1 s"):
        run_child([str(script)], 1.0)


def test_both_sides_in_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    row = replace(ROW, hand=ROW.hand[1:], ours=ROW.ours[1:])
    found = referee(bench=detect_machine("cpu", None)).turns(row)
    assert [turn.side for turn in found] == [HAND, OURS, HAND]
    assert all(turn.seconds and not turn.message for turn in found)
    assert all(turn.start_seconds for turn in found)


def test_a_trial_that_cannot_be_run_says_why() -> None:
    row = replace(ROW, hand=(), ours=(OurLoop("fp32", "space-to-depth"),))
    unfit = Referee(
        detect_machine("cpu", None),
        Setting("cpu", Path("nowhere"), 0.05),
        None,
        (OURS,),
        1,
        60.0,
        lambda row, turn: None,
    )
    (turn,) = unfit.turns(row)
    assert turn.seconds is None
    assert "unsupported" in turn.message
