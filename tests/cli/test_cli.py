import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CommandLine
from fake_engine import FakeEngine, step_time_of
from programs import PATIENCE_SECONDS, run_fake_cli
from rich.console import Console

import castwise
from castwise.cli import app, compare, export, listings, max_batch, report, run, suite, tune
from castwise.cli.options import completion_of
from castwise.registry.gpus import GPU_MODELS
from castwise.registry.precisions import PRECISIONS
from castwise.registry.techniques import SETS, TECHNIQUES
from castwise.registry.workloads import WORKLOADS
from castwise.show.presentation import print_parts
from castwise.spec.options import RunOptions, options_of

ALL = [row.name for row in PRECISIONS]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--help",), "In which numeric precision"),
        (("--version",), castwise.__version__),
        (("list", "devices"), "NVIDIA H200"),
        (("list", "techniques"), "channels-last"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_commands_that_do_not_measure_import_no_torch(arguments: tuple[str, ...], word: str) -> None:
    done = run_fake_cli(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert word in done.stdout


def test_a_whole_run_outside_measure_imports_no_torch(tmp_path: Path) -> None:
    done = run_fake_cli("run", "resnet50", cwd=tmp_path, env={"CASTWISE_FAKE_FAULTS": "fp16-true=nan,tf32=oom"})
    assert done.returncode == 0, done.stderr
    assert "take bf16-mixed" in done.stdout or "bf16-mixed looks faster (" in done.stdout, "on a busy machine"
    assert "Traceback" not in done.stderr


def test_python_dash_m_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "castwise", "--version"],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"castwise {castwise.__version__}\n", "")


def test_without_a_command_the_next_steps_are_shown(command: CommandLine) -> None:
    done = command()
    assert (done.code, done.err, done.engine.sessions) == (0, "", [])
    assert len(done.out.splitlines()) <= 12
    assert all(len(line) <= 80 for line in done.out.splitlines() + command("--help").out.splitlines())
    for words in ("doctor", "run -- python train.py", "run FILE.py:build", "tune FILE.py:build", "report", "--help"):
        assert f"castwise {words}" in done.out


HELP_GROUPS = {
    "run": ["Arguments", "What to measure", "How long", "Machine", "Output", "Records", "Prices"],
    "tune": ["Arguments", "What to measure", "How long", "Machine", "Output", "Records"],
    "max-batch": ["Arguments", "What to measure", "How long", "Machine", "Output", "Records"],
    "suite": ["Arguments", "What to measure", "How long", "Machine", "Output", "Records"],
    "report": ["Arguments", "Output", "Records"],
    "compare": ["Arguments", "What to measure", "Output", "Records"],
    "export": ["Arguments", "Output", "Records"],
}


@pytest.mark.parametrize("name", HELP_GROUPS)
def test_help_groups_options_and_fits_a_terminal(name: str) -> None:
    done = run_fake_cli(name, "--help", env={"COLUMNS": "80"})
    lines = done.stdout.splitlines()
    assert re.findall(r"^╭─ (.*?) ─+╮$", done.stdout, re.MULTILINE) == HELP_GROUPS[name]
    assert max(map(len, lines)) <= 80
    assert not re.search(r"<\w+>", done.stdout), "no Python types"
    shown = re.findall(r"^│ \*? *(--[a-z-]+)", done.stdout, re.MULTILINE)
    assert len(shown) >= 6
    assert "--help" in shown
    assert all(not flag.endswith("-") for flag in shown)
    sources = {"run": run, "tune": tune, "max-batch": max_batch, "suite": suite, "report": report, "export": export}
    for line in sources.get(name, compare).EXAMPLES.splitlines():
        assert line.strip() in [each.strip() for each in lines], "no example is wrapped"


def test_help_shows_every_option_whole(command: CommandLine) -> None:
    done = run_fake_cli("run", "--help-all", env={"COLUMNS": "80"})
    for option in [*options_of(RunOptions), *options_of(run.RunPrintOptions)]:
        assert option.label in done.stdout.split(), option.label


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("workloads", [row.name for row in WORKLOADS]),
        ("precisions", ALL),
        ("devices", [row.names[0] for row in GPU_MODELS]),
        ("techniques", [*(row.name for row in TECHNIQUES), *SETS]),
    ],
)
def test_a_list_has_every_row_whole(command: CommandLine, what: str, names: list[str]) -> None:
    done = command("list", what)
    assert (done.code, done.err) == (0, "")
    for name in names:
        assert any(line.strip().startswith(name) for line in done.out.splitlines()), name
    assert "…" not in done.out


