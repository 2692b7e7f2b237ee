import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from castwise.errors import StoreError, UsageError
from castwise.orchestrator.pickling import pickle_user_objects
from castwise.spec.user_model import locate, shown_name


class Holding(nn.Module):
    """A model with something in it that cannot be pickled."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(1, 1))
        self.inner.held = held


def received(reference: str) -> Any:
    return pickle.loads(Path(locate(reference).path).read_bytes())


def test_objects_arrive_as_they_were(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    width = 5
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    parts = {"model": model, "loss": lambda output: output.sum() * width, "optimizer": optimizer}
    reference = pickle_user_objects(parts | {"scheduler": scheduler}, tmp_path / "objects")
    assert shown_name(reference) == "own:Linear"
    arrived = received(reference)
    assert arrived["loss"](torch.ones(2)) == 10
    # What belongs together still does.
    assert arrived["optimizer"].param_groups[0]["params"][0] is arrived["model"].weight
    assert arrived["scheduler"].optimizer is arrived["optimizer"]


def test_the_same_objects_are_the_same_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    first = pickle_user_objects({"model": model}, tmp_path)
    assert pickle_user_objects({"model": model}, tmp_path) == first
    with torch.no_grad():
        model.weight += 1
    assert pickle_user_objects({"model": model}, tmp_path) != first


@pytest.mark.parametrize(
    ("parts", "where"),
    [
        (lambda lock: {"model": Holding(lock)}, r"model\.inner\.held \(lock\)"),
        (lambda lock: {"model": nn.Linear(1, 1), "loss": lambda output: (output, lock)}, r"loss → lock \(lock\)"),
        (lambda lock: {"model": nn.Linear(1, 1), "batch": {"x": [torch.ones(1), lock]}}, r"batch\.x\[1\] \(lock\)"),
    ],
)
def test_unpicklable_part_is_named(parts: Any, where: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"^{where} cannot travel to the process that measures: ") as refusal:
        pickle_user_objects(parts(threading.Lock()), tmp_path)
    assert "\n" not in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_said(unwritable: Path) -> None:
    with pytest.raises(StoreError, match="The model cannot be written to"):
        pickle_user_objects({"model": nn.Linear(1, 1)}, unwritable)


def test_without_cloudpickle_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cloudpickle", None)
    with pytest.raises(UsageError, match=r"castwise\.compare needs cloudpickle"):
        pickle_user_objects({"model": nn.Linear(1, 1)}, tmp_path)
