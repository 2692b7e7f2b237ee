"""Where a sitting's seconds go, from its records."""

import subprocess
import sys
from pathlib import Path

import pytest
import round_cost
from fake_engine import fake_facts, fake_spec, fake_trial
from fake_gpu import fake_reading
from round_cost import sittings_of, table_of

from castwise.records.schema import Trial
from castwise.records.telemetry import EnergyMeasurement


def sat(precision: str, sitting: str, second: int, ready: float) -> Trial:
    facts = fake_facts(ready_seconds=ready, set_up_seconds=0.5, first_step_seconds=1.0, warm_up_seconds=0.25)
    trial = fake_trial(
        fake_spec(precision), step_seconds=(0.5, 0.5), facts=facts, readings=(fake_reading(), fake_reading())
    )
    update = {
        "sitting": sitting,
        "started_at": f"2000-01-01T00:00:{second:02d}.000+00:00",
        "duration_seconds": 10.0,
        "metered": EnergyMeasurement(joules=1.0, seconds=0.5, num_ticks=5),
    }
    return trial.model_copy(update=update)


def test_what_is_side_by_side_counts_once_and_what_is_in_turns_each_time() -> None:
    first, second = sittings_of([sat("fp32", "b", 20, 1.0), sat("fp32", "a", 0, 1.0), sat("tf32", "a", 1, 0.75)])
    assert (len(first.trials), len(second.trials)) == (2, 1)
    expected = {"ready": 1.0, "set up": 1.5, "warm-up": 0.5, "turns": 4.0, "timed": 2.0, "energy": 1.0, "all": 11.0}
    assert {part: first.parts[part] for part in expected} == expected
    assert first.parts["rest"] == 11.0 - 8.0


def test_trials_that_sat_alone_are_in_no_sitting() -> None:
    assert sittings_of([fake_trial()]) == []


def test_the_table_has_a_row_a_sitting_and_one_of_sums() -> None:
    lines = table_of(sittings_of([sat("fp32", "a", 0, 1.0), sat("fp32", "b", 20, 2.0)]))
    assert len(lines) == 5
    assert lines[-1].startswith("| all | 3.0 | 3.0 | 0.5 | 4.0 | 2.0 | 1.0 |")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("--results", "kept"), "kept"),
        (("--results=kept",), "kept"),
        (("--results", "first", "--results=kept"), "kept"),
        ((), None),
    ],
    ids=["apart", "joined", "twice", "none"],
)
def test_the_records_stay_in_the_folder_that_the_command_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: tuple[str, ...], named: str | None
) -> None:
    commands: list[list[str]] = []
    folders: list[Path] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    def load_folder(folder: Path) -> tuple[list[Trial], list[object]]:
        folders.append(folder)
        return [sat("fp32", "a", 0, 1.0).model_copy(update={"started_at": "2999-01-01T00:00:00.000+00:00"})], []

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(round_cost, "load_folder", load_folder)
    monkeypatch.setattr(sys, "argv", ["round_cost.py", "--run", "resnet50", *given, "--within", "1%"])
    assert round_cost.main() == 0
    asked = ["resnet50", *given, "--within", "1%"]
    assert commands[0][4:] == (asked if named else [*asked, "--results", str(folders[0])])
    assert named is None or folders == [Path(named)]
    assert "| all |" in capsys.readouterr().out
