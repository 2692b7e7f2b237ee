"""MNIST as tensors, from files whose checksums `data_sets.py` has verified."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from castwise.data_sets import MNIST, read_verified
from castwise.errors import DataError

_MEAN, _STD = 0.1307, 0.3081  # Source: pytorch/examples mnist/main.py
_IMAGE_HEADER_BYTES, _LABEL_HEADER_BYTES = 16, 8  # Source: yann.lecun.com/exdb/mnist, the IDX format


def load_mnist(data_dir: Path, split: str = "train") -> tuple[Tensor, Tensor]:
    """Return all images and labels of a split.

    Args:
        data_dir: A folder in which `data_sets.find_files` finds MNIST.
        split: "train" (60,000 digits) or "test" (10,000).

    Returns:
        Images, uint8 of shape (N, 1, 28, 28), and labels, int64 of shape (N,).

    Raises:
        DataError: A file is missing or is not the official one.
    """
    images = read_verified(MNIST, data_dir, f"{split}-images")[_IMAGE_HEADER_BYTES:]
    labels = read_verified(MNIST, data_dir, f"{split}-labels")[_LABEL_HEADER_BYTES:]
    pixels = np.frombuffer(images, np.uint8).reshape(-1, 1, 28, 28)
    return torch.from_numpy(pixels.copy()), torch.from_numpy(np.frombuffer(labels, np.uint8).astype(np.int64))


def mnist_batches(
    data_dir: Path,
) -> Callable[[int, int, torch.device, torch.Generator], Sequence[tuple[Tensor, ...]]]:
    """Return a batch maker over MNIST's training images, shuffled, normalised and resident on the device.

    It gives one epoch's full batches; `count` is not looked at, since the set has its own length.

    Args:
        data_dir: Where MNIST lies.
    """

    def make(
        count: int, batch_size: int, device: torch.device, generator: torch.Generator
    ) -> Sequence[tuple[Tensor, ...]]:
        del count
        images, labels = (part.to(device) for part in load_mnist(data_dir))
        order = torch.randperm(len(labels), generator=generator, device=device)
        images = (images[order].float() / 255 - _MEAN) / _STD
        labels = labels[order]
        full = len(labels) // batch_size
        if not full:
            raise DataError(f"MNIST has {len(labels):,} training images; a batch of {batch_size:,} cannot be made.")
        return [
            (images[start : start + batch_size], labels[start : start + batch_size])
            for start in range(0, full * batch_size, batch_size)
        ]

    return make
