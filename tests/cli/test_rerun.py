"""The same request again: its records answer it, and no process that imports torch is started."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import CommandLine, Outcome
from fake_engine import FakeEngine, fake_environment
from fake_gpu import UUID

from castwise.orchestrator import machine
from castwise.records.schema import Environment
from castwise.records.store import load_folder
from castwise.spec.user_model import UserModel, UserWorkload, digest_of, locate
from castwise.telemetry.gpu import GpuUnreadableError

Ask = Callable[..., Outcome]

MINE = """\
name = "mine"
title = "My loop"
source = "me"
machine = "my GPU"

[recipes.two]
epochs = 2
samples_per_epoch = 800

[[cells]]
workloads = ["mnist-cnn"]
recipe = "two"
precisions = ["fp32"]
batch_sizes = [8]
"""


@pytest.fixture
def ask(command: CommandLine) -> Ask:
    """Return `castwise run mnist-cnn` on a CPU, or another command, with an engine of its own each time."""

    def ask(*arguments: str | Path, environment: Environment | None = None, **engine: object) -> Outcome:
        made = FakeEngine(environment=environment or fake_environment(None), exclusive=False, **engine)  # type: ignore[arg-type]
        words = arguments or ("run", "mnist-cnn", "--precision", "fp32,bf16-mixed")
        return command(*words, "--results", command.results, engine=made)

    return ask


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "mnist-cnn", "--precision", "fp32"),
        ("run", "mnist-cnn", "--precision", "fp32", "--rounds", "1", "--device", "cpu"),
        ("run", "torchvision:alexnet", "--precision", "fp32"),
        ("tune", "mnist-cnn", "--precision", "fp32"),
        ("max-batch", "mnist-cnn", "--precision", "fp32", "--memory", "1GiB"),
        ("suite", "mine.toml", "--synthetic", "--format", "markdown"),
        ("suite", "mine.toml", "--synthetic", "--format", "json"),
    ],
)
def test_what_is_on_record_needs_no_process(
    ask: Ask, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(MINE)
    before = ask(*arguments)
    assert before.engine.measured
    again = ask(*arguments)
    assert again.engine.sessions == []
    assert again.code == before.code
    if arguments[0] in ("run", "suite"):  # the others say how long they took
        assert again.out == before.out
    assert again.out


def test_what_is_not_on_record_is_measured_and_said_once(ask: Ask) -> None:
    ask("run", "mnist-cnn", "--precision", "fp32", "--rounds", "1")
    more = ask("run", "mnist-cnn", "--precision", "fp32,bf16-mixed", "--rounds", "2")
    assert sorted(more.engine.measured_precisions) == ["bf16-mixed", "bf16-mixed", "fp32", "fp32"]
    assert len([line for line in more.error_lines if "on record already" in line]) == 1


def change_a_variable(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")


def change_the_driver(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(machine, "driver_version", lambda: "1.0-fake")


def install_a_package(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    os.utime(folder, (1, 1))


def damage_the_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder.parent / "cache" / "castwise" / "machines.json").write_text('{"a": ')


@pytest.mark.parametrize("change", [change_a_variable, change_the_driver, install_a_package, damage_the_cache])
def test_a_machine_that_may_have_changed_is_looked_at(
    ask: Ask, change: Callable[[pytest.MonkeyPatch, Path], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    monkeypatch.syspath_prepend(str(packages))
    ask()
    change(monkeypatch, packages)
    again = ask()
    assert len(again.engine.sessions) == 1
    assert again.engine.measured == []
    assert ask().engine.sessions == []


def test_a_login_is_no_change_of_the_machine(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    ask()
    monkeypatch.setenv("SSH_CONNECTION", "another")
    assert ask().engine.sessions == []


def test_what_was_remembered_wrongly_gets_into_no_record_and_is_refreshed(ask: Ask, command: CommandLine) -> None:
    """A machine that changed unseen: its first process finds out."""
    ask("run", "mnist-cnn", "--precision", "fp32", "--rounds", "1")
    changed = fake_environment(None, host="another-host")
    ask("run", "mnist-cnn", "--precision", "bf16-mixed", "--rounds", "1", environment=changed)
    hosts = {trial.spec.precision: trial.environment.host for trial in load_folder(command.results)[0]}
    assert hosts == {"fp32": "fake-host", "bf16-mixed": "another-host"}
    again = ask("run", "mnist-cnn", "--precision", "bf16-mixed", "--rounds", "1", environment=changed)
    assert again.engine.sessions == []


def test_a_gpu_that_is_not_there_is_looked_for(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    present = [UUID]

    def look_up(uuid: str) -> tuple[()]:
        if uuid not in present:
            raise GpuUnreadableError("Not Found")
        return ()

    monkeypatch.setattr(machine, "compute_processes", look_up)
    ask(environment=fake_environment(gpu_uuid=UUID))
    assert ask(environment=fake_environment(gpu_uuid=UUID)).engine.sessions == []
    with monkeypatch.context() as patch:
        patch.setattr(machine, "power_limit", lambda uuid: 300.0)
        assert len(ask(environment=fake_environment(gpu_uuid=UUID)).engine.sessions) == 1, "another limit"
    present.clear()
    assert len(ask(environment=fake_environment(gpu_uuid=UUID)).engine.sessions) == 1


def test_a_cache_that_cannot_be_written_is_no_error(
    ask: Ask, unwritable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(unwritable))
    assert ask().code == 0
    again = ask()
    assert again.code == 0
    assert len(again.engine.sessions) == 1


def test_the_cache_keeps_the_newest_machines(ask: Ask, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_MOST_MACHINES", 2)
    for name in ("a", "b", "c"):
        monkeypatch.setenv("MINE", name)
        ask()
    numbers = []
    for name in ("c", "b", "a"):
        monkeypatch.setenv("MINE", name)
        numbers.append(len(ask().engine.sessions))
    assert numbers == [0, 0, 1]


def test_a_users_model_is_not_run_again_unless_what_it_reads_has_changed(ask: Ask, tmp_path: Path) -> None:
    file, config = tmp_path / "train_me.py", tmp_path / "config.json"
    file.write_text("def build(): ...")
    config.write_text("8")
    words = ("run", f"{file}:build", "--precision", "fp32")

    def sources() -> dict[str, str]:
        return {str(path): digest_of(str(path)) for path in (file, config)}

    ask(*words, sources=sources())
    assert ask(*words).engine.sessions == []
    config.write_text("16")
    assert ask(*words, sources=sources()).engine.sessions
    assert ask(*words).engine.sessions == []
    config.unlink()
    assert ask(*words).engine.sessions


def test_a_users_model_that_may_depend_on_anything_is_run_again(ask: Ask, tmp_path: Path) -> None:
    file = tmp_path / "train_me.py"
    file.write_text("def build(): ...")
    words = ("run", f"{file}:build", "--precision", "fp32")
    ask(*words, sources=None)
    again = ask(*words, sources=None)
    assert len(again.engine.sessions) == 2
    assert again.engine.measured == []


def test_what_is_known_of_a_script_is_of_how_it_is_started_and_counted() -> None:
    alone = UserModel(kind="script", path="/train.py", name="", arguments=("--lr", "1"))
    others = ({"launcher": ("torchrun", "--nproc-per-node", "2")}, {"unit": "tokens"}, {"scratch": "/elsewhere"})
    keys = {machine._user_model_key("cpu", alone.model_copy(update=each)) for each in ({}, *others)}
    assert len(keys) == 4
    assert machine._user_model_key("cpu", alone.model_copy(update={"digest": "0123456789ab"})) in keys


def test_secret_arguments_of_a_script_are_not_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    script, other = (locate(f"python train.py --lr 0.1 --token {token}") for token in ("abc123", "def456"))
    found = script.model_copy(update={"digest": "fedcba"})
    known = UserWorkload(model=found, batch_size=8, sources={})
    machine.MachineCache().keep_user_workload("cpu", known)
    (file,) = tmp_path.rglob("machines.json")
    assert "0.1" in file.read_text()
    assert "abc123" not in file.read_text()
    cache = machine.MachineCache()
    assert cache.user_workload("cpu", script) == known
    assert cache.user_workload("cpu", other) is None
