"""The functions of the package and their results, on the fake engine."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from conftest import CommandLine
from fake_engine import FakeEngine, fake_run, fake_training
from torch import nn

import castwise
from castwise.errors import UsageError
from castwise.records.store import Store

MODEL, BATCH = nn.Linear(3, 2), torch.ones(4, 3)
QUIET: dict[str, Any] = {"precision": "fp32,bf16-mixed", "progress": False}


def test_run_returns_rows_and_is_the_sequence_of_its_trials(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = castwise.run(
        ["resnet50"], precision=["O0", "bf16-mixed"], batch_size=64, techniques="none,channels-last", rounds=1
    )
    assert list(tmp_path.iterdir()) == [], "without `results` it keeps nothing"
    assert len(found) == len(list(found)) == 4
    assert found[0] is found.trials[0]
    assert found[1:] == found.trials[1:]
    assert [(row.precision, row.batch_size, row.techniques) for row in found.rows] == [
        ("fp32", 64, ()),
        ("bf16-mixed", 64, ()),
        ("fp32", 64, ("channels-last",)),
        ("bf16-mixed", 64, ("channels-last",)),
    ]


def test_a_search_of_objects_is_that_of_a_workload(engine: FakeEngine) -> None:
    found = castwise.tune(MODEL, BATCH, nn.MSELoss(), **QUIET)
    assert {trial.spec.workload for trial in found.trials} == {"own:Linear"}
    assert found.fastest is not None
    assert found.fastest.precision == "bf16-mixed"
    assert found.sentences[0].startswith("The fastest loop")
    assert "castwise tune own:" not in str(found)  # which no command can name
    batches = castwise.max_batch("resnet50", **QUIET)
    assert list(batches.largest) == ["fp32", "bf16-mixed"]
    assert 0 < (batches.largest["fp32"] or 0) < (batches.largest["bf16-mixed"] or 0)
    with pytest.raises(UsageError, match="is one name here"):
        castwise.tune("resnet50,dpn92", **QUIET)


def test_a_result_and_its_parts_are_a_line_each_and_printed_they_are_tables(engine: FakeEngine) -> None:
    run = castwise.run("resnet50", precision="fp32,bf16-mixed")
    tuned, batches = castwise.tune("resnet50", **QUIET), castwise.max_batch("resnet50", **QUIET)
    for each in (run, run.rows[0], run[0], run[0].spec, tuned, tuned.fastest, batches, batches.max_batches[0]):
        assert "\n" not in repr(each)
        assert "resnet50" in repr(each)
        assert len(repr(each)) < 120
    for found in (run, tuned, batches):
        assert len(str(found).splitlines()) > 3
        tables, chart = found._repr_html_().split("<svg", 1)
        assert "<table>" in tables
        ElementTree.fromstring("<svg" + chart.partition("</svg>")[0] + "</svg>")
        assert "var(" not in chart, "a notebook has none of the page's colours"


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (lambda where: castwise.run("resnet50", precision="fp32,bf16-mixed", results=where), ("run", "resnet50")),
        (lambda where: castwise.tune("resnet50", results=where, **QUIET), ("tune", "resnet50")),
        (lambda where: castwise.max_batch("resnet50", results=where, **QUIET), ("max-batch", "resnet50")),
    ],
    ids=["run", "tune", "max_batch"],
)
def test_a_dict_is_what_the_command_prints_as_json(
    function: Any, arguments: tuple[str, ...], engine: FakeEngine, command: CommandLine
) -> None:
    store = Store(command.results)
    for precision, seed in itertools.product(("fp32", "bf16-mixed"), range(5)):  # what is known of the accuracy
        spec = fake_training(precision, {"validate_each_epoch": True}, seed=seed)
        store.save(fake_run(spec, environment=engine.environment))
    found = function(command.results)
    done = command(
        *arguments,
        *("--precision", "fp32,bf16-mixed", "--results", command.results, "--format", "json"),
        engine=engine,
    )
    printed, own = json.loads(done.out), json.loads(json.dumps(found.to_dict()))
    for document in (printed, own):  # that of the command is from records
        for name in ("seconds", "num_recorded", "sentences"):
            document.pop(name, None)
    assert printed == own
    assert own["schema_version"] == 1
    assert all(advice["accuracy"].startswith("as good as fp32") for advice in own.get("advice", ()))


def test_a_data_frame_has_the_columns_of_the_export(engine: FakeEngine, command: CommandLine) -> None:
    pandas = pytest.importorskip("pandas")
    found = castwise.run("resnet50", precision="fp32,bf16-mixed", results=command.results)
    frame = found.to_pandas()
    cells = json.loads(command("export", command.results, "--level", "cells", "--format", "json", engine=engine).out)
    assert [*frame.columns, "file"] == list(cells[0])
    assert list(frame["precision"]) == ["fp32", "bf16-mixed"]
    assert frame["speedup"][1] == found.rows[1].speedup
    assert pandas.isna(frame["verdict"][0])
    assert str(frame["batch_size"].dtype) == "Int64"
    report = castwise.report(command.results)
    assert report.to_dict()["cells"] == cells
    # A wider margin is for both.
    wide = castwise.run("resnet50", precision="fp32,tf32", margin=0.99, results=command.results)
    assert list(wide.to_pandas()["verdict"])[1] == wide.rows[1].verdict.kind == "same"  # type: ignore[union-attr]


def test_a_report_is_written_only_if_a_file_is_named(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    castwise.run("resnet50", precision="fp32,bf16-mixed", results="records")
    assert castwise.report("records").output is None
    assert [path.name for path in tmp_path.iterdir()] == ["records"]
    found = castwise.report(["records"], output="report.md", precision="bf16-mixed")
    assert "bf16-mixed" in Path("report.md").read_text()
    assert {trial.spec.precision for trial in found.trials} == {"bf16-mixed"}
    assert "report.md" in repr(found)
    assert "resnet50" in str(found)
    with pytest.raises(UsageError, match="There is no folder or file 'nowhere'"):
        castwise.report("nowhere")


WITHOUT_PANDAS = """\
import sys
sys.modules["pandas"] = None
import castwise
try:
    castwise.report(sys.argv[1]).to_pandas()
except castwise.UsageError as error:
    print(error)
"""


def test_without_pandas_the_error_names_the_extra(engine: FakeEngine, tmp_path: Path) -> None:
    castwise.run("resnet50", precision="fp32", rounds=1, results=tmp_path)
    environment = os.environ | {"PYTHONPATH": str(Path(castwise.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PANDAS, tmp_path], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "A data frame needs pandas: pip install 'castwise[pandas]'.\n", done.stderr
