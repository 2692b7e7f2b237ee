import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CommandLine
from fake_engine import FakeEngine, fake_environment

import castwise
from castwise.cli import app, run
from castwise.cli.options import completion_of
from castwise.registry.gpus import GPU_MODELS
from castwise.registry.precisions import PRECISIONS
from castwise.registry.techniques import SETS, TECHNIQUES
from castwise.registry.workloads import WORKLOADS

ALL = [row.name for row in PRECISIONS]
FAKE_CLI = Path(__file__).parent.parent / "fake_cli.py"


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process that cannot import torch."""
    return subprocess.run(
        [sys.executable, FAKE_CLI, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--help",), "In which numeric precision"),
        (("run", "--help"), "--batch-size"),
        (("--version",), castwise.__version__),
        (("list", "workloads"), "wrn-28-10"),
        (("list", "precisions"), "bf16-mixed"),
        (("list", "devices"), "NVIDIA H200"),
        (("list", "techniques"), "channels-last"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_measures_nothing_imports_no_torch(arguments: tuple[str, ...], word: str) -> None:
    done = process(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert word in done.stdout


def test_a_whole_run_outside_measure_imports_no_torch(tmp_path: Path) -> None:
    done = process("run", "resnet50", "--results", str(tmp_path), CASTWISE_FAKE_FAULTS="fp16-true=nan,tf32=oom")
    assert done.returncode == 1, done.stderr
    assert "take bf16-mixed" in done.stdout
    assert "Traceback" not in done.stderr


def test_python_dash_m_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "castwise", "--version"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"castwise {castwise.__version__}\n", "")


def test_version(command: CommandLine) -> None:
    done = command("--version")
    assert (done.code, done.out, done.err) == (0, f"castwise {castwise.__version__}\n", "")


def test_without_a_command_help_is_shown(command: CommandLine) -> None:
    done = command()
    assert "Usage:" in done.out + done.err
    assert done.engine.sessions == []


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
        assert any(line.startswith(name) for line in done.out.splitlines()), name
    assert "…" not in done.out


def test_what_tuned_is_short_for_is_said_where_it_is_offered(command: CommandLine) -> None:
    listed = " ".join(command("list", "techniques").out.split())
    assert "tuned short for" in listed
    assert "in a suite, for the loop that its file" in listed
    shown = " ".join(re.sub(r"[│\s]+", " ", command("suite", "--help").out).split())
    assert "tuned is short for the fastest loop known, which the suite's file names" in shown
    assert "The published loop and the fastest one known, which the suite's file names, side by side" in shown


def test_comma_lists_are_axes(command: CommandLine) -> None:
    done = command.run("resnet50, dpn92", "--precision", "fp32,bf16-mixed", "--batch-size", "4, 8")
    assert done.code == 0
    assert [(spec.workload, spec.batch_size, spec.precision) for spec in done.engine.measured] == [
        (workload, batch_size, precision)
        for workload in ("resnet50", "dpn92")
        for batch_size in (4, 8)
        for precision in ("fp32", "bf16-mixed")
    ]


def test_several_workloads_stand_apart_by_spaces_or_commas(command: CommandLine) -> None:
    for names in (("mnist-cnn,resnet50",), ("mnist-cnn", "resnet50"), ("mnist-cnn,", "resnet50")):
        done = command("run", *names, "--precision", "fp32", "--format", "csv", "--results", command.results)
        assert done.code == 0, done.err
        assert [line.split(",")[0] for line in done.out.splitlines()[1:]] == ["mnist-cnn", "resnet50"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("run", "mnist-cnn", "--rounds", "0"), "--rounds takes a whole number from 1; 0 is none."),
        (("tune", "mnist-cnn", "--batch-size", "0"), "--batch-size takes a whole number from 1; 0 is none."),
        (("report", "--results", "h200"), "report takes its folders without --results: castwise report h200"),
        (
            ("export", "--results", "two words"),
            "export takes its folders without --results: castwise export 'two words'",
        ),
        (("lst",), "No such command 'lst'. Did you mean 'list'? `castwise --help` says what there is."),
        (("run", "--budget"), "Option '--budget' requires an argument."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_understood_is_one_line(command: CommandLine, arguments: tuple[str, ...], line: str) -> None:
    done = command(*arguments)
    assert (done.code, done.out, done.err) == (2, "", f"castwise: {line}\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "--seconds", "long"), "'--seconds': "),
        (("run", "--budgt", "60s"), "No such option: --budgt"),
        (("list", "foo"), "'what': 'foo' is not one of 'workloads'"),
        (("max-batch",), "Missing argument 'WORKLOAD'."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_typer_refuses_is_one_line_too(command: CommandLine, arguments: tuple[str, ...], words: str) -> None:
    done = command(*arguments)
    (line,) = done.error_lines
    assert (done.code, done.out) == (2, "")
    assert words in line
    assert line.endswith(f". `castwise {arguments[0]} --help` says what there is.")


@pytest.mark.parametrize("name", ["max-batch", "tune"])
def test_what_takes_one_workload_says_so(command: CommandLine, name: str) -> None:
    done = command(name, "mnist-cnn,resnet50")
    assert (done.code, done.out) == (2, "")
    (line,) = done.error_lines
    assert line.startswith("castwise: WORKLOAD is one name here, and 'mnist-cnn,resnet50' is a list.")


def test_techniques_are_an_axis(command: CommandLine) -> None:
    loops = "none,channels-last+compile,tuned"
    done = command.run("resnet50", "--precision", "fp32,bf16-mixed", "--techniques", loops, "--format", "json")
    assert done.code == 0
    assert [(spec.techniques, spec.precision) for spec in done.engine.measured] == [
        (names, precision)
        for names in ((), ("channels-last", "compile"), ("channels-last", "cudnn-search", "fused-optimizer"))
        for precision in ("fp32", "bf16-mixed")
    ]
    rows = json.loads(done.out)["rows"]
    assert [row["techniques"] for row in rows[::2]] == [
        "none",
        "channels-last+compile",
        "channels-last+cudnn-search+fused-optimizer",
    ]
    assert [row["loop_speedup"] for row in rows[:2]] == [None, None]
    assert all(row["loop_speedup"] for row in rows[2:])


def test_a_technique_that_does_not_apply_is_unsupported_and_the_others_go_on(command: CommandLine) -> None:
    arguments = ("lstm-lm,resnet50", "--precision", "bf16-mixed", "--techniques", "none,channels-last")
    done = command.run(*arguments, "--format", "csv")
    assert done.code == 0
    assert [row["status"] for row in csv.DictReader(io.StringIO(done.out))] == ["ok", "unsupported", "ok", "ok"]
    assert "channels-last is for images; lstm-lm has tokens" in done.out
    assert len(done.engine.measured) == 3


@pytest.mark.parametrize(
    ("techniques", "words"),
    [
        ("chanels-last", "No technique named 'chanels-last'. Did you mean channels-last,"),
        ("compile+compile-max-autotune", "exclude each other"),
        ("compile+", "is no list of techniques"),
        ("resident-data", "here only steps are timed"),
        ("set-to-none", "gradients are set to None, as torch does since 2.0"),
    ],
)
def test_a_mistaken_technique_is_one_line(command: CommandLine, techniques: str, words: str) -> None:
    done = command.run("resnet50", "--techniques", techniques)
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert done.err.count("\n") == 1
    assert done.engine.sessions == []


def test_gpus_and_how_they_share_a_step_are_axes(command: CommandLine) -> None:
    engine = FakeEngine(environment=fake_environment(num_gpus=4))
    arguments = ("resnet50", "--precision", "fp32", "--gpus", "1,4", "--parallelism", "ddp,dp", "--format", "json")
    done = command.run(*arguments, engine=engine)
    assert (done.code, done.err.count(" ok (")) == (0, 3)
    assert [(spec.world_size, spec.parallelism) for spec in engine.measured] == [(1, "none"), (4, "ddp"), (4, "dp")]
    rows = json.loads(done.out)["rows"]
    assert [row["scaling_efficiency"] for row in rows] == [None, pytest.approx(0.625), pytest.approx(0.625)]


def test_loss_scales_are_an_axis_of_the_precisions_that_scale(command: CommandLine) -> None:
    arguments = ("dpn92", "--precision", "fp32,fp16-master", "--loss-scale", "dynamic,128", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(command.run(*arguments).out)))
    assert [(row["precision"], row["loss_scale"]) for row in rows] == [
        ("fp32", "none"),
        ("fp16-master", "dynamic"),
        ("fp16-master", "128"),
    ]


def test_apexs_levels_are_understood(command: CommandLine) -> None:
    done = command.run("resnet50", "--precision", "O0,O1,O2,O3")
    assert done.engine.measured_precisions == ["fp32", "fp16-mixed", "fp16-master", "fp16-true"]


def test_options_reach_the_trials(command: CommandLine) -> None:
    options = ("--device", "cpu", "--seconds", "6", "--timeout", "9", "--seed", "3", "--precision", "fp32")
    (spec,) = command.run("resnet50", *options).engine.measured
    assert (spec.device, spec.seed) == ("cpu", 3)
    assert (spec.protocol.max_seconds, spec.protocol.timeout_seconds) == (6.0, 9.0)


USAGE = [
    (("resnet49",), "No workload named 'resnet49'. Did you mean resnet"),
    (("resnet50", "--precision", "bf16"), "No precision named 'bf16'. Did you mean bf16-"),
    (("resnet50", "--precision", "fp32,O4"), "No precision named 'O4'."),
    (("resnet50", "--precision", ","), "--precision is empty: ','."),
    (("",), "WORKLOAD is empty: ''."),
    (("resnet50", "--batch-size", "0"), "--batch-size takes whole numbers from 1, comma-separated; '0' is none."),
    (("resnet50", "--batch-size", "-4"), "'-4' is none."),
    (("resnet50", "--batch-size", "8,x"), "'x' is none."),
    (("resnet50", "--batch-size", "1.5"), "'1.5' is none."),
    (("resnet50", "--batch-size", "1e3"), "'1e3' is none."),
    (("resnet50", "--batch-size", "²"), "'²' is none."),
    (("resnet50", "--batch-size", "9" * 5000), "is none."),
    (("resnet50", "--loss-scale", "big"), "'big' is no loss scale."),
    (("resnet50", "--loss-scale", "-1"), "must be a positive number; '-1' is not."),
    (("resnet50", "--device", "gpu"), "No device 'gpu'. Write cpu, cuda or cuda:N."),
    (("resnet50", "--device", "cuda:9"), "The device 'cuda:9' cannot be opened"),
    (("resnet50", "--data-set", "imagenet"), "No data set named 'imagenet'."),
    (("resnet50", "--data-set", "mnist"), "resnet50 does not take the data set 'mnist'."),
    (("mnist-cnn", "--data-set", "mnist"), "mnist: no train-images-idx3-ubyte[.gz] in"),
    (("resnet50", "--seconds", "0"), "A time of 0 seconds is impossible."),
    (("resnet50", "--timeout", "-1"), "--timeout takes a duration above 0, such as 60s or 5min; '-1' is none."),
    (("torchvision:",), "'torchvision:' needs a model's name behind the colon"),
    (("torchvision:alexnut",), "No model 'torchvision:alexnut' (fake)."),
]


@pytest.mark.parametrize(("arguments", "message"), USAGE, ids=lambda value: str(value)[:40])
def test_a_request_that_cannot_be_carried_out_is_one_line_and_exit_code_2(
    command: CommandLine, arguments: tuple[str, ...], message: str
) -> None:
    done = command.run(*arguments)
    assert done.code == 2
    assert done.out == ""
    (line,) = done.error_lines
    assert line.startswith("castwise: ")
    assert message in line
    assert done.engine.measured == []
    assert command.records() == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "resnet50", "--colour", "red"),
        ("run", "resnet50", "--format", "xml"),
        ("run", "resnet50", "--seconds", "soon"),
        ("run", "resnet50", "--seed", "x"),
        ("max-batch", "resnet50", "dpn92"),
        ("list", "colours"),
        ("runn",),
    ],
    ids=" ".join,
)
def test_what_cannot_be_parsed_is_exit_code_2_and_no_traceback(
    command: CommandLine, arguments: tuple[str, ...]
) -> None:
    done = command(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err
    assert "Traceback" not in done.err
    assert done.engine.sessions == []


@pytest.mark.parametrize("capability", [(7, 0), None])
def test_a_precision_the_device_lacks_is_refused_where_it_was_named(
    command: CommandLine, capability: tuple[int, int] | None
) -> None:
    engine = FakeEngine(environment=fake_environment(capability))
    done = command.run("resnet50", "--precision", "fp32,tf32", engine=engine)
    assert (done.code, done.out, engine.measured) == (2, "", [])
    (line,) = done.error_lines
    assert line.startswith("castwise: tf32 needs CUDA compute capability 8.0 or newer; Fake ")
    assert command.records() == []


def test_a_precision_the_device_lacks_is_left_out_where_none_was_named(command: CommandLine) -> None:
    engine = FakeEngine(environment=fake_environment((7, 0)))
    done = command.run("resnet50", engine=engine)
    assert done.code == 0
    assert engine.measured_precisions == [name for name in ALL if name != "tf32"]


def test_a_results_folder_that_cannot_be_written_is_exit_code_3(command: CommandLine, unwritable: Path) -> None:
    done = command("run", "resnet50", "--results", unwritable)
    assert (done.code, done.out) == (3, "")
    (line,) = done.error_lines
    assert (
        line == f"castwise: Results cannot be written to '{unwritable}': Not a directory. Name another with --results."
    )
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
        assert (stop.value.code, out) == (1, "")
        assert err.splitlines() == [
            "castwise: PyTorch is not installed, and nothing can be measured without it. "
            "Install it with: pip install 'castwise[measure]'"
        ]


@pytest.mark.parametrize("output", ["table", "json", "markdown", "csv"])
def test_results_go_to_stdout_and_everything_else_to_stderr(command: CommandLine, output: str) -> None:
    done = command.run("resnet50", "--precision", "fp32,tf32", "--format", output)
    assert done.code == 0
    assert "trial 1 of 2: resnet50 fp32 batch 256: ok" in done.err
    assert "trial" not in done.out.replace('"trials"', "")
    assert "fp32" in done.out
    again = command.run("resnet50", "--precision", "fp32,tf32", "--format", output)
    assert again.out == done.out, "from records, the same is printed"
    assert again.error_lines == ["2 of 2 trials are on record already; measuring 0."]


def test_json_is_one_document(command: CommandLine) -> None:
    document = json.loads(command.run("resnet50", "--format", "json").out)
    assert [row["precision"] for row in document["rows"]] == ALL
    assert [trial["spec"]["precision"] for trial in document["trials"]] == ALL
    assert document["advice"][0]["precision"] == "bf16-mixed"


def test_nothing_colours_what_is_piped(command: CommandLine) -> None:
    for output in ("table", "json", "markdown", "csv"):
        assert "\x1b" not in command.run("resnet50", "--format", output).out


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    for arguments in (("list", "workloads"), ("run", "resnet50", "--results", str(tmp_path), "--format", "json")):
        reader, writer = os.pipe()
        os.close(reader)
        try:
            done = subprocess.run(
                [sys.executable, FAKE_CLI, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
            )
        finally:
            os.close(writer)
        assert done.returncode == 1
        assert not [line for line in done.stderr.splitlines() if not line.startswith("trial ")]


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
        if "DIR" in arguments:
            continue  # it needs real data
        engine = FakeEngine(exclusive="--within" not in arguments)
        assert command(*arguments, "--results", command.results, engine=engine).code == 0, example


def test_a_margin_decides_what_is_the_same(command: CommandLine) -> None:
    def verdict(*margin: str) -> str:
        engine = FakeEngine(exclusive=False)
        arguments = ("mnist-cnn", "--precision", "fp32,tf32", "--rounds", "3", "--format", "json", "--again")
        shown = command("run", *arguments, *margin, "--results", command.results, engine=engine)
        assert shown.code == 0, shown.err
        return str(json.loads(shown.out)["rows"][1]["verdict"]["kind"])

    assert verdict() == "faster"
    assert verdict("--margin", "99%") == "same"
    alone = command("run", "mnist-cnn", "--margin", "2%", "--results", command.results)
    assert (alone.code, "margin is for speed-ups with intervals" in alone.err) == (2, True)
