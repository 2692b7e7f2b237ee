"""castwise report and castwise export, from the command line: what they read, write and refuse."""

import csv
import io
import json
import shutil
import sys
import zlib
from pathlib import Path

import pytest
from conftest import CommandLine
from fake_engine import fake_spec, fake_trial
from fake_records import every_kind, many, other_machine, poisoned, steady, stored
from programs import run_fake_cli

from castwise.records.store import Store
from castwise.report import files

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "records"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return stored(tmp_path / "h200", [steady("fp32"), steady("bf16-mixed")])


def test_a_report_is_one_file_that_loads_nothing(
    command: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    stored(Path("castwise-results"), [steady(name, repeat) for repeat in range(3) for name in ("fp32", "bf16-mixed")])
    output = Path("castwise-report.html")
    outcome = command("report")
    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err.startswith(f"{output}: 6 trials, ")
    page = output.read_text(encoding="utf-8")
    assert "take bf16-mixed" in page
    assert "default-src &#39;none&#39;; script-src &#39;sha256-" in page
    assert "<script src" not in page
    assert '<link rel="stylesheet' not in page
    assert str(tmp_path) not in page
    assert {path.name for path in Path().iterdir()} == {"castwise-report.html", "castwise-results"}


def test_the_example_is_real_and_small(command: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    without = command("report")
    assert without.code == 2
    assert "castwise report --example" in without.err
    assert command("report", "--example").code == 0
    page = Path("castwise-example.html").read_text(encoding="utf-8")
    assert all(each in page for each in ("3.66×", "bf16-master", "Limited by", "H100"))
    assert command("report", "--example", tmp_path).code == 2

    shipped = list(Path(files.__file__).with_name("example").glob("*.json"))
    measured = {path.name: path for path in BENCHMARKS.rglob("*.json")}
    assert all(path.read_bytes() == measured[path.name].read_bytes() for path in shipped)
    assert sum(len(zlib.compress(path.read_bytes())) for path in shipped) < 200_000, "in the wheel"


def test_a_card_is_the_answer_as_a_picture(command: CommandLine, tmp_path: Path) -> None:
    records = [steady(name, repeat) for repeat in range(3) for name in ("fp32", "bf16-mixed")]
    folder, output = stored(tmp_path / "h200", records), tmp_path / "answer.svg"
    outcome = command("report", folder, "--card", output)
    assert (outcome.code, outcome.err) == (0, f"{output}: 1 kB\n")
    assert "take bf16-mixed" in output.read_text(encoding="utf-8")
    assert not list(tmp_path.rglob("*.html")), "only what was asked for"
    search = stored(
        tmp_path / "search", [fake_trial(fake_spec(memory_limit_bytes=2**34), status="oom", step_seconds=())]
    )
    refused = command("report", search, "--card", output)
    assert (refused.code, refused.error_lines[0].startswith("castwise: --card shows an answer")) == (2, True)


def test_the_same_records_give_the_same_page(command: CommandLine, results: Path, tmp_path: Path) -> None:
    for name in ("one.html", "two.html"):
        assert command("report", results, "-o", tmp_path / name).code == 0
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


def test_markdown_of_every_kind_of_record_and_of_hostile_ones(command: CommandLine, tmp_path: Path) -> None:
    folder = stored(tmp_path / "all", [*every_kind(), *(poisoned(trial) for trial in every_kind()[:3])])
    assert command("report", folder, "-o", tmp_path / "report.md").code == 0
    text = (tmp_path / "report.md").read_text()
    assert "<details><summary>wrn-28-10 on cifar10: training" in text
    assert "| batch 256 | bf16-mixed |" in text
    assert "<script" not in text
    assert "<img" not in text


@pytest.mark.parametrize("command_name", ["report", "export"])
def test_a_path_without_records_is_one_line(command: CommandLine, tmp_path: Path, command_name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "alien").mkdir()
    (tmp_path / "alien" / "package.json").write_text("{}")
    (tmp_path / "photo.png").write_bytes(b"\x89PNG\xff\xfe")
    reasons = {
        "nowhere": "There is no folder or file",
        "empty": "There are no records in",
        "alien": "package.json",
        "photo.png": "not a castwise record",
    }
    for name, reason in reasons.items():
        outcome = command(command_name, tmp_path / name)
        assert (outcome.code, len(outcome.error_lines)) == (2, 1)
        assert reason in outcome.err


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"}}", b"}", "not a castwise record: no JSON, or cut off"),
        (b'"schema_version": 1', b'"schema_version": 2', "a record of schema 2"),
        (b'"seconds": 0.1', b'"seconds": Infinity', "finite number"),
    ],
)
def test_a_file_that_is_no_record_is_named_and_the_others_count(
    command: CommandLine, results: Path, tmp_path: Path, old: bytes, new: bytes, reason: str
) -> None:
    good = next(iter(results.rglob("*fp32*.json"))).read_bytes()
    bad = good[: len(good) // 2] if old == b"}}" else good.replace(old, new, 1)
    assert bad != good
    (results / "bad.json").write_bytes(bad)
    output = tmp_path / "report.html"
    first, second = command("report", results, "-o", output).error_lines
    assert f"{output}: 2 trials" in first
    assert second.startswith("Left out: h200/bad.json: ")
    assert reason in second
    assert "h200/bad.json" in output.read_text()


def test_among_many_alien_files_a_newer_record_is_named(command: CommandLine, results: Path, tmp_path: Path) -> None:
    record = next(results.rglob("*.json")).read_bytes()
    (results / "z-newer.json").write_bytes(record.replace(b'"schema_version": 1', b'"schema_version": 7'))
    for number in range(6):
        (results / f"a-{number}.json").write_text("{}")
    lines = command("report", results, "-o", tmp_path / "report.html").error_lines
    assert lines[1].startswith("Left out: h200/z-newer.json: a record of schema 7")
    assert lines[-1] == "Left out: 2 more files without a record to read"


def test_a_record_counts_once(command: CommandLine, results: Path, tmp_path: Path) -> None:
    output = tmp_path / "report.md"
    record = next(iter(results.rglob("*.json")))
    outcome = command("report", results, results / "..", record, "-o", output)
    assert f"{output}: 2 trials" in outcome.err
    assert "copies of another" not in output.read_text()
    shutil.copytree(results, tmp_path / "copy")
    assert command("report", results, tmp_path / "copy", "-o", output).code == 0
    assert "2 records are copies of another, and counted once" in output.read_text()


def test_workloads_and_precisions_narrow_it_down(command: CommandLine, tmp_path: Path) -> None:
    folder = stored(tmp_path / "all", every_kind())
    output = tmp_path / "report.html"
    outcome = command("report", folder, "-o", output, "--workload", "resnet50", "--precision", "O0,bf16-mixed")
    assert f"{output}: 13 trials" in outcome.err
    outcome = command("report", folder, "-o", output, "--workload", "gru-lm")
    assert (outcome.code, len(outcome.error_lines)) == (2, 1)
    outcome = command("report", folder, "-o", output, "--precision", "fp65")
    assert (outcome.code, "No precision named 'fp65'" in outcome.err) == (2, True)


def test_an_unwritable_output_is_one_line(command: CommandLine, results: Path, unwritable: Path) -> None:
    outcome = command("report", results, "-o", unwritable / "report.html")
    assert (outcome.code, len(outcome.error_lines)) == (3, 1)
    outcome = command("export", results, "--format", "csv", "-o", unwritable / "trials.csv")
    assert (outcome.code, len(outcome.error_lines)) == (3, 1)


@pytest.mark.parametrize(
    ("module", "arguments", "extra"),
    [
        ("jinja2", ["report", "-o", "x.html"], "castwise[report]"),
        ("pyarrow", ["export", "-o", "x.parquet"], "castwise[parquet]"),
    ],
)
def test_a_missing_extra_is_named(  # noqa: PLR0917  a fixture each
    command: CommandLine,
    results: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    arguments: list[str],
    extra: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    outcome = command(arguments[0], results, *arguments[1:])
    assert (outcome.code, len(outcome.error_lines)) == (2, 1)
    assert extra in outcome.err


MORE_THAN_REPORT = "cloudpickle,pandas,pyarrow,lightning,transformers,accelerate"


@pytest.mark.parametrize(
    "arguments",
    [
        ("report", "h200", "-o", "report.html"),
        ("report", "h200", "--format", "table"),
        ("compare", "h200", "a100", "-o", "both.html"),
        ("compare", "h200", "a100", "--format", "markdown"),
        ("export", "h200", "--level", "cells", "-o", "cells.csv"),
    ],
    ids=" ".join,
)
def test_commands_that_read_records_need_only_the_extra_report(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    stored(tmp_path / "h200", [steady("fp32"), steady("bf16-mixed")])
    stored(tmp_path / "a100", [other_machine(steady("fp32")), other_machine(steady("bf16-mixed"))])
    done = run_fake_cli(*arguments, cwd=tmp_path, env={"CASTWISE_FAKE_MISSING": MORE_THAN_REPORT})
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    written = tmp_path / arguments[-1]
    assert (written.stat().st_size if written.suffix else len(done.stdout)) > 500


def test_every_chart_becomes_a_picture(command: CommandLine, results: Path, tmp_path: Path) -> None:
    outcome = command("report", results, "--charts", tmp_path / "charts")
    assert outcome.code == 0, outcome.err
    names = {path.name for path in (tmp_path / "charts").iterdir()}
    assert names == {"resnet50-throughput.svg", "resnet50-memory.svg"}
    drawing = (tmp_path / "charts" / "resnet50-throughput.svg").read_text()
    assert "resnet50, Fake GPU, 2000-01-01" in drawing
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".html"] == []


def test_markdown_is_not_too_long_for_github(command: CommandLine, tmp_path: Path) -> None:
    folder = stored(tmp_path / "many", [steady("fp32", workload=f"{'model' * 20}-{n}") for n in range(150)])
    text = command("report", folder, "--format", "markdown").out
    assert 50_000 < len(text) < 65_536
    assert "more comparisons in the HTML report" in text


def test_export_prints_csv_and_writes_the_format_of_a_name(command: CommandLine, results: Path, tmp_path: Path) -> None:
    output = tmp_path / "blocks.json"
    outcome = command("export", results, "--level", "blocks", "-o", output)
    assert outcome.err.startswith(f"{output}: blocks as json, ")
    assert len(json.loads(output.read_text())) == 16
    outcome = command("export", results)
    assert outcome.code == 0
    rows = list(csv.DictReader(io.StringIO(outcome.out)))
    assert {row["precision"] for row in rows} == {"fp32", "bf16-mixed"}
    assert rows[0]["file"].startswith("h200/fake-gpu-")


@pytest.mark.parametrize(
    ("name", "arguments", "word"),
    [
        ("export", ["--format", "excel"], "No format named 'excel'"),
        ("export", ["--level", "cell"], "Did you mean cells?"),
        ("export", ["-o", "trials.xls"], "--format"),
        ("export", ["--format", "parquet"], "--output"),
        ("report", ["-o", "report.pdf"], "one of .html, .md."),
        ("report", ["--format", "pdf"], "'pdf' is not one of 'table', 'markdown'"),
        ("report", ["--format", "table", "-o", "x.html"], "name one of them"),
    ],
)
def test_a_format_that_cannot_be_written_is_one_line(
    command: CommandLine, results: Path, name: str, arguments: list[str], word: str
) -> None:
    outcome = command(name, results, *arguments)
    assert (outcome.code, len(outcome.error_lines)) == (2, 1)
    assert word in outcome.err


@pytest.mark.slow
def test_a_thousand_precisions_and_batches_make_a_page(command: CommandLine, tmp_path: Path) -> None:
    store = Store(tmp_path / "many")
    machine = store.machine_folder(steady().environment)
    machine.mkdir(parents=True)
    for number, trial in enumerate(many(1000)):
        spec = trial.spec.model_copy(update={"precision": f"int{number}"})
        (machine / f"{number}.json").write_text(trial.model_copy(update={"spec": spec}).model_dump_json())
    output = tmp_path / "report.html"
    outcome = command("report", tmp_path / "many", "-o", output)
    assert outcome.code == 0
    assert "1,000 trials" in outcome.err
    assert output.stat().st_size < 6_000_000


def test_a_report_in_the_terminal(command: CommandLine, tmp_path: Path) -> None:
    folder = stored(tmp_path / "all", every_kind())
    outcome = command("report", folder, "--format", "table")
    assert (outcome.code, outcome.err) == (0, "")
    for words in ("models in 13 settings on Fake GPU", "3 runs each", "wrn-28-10 on cifar10: training", "oom"):
        assert words in outcome.out
    assert command("report", folder, "--format", "markdown").out.startswith("**6 models in 13 settings on Fake GPU: ")


def test_losses_that_are_no_numbers_make_a_report(command: CommandLine, tmp_path: Path) -> None:
    losses = (float("nan"), float("inf")) * 3
    trial = fake_trial(fake_spec(), step_seconds=(0.1,) * 6, losses=losses, status="diverged", message="nan")
    folder = stored(tmp_path / "nan", [trial])
    assert command("report", folder, "-o", tmp_path / "nan.html").code == 0
    assert command("report", folder, "--format", "table").code == 0
    assert command("export", folder).code == 0
