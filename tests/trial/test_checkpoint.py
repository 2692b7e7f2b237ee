"""Checkpoints: written whole or not at all, and no reason to lose a run."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from small_step import cpu_spec

from castwise.spec.recipe import Loader, Recipe
from castwise.trial import checkpoint as checkpoints
from castwise.trial.data import datasets
from castwise.trial.training_run import TrainingRun

CPU = torch.device("cpu")
FULL = OSError(errno.ENOSPC, "No space left on device")
TORN = RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0\nframe #0: more of it")


def break_off(error: Exception) -> Any:
    """Return a `torch.save` that writes a part and fails."""

    def save(state: object, path: Path) -> None:
        path.write_bytes(b"a part")
        raise error

    return save


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (FULL, "[Errno 28] No space left on device"),
        (TORN, "[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"),
        (OSError(), "OSError"),
    ],
)
def test_full_disk_keeps_last_checkpoint(
    error: Exception, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.pt"
    checkpoints.save(path, {"question": "q", "epoch": 1})
    monkeypatch.setattr(torch, "save", break_off(error))
    with pytest.warns(UserWarning, match="nothing was") as caught:
        assert not checkpoints.save(path, {"epoch": 2})
    assert str(caught[0].message) == f"nothing was written to '{path}': {reason}"
    assert checkpoints.load(path, CPU, "q") == {"question": "q", "epoch": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"], "nothing half-written is left"


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04half", b"\x80\x04N."])
def test_damaged_checkpoint_is_not_used(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    path.write_bytes(content)
    with pytest.warns(UserWarning, match="is not used"):
        assert checkpoints.load(path, CPU, "q") is None


def test_checkpoint_of_another_run_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    checkpoints.save(path, {"question": "another", "epoch": 1})
    with pytest.warns(UserWarning, match="it is of a run with other settings"):
        assert checkpoints.load(path, CPU, "q") is None


def test_run_with_a_damaged_checkpoint_starts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.pt"
    path.write_bytes(b"no checkpoint")
    with pytest.warns(UserWarning, match="is not used"):
        run = a_run(path, monkeypatch)
    assert run.epochs == ()
    run.run_epoch()
    assert a_run(path, monkeypatch).epochs == run.epochs, "the next checkpoint takes its place"


def a_run(path: Path | None, monkeypatch: pytest.MonkeyPatch) -> TrainingRun:
    """Return a run of three short epochs on a handful of random images."""
    monkeypatch.setitem(datasets.NUM_IMAGES, "mnist", (40, 20))
    recipe = Recipe(epochs=3, transform="mnist", loader=Loader(num_workers=0))
    return TrainingRun(cpu_spec(batch_size=20, data_set="synthetic:mnist", recipe=recipe), None, path)


def test_run_continues_without_writable_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = a_run(None, monkeypatch)
    losses = [plain.run_epoch().losses for _ in range(3)]
    plain.finish()
    path = tmp_path / "checkpoints" / "run.pt"
    run = a_run(path, monkeypatch)
    first = run.run_epoch()
    assert path.exists()
    with monkeypatch.context() as full:
        full.setattr(torch, "save", break_off(FULL))
        with pytest.warns(UserWarning, match="nothing was written"):
            second = run.run_epoch()
    third = run.run_epoch()
    assert [epoch.losses for epoch in (first, second, third)] == losses
    assert len(run.finish().epochs) == 3
    assert list(path.parent.iterdir()) == [], "the one that could be written is not left behind"
