"""`castwise suite` from request to records, on made-up trials."""

import json
from pathlib import Path

import pytest
from conftest import CommandLine, Outcome
from fake_engine import FakeEngine, Fault, fake_environment

from castwise.cli.measuring import INTERRUPTED
from castwise.orchestrator import machine as machine_module
from castwise.orchestrator.machine import Machine
from castwise.registry.suites import SUITE_NAMES, find_suite
from castwise.suites.options import SuiteOptions
from castwise.suites.result import SuiteResult
from castwise.suites.run import prepare_suite

MINE = """\
name = "mine"
title = "My loop"
source = "me"
machine = "my GPU"

[recipes.three]
epochs = 3
samples_per_epoch = 800

[[cells]]
workloads = ["mnist-cnn"]
recipe = "three"
precisions = ["fp32", "fp16-mixed", "fp16-true"]
batch_sizes = [8]

[[published]]
gpu = "Tesla T4"
workload = "mnist-cnn"
precision = "O0"
batch_size = 8
seconds = 4.0

[[published]]
gpu = "Tesla T4"
workload = "mnist-cnn"
precision = "O1"
batch_size = 8
seconds = 2.0
"""
THREE = ["fp32", "fp16-mixed", "fp16-true"]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    return path


# What is asked


USAGE = [
    ((), "Name the suites to run"),
    (("tensorcore", "--all"), "Name the suites to run"),
    (("tensorcore,wrn",), "No suite named 'wrn'. Did you mean wrn-cifar10?"),
    (("nowhere/mine.toml",), "The suite 'nowhere/mine.toml' cannot be read"),
    (("/dev/zero",), "'/dev/zero' is no suite: it has more than 1,000,000 characters"),
    (("tensorcore", "--epochs", "0"), "--epochs takes a whole number from 1"),
    (("tensorcore", "--gpus", "0"), "--gpus takes whole numbers from 1"),
    (("tensorcore", "--workload", "dpn9"), "No workload named 'dpn9'"),
    (("--all", "--precision", "fp33"), "No precision named 'fp33'"),
    (("tensorcore", "--device", "gpu"), "No device 'gpu'"),
    (("tensorcore", "--tuned", "--techniques", "compiled"), "--tuned stands for --techniques none,tuned"),
]


@pytest.mark.parametrize(("arguments", "message"), USAGE, ids=lambda value: str(value)[:40])
def test_bad_input_is_one_line_and_starts_no_process(
    command: CommandLine, arguments: tuple[str, ...], message: str
) -> None:
    done = command.suite(*arguments)
    assert (done.code, done.out) == (2, "")
    (line,) = done.error_lines
    assert message in line
    assert done.engine.sessions == []
    assert command.records() == []


def test_a_filter_that_leaves_nothing_is_refused(command: CommandLine) -> None:
    done = command.suite("tensorcore", "--gpus", "2")
    assert (done.code, done.out, len(done.error_lines)) == (2, "", 1)
    assert done.engine.measured == []


def test_options_reach_the_trials(command: CommandLine) -> None:
    options = ("--epochs", "2", "--max-steps", "3", "--seeds", "2", "--precision", "O0,O1", "--timeout", "9s")
    done = command.suite("wrn-cifar10", *options, "--synthetic", "--workload", "wrn-28-10")
    assert done.code == 0
    assert [(spec.precision, spec.seed) for spec in done.engine.measured] == [
        ("fp32", 0),
        ("fp32", 1),
        ("fp16-mixed", 0),
        ("fp16-mixed", 1),
    ]
    for spec in done.engine.measured:
        assert spec.recipe is not None
        assert (spec.recipe.num_epochs, spec.recipe.epochs, spec.recipe.max_steps) == (2, 10, 3)
        assert (spec.data_set, spec.protocol.timeout_seconds) == ("synthetic:cifar10", 9.0)
    assert len({line for line in done.error_lines if ": ok (" in line}) == 4, "no two trials share their label"


def test_cells_for_more_gpus_than_the_machine_has_are_skipped(command: CommandLine) -> None:
    done = command.suite("amd-nvidia", "--workload", "resnet50", "--quick")
    assert done.code == 0
    assert {spec.world_size for spec in done.engine.measured} == {1}
    none = command.suite("amd-nvidia", "--workload", "resnet50", "--quick", "--gpus", "4")
    assert none.engine.measured == []
    assert "status" not in none.out, "a table of nothing"


def test_the_suites_are_listed(command: CommandLine) -> None:
    done = command("list", "suites")
    assert (done.code, done.err) == (0, "")
    lines = {line.split()[0]: line for line in done.out.splitlines()}
    assert set(SUITE_NAMES) <= set(lines)
    assert " 6 " in lines["tensorcore"]
    assert "Tesla T4, Tesla K80, Tesla P100" in lines["wrn-cifar10"]


# What is printed


