"""Files of pretrained weights: where they are looked for, what is loaded, and what is refused in one line."""

import hashlib
import os
import pickle
import random
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import PATIENCE_SECONDS
from torch import Tensor, nn

from castwise.errors import DataError
from castwise.trial import pretrained
from castwise.trial.pretrained import find_weights, load_weights


class Attack:
    """Unpickles as a call of os.system."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def make_body(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))


def state(**changes: Tensor) -> dict[str, Any]:
    """Return another body's weights, and a classifier's."""
    return {**make_body(seed=1).state_dict(), "fc.weight": torch.ones(10, 4), "fc.bias": torch.ones(10), **changes}


def saved(content: object, folder: Path, **options: Any) -> Path:
    path = folder / "resnet18.pth"
    torch.save(content, path, **options)
    return path


def message(path: Path) -> str:
    """Return what loading a file into a body is refused with; the body is left as it was."""
    body = make_body()
    with pytest.raises(DataError) as caught:
        load_weights(body, path)
    text = str(caught.value)
    assert "\n" not in text
    assert f"'{path}'" in text
    assert text.endswith("leave the weights out.")
    assert all(torch.equal(value, make_body().state_dict()[name]) for name, value in body.state_dict().items())
    return text


# Loading


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_all_but_the_classifier_is_loaded(zipped: bool, tmp_path: Path) -> None:
    body, content = make_body(), state()
    load_weights(body, saved(content, tmp_path, _use_new_zipfile_serialization=zipped))
    assert all(torch.equal(value, content[name]) for name, value in body.state_dict().items())
    load_weights(make_body(), saved(without("1.num_batches_tracked"), tmp_path))  # from before PyTorch 0.4.1


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in state().items() if key != name}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (without("0.bias"), "another model's: '0.bias' is missing"),
        (state(extra=torch.ones(1)), "there is 'extra', which the model has not"),
        (state(**{"0.bias": torch.ones(5)}), r"'0.bias' has shape (5,) where the model has (4,)"),
        (state(**{"0.bias": torch.ones(4, dtype=torch.int64)}), "'0.bias' is torch.int64"),
        (state(**{"0.bias": torch.full((4,), torch.nan)}), "no finite numbers"),
        ([1, 2], "holds no state dict"),
        ({"0.bias": 3}, "holds no state dict"),
        ({1: torch.ones(1)}, "holds no state dict"),
    ],
)
def test_another_content_is_refused(content: object, words: str, tmp_path: Path) -> None:
    assert words in message(saved(content, tmp_path))


@pytest.mark.parametrize("spoil", [lambda _: b"", lambda _: b"hello\n" * 9, lambda content: content[:-300]])
def test_a_damaged_file_is_refused(spoil: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = saved(state(), tmp_path)
    path.write_bytes(spoil(path.read_bytes()))
    assert "cannot be read" in message(path)
    path.unlink()
    assert "No such file" in message(path)


def test_damage_raises_nothing_else(tmp_path: Path) -> None:
    path = saved(state(), tmp_path)
    content, chance = path.read_bytes(), random.Random(0)
    for _ in range(150):
        mutated = bytearray(content)
        for place in chance.sample(range(len(content)), 4):
            mutated[place] = chance.randrange(256)
        path.write_bytes(mutated)
        with suppress(DataError):
            load_weights(make_body(), path)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_nothing_in_a_file_is_run(zipped: bool, tmp_path: Path) -> None:
    executed = tmp_path / "executed"
    path = saved(state(extra=Attack(f"touch {executed}")), tmp_path, _use_new_zipfile_serialization=zipped)  # type: ignore[arg-type]
    assert "cannot be read" in message(path)
    path.write_bytes(pickle.dumps(Attack(f"touch {executed}"), protocol=2))
    assert "cannot be read" in message(path)
    assert not executed.exists()
    pickle.loads(path.read_bytes())
    assert executed.exists(), "the attack itself works"


def test_checksum_in_file_name(tmp_path: Path) -> None:
    content = saved(state(), tmp_path).read_bytes()
    digits = hashlib.sha256(content).hexdigest()[:8]
    good, bad = tmp_path / f"resnet18-{digits}.pth", tmp_path / "resnet18-f37072fd.pth"
    good.write_bytes(content)
    bad.write_bytes(content)
    load_weights(make_body(), good)
    assert f"its SHA-256 begins with {digits}" in message(bad)


# Finding


def test_torchvision_file_name_comes_first(tmp_path: Path) -> None:
    names = ["resnet50-11ad3fa6.pth", "resnet50-19c8e357.pth", "resnet50.pth", "resnet50-0676ba61.pth"]
    (tmp_path / "resnet18-f37072fd.pth").touch()
    for expected, name in zip([names[0], names[0], "resnet50.pth", names[3]], names, strict=True):
        (tmp_path / name).touch()
        assert find_weights("resnet50", tmp_path) == tmp_path / expected
    assert find_weights("resnet50", tmp_path / "resnet18-f37072fd.pth") == tmp_path / "resnet18-f37072fd.pth"


@pytest.mark.parametrize("where", ["", "nowhere"])
def test_folder_without_weights(where: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        find_weights("resnet18", tmp_path / where)
    assert f"'{tmp_path / where}' is neither a file nor a folder with weights of resnet18" in str(caught.value)
    assert "https://download.pytorch.org/models/resnet18-f37072fd.pth" in str(caught.value)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return torch.hub's folder of checkpoints, empty, with a server that is a folder beside it."""
    (tmp_path / "server").mkdir()
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr(pretrained, "_TIMEOUT_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(pretrained, "weights_url", lambda name: (tmp_path / "server" / f"{name}.pth").as_uri())
    return tmp_path / "hub" / "checkpoints"


def test_hub_folder_comes_before_download(hub: Path) -> None:
    assert find_weights("resnet18", None) is None, "the server has none"
    served = saved(state(), hub.parent.parent / "server")
    before = socket.getdefaulttimeout()
    assert find_weights("resnet18", None) == hub / "resnet18.pth"
    assert (hub / "resnet18.pth").read_bytes() == served.read_bytes()
    assert socket.getdefaulttimeout() == before
    served.unlink()
    (hub / "resnet18.pth").rename(hub / "resnet18-5c106cde.pth")
    assert find_weights("resnet18", None) == hub / "resnet18-5c106cde.pth"


def test_download_with_wrong_checksum(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = saved(state(), hub.parent.parent / "server").rename(hub.parent.parent / "server" / "resnet18-f37072fd.pth")
    monkeypatch.setattr(pretrained, "weights_url", lambda name: served.as_uri())
    assert find_weights("resnet18", None) is None
    assert list(hub.iterdir()) == []


def test_server_that_never_answers(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "_TIMEOUT_SECONDS", 0.2)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/resnet18.pth"
        monkeypatch.setattr(pretrained, "weights_url", lambda name: url)
        assert find_weights("resnet18", None) is None
