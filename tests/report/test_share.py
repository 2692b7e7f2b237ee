"""Compact records that may be shared, their check, and what they say of a speed."""

import json
from pathlib import Path

import pytest
from fake_engine import fake_spec, fake_trial
from fake_records import every_kind, poisoned, steady, stored
from typer.testing import CliRunner

from castwise.analysis import normal
from castwise.analysis.result_table import rows_of_steps
from castwise.cli.app import app
from castwise.errors import CastwiseError
from castwise.records import shared
from castwise.records.schema import Trial
from castwise.records.shared import SharedRecord, SharedRow, problems_of, shared_records
from castwise.report.collection import collect
from castwise.report.share import shared_of
from castwise.show.notes import MORE, note_lines, remarks

H100 = "NVIDIA H100 80GB HBM3"
TRIALS = [
    steady(precision, repeat, workload="resnet50", device="cuda:0")
    for precision in ("fp32", "bf16-mixed")
    for repeat in range(3)
]


def on(gpu: str, trial: Trial, **facts: object) -> Trial:
    environment = trial.environment.model_copy(update={"gpu": gpu, "capability": (9, 0), **facts})
    return trial.model_copy(update={"environment": environment})


def record_of(trials: list[Trial]) -> SharedRecord:
    records, _ = shared_of(collect(trials).configurations)
    (record,) = records
    return record


def test_a_record_has_the_figures_and_their_intervals() -> None:
    record = record_of([on(H100, trial) for trial in TRIALS])
    assert (record.gpu, [row.precision for row in record.rows]) == (H100, ["fp32", "bf16-mixed"])
    row = record.rows[1]
    assert row.n == 3
    assert (row.throughput_low or 0) < row.throughput < (row.throughput_high or 0)
    assert (row.speedup or 0) > 1
    assert record.rows[0].speedup is None
    assert SharedRecord.model_validate_json(record.text) == record
    assert problems_of(record.text.encode(), record.path.name) == []
    assert str(record.path).startswith("h100-80gb-hbm3/")


def test_nothing_of_the_user_is_in_it() -> None:
    """Every string of the records is replaced, but for those that a shared record names."""
    named = ("workload", "precision", "loss_scale", "device", "data_set", "parallelism", "kind", "status", "gpu")
    named += ("driver", "torch", "cuda", "cudnn", "castwise", "started_at", "weights")
    hostile = [poisoned(on(H100, trial), *named) for trial in TRIALS]
    assert "pwned" in hostile[0].model_dump_json()
    text = record_of(hostile).text
    assert "pwned" not in text
    assert TRIALS[0].started_at[:10] in text
    assert TRIALS[0].started_at[11:16] not in text


def test_own_models_runs_failures_and_disturbed_figures_stay_out() -> None:
    trials = [on(H100, trial) for trial in every_kind()]
    records, left = shared_of(collect(trials).configurations)
    assert records
    assert any("that failed" in line for line in left)
    assert any("training runs" in line for line in left)
    assert not any(row.workload.startswith("own.py") for record in records for row in record.rows)
    noisy = fake_trial(fake_spec("fp32", device="cuda:0"), step_seconds=(0.1, 0.2) * 4)
    assert shared_of(collect([on(H100, noisy)]).configurations) == ([], ["1 configuration with the warning noisy"])
    on_cpu = [trial.model_copy(update={"spec": trial.spec.model_copy(update={"device": "cpu"})}) for trial in TRIALS]
    assert shared_of(collect(on_cpu).configurations)[0] == []
    records, left = shared_of(collect([on("No GPU", trial) for trial in TRIALS]).configurations)
    assert (records, len(left)) == ([], 1)
    assert "2 configurations where castwise knows no datasheet of the GPU 'No GPU'" in left[0]