def test_every_suite_runs_without_data(command: CommandLine) -> None:
    done = command.suite("--all", "--quick", "--synthetic")
    assert done.code == 0, done.err
    for name in SUITE_NAMES:
        assert f"{name}: {find_suite(name).title}" in done.out.splitlines()


# Its data


def test_missing_data_is_named_with_a_way_out(command: CommandLine) -> None:
    done = command.suite("wrn-cifar10")
    assert (done.code, done.out) == (2, "")
    (line,) = done.error_lines
    for words in ("cifar10", "no network (fake)", "--synthetic"):
        assert words in line
    assert done.engine.measured == []


def test_real_data_is_used_if_it_is_there(command: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "verify", lambda data_set, data_dir: None)
    done = command.suite("wrn-cifar10", "--quick")
    assert {spec.data_set for spec in done.engine.measured} == {"cifar10"}
    assert "random samples" not in done.out


def test_pretrained_weights_are_looked_up_once_and_reach_the_trials(command: CommandLine, tmp_path: Path) -> None:
    arguments = ("fastai-cifar100", "--quick", "--synthetic", "--workload", "fastai-resnet18,fastai-resnet34")
    without = command.suite(*arguments)
    assert {spec.weights for spec in without.engine.measured} == {None}
    done = command.suite(*arguments, "--weights", tmp_path / "w")
    assert {spec.weights for spec in done.engine.measured} == {
        str(tmp_path / "w" / f"{name}.pth") for name in ("resnet18", "resnet34")
    }
    assert sum("find_weights" in session.calls for session in done.engine.sessions) == 1
    assert not any("find_weights" in s.calls for s in command.suite("wrn-cifar10", "--synthetic").engine.sessions)


def test_unreadable_weights_are_a_usage_error(command: CommandLine, tmp_path: Path) -> None:
    engine = FakeEngine(faults={"#2": Fault("crash", "find_weights")})
    done = command.suite("fastai-cifar100", "--synthetic", "--weights", tmp_path, engine=engine)
    assert (done.code, done.out, len(done.error_lines)) == (2, "", 1)


def test_other_suites_run_if_the_data_of_one_is_missing(command: CommandLine, mine: Path) -> None:
    done = command.suite(f"wrn-cifar10,{mine}")
    assert done.code == 2
    assert done.engine.measured_precisions == THREE
    assert "mine: My loop" in done.out


# Its records


def test_results_are_read_from_records(command: CommandLine, mine: Path) -> None:
    first = command.suite(mine)
    assert first.engine.measured_precisions == THREE
    second = command.suite(mine)
    assert (second.engine.measured, second.code) == ([], 0)
    assert second.out == first.out
    shorter = command.suite(mine, "--epochs", "1")
    assert shorter.engine.measured_precisions == THREE, "a shorter run is another question"


def test_an_interrupt_between_suites_keeps_the_first_table(command: CommandLine, mine: Path) -> None:
    engine = FakeEngine(faults={"#6": Fault("interrupt", "run_epoch")})
    done = command.suite(f"{mine},tensorcore", "--synthetic", "--quick", engine=engine)
    assert done.code == INTERRUPTED
    assert "mine: My loop" in done.out
    assert "tensorcore: " not in done.out


def test_retry_measures_crashed_trials_and_again_measures_all(command: CommandLine, mine: Path) -> None:
    faults = {"fp16-mixed": Fault("crash", "run_epoch", block=1), "fp16-true": Fault("nan")}
    assert command.suite(mine, engine=FakeEngine(faults=faults)).code == 1
    assert command.suite(mine).engine.measured == []
    retried = command.suite(mine, "--retry")
    assert (retried.code, retried.engine.measured_precisions) == (0, ["fp16-mixed"])
    again = command.suite(mine, "--again")
    assert again.engine.measured_precisions == THREE


def test_again_deletes_old_checkpoints(command: CommandLine, mine: Path) -> None:
    first = command.suite(mine, engine=FakeEngine(faults={"fp32": Fault("crash", "run_epoch", block=1)}))
    path = next(session.checkpoint for session in first.engine.sessions if session.checkpoint)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"state")
    command.suite(mine, "--retry", engine=FakeEngine(faults={"fp32": Fault("crash", "run_epoch", block=1)}))
    assert path.exists(), "a retry goes on from it"
    command.suite(mine, "--again")
    assert not path.exists()


def test_kept_weights_are_named_as_their_records(command: CommandLine, mine: Path, tmp_path: Path) -> None:
    done = command.suite(mine, "--keep-weights", str(tmp_path / "kept"))
    kept = [session.weights for session in done.engine.sessions if session.weights]
    records = sorted(command.results.rglob("*.json"))
    assert sorted(kept) == [tmp_path / "kept" / record.parent.name / f"{record.stem}.pt" for record in records]
    other = command.suite(mine, "--again", engine=FakeEngine())
    assert [session.weights for session in other.engine.sessions if session.weights] == []


