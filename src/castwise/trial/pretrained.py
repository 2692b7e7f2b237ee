"""Pretrained weights of torchvision's models: find or download their file, and load it without running its content."""

import hashlib
import pickle
import re
import socket
import threading
import zipfile
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import torch
from torch import Tensor, nn

from castwise.errors import DataError

# How long torchvision's server may take to answer, name look-up included. Source: chosen here.
_TIMEOUT_SECONDS = 8.0
# torchvision's files carry the first digits of their SHA-256. Source: torch.hub (`HASH_REGEX`).
_HASH_IN_NAME = re.compile(r"-([a-f0-9]{8,})\.pth$")
_DOWNLOAD_ERRORS = (OSError, RuntimeError, ValueError, HTTPException)
# What torch.load raises on damaged files, seen over many mutated ones.
_READ_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, LookupError, MemoryError,
    OSError, RuntimeError, TypeError, ValueError, pickle.PickleError, zipfile.BadZipFile,
)  # fmt: skip
_WHAT_TO_DO = "Name torchvision's file for the model, downloaded anew, or leave the weights out."


def find_weights(model_name: str, where: Path | None) -> Path | None:
    """Return the file with a torchvision model's pretrained weights; None if `where` is None and no file can be had.

    `where` is the file itself, or a folder with it. None looks where torch.hub keeps its files and then asks
    torchvision's server, for at most eight seconds without an answer or without data.
    """
    if where is None:
        folder = Path(torch.hub.get_dir()) / "checkpoints"
        return _find_in(folder, model_name) or _download(model_name, folder)
    found = where if where.is_file() else _find_in(where, model_name)
    if found is None:
        raise DataError(
            f"'{where}' is neither a file nor a folder with weights of {model_name}. Put {weights_url(model_name)} "
            "into it, or leave the weights out."
        )
    return found


def weights_url(model_name: str) -> str:
    """Return the address of a torchvision model's first weights.

    The published results that castwise compares with are older than the second ones, which another recipe trained.
    """
    from torchvision.models import get_model_weights

    return str(get_model_weights(model_name)["IMAGENET1K_V1"].url)


def _find_in(folder: Path, model_name: str) -> Path | None:
    """Return torchvision's own file if the folder has it; else the first one named after the model."""
    official = weights_url(model_name).rpartition("/")[2]
    first = (folder / official, folder / f"{model_name}.pth")
    return next((path for path in (*first, *sorted(folder.glob(f"{model_name}-*.pth"))) if path.is_file()), None)


def _download(model_name: str, folder: Path) -> Path | None:
    url = weights_url(model_name)
    path = folder / url.rpartition("/")[2]
    answered = threading.Event()

    def ask() -> None:
        try:
            with urlopen(Request(url, method="HEAD"), timeout=_TIMEOUT_SECONDS):
                answered.set()
        except _DOWNLOAD_ERRORS:
            return

    asking = threading.Thread(target=ask, daemon=True)  # a name look-up knows no timeout
    asking.start()
    asking.join(_TIMEOUT_SECONDS)
    if not answered.is_set():
        return None
    expected = _HASH_IN_NAME.search(path.name)
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT_SECONDS)  # torch.hub sets none
    try:
        folder.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(path), expected and expected[1], progress=False)
    except _DOWNLOAD_ERRORS:
        return None
    finally:
        socket.setdefaulttimeout(before)
    return path


def load_weights(body: nn.Module, path: Path) -> None:
    """Fill a torchvision model that has no classifier with the weights of torchvision's file, all of them or none.

    The body is in float32 and its children have torchvision's names. The classifier's entries (`fc.`) are ignored.
    """
    weights = {name: value for name, value in _read(path).items() if not name.startswith("fc.")}
    wanted = body.state_dict()
    for name in wanted:
        if name.endswith(".num_batches_tracked"):  # files from before PyTorch 0.4.1 have none
            weights.setdefault(name, torch.zeros((), dtype=torch.int64))
    difference = _first_difference(weights, wanted)
    if difference:
        raise DataError(f"The weights in '{path}' are another model's: {difference}. {_WHAT_TO_DO}")
    body.load_state_dict(weights)


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
    expected = _HASH_IN_NAME.search(path.name)
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest() if expected else ""
        if expected is None or found.startswith(expected[1]):
            content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except _READ_ERRORS as error:
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line[:160].rstrip(".")
        raise DataError(f"The weights in '{path}' cannot be read: {reason}. {_WHAT_TO_DO}") from None
    if expected is not None and not found.startswith(expected[1]):
        raise DataError(
            f"The file '{path}' is damaged, or not what its name says: its SHA-256 begins with "
            f"{found[: len(expected[1])]}. {_WHAT_TO_DO}"
        )
    if not isinstance(content, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise DataError(f"The file '{path}' holds no state dict, names with tensors. {_WHAT_TO_DO}")
    return dict(content)
