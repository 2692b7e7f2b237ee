"""Emitted scripts beside the loops that were measured, which a CPU tries and does not time."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import emitted
import pytest
from emitted import ALIKE, RUNG, SCRIPT, Rung, Speed, Turn, compare, fastest_of, take_turns
from emitted_tables import emitted_table

from castwise.orchestrator.machine import detect_machine
from castwise.spec.plan import MeasurementProtocol, TrialSpec


def ignore(turns: list[Turn]) -> None:
    del turns


def test_the_sides_take_turns_and_change_who_begins() -> None:
    order: list[str] = []

    def side(name: str, speed: float) -> Any:
        return lambda: order.append(name) or Speed(speed)

    kept: list[int] = []
    turns = take_turns(
        {RUNG: side(RUNG, 10.0), SCRIPT: side(SCRIPT, 9.0)}, 3, float("inf"), lambda turns: kept.append(len(turns))
    )
    assert order == [RUNG, SCRIPT, SCRIPT, RUNG, RUNG, SCRIPT]
    assert [(turn.side, turn.per_second) for turn in turns][:2] == [(RUNG, 10.0), (SCRIPT, 9.0)]
    assert kept == [2, 4, 6], "what a machine that is taken away has measured stands on the disk"


def test_no_round_begins_that_would_end_late(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def slow() -> Speed:
        now[0] += 4.0
        return Speed(1.0)

    assert len(take_turns({RUNG: slow, SCRIPT: slow}, 9, 20.0, ignore)) == 4


@pytest.mark.parametrize("path", sorted((emitted.RECORDS / "climbs").glob("*.json")), ids=lambda path: path.stem)
def test_the_fastest_loop_of_every_climb_is_on_record(path: Path) -> None:
    spec = fastest_of(path.stem)
    fastest = json.loads(path.read_text())["fastest"]
    assert (spec.precision, list(spec.techniques)) == (fastest["precision"], fastest["techniques"])
    assert spec.kind == "steady"


def test_both_sides_measure_the_same_loop(tmp_path: Path) -> None:
    protocol = MeasurementProtocol(warm_up_steps=1, warm_up_seconds=0.1, block_seconds=0.01, num_blocks=2, min_blocks=1)
    spec = TrialSpec(
        workload="mnist-cnn", precision="fp32", loss_scale="none", batch_size=4, device="cuda:0", protocol=protocol
    )
    sides = compare(spec, detect_machine("cpu", None), tmp_path, ("--steps", "4", "--warm-up", "1"))
    turns = take_turns(sides, 1, float("inf"), ignore)
    assert [turn.side for turn in turns] == [RUNG, SCRIPT, ALIKE]
    assert all(turn.per_second > 0 for turn in turns)
    (tmp_path / "train.py").write_text("raise SystemExit('no')")
    with pytest.raises(RuntimeError, match="no"):
        sides[SCRIPT]()


def test_a_script_is_told_to_run_as_many_steps_as_the_loop_did() -> None:
    bench = detect_machine("cpu", None)
    protocol = MeasurementProtocol(
        warm_up_steps=2, warm_up_seconds=0.001, block_seconds=1e-9, num_blocks=3, min_blocks=3, max_seconds=9.0
    )
    spec = TrialSpec(
        workload="mnist-cnn", precision="fp32", loss_scale="none", batch_size=4, device="cpu", protocol=protocol
    )
    rung = Rung(spec, bench)
    with pytest.raises(LookupError, match="not measured yet"):
        _ = rung.options
    assert rung.measure().per_second > 0
    _, warm_up, steps, timed = rung.options
    assert int(warm_up) >= 2
    assert (steps, timed) == ("--steps", "3"), "a block is one step"


def record(path: Path, speeds: list[tuple[float, ...]], **more: object) -> Path:
    pairs = [(side, speed) for each in speeds for side, speed in zip((RUNG, SCRIPT, ALIKE), each, strict=False)]
    turns = [{"side": side, "per_second": speed, "seconds": 1.0} for side, speed in pairs]
    spec = TrialSpec(
        workload="lstm-lm", precision="tf32", loss_scale="none", batch_size=20, device="cuda:0", techniques=("compile",)
    )
    loop = {"name": "lstm-lm", "spec": spec.model_dump(mode="json"), "turns": turns, **more}
    environment = {"gpu": "Fake GPU", "torch": "2.11", "driver": "1", "commit": "abc"}
    path.write_text(json.dumps({"environment": environment, "loops": [loop]}))
    return path


@pytest.mark.parametrize(
    ("speeds", "said"),
    [
        ([(100.0, 100.5), (100.0, 99.5), (100.0, 100.0)], "yes"),
        ([(100.0, 90.5), (100.0, 89.5), (100.0, 90.0)], "no"),
        ([(100.0, 101.0)], "open"),
        ([(100.0, 90.0), (100.0, 110.0)], "open"),
        ([(100.0, 90.0, 100.0), (100.0, 90.5, 100.1)], "yes"),
        ([(100.0, 100.0, 90.0), (100.0, 100.0, 90.1)], "no"),
    ],
)
def test_the_table_says_whether_a_script_keeps_up(tmp_path: Path, speeds: list[tuple[float, ...]], said: str) -> None:
    lines = emitted_table(record(tmp_path / "2026-11-23-h200.json", speeds)).splitlines()
    assert "2026-11-23" in lines[0]
    assert lines[-1].endswith(f"| {len(speeds)} | {said} |")
    assert "| 100.0 tokens/s |" in lines[-1]


def test_runs_on_several_gpus_are_one_table(tmp_path: Path) -> None:
    speeds: list[tuple[float, ...]] = [(100.0, 100.0)] * 2
    one, other = (record(tmp_path / f"2026-11-23-{name}.json", speeds, name=name) for name in ("wrn", "lstm"))
    where, _, _, _, *rows = emitted_table(one, other).splitlines()
    assert where.endswith("castwise at abc")
    assert [row.split(",")[0] for row in rows] == ["| wrn", "| lstm"]


def test_of_a_loop_that_was_measured_again_the_last_stands(tmp_path: Path) -> None:
    (early, late, other) = (
        record(tmp_path / f"2026-11-{day}-x.json", [(speed, speed)] * 2, name=name)
        for day, name, speed in ((21, "wrn", 50.0), (23, "wrn", 100.0), (22, "lstm", 70.0))
    )
    first, _, second, *_, wrn, lstm = emitted_table(early, late, other).splitlines()
    assert ("2026-11-23" in first, first.endswith("(wrn)")) == (True, True)
    assert ("2026-11-22" in second, second.endswith("(lstm)")) == (True, True)
    assert "| 100.0 tokens/s |" in wrn
    assert "| 70.0 tokens/s |" in lstm


def test_beside_a_script_that_does_not_keep_up_stand_the_stretch_and_the_clock(tmp_path: Path) -> None:
    path = record(tmp_path / "2026-11-23-h200.json", [(100.0, 90.0, 100.0), (100.0, 90.2, 100.0)])
    document = json.loads(path.read_text())
    told = {RUNG: (90.0, 1.5e9, 650.0), SCRIPT: (None, 1.35e9, 690.0), ALIKE: (None, None, None)}
    for turn in document["loops"][0]["turns"]:
        turn |= dict(zip(("at_a_stretch", "clock_hertz", "power_watts"), told[turn["side"]], strict=True))
    path.write_text(json.dumps(document))
    stretch, clock = emitted_table(path).splitlines()[-2:]
    assert ": 1.001 [" in stretch
    assert clock.endswith("rung 1,500 MHz (1,500 to 1,500) at 650 W; script 1,350 MHz (1,350 to 1,350) at 690 W")
    for turn in document["loops"][0]["turns"]:
        turn["per_second"] = 100.0
    path.write_text(json.dumps(document))
    assert emitted_table(path).splitlines()[-1].endswith("| yes |"), "one that keeps up needs no notes"


def test_a_failure_is_a_line(tmp_path: Path) -> None:
    lines = emitted_table(record(tmp_path / "2026-11-23-h200.json", [], failure="train.py: broken")).splitlines()
    assert lines[-1].endswith("| train.py: broken |")


def test_a_failure_after_the_first_round_is_said_beside_what_was_measured(tmp_path: Path) -> None:
    path = record(tmp_path / "2026-11-23-h200.json", [(100.0, 99.0)], failure="train.py: broken")
    assert emitted_table(path).splitlines()[-1].endswith("| 1 | open; then train.py: broken |")


def test_a_run_is_kept_round_by_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sides(spec: TrialSpec, *_: object) -> dict[str, Any]:
        def fail() -> Speed:
            raise RuntimeError("(made up)")

        fine = {RUNG: lambda: Speed(5.0), SCRIPT: lambda: Speed(5.0)}
        return fine if spec.workload == "lstm-lm" else {RUNG: fail, SCRIPT: fail}

    out = tmp_path / "2026-11-23-x.json"
    monkeypatch.setattr(emitted, "compare", sides)
    monkeypatch.setattr(emitted, "detect_machine", lambda *_: detect_machine("cpu", None))
    monkeypatch.setattr(sys, "argv", ["emitted.py", "--out", str(out), "--rounds", "2", "lstm-lm", "mlp-4096"])
    assert emitted.main() == 0
    first, second = json.loads(out.read_text())["loops"]
    assert len(first["turns"]) == 4
    assert second["failure"] == "(made up)"
    assert len(emitted_table(out).splitlines()) == 6