def test_weights_that_cannot_be_written_are_reported(command: CommandLine, mine: Path, tmp_path: Path) -> None:
    done = command.suite(mine, "--keep-weights", tmp_path / "kept", engine=FakeEngine(disk_is_full=True))
    assert done.code == 0, "the run is no worse for it"
    for precision in THREE:
        assert any("its weights" in line and f"/mnist-cnn-{precision}-" in line for line in done.error_lines)


def test_a_folder_for_weights_that_cannot_be_written_is_refused_before_training(
    command: CommandLine, mine: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    done = command.suite(mine, "--keep-weights", tmp_path / "file" / "kept")
    assert done.code == 3
    assert "Not a directory" in done.error_lines[-1]
    assert done.engine.measured_precisions == []


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        (Fault("nan"), "diverged", 0),
        (Fault("crash", "run_epoch", block=1), "crashed", 1),
        (Fault("timeout", "run_epoch"), "timeout", 1),
    ],
)
def test_only_crashes_and_timeouts_set_the_exit_code(
    command: CommandLine, mine: Path, fault: Fault, status: str, code: int
) -> None:
    done = command.suite(mine, engine=FakeEngine(faults={"fp16-true": fault}))
    assert done.code == code
    (row,) = [line for line in done.out.splitlines() if line.startswith("fp16-true")]
    assert row.split()[-1] == status


# The search for the largest batch


def limits(done: Outcome) -> list[tuple[str, list[int | None]]]:
    (suite,) = json.loads(done.out)["suites"]
    return [(row["precision"], row["measured"]) for row in suite["largest_batch"]]


DPN = ("dpn-cifar10", "--synthetic", "--format", "json")


def test_the_largest_batch_is_found_again_from_records(command: CommandLine) -> None:
    first = command.suite(*DPN)
    assert first.code == 0
    # Fake figures: 0.5 GiB, and 32 MiB a sample in float32, 0.7 of that with master weights; 16 GiB in all.
    assert limits(first) == [("fp32", [384, 512]), ("fp16-master", [640, 768])]
    short = [spec.recipe for spec in first.engine.measured[11:]]
    assert all(recipe is not None and (recipe.num_epochs, recipe.max_steps) == (1, 4) for recipe in short)
    second = command.suite(*DPN)
    assert second.engine.measured == []
    assert limits(second) == limits(first)
    assert len(command.suite(*DPN, "--again").engine.measured) == len(first.engine.measured)


def test_a_crashed_search_is_reported_and_retried(command: CommandLine) -> None:
    # 1: the machine; 2 to 12: the cells; the first trial of the first search.
    engine = FakeEngine(faults={"#13": Fault("crash", "set_up")})
    first = command.suite(*DPN, engine=engine)
    assert first.code == 1
    assert limits(first)[0] == ("fp32", [None, None])
    assert command.suite(*DPN).engine.measured == [], "not without --retry"
    retried = command.suite(*DPN, "--retry")
    assert retried.code == 0
    assert limits(retried)[0] == ("fp32", [384, 512])
    assert retried.engine.measured[0].batch_size == 128


def test_a_cpu_has_no_largest_batch(command: CommandLine) -> None:
    done = command.suite(*DPN, engine=FakeEngine(environment=fake_environment(None)))
    assert (done.code, limits(done)) == (0, [])


# The functions below the command


def machine_of(engine: FakeEngine, tmp_path: Path) -> Machine:
    return Machine(engine, engine.environment, "cuda:0", tmp_path / "data")


def test_without_a_results_folder_nothing_is_kept(tmp_path: Path) -> None:
    options = SuiteOptions(quick=True, synthetic=True)
    for _ in range(2):
        engine = FakeEngine()
        result: SuiteResult = prepare_suite(find_suite("dpn-cifar10"), options, machine_of(engine, tmp_path)).run()
        assert len(engine.measured) == len(result.all_trials) > 11
    assert list(tmp_path.iterdir()) == []


def test_validate_adds_accuracies_that_the_source_lacks(command: CommandLine) -> None:
    asked = ("tensorcore", "--quick", "--synthetic", "--workload", "mnist-cnn", "--tuned", "--format", "markdown")
    assert "accuracy or perplexity, published" not in command.suite(*asked).out
    judged = command.suite(*asked, "--validate")
    assert "accuracy or perplexity, published" in judged.out
    recipes = [spec.recipe for spec in judged.engine.measured if spec.recipe is not None]
    assert recipes, "runs of their own"
    assert all(recipe.validate_at_end for recipe in recipes)


def test_tuned_runs_the_published_loop_and_the_tuned_one(command: CommandLine) -> None:
    done = command.suite("tensorcore", "--quick", "--synthetic", "--workload", "mnist-cnn", "--tuned")
    assert done.code == 0
    tuned = ("resident-data", "compiled-update", "matmul-stem", "compile", "cuda-graph")
    assert {spec.techniques for spec in done.engine.measured} == {(), tuned}
