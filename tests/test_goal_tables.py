"""The documents' tables of the speed goals."""

import json
from pathlib import Path
from typing import Any

from goal_rows import ROWS
from goal_summary import HAND, OURS
from goal_tables import NOT_MEASURED, goals_table, least_time_table, measured_rows
from test_goal_summary import row, turn
from work_counter import count_work

from castwise.registry.workloads import find_workload

ROOT = Path(__file__).resolve().parent.parent
COUNTED = json.loads((ROOT / "benchmarks" / "records" / "least_time" / "nvidia-h200.json").read_text())
CEILINGS = {"bf16": 772e12, "bytes_per_second": 4.27e12}
ENVIRONMENT = {"gpu": "NVIDIA H200", "torch": "2.11", "driver": "580", "commit": "abc"}


def bounds(by_operation: float = 0.020) -> dict[str, Any]:
    times = {"arithmetic": 0.006, "memory": 0.016, "by_operation": by_operation}
    return {"format": "bf16", "flops": 6e12, "bytes": 8e10, "datasheet": times, "measured": times}


def keep(folder: Path, name: str, *rows: dict[str, Any]) -> None:
    document = {"environment": ENVIRONMENT, "ceilings": CEILINGS, "rows": rows}
    (folder / name).write_text(json.dumps(document))


def measured(seconds: float = 0.032, **more: Any) -> dict[str, Any]:
    turns = (turn(HAND, 0.04, "by hand"), turn(OURS, seconds, "ours", start_seconds=40.0), turn(HAND, 0.04, "by hand"))
    return row(*turns, bounds=bounds(), steps_per_epoch=None, **more)


def test_nothing_measured_says_so(tmp_path: Path) -> None:
    assert goals_table(list(measured_rows(tmp_path).values())) == NOT_MEASURED


def test_goals(tmp_path: Path) -> None:
    keep(tmp_path, "2026-11-21-a.json", measured())
    text = goals_table(list(measured_rows(tmp_path).values()))
    assert "NVIDIA H200, torch 2.11, driver 580, 2026-11-21, castwise at abc; products of 8192³ reach bf16 772" in text
    assert (
        "| resnet50, batch 256 | 6,400 images/s | 8,000 images/s | 1.25 | ≥ 8,000 images/s | yes | 40.0 s |"
    ) in text
    assert "- resnet50: hand: by hand; castwise: ours" in text


def test_the_last_record_of_a_row_counts_and_one_cut_short_does_not(tmp_path: Path) -> None:
    keep(tmp_path, "2026-11-21-a.json", measured(0.040))
    keep(tmp_path, "2026-11-22-b.json", measured(0.033))
    keep(tmp_path, "2026-11-23-c.json", measured(0.001, is_whole=False))
    (found,) = measured_rows(tmp_path).values()
    assert found["turns"][1]["seconds"] == 0.033
    assert " | no | " in goals_table([found])


def test_least_times_stand_beside_the_goals_step_and_the_measured_one() -> None:
    document = {"device": "NVIDIA H200", "rows": [row(bounds=bounds(), steps_per_epoch=None)]}
    line = "| resnet50, batch 256 | bf16 | 6,000 GFLOP | 80 GB | 6.00 ms | 16.0 ms | 20.0 ms | 32.0 ms |"
    assert f"{line} – | – |" in least_time_table(document, {})
    found = measured(0.040) | {"where": "NVIDIA H200, castwise at abc"}
    text = least_time_table(document, {"resnet50": found})
    assert f"{line} 40.0 ms | 40.0 % |" in text
    assert "\n\ncastwise's step: NVIDIA H200, castwise at abc\n\n| what |" in text


def test_steps_from_several_places_name_their_rows() -> None:
    runs = {name: measured(0.040, name=name) | {"where": f"at {place}"} for name, place in (("a", "x"), ("b", "y"))}
    runs["by hand alone"] = row(turn(HAND, 0.1), bounds=bounds(), steps_per_epoch=None) | {"where": "at z"}
    rows = [row(bounds=bounds(), steps_per_epoch=None, name=name) for name in runs]
    text = least_time_table({"device": "g", "rows": rows}, runs)
    assert "castwise's step: at x (a)\n\ncastwise's step: at y (b)\n\n| what |" in text


def test_a_run_is_held_against_its_steps() -> None:
    run = row(turn(OURS, 0.118), measure="run", times=20, goal=1.5, steps_per_epoch=118, bounds=bounds(), name="mnist")
    text = least_time_table({"device": "g", "rows": [run | {"turns": []}]}, {"mnist": run | {"where": "w"}})
    assert f"| {1.5e6 / 20 / 118:.0f} µs | 1.00 ms |".replace("636 µs", "635.6 µs") in text


def test_the_committed_counts_are_those_of_today() -> None:
    assert [found["name"] for found in COUNTED["rows"]] == [found.name for found in ROWS]
    for name in ("mlp", "wrn", "lstm-200"):
        kept = next(found for found in COUNTED["rows"] if found["name"] == name)
        work = count_work(find_workload(kept["workload"]), kept["batch_size"])
        assert (kept["bounds"]["flops"], kept["bounds"]["bytes"]) == (work.flops, work.bytes(2))