def test_list_alone_lists_everything(command: CommandLine) -> None:
    done = command("list")
    assert done.code == 0
    for name in ("mnist-cnn", "bf16-mixed", "channels-last", "NVIDIA H200", "wrn-cifar10"):
        assert name in done.out


def test_the_list_of_gpus_fits_a_narrow_terminal() -> None:
    shown = shown_list("devices", 80)
    assert max(map(len, shown.splitlines())) <= 80
    assert re.search(r"^  NVIDIA H200 +141 +67 +494\.5 +989\.5 +989\.5 +1979 +4\.8$", shown, re.MULTILINE)


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("what", app.Listing)
def test_a_list_breaks_no_word_on_a_narrow_terminal(what: str, width: int) -> None:
    shown = shown_list(what, width)
    assert max(map(len, shown.splitlines())) <= width
    wide = "left out, the terminal is too narrow: (a pipe gets it) " + shown_list(what, 1000)
    assert set(shown.split()) <= set(wide.split())


def shown_list(what: str, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    print_parts(getattr(listings, what)(), console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_two_lists_of_gpus_name_each_other_first(command: CommandLine) -> None:
    assert "`castwise list devices`" in command("list", "gpus").out.splitlines()[0]
    assert "`castwise list gpus`" in command("list", "devices").out.splitlines()[0]


@pytest.mark.parametrize("name", ["run", "why", "tune", "max-batch", "fits", "accuracy", "suite", "compare", "list"])
def test_help_breaks_no_word_on_a_narrow_terminal(
    command: CommandLine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    shown = []
    for width in ("60", "400"):
        monkeypatch.setenv("COLUMNS", width)
        shown.append(re.sub("[│╭╮╰╯─]", " ", command(name, "--help").out))
    narrow, wide = shown
    assert max(map(len, narrow.splitlines())) <= 60 < max(map(len, wide.splitlines()))
    assert set(narrow.split()) <= set(wide.split())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("run", "mnist-cnn", "--rounds", "0"), "--rounds takes a whole number from 1, not '0'."),
        (("tune", "mnist-cnn", "--batch-size", "0"), "--batch-size takes a whole number from 1, not '0'."),
        (("report", "--results", "h200"), "report takes its folders without --results: castwise report h200"),
        (
            ("export", "--results", "two words"),
            "export takes its folders without --results: castwise export 'two words'",
        ),
        (("lst",), "No such command 'lst'. Did you mean 'list'? `castwise --help` says what there is."),
        (
            ("run", "--precison", "fp32"),
            "No such option: --precison. Did you mean --precision? `castwise run --help` says what there is.",
        ),
        (("run", "--budget"), "Option '--budget' requires an argument."),
        (
            ("tune", "mnist-cnn,resnet50"),
            "WORKLOAD is one name here, and 'mnist-cnn,resnet50' is a list. Give one command for each.",
        ),
        *(
            (
                (name, "--", "python", "early.py"),
                "'python early.py' is a script. castwise run, why, tune and fits take one.",
            )
            for name in ("max-batch", "accuracy")
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistyped_command_is_one_line(command: CommandLine, arguments: tuple[str, ...], line: str) -> None:
    done = command(*arguments)
    assert (done.code, done.out, done.err) == (2, "", f"castwise: {line}\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "--seconds", "long"), "'--seconds': "),
        (("run", "--xyz", "60s"), "No such option: --xyz"),
        (("run", "--format", "xml"), "'xml' is not one of 'table', 'json', 'markdown', 'csv'"),
        (("list", "suites", "devices"), "unexpected extra argument"),
        (("list", "foo"), "'what': 'foo' is not one of 'workloads'"),
        (("max-batch",), "Missing argument 'WORKLOAD', as in: castwise max-batch resnet50."),
        (("fits",), "Missing argument 'WORKLOAD', as in: castwise fits resnet50."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_typer_refuses_is_one_line(command: CommandLine, arguments: tuple[str, ...], words: str) -> None:
    done = command(*arguments)
    (line,) = done.error_lines
    assert (done.code, done.out, done.engine.sessions) == (2, "", [])
    assert words in line
    assert line.endswith(f". `castwise {arguments[0]} --help` says what there is.")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("max-batch", "mnist-cnn", "--device", "cpu"), "name a limit with --memory"),
        (("max-batch", "mnist-cnn", "--budget", "2s"), "A budget of 2 s is too short"),
        (("accuracy", "mnist-cnn", "--budget", "2s"), "A budget of 2 s is too short"),
        *(((name, "none.py:build"), "'none.py' does not exist") for name in ("max-batch", "accuracy", "tune", "fits")),
        *(
            ((name, "gpt2", "--precision", "bf17"), "No precision named 'bf17'")
            for name in ("max-batch", "accuracy", "fits")
        ),
        (("fits", "gpt2", "--gpu", "L5"), "No GPU named 'L5'"),
        (("accuracy", "resnet50"), "No suite trains 'resnet50'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_is_known_to_be_wrong_is_said_before_any_process(
    command: CommandLine, arguments: tuple[str, ...], words: str
) -> None:
    done = command(*arguments)
    assert (done.code, done.out, done.engine.sessions) == (2, "", [])
    assert words in done.error_lines[-1]


def test_options_reach_the_trials(command: CommandLine) -> None:
    lists = ("--precision", "fp32,bf16-mixed", "--batch-size", "4, 8", "--techniques", "none,channels-last")
    numbers = ("--device", "cpu", "--seconds", "6", "--timeout", "9", "--seed", "3", "--rounds", "1")
    done = command.run("resnet50, dpn92", *lists, *numbers, "--format", "json")
    assert done.code == 0, done.err
    assert [(spec.workload, spec.batch_size, spec.techniques, spec.precision) for spec in done.engine.measured] == [
        (workload, batch_size, techniques, precision)
        for workload in ("resnet50", "dpn92")
        for batch_size in (4, 8)
        for techniques in ((), ("channels-last",))
        for precision in ("fp32", "bf16-mixed")
    ]
    assert {(spec.device, spec.seed) for spec in done.engine.measured} == {("cpu", 3)}
    protocol = done.engine.measured[0].protocol
    assert (protocol.max_seconds, protocol.timeout_seconds) == (6.0, 9.0)
    rows = json.loads(done.out)["rows"]
    assert [row["loop_speedup"] is not None for row in rows[:4]] == [False, False, True, True]


def test_a_plain_run_gives_intervals_and_a_decision(command: CommandLine) -> None:
    done = command.run("resnet50", "--format", "json")
    found = json.loads(done.out)
    rows = {row["precision"]: row for row in found["rows"]}
    assert list(rows) == ALL
    assert all(row["processes"] >= 3 for row in rows.values())
    for name in ("default_speedup", "speedup"):
        low, high = (rows["bf16-mixed"][f"{name}_{end}"] for end in ("low", "high"))
        assert 1 < low <= rows["bf16-mixed"][name] <= high
    assert rows["bf16-mixed"]["speedup"] == pytest.approx(step_time_of("fp32") / step_time_of("bf16-mixed"))
    assert rows["bf16-mixed"]["default_speedup"] == pytest.approx(step_time_of("default") / step_time_of("bf16-mixed"))
    assert rows["default"]["default_speedup"] == rows["fp32"]["speedup"] == 1
    assert [rows[name]["verdict"] for name in ("default", "fp32", "tf32")] == [None, "slower", "faster"]
    (advice,) = found["advice"]
    assert (advice["decision"], advice["precision"], advice["command"]) == ("take", "bf16-mixed", None)


def test_one_round_is_undecided_and_its_command_decides(command: CommandLine) -> None:
    def advice_of(*arguments: str) -> dict[str, object]:
        done = command.run(*arguments, "--format", "json")
        assert done.code == 0, done.err
        (advice,) = json.loads(done.out)["advice"]
        return advice  # type: ignore[no-any-return]

    first = advice_of("resnet50", "--rounds", "1", "--batch-size", "64")
    assert (first["decision"], first["precision"], first["code"]) == ("undecided", None, None)
    name, subcommand, *arguments = shlex.split(str(first["command"]))
    assert (name, subcommand) == ("castwise", "run")
    assert advice_of(*arguments)["decision"] == "take"


def test_a_margin_alone_widens_what_is_the_same(command: CommandLine) -> None:
    done = command.run("resnet50", "--precision", "fp32,tf32", "--margin", "90%", "--format", "json")
    assert [row["verdict"] for row in json.loads(done.out)["rows"]] == [None, "same"]


@pytest.mark.parametrize("names", [("mnist-cnn", "resnet50"), ("mnist-cnn,", "resnet50")])
def test_workloads_are_separated_by_spaces_or_commas(command: CommandLine, names: tuple[str, ...]) -> None:
    done = command.run(*names, "--precision", "fp32", "--rounds", "1")
    assert [spec.workload for spec in done.engine.measured] == ["mnist-cnn", "resnet50"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("resnet49",), "No workload named 'resnet49'. Did you mean resnet"),
        (("resnet50", "--precision", "fp30"), "No precision named 'fp30'. Did you mean fp"),
        (("resnet50", "--precision", ","), "--precision is empty: ','."),
        (("resnet50", "--batch-size", "0"), "--batch-size takes whole numbers from 1, comma-separated, not '0'."),
        (("resnet50", "--batch-size", "²"), "not '²'."),
        (("resnet50", "--batch-size", "9" * 5000), "takes whole numbers from 1"),
        (("resnet50", "--loss-scale", "big"), "'big' is no loss scale."),
        (("resnet50", "--device", "cuda:9"), "The device 'cuda:9' cannot be opened"),
        (("mnist-cnn", "--data-set", "mnist"), "mnist: no train-images-idx3-ubyte[.gz] in"),
        (("resnet50", "--timeout", "-1"), "--timeout takes a duration above 0, such as 60s or 5min, not '-1'."),
        (
            ("resnet50", "--techniques", "chanels-last"),
            "No technique named 'chanels-last'. Did you mean channels-last,",
        ),
        (("resnet50", "--price-kwh", "-1"), "A price of -1 per kWh is impossible"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_impossible_request_is_one_line_and_exit_code_2(
    command: CommandLine, arguments: tuple[str, ...], message: str
) -> None:
    done = command.run(*arguments)
    assert (done.code, done.out) == (2, "")
    (line,) = done.error_lines
    assert line.startswith("castwise: ")
    assert message in line
    assert (done.engine.measured, command.records()) == ([], [])


def test_a_results_folder_that_cannot_be_written_is_exit_code_3(command: CommandLine, unwritable: Path) -> None:
    done = command("run", "resnet50", "--results", unwritable)
    assert (done.code, done.out) == (3, "")
    (line,) = done.error_lines
    assert f"'{unwritable}': Not a directory." in line
    assert done.engine.sessions == []


def test_without_torch_measuring_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for arguments in (["run", "resnet50", "--results", str(tmp_path)], ["doctor"]):
        monkeypatch.setattr(sys, "argv", ["castwise", *arguments])
        with pytest.raises(SystemExit) as stop:
            app.main()
        out, err = capsys.readouterr()
        assert stop.value.code == 1
        shown = [line.split()[0] for line in out.splitlines()]
        assert shown == (["This", "CPU", "system", "castwise"] if arguments == ["doctor"] else [])
        assert err.splitlines() == [
            "castwise: PyTorch is not installed, and nothing can be measured without it. "
            "Install it with: pip install 'castwise[measure]'"
        ]


@pytest.mark.parametrize("output", ["table", "json", "markdown", "csv"])
def test_results_go_to_stdout_and_everything_else_to_stderr(command: CommandLine, output: str) -> None:
    done = command.run("resnet50", "--precision", "fp32,tf32", "--format", output)
    assert done.code == 0
    assert "\x1b" not in done.out, "no colours in a pipe"
    assert "round 1: resnet50 fp32 batch 256: 9,634 images/s" in done.err
    assert "round 1" not in done.out
    assert "fp32" in done.out
    again = command.run("resnet50", "--precision", "fp32,tf32", "--format", output)
    assert again.out == done.out, "from records, the same is printed"
    assert again.error_lines[0] == "6 trials of earlier rounds are on record already."
    assert again.engine.measured == []


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    for arguments in (("list", "workloads"), ("run", "resnet50", "--results", str(tmp_path), "--format", "json")):
        reader, writer = os.pipe()
        os.close(reader)
        try:
            done = run_fake_cli(*arguments, stdout=writer)
        finally:
            os.close(writer)
        assert done.returncode == 1
        assert not [
            line for line in done.stderr.splitlines() if not line.startswith(("round ", "resnet50 batch 256: "))
        ]


def test_names_are_completed_behind_the_last_comma() -> None:
    assert completion_of("precisions")("fp32,bf16-t") == ["fp32,bf16-true"]
    assert completion_of("workloads")("resnet1") == ["resnet18", "resnet101", "resnet152"]
    assert completion_of("workloads")("xyz") == []
    assert completion_of("techniques")("none,channels-last+cuda-graph-") == ["none,channels-last+cuda-graph-8"]
    assert completion_of("suites")("tensor") == ["tensorcore"]


def test_the_examples_of_the_help_are_understood(
    command: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train_me.py").touch()
    examples = [line.split("castwise ", 1)[1] for line in run.EXAMPLES.splitlines() if "castwise " in line]
    assert len(examples) >= 4
    for example in examples:
        arguments = re.split(r"\s{3,}", example)[0].split()
        if "DIR" in arguments or "--" in arguments:
            continue  # it needs real data, or a script
        engine = FakeEngine(exclusive=False)
        assert command(*arguments, "--results", command.results, engine=engine).code == 0, example


def test_the_changelog_begins_with_this_version() -> None:
    changelog = Path(__file__).parents[2] / "CHANGELOG.md"
    assert re.findall(r"^## (\S+)", changelog.read_text(), re.MULTILINE)[0] == castwise.__version__
