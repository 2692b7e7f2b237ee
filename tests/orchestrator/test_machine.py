"""The machine that jobs run on: its device, its data, castwise's commit."""

import subprocess
from pathlib import Path

import pytest
from fake_engine import FakeEngine, Fault

from castwise.errors import DataError, EngineError, UsageError
from castwise.orchestrator import machine as machine_module
from castwise.orchestrator.machine import check_device_name, choose_device, find_commit, provide
from castwise.registry.datasets import MNIST


def test_missing_device_is_a_usage_error() -> None:
    engine = FakeEngine()
    with pytest.raises(UsageError, match=r"The device 'cuda:9' cannot be opened: there is no cuda:9 \(fake\)\. `castw"):
        choose_device(engine, "cuda:9")
    assert engine.num_open == 0


@pytest.mark.parametrize("device", [None, "cpu"])
def test_failing_probe_is_an_engine_error(device: str | None) -> None:
    engine = FakeEngine(faults={"#1": Fault("crash", "open")})
    with pytest.raises(EngineError, match="could not open a device"):
        choose_device(engine, device)
    assert engine.num_open == 0


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cpu:0", "cuda:1000"])
def test_impossible_device_name(name: str) -> None:
    with pytest.raises(UsageError, match="Write cpu, cuda or cuda:N"):
        check_device_name(name)


def test_download_is_verified(tmp_path: Path) -> None:
    def download(name: str, folder: Path) -> None:
        for file in MNIST.files:
            (folder / file.name).write_bytes(b"a login page")

    with pytest.raises(DataError, match="Put the official file there"):
        provide(FakeEngine(data_set=download), MNIST, tmp_path)


def test_a_changed_checkout_has_a_plus_behind_its_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(machine_module.COMMIT_VARIABLE, raising=False)
    here = tmp_path / "src" / "castwise" / "orchestrator" / "machine.py"
    here.parent.mkdir(parents=True)
    here.write_text("")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@x"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "m"], check=True)
    monkeypatch.setattr(machine_module, "__file__", str(here))
    commit = find_commit()
    assert commit is not None
    assert len(commit) == 12
    here.write_text("changed")
    assert find_commit() == f"{commit}+"


def test_outside_a_checkout_the_commit_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(machine_module.COMMIT_VARIABLE, raising=False)
    monkeypatch.setattr(machine_module, "__file__", str(tmp_path / "a" / "b" / "c" / "d" / "bench.py"))
    assert find_commit() is None
