"""MNIST as tensors, from files whose checksums `data_sets.py` has verified."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from castwise.registry.datasets import MNIST, read_verified

_IMAGE_HEADER_BYTES, _LABEL_HEADER_BYTES = 16, 8  # Source: yann.lecun.com/exdb/mnist, the IDX format


def load_mnist(data_dir: Path, split: str = "train") -> tuple[Tensor, Tensor]:
    """Return all images and labels of a split.

    Args:
        data_dir: A folder in which `data_sets.find_file` finds MNIST.
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
