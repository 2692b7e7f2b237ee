"""Pauses between timed blocks, which a CPU tries and does not time."""

import sys
from pathlib import Path

import pauses
import pytest
from emitted import fastest_of
from pauses import AS_CASTWISE, AT_A_STRETCH, Turn, measure, step_config_of, turns_of
from pauses_tables import pauses_table

from castwise.orchestrator.machine import detect_machine
from castwise.records.schema import Block
from castwise.spec.plan import MeasurementProtocol, TrialSpec


def small() -> TrialSpec:
    protocol = MeasurementProtocol(
        warm_up_steps=1, warm_up_seconds=0.1, block_seconds=0.002, num_blocks=2, min_blocks=1
    )
    return TrialSpec(
        workload="mnist-cnn", precision="fp32", loss_scale="none", batch_size=4, device="cuda:0", protocol=protocol
    )


def test_every_round_goes_through_all_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses, "_REST_SECONDS", 0.2)
    monkeypatch.setattr(pauses, "_PART_SECONDS", 0.2)
    monkeypatch.setattr(pauses, "_NUM_PARTS", 2)
    turns = turns_of(small(), detect_machine("cpu", None), rounds=2, seconds=0.02)
    assert [turn.pattern for turn in turns if "rest" in turn.pattern][:2] == [
        "0.0 to 0.2 s after a rest of 0.2 s",
        "0.2 to 0.4 s after a rest of 0.2 s",
    ]
    first, second = turns[: len(turns) // 2], turns[len(turns) // 2 :]
    assert {turn.pattern for turn in first} == {turn.pattern for turn in second}
    assert len({turn.pattern for turn in first}) == len(first)
    assert {AT_A_STRETCH, AS_CASTWISE, "blocks, 100 ms between them"} <= {turn.pattern for turn in first}
    assert all(turn.step_seconds > 0 for turn in turns)
    paused = next(turn for turn in turns if turn.pattern == "blocks, 100 ms between them")
    assert paused.idle_share > 0.5


def test_a_loop_has_its_climb_s_precision_or_another() -> None:
    spec, other = step_config_of("wrn-28-10"), step_config_of("wrn-28-10:bf16-mixed")
    assert spec == fastest_of("wrn-28-10")
    assert (other.precision, other.loss_scale, other.techniques) == ("bf16-mixed", "none", spec.techniques)


def test_what_passes_before_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(pauses.time, "perf_counter", lambda: now[0])

    def timed() -> tuple[Block, float]:
        now[0] += 0.25
        is_early = now[0] <= 1.0
        return Block(seconds=9.0 if is_early else 0.1, num_steps=2, loss=1.0), 0.0 if is_early else 0.1

    turn = measure("(made up)", timed, 1.0)
    assert turn.step_seconds == pytest.approx(0.05)
    assert turn.idle_share == pytest.approx(0.2), "of 0.25 s 0.1 are timed and 0.1 are steps before them"
    assert now[0] == 2.0


def test_the_table_is_over_the_stretch_of_the_same_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        Turn(AT_A_STRETCH, 0.010, 0.0, 1.4e9, 700.0),
        Turn("blocks", 0.0098, 0.1, 1.45e9, 690.0),
        Turn("blocks", 0.0198, 0.1, 1.45e9, 690.0),
        Turn(AT_A_STRETCH, 0.020, 0.0, 1.4e9, 700.0),
    ]
    path = tmp_path / "2026-11-23-x.json"
    monkeypatch.setattr(pauses, "turns_of", lambda *_: found)
    monkeypatch.setattr(sys, "argv", ["pauses.py", "--out", str(path), "lstm-lm"])
    monkeypatch.setattr(pauses, "detect_machine", lambda *_: detect_machine("cpu", None))
    assert pauses.main() == 0
    stretch, blocks = pauses_table(path).splitlines()[-2:]
    assert stretch == "| at a stretch | – | 1 (15.0 ms) | 1,400 MHz |"
    assert blocks.startswith("| blocks | 10.0% | 0.985 [")
    assert blocks.endswith("] | 1,450 MHz |")
