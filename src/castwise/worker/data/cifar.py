"""CIFAR-10 and CIFAR-100 as tensors, from files whose checksums `data_sets.py` has verified.

Source of both layouts: https://www.cs.toronto.edu/~kriz/cifar.html.
"""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from castwise.errors import DataError
from castwise.registry.datasets import CIFAR10, CIFAR100, DataSet, find_layout, read_verified

_SHAPE = (3, 32, 32)  # channels, rows, columns
_PIXEL_BYTES = 3 * 32 * 32

Bytes = npt.NDArray[np.uint8]

# What a pickle that is damaged or hostile has been seen to raise, over many mutated ones.
_PICKLE_ERRORS = (
    pickle.PickleError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)


def load_cifar10(data_dir: Path, split: str = "train") -> tuple[Tensor, Tensor]:
    """Return all images and labels of a split of CIFAR-10, from whichever layout is there.

    Args:
        data_dir: A folder in which `data_sets.find_layout` finds CIFAR-10.
        split: "train" (50,000 images) or "test" (10,000).

    Returns:
        Images, uint8 of shape (N, 3, 32, 32), and labels from 0 to 9, int64 of shape (N,).

    Raises:
        DataError: A file is missing or is not the official one.
    """
    return _load(CIFAR10, data_dir, split, num_classes=10)


def load_cifar100(data_dir: Path, split: str = "train") -> tuple[Tensor, Tensor]:
    """Return all images and fine labels of a split of CIFAR-100, from whichever layout is there.

    Args:
        data_dir: A folder in which `data_sets.find_layout` finds CIFAR-100.
        split: "train" (50,000 images) or "test" (10,000).

    Returns:
        Images, uint8 of shape (N, 3, 32, 32), and labels from 0 to 99, int64 of shape (N,).

    Raises:
        DataError: A file is missing or is not the official one.
    """
    return _load(CIFAR100, data_dir, split, num_classes=100)


def _load(data_set: DataSet, data_dir: Path, split: str, *, num_classes: int) -> tuple[Tensor, Tensor]:
    layout = find_layout(data_set, data_dir)
    parse: Callable[..., tuple[Bytes, Bytes]] = parse_python if layout.layout == "python" else parse_binary
    parts = [file.part for file in layout.files if file.part == split or file.part.startswith(f"{split}-")]
    batches = [parse(read_verified(layout, data_dir, part), num_classes=num_classes) for part in parts]
    images = np.concatenate([pixels for pixels, _ in batches]).reshape(-1, *_SHAPE)
    labels = np.concatenate([labels for _, labels in batches]).astype(np.int64)
    return torch.from_numpy(images), torch.from_numpy(labels)


def parse_binary(content: bytes, *, num_classes: int) -> tuple[Bytes, Bytes]:
    """Take a file of the binary layout apart.

    Args:
        content: Records of label and pixels: one label byte in CIFAR-10; two, coarse and fine, in CIFAR-100.
        num_classes: 10 or 100, which says whose file it is.

    Returns:
        Pixels of shape (N, 3072), channel after channel, and labels of shape (N,).

    Raises:
        DataError: The file ends within a record, or a label is out of range.
    """
    num_labels = 1 if num_classes == 10 else 2
    if not content or len(content) % (num_labels + _PIXEL_BYTES):
        size = num_labels + _PIXEL_BYTES
        raise DataError(f"A CIFAR-{num_classes} file of {len(content):,} bytes is not made of records of {size:,}.")
    records = np.frombuffer(content, np.uint8).reshape(-1, num_labels + _PIXEL_BYTES)
    return records[:, num_labels:], _checked(records[:, num_labels - 1], num_classes)


def parse_python(content: bytes, *, num_classes: int) -> tuple[Bytes, Bytes]:
    """Take a file of the python layout apart: a pickled dictionary, of which nothing but plain data is built.

    Args:
        content: The pickle.
        num_classes: 10 or 100, which says where the labels are.

    Returns:
        Pixels of shape (N, 3072), channel after channel, and labels of shape (N,).

    Raises:
        DataError: It is not such a pickle, or a label is out of range.
    """
    batch = unpickle(content)
    key = b"labels" if num_classes == 10 else b"fine_labels"
    try:
        pixels, labels = batch[b"data"].as_bytes(), np.asarray(batch[key])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"A CIFAR-{num_classes} batch has no usable data or {key.decode()}: {error!r}.") from None
    if labels.dtype.kind != "i" or pixels.shape[1:] != (_PIXEL_BYTES,) or labels.shape != pixels.shape[:1]:
        raise DataError(
            f"A CIFAR-{num_classes} batch holds pixels of shape {pixels.shape} and {labels.dtype} labels of shape "
            f"{labels.shape}."
        )
    return pixels, _checked(labels, num_classes)


def _checked(labels: npt.NDArray[Any], num_classes: int) -> Bytes:
    wrong = labels[(labels < 0) | (labels >= num_classes)]
    if wrong.size:
        raise DataError(f"A CIFAR-{num_classes} label is {wrong[0]}; they go from 0 to {num_classes - 1}.")
    return labels.astype(np.uint8)


def unpickle(content: bytes) -> dict[bytes, Any]:
    """Return a pickled dictionary of plain data and numpy arrays.

    No name in a pickle is ever looked up: the three of numpy that CIFAR's have are stood in for by classes that
    take down what they are given, and any other is refused. So nothing is run, and no array is allocated by a
    size that the pickle merely states. A pickle can still waste memory: verify it first.

    Args:
        content: A pickle, Python 2's too, whose strings come back as bytes.

    Returns:
        The dictionary; its arrays are `PickledArray`.

    Raises:
        DataError: It is not such a pickle.
    """
    try:
        batch = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    except _PICKLE_ERRORS as error:
        raise DataError(f"A file that should be a CIFAR batch is no pickle of plain data: {error}.") from None
    if not isinstance(batch, dict):
        raise DataError(f"A file that should be a CIFAR batch holds a {type(batch).__name__} where it has a dict.")
    return batch


class PickledArray:
    """What a pickled numpy array is made of."""

    def __init__(self, *_: object) -> None:
        self._state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        # Source: numpy.ndarray.__setstate__: version, shape, dtype, Fortran order, content.
        self._state = state

    def as_bytes(self) -> Bytes:
        """Return the array, if it is a matrix of bytes.

        Raises:
            ValueError: It is not.
        """
        _, shape, dtype, is_fortran, content = self._state
        if not isinstance(dtype, _PickledDtype) or dtype.name not in ("u1", b"u1"):
            raise ValueError("not an array of bytes")
        return np.frombuffer(content, np.uint8).reshape(shape, order="F" if is_fortran else "C")


class _PickledDtype:
    def __init__(self, name: object = None, *_: object) -> None:
        self.name = name

    def __setstate__(self, state: object) -> None:
        """Take byte order and the like, which a byte has none of."""


_STAND_INS: dict[str, Any] = {
    "numpy.core.multiarray._reconstruct": PickledArray,
    "numpy._core.multiarray._reconstruct": PickledArray,  # its name since numpy 2
    "numpy.ndarray": PickledArray,
    "numpy.dtype": _PickledDtype,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        name = f"{module_name}.{global_name}"
        if name not in _STAND_INS:
            raise pickle.UnpicklingError(f"it asks for {name}")
        return _STAND_INS[name]
