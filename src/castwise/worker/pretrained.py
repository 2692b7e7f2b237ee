"""Pretrained weights of torchvision's models: find their file, and load it without running anything it holds."""

import hashlib
import pickle
import re
import socket
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import torch
from torch import Tensor, nn

from castwise.errors import DataError

# How long torchvision's server may take to answer, name look-up and all. Source: chosen here.
_PATIENCE_SECONDS = 8.0
# Several times the largest file that torchvision has for a ResNet (242 MB).
_MOST_BYTES = 1 << 30
# torchvision's files carry the first digits of their SHA-256. Source: torch.hub (`HASH_REGEX`).
_DIGITS_IN_NAME = re.compile(r"-([a-f0-9]{8,})\.pth$")
_CLASSIFIER = "fc."
_DOWNLOAD_ERRORS = (OSError, RuntimeError, ValueError, HTTPException)
# What a file that is damaged or hostile has been seen to raise.
_READ_ERRORS = (
    pickle.PickleError,
    zipfile.BadZipFile,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


def find_weights(model_name: str, where: Path | None) -> Path | None:
    """Return the file with a torchvision model's pretrained weights.

    Args:
        model_name: As torchvision spells it ("resnet18").
        where: The file itself, or a folder with it. None looks where torch.hub keeps its files and then asks
            torchvision's server, which is given up when it does not answer within eight seconds, or stops sending
            for as long.

    Returns:
        The file; None where `where` is None and there is none to be had.

    Raises:
        DataError: `where` is neither a file nor a folder that has one for the model.
    """
    if where is None:
        folder = Path(torch.hub.get_dir()) / "checkpoints"
        return _find_in(folder, model_name) or _download(model_name, folder)
    found = where if where.is_file() else _find_in(where, model_name)
    if found is None:
        raise DataError(
            f"'{where}' is neither a file nor a folder with weights of {model_name}. Put {_url(model_name)} into it, "
            "or leave the weights out."
        )
    return found


def _find_in(folder: Path, model_name: str) -> Path | None:
    """Return torchvision's own file where the folder has it; else the first that is named after the model."""
    first = (folder / _file_name(model_name), folder / f"{model_name}.pth")
    return next((path for path in (*first, *sorted(folder.glob(f"{model_name}-*.pth"))) if path.is_file()), None)


def _url(model_name: str) -> str:
    from torchvision.models import get_model_weights

    # Each model's first weights: the sources are older than the second ones, which another recipe trained.
    return str(get_model_weights(model_name)["IMAGENET1K_V1"].url)


def _file_name(model_name: str) -> str:
    return _url(model_name).rpartition("/")[2]


def _download(model_name: str, folder: Path) -> Path | None:
    url, path = _url(model_name), folder / _file_name(model_name)
    if not _answers(url):
        return None
    digits = _DIGITS_IN_NAME.search(path.name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _short_patience():
            torch.hub.download_url_to_file(url, str(path), digits and digits[1], progress=False)
    except _DOWNLOAD_ERRORS:
        return None
    return path


def _answers(url: str) -> bool:
    """Say whether a server answers in time; looking up its name and trying its many addresses have no time-out."""
    answered = threading.Event()

    def ask() -> None:
        try:
            with urlopen(Request(url, method="HEAD"), timeout=_PATIENCE_SECONDS):
                answered.set()
        except _DOWNLOAD_ERRORS:
            return

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_PATIENCE_SECONDS)
    return answered.is_set()


@contextmanager
def _short_patience() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_PATIENCE_SECONDS)  # torch.hub sets none of its own
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def load_weights(body: nn.Module, path: Path) -> None:
    """Fill a model without its classifier with the weights of a torchvision file, all of them or none.

    Args:
        body: The model, whose children have the names that torchvision gives them; in float32.
        path: A state dict as torchvision publishes it. The classifier's entries (`fc.`) are ignored.

    Raises:
        DataError: The file cannot be read, is damaged, holds anything but tensors, or is another model's.
    """
    weights = {name: value for name, value in _read(path).items() if not name.startswith(_CLASSIFIER)}
    wanted = body.state_dict()
    for name in wanted:
        if name.endswith(".num_batches_tracked"):
            # Files from before PyTorch 0.4.1 have none; torch counts from zero then.
            weights.setdefault(name, torch.zeros((), dtype=torch.int64))
    wrong = _first_difference(weights, wanted)
    if wrong:
        raise DataError(f"The weights in '{path}' are another model's: {wrong}. {_what_to_do()}")
    try:
        body.load_state_dict(weights)
    except _READ_ERRORS as error:
        raise _unreadable(path, error) from None


def _first_difference(weights: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str | None:
    for name in wanted:
        if name not in weights:
            return f"'{name}' is missing"
    for name, value in weights.items():
        if name not in wanted:
            return f"there is '{name}', which the model has not"
        if value.shape != wanted[name].shape:
            return f"'{name}' has shape {tuple(value.shape)} where the model has {tuple(wanted[name].shape)}"
        if value.layout != torch.strided or value.is_floating_point() != wanted[name].is_floating_point():
            return f"'{name}' is {value.dtype}, {value.layout}"
        if not value.isfinite().all():
            return f"'{name}' has values that are no finite numbers"
    return None


def _read(path: Path) -> dict[str, Tensor]:
    try:
        _check_size(path)
        _check_digits(path)
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except DataError:
        raise
    except _READ_ERRORS as error:
        raise _unreadable(path, error) from None
    if not isinstance(content, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise DataError(f"The file '{path}' holds no state dict, names with tensors. {_what_to_do()}")
    return dict(content)


def _check_size(path: Path) -> None:
    num_bytes = path.stat().st_size
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            num_bytes = max(num_bytes, sum(entry.file_size for entry in archive.infolist()))
    if num_bytes > _MOST_BYTES:
        raise DataError(f"The file '{path}' holds {num_bytes:,} bytes, more than any ResNet's weights. {_what_to_do()}")


def _check_digits(path: Path) -> None:
    digits = _DIGITS_IN_NAME.search(path.name)
    if digits is None:
        return
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if not found.startswith(digits[1]):
        raise DataError(
            f"The file '{path}' is damaged, or not what its name says: its SHA-256 begins with "
            f"{found[: len(digits[1])]}. {_what_to_do()}"
        )


def _unreadable(path: Path, error: BaseException) -> DataError:
    first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line[:160].rstrip(".")
    return DataError(f"The weights in '{path}' cannot be read: {reason}. {_what_to_do()}")


def _what_to_do() -> str:
    return "Name torchvision's file for the model, downloaded anew, or leave the weights out."
