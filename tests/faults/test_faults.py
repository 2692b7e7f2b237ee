"""The short form of the fault suite; `make faults` is the long one."""

import random
import tempfile
from pathlib import Path

import pytest
from faults import processes_that_die
from faults.hostile_files import FAULTS, INPUTS
from programs import PATIENCE_SECONDS


@pytest.mark.parametrize("kind", FAULTS)
def test_faults(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes_that_die, "_GONE_SECONDS", PATIENCE_SECONDS)  # how soon is for the long form
    with tempfile.TemporaryDirectory() as folder:  # a socket's path is 107 bytes long at the most
        FAULTS[kind](random.Random(f"{kind} -1"), Path(folder))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind == "files with a model")) for kind in INPUTS]
)
def test_inputs(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("castwise.orchestrator.machine.ForkserverEngine", None)  # restored at the end
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for seed in range(-100, 0):
        INPUTS[kind](random.Random(f"{kind} {seed}"), tmp_path)
