"""`castwise why` and `castwise.why`, on the fake engine; and what they print of an H100's records."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import CommandLine, Outcome
from fake_engine import FakeEngine, Fault, fake_environment, fake_profile, fake_spec, fake_trial

import castwise
from castwise.analysis.causes import diagnose
from castwise.analysis.result_table import rows_of_steps
from castwise.records.schema import Trial
from castwise.records.store import load_folder
from castwise.show.console import SafeConsole
from castwise.show.presentation import print_parts
from castwise.show.why_report import kernel_lines, present

RECORDS = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "records" / "why"
WORKLOADS = sorted(path.name.removesuffix("-default.json") for path in RECORDS.glob("*-default.json"))
TWO = ("resnet50", "--precision", "fp32,bf16-mixed")
EXPLAINED = ["default", "fp32", "tf32", "fp16-mixed", "bf16-mixed"]


def why(command: CommandLine, *arguments: str | Path, engine: FakeEngine | None = None) -> Outcome:
    """Run `castwise why ARGUMENTS --results ...`."""
    engine = engine or FakeEngine()
    engine.exclusive = False
    return command("why", *arguments, "--results", command.results, engine=engine)


def test_causes_come_with_evidence_and_what_to_try(command: CommandLine) -> None:
    done = why(command, *TWO)
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0] == "resnet50, batch 256, synthetic data"
    assert lines[2].split() == ["precision", "step", "×", "fp32", "products", "data", "update", "idle"]
    (first,) = [number for number, line in enumerate(lines) if line.startswith("bf16-mixed: ")]
    assert lines[first] == "bf16-mixed: memory, at most 44 % of the step."
    assert lines[first + 1].startswith("    44 % of the step only moves data, most of it normalisation and ")
    assert lines[first + 2] == "    Try torch.compile, which fuses it (--techniques compile)."
    assert "Not known: no counters of the GPU: " in done.out


def test_a_noisy_machine_is_said_as_run_says_it() -> None:
    found = diagnose(rows_of_steps([fake_trial(fake_spec("fp32"), step_seconds=(0.1, 0.2) * 4)]))
    assert "- noisy: fp32 (blocks spread by 67 %)" in present(found).text("markdown")
    assert "a quiet machine, or a larger batch" in present(found, verbose=True).text("markdown")
    assert json.loads(present(found).text("json"))["warnings"][0]["name"] == "noisy"


@pytest.mark.parametrize("workload", [*WORKLOADS, ""])
@pytest.mark.parametrize("first", ["default", "fp32"])
def test_two_precisions_fit_on_a_terminal_of_80_columns(
    command: CommandLine, monkeypatch: pytest.MonkeyPatch, workload: str, first: str
) -> None:
    if workload:
        paths = (RECORDS / f"{workload}-{precision}.json" for precision in (first, "bf16-mixed"))
        console = SafeConsole(width=80, force_terminal=True, record=True)
        print_parts(
            present(diagnose(rows_of_steps([Trial.model_validate_json(path.read_text()) for path in paths]))).parts,
            console,
        )
        lines = console.export_text().splitlines()
    else:
        monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stdout for a terminal
        monkeypatch.setenv("COLUMNS", "80")
        printed = why(command, "resnet50", "--precision", f"{first},bf16-mixed").out
        lines = re.sub(r"\x1b\[[\d;]*m", "", printed).splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "nan" in line or "None" in line]


def test_loops_have_one_line_each_on_a_terminal_of_80_columns() -> None:
    paths = [RECORDS / f"resnet50-{name}.json" for name in ("default", "bf16-mixed", "bf16-mixed-channels-last")]
    console = SafeConsole(width=80, force_terminal=True, record=True)
    print_parts(
        present(diagnose(rows_of_steps([Trial.model_validate_json(path.read_text()) for path in paths]))).parts, console
    )
    lines = console.export_text().splitlines()
    assert [line.split()[1] for line in lines[3:6]] == ["none", "none", "channels-last"]
    assert lines[6] == "  left out, the terminal is too narrow: update (--format json has them)"


def test_kernels_and_modules_are_printed_if_asked_for(command: CommandLine) -> None:
    without, done = why(command, *TWO), why(command, *TWO, "--kernels")
    assert "fake_gemm" not in without.out
    assert done.out.startswith(without.out)
    own = done.out.removeprefix(without.out)
    assert " ".join(own.split()).count("the kernels that take longest, of 3 in a step of ") == 2
    assert re.search(r"50\.0 ms +1× +tensor core product bf16: +fake_gemm|fake_gemm", own)
    assert "80.0 ms  layer1" in own
    assert "10.0 ms  loss and optimizer" in own


@pytest.mark.parametrize("path", sorted(RECORDS.glob("*.json")), ids=lambda path: path.stem)
def test_kernels_and_modules_fit_into_80_columns(path: Path) -> None:
    (found,) = diagnose(rows_of_steps([Trial.model_validate_json(path.read_text())]))
    assert max(map(len, kernel_lines(found))) <= 80 - len("    ")


def test_json_and_markdown_have_the_same(command: CommandLine) -> None:
    found = json.loads(why(command, *TWO, "--format", "json").out)
    assert found["schema_version"] == 1
    assert [each["precision"] for each in found["diagnoses"]] == ["fp32", "bf16-mixed"]
    mixed = found["diagnoses"][1]
    assert mixed["speedup"] == pytest.approx(2.5)
    assert sum(mixed["class_shares"].values()) + mixed["idle_share"] == pytest.approx(1)
    assert [(cause["name"], cause["technique"]) for cause in mixed["causes"]] == [("memory", "compile")]
    assert mixed["profile"]["kernels"][0]["name"] == "fake_gemm"
    markdown = why(command, *TWO, "--format", "markdown", "--kernels").out
    assert "| precision | step |" in markdown
    assert "**bf16-mixed: memory, at most 44 % of the step.**" in markdown
    assert "- 44 % of the step only moves data" in markdown
    assert "```text\n" in markdown


def test_a_second_call_measures_nothing(command: CommandLine) -> None:
    first = why(command, *TWO)
    second = why(command, *TWO)
    assert first.engine.measured_precisions == ["fp32", "bf16-mixed"]
    assert (second.engine.measured, second.out) == ([], first.out)
    assert len(command.records()) == 2


def test_after_a_run_one_more_process_of_each_is_measured(command: CommandLine) -> None:
    command.run(*TWO, "--rounds", "3")
    done = why(command, *TWO)
    assert {(spec.precision, spec.repeat) for spec in done.engine.measured} == {("fp32", 3), ("bf16-mixed", 3)}
    trials, problems = load_folder(command.results)
    assert (len(trials), problems) == (8, [])
    assert len({trial.spec.key for trial in trials}) == 8
    assert [trial.spec.repeat for trial in trials if trial.profile is not None] == [3, 3]
    assert command.run(*TWO, "--rounds", "3").engine.measured == [], "a record with a profile is as good"
    assert why(command, *TWO).engine.measured == []


def test_run_says_why_the_precision_is_no_faster_if_records_show_it(command: CommandLine) -> None:
    before = command.run(*TWO, "--rounds", "2")
    why(command, *TWO)
    after = command.run(*TWO, "--rounds", "2")
    assert "Limited by" not in before.out
    (line,) = [line.strip() for line in after.out.splitlines() if "Limited by: " in line]
    assert line.startswith("Limited by: bf16-mixed: 44 % of the step only moves data")
    assert line.endswith(f". `castwise why resnet50 --results {command.results}` says more.")
    advice = json.loads(command.run(*TWO, "--rounds", "2", "--format", "json").out)["advice"]
    assert advice[0]["limit"].startswith("bf16-mixed: 44 %")


def test_a_trace_is_a_file_or_a_folder(command: CommandLine, tmp_path: Path) -> None:
    def traces(*arguments: str | Path) -> list[Path | None]:
        return [session.trace for session in why(command, *arguments).engine.sessions if session.trace]

    one, file, folder = ("resnet50", "--precision", "fp32"), tmp_path / "trace.json", tmp_path / "traces"
    assert traces(*one, "--trace", file) == [file]
    assert traces(*one, "--trace", file) == [file], "although the profile is on record"
    assert {path.parent for path in traces(*TWO, "--trace", folder) if path} == {folder}
    refused = why(command, *TWO, "--trace", file)
    assert (refused.code, refused.engine.measured) == (2, [])
    assert "has room for one configuration's trace, and there are 2. Name a folder" in refused.error_lines[-1]


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((9, 0), EXPLAINED), ((7, 5), ["fp32", "fp16-mixed", "bf16-mixed"]), (None, ["fp32", "fp16-mixed", "bf16-mixed"])],
)
def test_without_a_wish_five_precisions_are_explained(
    command: CommandLine, capability: tuple[int, int] | None, expected: list[str]
) -> None:
    done = why(command, "mnist-cnn", engine=FakeEngine(environment=fake_environment(capability)))
    assert done.code == 0
    assert {spec.precision for spec in done.engine.measured} == set(expected)
    assert [line.split()[0] for line in done.out.splitlines() if " ms " in line] == expected
    assert "TF32" not in done.err


def test_a_gpu_that_cannot_be_profiled_says_what_is_missing(command: CommandLine) -> None:
    missing = "torch's profiler saw no kernel: it may lack the permission, or another profiler is attached"
    refused = fake_profile(missing=missing, class_seconds={}, kernels=(), module_seconds={}, num_steps=0)
    done = why(command, *TWO, "--kernels", engine=FakeEngine(profiles={"bf16-mixed": refused}))
    assert done.code == 0
    assert "bf16-mixed: no cause found. What takes its time is not known." in done.out
    assert f"Not known (bf16-mixed): {missing}." in done.out
    assert "bf16-mixed batch 256: no kernels, because no step was profiled" in done.out


@pytest.mark.parametrize("kind", ["table", "markdown", "json"])
def test_a_precision_that_fails_is_there_with_its_reason(command: CommandLine, kind: str) -> None:
    engine = FakeEngine(faults={"bf16-mixed": Fault("oom")})
    done = why(command, *TWO, "--format", kind, engine=engine)
    assert done.code == 0
    assert "CUDA out of memory" in done.out
    if kind == "json":
        found = json.loads(done.out)
        assert [each["precision"] for each in found["diagnoses"]] == ["fp32"]
        assert [(each["precision"], each["status"]) for each in found["left_out"]] == [("bf16-mixed", "oom")]
    else:
        assert re.search(r"^(\| )?bf16-mixed[ |]+oom\b", done.out, re.MULTILINE), "in the table"


def test_if_all_fail_the_reasons_are_printed(command: CommandLine) -> None:
    engine = FakeEngine(faults={"fp32": Fault("oom"), "bf16-mixed": Fault("crash")})
    done = why(command, *TWO, engine=engine)
    assert done.code == 1
    assert ("out of memory" in done.out, "illegal memory access" in done.out) == (True, True)


def test_records_without_a_profile_have_a_table_and_say_so(command: CommandLine) -> None:
    command.run(*TWO, "--rounds", "1")
    found = diagnose(rows_of_steps(load_folder(command.results)[0]))
    console = SafeConsole(width=80, record=True)
    print_parts(present(found, kernels=True).parts, console)
    text = console.export_text()
    assert "moving" not in text
    assert "fp32: no cause found. What takes its time is not known." in text
    assert "resnet50 fp32 batch 256: no kernels, because no step was profiled" in text


def test_python_has_the_diagnoses(engine: FakeEngine, tmp_path: Path) -> None:
    options: dict[str, Any] = {"precision": ["fp32", "bf16-mixed"], "results": tmp_path, "progress": False}
    found = castwise.why("resnet50", **options)
    assert repr(found) == "Diagnoses({'fp32': 'memory', 'bf16-mixed': 'memory'})"
    assert [each.row.precision for each in found.found] == ["fp32", "bf16-mixed"]
    assert found.found[1].causes[0].technique == "compile"
    assert len(found.trials) == 2
    assert found.to_dict()["diagnoses"][1]["precision"] == "bf16-mixed"
    assert "bf16-mixed: memory, at most 44 % of the step." in str(found)
    assert "Where the time of a step goes" in found._repr_html_()
    again = castwise.why("resnet50", trace=tmp_path / "traces", **options)
    assert len(again.trials) == 4
    assert {session.trace.parent for session in engine.sessions if session.trace} == {tmp_path / "traces"}
