"""Real data as batches on the device, for steady-state trials."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from castwise.errors import DataError
from castwise.registry.datasets import CIFAR10, CIFAR100, MNIST, SYNTHETIC_PREFIX, WIKITEXT2
from castwise.worker.data.images import load_cifar10, load_cifar100, load_mnist
from castwise.worker.data.transforms import STATISTICS
from castwise.worker.data.wikitext import batchify, load_wikitext2, segments

MakeBatches = Callable[[int, int, torch.device, torch.Generator], Sequence[tuple[Tensor, ...]]]
LoadImages = Callable[[Path, str], tuple[Tensor, Tensor]]

IMAGE_SETS: dict[str, LoadImages] = {
    MNIST.name: load_mnist,
    CIFAR10.name: load_cifar10,
    CIFAR100.name: load_cifar100,
}

# By data set: one image's shape, channels first, and the number of classes.
_SHAPES = {MNIST.name: ((1, 28, 28), 10), CIFAR10.name: ((3, 32, 32), 10), CIFAR100.name: ((3, 32, 32), 100)}
# By data set: training and test images.
NUM_IMAGES = {MNIST.name: (60_000, 10_000), CIFAR10.name: (50_000, 10_000), CIFAR100.name: (50_000, 10_000)}


def load_images(data_set: str, data_dir: Path | None, split: str) -> tuple[Tensor, Tensor]:
    """Return all images of a split: real ones, or random ones (`synthetic:cifar10`).

    Args:
        data_set: A name of `IMAGE_SETS`, with or without `SYNTHETIC_PREFIX`.
        data_dir: The folder with real ones.
        split: "train" or "test".

    Returns:
        Images, uint8 of shape (N, C, H, W), and labels, int64 of shape (N,).

    Raises:
        DataError: The real set is missing or wrong.
    """
    if data_set.startswith(SYNTHETIC_PREFIX):
        return random_images(data_set.removeprefix(SYNTHETIC_PREFIX), split)
    assert data_dir is not None, "real data has a folder"
    return IMAGE_SETS[data_set](data_dir, split)


def random_images(data_set: str, split: str) -> tuple[Tensor, Tensor]:
    """Return random images and labels, as many as a data set has and in its shape, always the same."""
    shape, num_classes = _SHAPES[data_set]
    is_test = split == "test"
    count = NUM_IMAGES[data_set][is_test]
    generator = np.random.default_rng(int(is_test))
    images = generator.integers(0, 256, (count, *shape), np.uint8)
    return torch.from_numpy(images), torch.from_numpy(generator.integers(0, num_classes, count))


def resident_batches(data_set: str, data_dir: Path, side: int | None = None) -> MakeBatches:
    """Return a maker of one epoch's full batches of a data set, in order for text, shuffled for images.

    Its `count` matters only if images are enlarged, since a device could not hold all of them: otherwise it makes all
    batches of the data set.

    Args:
        data_set: A name of the data set registry.
        data_dir: The folder with its files.
        side: Height and width, in pixels, to which images are resized; None leaves them as they are.
    """
    if data_set == WIKITEXT2.name:
        return partial(_text_batches, data_dir)
    if side is None:
        return partial(_image_batches, data_set, data_dir)
    return partial(_enlarged_batches, partial(_image_batches, data_set, data_dir), side)


def _enlarged_batches(
    make: MakeBatches, side: int, count: int, batch_size: int, device: torch.device, generator: torch.Generator
) -> Sequence[tuple[Tensor, ...]]:
    """Return the first `count` batches with images of side × side; all batches if they have that size already."""
    batches = make(count, batch_size, device, generator)
    if batches[0][0].shape[-1] == side:
        return batches
    enlarge = partial(torch.nn.functional.interpolate, size=(side, side), mode="bilinear")
    return [(enlarge(images), labels) for images, labels in batches[:count]]


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
    mean, deviation = (torch.tensor(part, device=device).view(1, -1, 1, 1) for part in STATISTICS[data_set])
    images, labels = (images[order].float() / 255 - mean) / deviation, labels[order]
    return [
        (images[start : start + batch_size], labels[start : start + batch_size])
        for start in range(0, len(labels) - batch_size + 1, batch_size)
    ]


def _text_batches(
    data_dir: Path, count: int, batch_size: int, device: torch.device, generator: torch.Generator
) -> Sequence[tuple[Tensor, ...]]:
    """Return a language model's batches: tokens of shape (35, batch), and the next tokens, flat.

    Raises:
        DataError: The text is missing or wrong.
    """
    del count, generator  # a text is read in its order
    batches = segments(batchify(load_wikitext2(data_dir).train, batch_size).to(device))
    full = len(batches[0][0])
    return [batch for batch in batches if len(batch[0]) == full]
