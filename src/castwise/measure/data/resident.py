"""Real data as batches that lie on the device, for steady-state trials."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from castwise.data_sets import CIFAR10, CIFAR100, MNIST, WIKITEXT2
from castwise.errors import DataError
from castwise.measure.data.cifar import load_cifar10, load_cifar100
from castwise.measure.data.mnist import load_mnist
from castwise.measure.data.wikitext import batchify, load_wikitext2, segments

MakeBatches = Callable[[int, int, torch.device, torch.Generator], Sequence[tuple[Tensor, ...]]]
LoadImages = Callable[[Path, str], tuple[Tensor, Tensor]]

IMAGE_SETS: dict[str, LoadImages] = {
    MNIST.name: load_mnist,
    CIFAR10.name: load_cifar10,
    CIFAR100.name: load_cifar100,
}

# Mean and standard deviation of each channel. Sources: pytorch/examples mnist/main.py; kuangliu/pytorch-cifar main.py.
_CIFAR_STATISTICS = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
_STATISTICS = {
    MNIST.name: ((0.1307,), (0.3081,)),
    CIFAR10.name: _CIFAR_STATISTICS,
    CIFAR100.name: _CIFAR_STATISTICS,
}


def resident_batches(data_set: str, data_dir: Path) -> MakeBatches:
    """Return a maker of one epoch's full batches of a data set, in order for text, shuffled for images.

    Its `count` is not looked at: the set has its own length.

    Args:
        data_set: A name of the data set registry.
        data_dir: Where it lies.
    """
    if data_set == WIKITEXT2.name:
        return partial(_text_batches, data_dir)
    return partial(_image_batches, data_set, data_dir)


def _image_batches(
    data_set: str, data_dir: Path, count: int, batch_size: int, device: torch.device, generator: torch.Generator
) -> Sequence[tuple[Tensor, ...]]:
    """Return batches of normalised images, float32 of shape (batch, C, H, W), and labels, int64 of shape (batch,).

    Raises:
        DataError: The set is missing or wrong, or smaller than one batch.
    """
    del count
    images, labels = (part.to(device) for part in IMAGE_SETS[data_set](data_dir, "train"))
    if batch_size > len(labels):
        raise DataError(f"{data_set} has {len(labels):,} training images; a batch of {batch_size:,} cannot be made.")
    order = torch.randperm(len(labels), generator=generator, device=device)
    mean, deviation = (torch.tensor(part, device=device).view(1, -1, 1, 1) for part in _STATISTICS[data_set])
    images, labels = (images[order].float() / 255 - mean) / deviation, labels[order]
    return [
        (images[start : start + batch_size], labels[start : start + batch_size])
        for start in range(0, len(labels) - batch_size + 1, batch_size)
    ]


def _text_batches(
    data_dir: Path, count: int, batch_size: int, device: torch.device, generator: torch.Generator
) -> Sequence[tuple[Tensor, ...]]:
    """Return a language model's batches: tokens of shape (35, batch), and the tokens behind them, flat.

    Raises:
        DataError: The text is missing or wrong.
    """
    del count, generator  # a text is read in its order
    batches = segments(batchify(load_wikitext2(data_dir).train, batch_size).to(device))
    full = len(batches[0][0])
    return [batch for batch in batches if len(batch[0]) == full]
