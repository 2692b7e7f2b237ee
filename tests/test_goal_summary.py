"""What turns come to."""

import json
from typing import Any

import pytest
from goal_summary import HAND, OURS, Turn, is_reached, line_of, ratio_of, side_of, turn_of_run, what_of


def turn(side: str, seconds: float | None, loop: str = "a", **more: Any) -> dict[str, Any]:
    found = Turn(side, loop, "bf16-mixed", seconds, **more).document()
    loaded: dict[str, Any] = json.loads(json.dumps(found))
    return loaded


def row(*turns: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "name": "resnet50",
        "workload": "resnet50",
        "batch_size": 256,
        "world_size": 1,
        "measure": "rate",
        "goal": 8000.0,
        "unit": "images",
        "units_per_step": 256,
        "times": 1,
        "data_set": None,
        "is_whole": True,
        "turns": list(turns),
        **more,
    }


def test_the_fastest_loop_of_a_side_speaks_for_it_by_all_its_turns() -> None:
    found = side_of(row(turn(HAND, 0.04), turn(HAND, 0.05, "b"), turn(OURS, 0.02), turn(HAND, 0.044)), HAND)
    assert found is not None
    assert found.seconds == (0.04, 0.044)
    assert (found.low, found.high) == (256 / 0.044, 256 / 0.04)
    assert found.value == pytest.approx((256 / 0.044 + 256 / 0.04) / 2)


def test_ratio_and_its_spread() -> None:
    measured = row(turn(HAND, 0.04), turn(OURS, 0.032), turn(HAND, 0.044))
    assert ratio_of(side_of(measured, HAND), side_of(measured, OURS)) == pytest.approx(
        (0.042 / 0.032, 0.040 / 0.032, 0.044 / 0.032)
    )
    assert ratio_of(None, side_of(measured, OURS)) is None


def test_a_side_that_measured_nothing_has_no_figure() -> None:
    assert side_of(row(turn(HAND, None, message="ended with 1")), HAND) is None
    assert "by hand –; castwise –; goal ≥ 8,000 images/s" in line_of(row(turn(HAND, None, message="x")))


@pytest.mark.parametrize(
    ("measure", "goal", "value", "reached"),
    [("rate", 8000, 8000.0, True), ("rate", 8000, 7999.0, False), ("run", 1.5, 1.6, False), ("steps", 1.5, 1.4, True)],
)
def test_goals_are_least_or_most_figures(measure: str, goal: float, value: float, reached: bool) -> None:
    assert is_reached(row(measure=measure, goal=goal), value) is reached


def test_steps_and_runs_are_so_many_times_one() -> None:
    found = side_of(row(turn(OURS, 0.0006), measure="steps", times=150, goal=0.09), OURS)
    assert found is not None
    assert found.value == pytest.approx(0.09)


def test_efficiency_is_the_time_alone_over_the_time_together() -> None:
    found = side_of(row(turn(OURS, 0.040, alone_seconds=0.0396), measure="efficiency"), OURS)
    assert found is not None
    assert found.value == pytest.approx(0.99)


def test_a_run_takes_the_middle_of_the_epochs_after_the_first() -> None:
    found = turn_of_run(Turn(OURS, "a", "tf32"), [5.0, 1.0, 1.2, 1.1], 0.9)
    assert (found.seconds, found.total_seconds, found.accuracy) == (1.1, 8.3, 0.9)
    assert found.start_seconds == pytest.approx(3.9)
    assert turn_of_run(Turn(OURS, "a", "tf32"), [5.0], None).seconds == 5.0


def test_lines() -> None:
    measured = row(turn(HAND, 0.04), turn(OURS, 0.032), turn(HAND, 0.044))
    assert line_of(measured) == (
        "resnet50      by hand 6,109 images/s (5,818 images/s to 6,400 images/s); castwise 8,000 images/s; "
        "ratio 1.312 [1.250, 1.375]; goal ≥ 8,000 images/s: reached"
    )
    assert "cut short, which tells nothing of it" in line_of(measured | {"is_whole": False})
    assert what_of(row(measure="run", times=20, data_set="mnist", workload="mnist-cnn", batch_size=512)) == (
        "mnist-cnn, batch 512, 20 epochs on mnist"
    )
