"""MNIST, CIFAR-10 and CIFAR-100 as tensors, from files whose checksums were verified.

torchvision's own readers need one folder layout each; castwise finds the files in several (`registry/datasets.py`).
Source of the formats: https://www.cs.toronto.edu/~kriz/cifar.html; yann.lecun.com/exdb/mnist (IDX).
"""

import pickle
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from castwise.registry.datasets import CIFAR10, CIFAR100, MNIST, DataSet, find_layout, read_verified

_IMAGE_HEADER_BYTES, _LABEL_HEADER_BYTES = 16, 8
_PIXEL_BYTES = 3 * 32 * 32

Bytes = npt.NDArray[np.uint8]


def load_mnist(data_dir: Path, split: str = "train") -> tuple[Tensor, Tensor]:
    """Return all images and labels of a split.

    Args:
        data_dir: A folder in which `registry.datasets.find_file` finds MNIST.
        split: "train" (60,000 digits) or "test" (10,000).

    Returns:
        Images, uint8 of shape (N, 1, 28, 28), and labels, int64 of shape (N,).

    Raises:
        DataError: A file is missing or is not the official one.
    """
    images = np.frombuffer(read_verified(MNIST, data_dir, f"{split}-images"), np.uint8, offset=_IMAGE_HEADER_BYTES)
    labels = np.frombuffer(read_verified(MNIST, data_dir, f"{split}-labels"), np.uint8, offset=_LABEL_HEADER_BYTES)
    return torch.from_numpy(images.reshape(-1, 1, 28, 28).copy()), torch.from_numpy(labels.astype(np.int64))


def load_cifar10(data_dir: Path, split: str = "train") -> tuple[Tensor, Tensor]:
    """Return all images and labels, from 0 to 9, of a split of CIFAR-10; see `load_cifar100`."""
    return _load_cifar(CIFAR10, data_dir, split)


def load_cifar100(data_dir: Path, split: str = "train") -> tuple[Tensor, Tensor]:
    """Return all images and fine labels, from 0 to 99, of a split of CIFAR-100, in either official layout.

    Args:
        data_dir: A folder in which `registry.datasets.find_layout` finds the data set.
        split: "train" (50,000 images) or "test" (10,000).

    Returns:
        Images, uint8 of shape (N, 3, 32, 32), and labels, int64 of shape (N,).

    Raises:
        DataError: A file is missing or is not the official one.
    """
    return _load_cifar(CIFAR100, data_dir, split)


def _load_cifar(data_set: DataSet, data_dir: Path, split: str) -> tuple[Tensor, Tensor]:
    layout = find_layout(data_set, data_dir)
    is_fine = data_set.name == "cifar100"
    read = _read_python if layout.layout == "python" else _read_binary
    parts = [file.part for file in layout.files if file.part == split or file.part.startswith(f"{split}-")]
    batches = [read(read_verified(layout, data_dir, part), is_fine) for part in parts]
    images = np.concatenate([pixels for pixels, _ in batches]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([labels for _, labels in batches]).astype(np.int64)
    return torch.from_numpy(images), torch.from_numpy(labels)


def _read_binary(content: bytes, is_fine: bool) -> tuple[Bytes, Bytes]:
    """Read records of label and pixels: one label byte in CIFAR-10; two, coarse and fine, in CIFAR-100."""
    num_labels = 2 if is_fine else 1
    records = np.frombuffer(content, np.uint8).reshape(-1, num_labels + _PIXEL_BYTES)
    return records[:, num_labels:], records[:, num_labels - 1]


def _read_python(content: bytes, is_fine: bool) -> tuple[Bytes, Bytes]:
    """Read a pickled dictionary, as torchvision does: only content with the official checksum is unpickled."""
    batch = pickle.loads(content, encoding="bytes")
    return batch[b"data"], np.asarray(batch[b"fine_labels" if is_fine else b"labels"], np.uint8)