ROW = SharedRow(
    workload="resnet50", precision="bf16-mixed", loss_scale="none", batch_size=256, n=3, throughput=2200.0,
    step_seconds=0.1164,
    flops={"bf16": 6_300_000_000_000}, moved_bytes=40_000_000_000, peak_bytes=10**10,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "facts", "problem"),
    [
        ({}, {}, None),
        ({"workload": "no-such"}, {}, "castwise has no such workload or precision"),
        ({"throughput_low": 2300.0, "throughput_high": 2400.0}, {}, "the throughput is not within its interval"),
        (
            {"throughput_low": 1000.0, "throughput_high": 2400.0},
            {},
            "the interval of the throughput is wider than 30 %",
        ),
        ({"step_seconds": 0.005, "throughput": 51200.0, "moved_bytes": 0}, {}, "127 % of the GPU's peak in FLOP/s"),
        ({"moved_bytes": 10**12}, {}, "256 % of the GPU's memory bandwidth"),
        ({"peak_bytes": 10**12}, {}, "more memory than the GPU has"),
        ({"throughput": 9000.0}, {}, "4.09 units a sample"),
        ({"flops": {"bf16": 9 * 10**12}}, {}, "FLOPs a sample"),
        ({"flops": {}, "moved_bytes": 0}, {"gpu": "Tesla T4", "capability": (7, 5)}, None),
        ({"precision": "fp8-tensorwise"}, {"capability": (8, 0)}, "8.9"),
        ({}, {"gpu": "NVIDIA H100 Turbo"}, "no datasheet of the GPU 'NVIDIA H100 Turbo'"),
        ({}, {"gpu": "NVIDIA A100", "memory_bytes": None}, "no datasheet of the GPU 'NVIDIA A100'"),
        ({}, {"date": "2999-01-01"}, "the day 2999-01-01 is in the future"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, object], facts: dict[str, object], problem: str | None) -> None:
    record = SharedRecord(
        schema_version=1, licence="CC0-1.0", gpu=H100, capability=(9, 0), memory_bytes=85 * 10**9, torch="2.15.0",
        castwise="0.2.0", date="2026-11-30", rows=(ROW.model_copy(update=changes),),
    ).model_copy(update=facts)  # fmt: skip
    found = problems_of(record.text.encode(), record.path.name)
    assert len(found) == (problem is not None), found
    assert problem is None or problem in found[0]


def test_a_file_that_was_changed_or_says_more_is_refused() -> None:
    text = record_of([on(H100, trial) for trial in TRIALS]).text
    name = SharedRecord.model_validate_json(text).path.name
    assert "its content was changed" in problems_of(text.replace('"n": 3', '"n": 30').encode(), name)[0]
    more = json.dumps({**json.loads(text), "host": "node1"})
    assert problems_of(more.encode(), name) == ["it is no shared record: host: Extra inputs are not permitted"]
    assert "it is no shared record: the file" in problems_of(b"{", name)[0]


def test_the_command_writes_prints_and_checks(tmp_path: Path) -> None:
    folder, out = stored(tmp_path / "results", [on(H100, trial) for trial in TRIALS]), tmp_path / "out"
    printed = CliRunner().invoke(app, ["share", str(folder), "--dry-run"])
    assert printed.exit_code == 0
    assert SharedRecord.model_validate_json(printed.stdout).gpu == H100
    assert not out.exists()
    assert CliRunner().invoke(app, ["share", str(folder), "-o", str(out)]).exit_code == 0
    (file,) = out.rglob("*.json")
    assert file.read_text() == printed.stdout
    assert "1 file: no problem found" in CliRunner().invoke(app, ["share", "--check", str(out)]).stdout
    file.write_text(file.read_text().replace('"n": 3', '"n": 4'))
    checked = CliRunner().invoke(app, ["share", "--check", str(file)])
    assert "its content was changed" in checked.stdout
    assert isinstance(checked.exception, CastwiseError)
    assert checked.exception.exit_code == 3


def test_the_records_that_come_with_castwise_pass_their_own_check_and_are_small() -> None:
    assert shared._TABLE.stat().st_size < 300_000
    assert len(shared_records()) > 20
    for record in shared_records():
        assert problems_of(record.text.encode(), record.path.name) == []


def test_a_strange_speed_is_a_note_and_a_normal_one_a_detail(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of_steps([on(H100, trial) for trial in TRIALS])
    record = record_of([on(H100, trial) for trial in TRIALS])
    monkeypatch.setattr(normal, "shared_records", lambda: (record,))
    assert "others" not in "\n".join(note_lines(rows, MORE))
    assert "others: fp32, bf16-mixed: as fast as others measured with this GPU" in "\n".join(remarks(rows))
    faster = [row.model_copy(update={"throughput": 2 * row.throughput}) for row in record.rows]
    monkeypatch.setattr(normal, "shared_records", lambda: (record.model_copy(update={"rows": tuple(faster)}),))
    note = "\n".join(note_lines(rows, MORE))
    assert "others: fp32: others with this GPU reached 5,1" in note
    assert ": castwise why resnet50" in note
    other_gpu = rows_of_steps([on("NVIDIA H200", trial) for trial in TRIALS])
    assert "others" not in "\n".join(remarks(other_gpu))


@pytest.mark.parametrize(("seconds", "is_normal"), [(0.30 / 1.83, True), (0.29, False)])
def test_speedups_that_a_source_published_are_compared_with(seconds: float, is_normal: bool) -> None:
    """WRN-28-10 on a T4 took 3437 s in float32 and 1874 s in Apex's O1."""
    rows = rows_of_steps(
        [
            on("Tesla T4", fake_trial(fake_spec(name, workload="wrn-28-10", batch_size=128), step_seconds=(each,) * 6))
            for name, each in (("fp32", 0.3), ("fp16-mixed", seconds))
        ]
    )
    assert ("others: fp16-mixed: others with this GPU reached 1.83×" in "\n".join(note_lines(rows, MORE))) != is_normal
