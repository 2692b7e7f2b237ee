"""Data sets as tensors, from files whose checksums were verified, and full batches of them on the device.

torchvision's own readers need one folder layout each; castwise finds the files in several (`registry/datasets.py`).
Source of the formats: https://www.cs.toronto.edu/~kriz/cifar.html; yann.lecun.com/exdb/mnist (IDX).
"""

import pickle
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from castwise.errors import DataError
from castwise.registry.datasets import (
    CIFAR10,
    CIFAR100,
    IMAGE_FACTS,
    MNIST,
    SYNTHETIC_PREFIX,
    WIKITEXT2,
    DataSet,
    find_layout,
    read_verified,
)
from castwise.trial.data.transforms import STATISTICS
from castwise.trial.data.wikitext import batchify, load_wikitext2, segments

MakeBatches = Callable[[int, int, torch.device, torch.Generator], Sequence[tuple[Tensor, ...]]]

_IMAGE_HEADER_BYTES, _LABEL_HEADER_BYTES = 16, 8
_PIXEL_BYTES = 3 * 32 * 32


def fetch(name: str, data_dir: Path) -> None:
    """Download a data set of the registry into a folder, through torchvision; no pickle is opened here.

    Raises:
        DataError: It cannot be downloaded; the message says where to put its files.
        OSError: Its server could not be reached.
        RuntimeError: No mirror could be reached, or the download has a wrong checksum.
    """
    if name == WIKITEXT2.name:
        files = ", ".join(f"{file.name} (or {file.aliases[0]})" for file in WIKITEXT2.files)
        raise DataError(
            f"{name} is not downloaded by castwise: put {files} of pytorch/examples "
            f"word_language_model/data/wikitext-2 into '{data_dir / WIKITEXT2.folders[0]}'"
        )
    from torchvision import datasets

    archive = getattr(datasets, IMAGE_FACTS[name].torchvision)
    if name == MNIST.name:
        archive(root=str(data_dir), download=True)
        return
    datasets.utils.download_and_extract_archive(
        archive.url, str(data_dir), filename=archive.filename, md5=archive.tgz_md5, remove_finished=True
    )


def load_mnist(row: DataSet, data_dir: Path, split: str) -> tuple[Tensor, Tensor]:
    """Return the images of MNIST's row, uint8 of shape (N, 1, 28, 28), and labels, int64 of shape (N,)."""
    images = np.frombuffer(read_verified(row, data_dir, f"{split}-images"), np.uint8, offset=_IMAGE_HEADER_BYTES)
    labels = np.frombuffer(read_verified(row, data_dir, f"{split}-labels"), np.uint8, offset=_LABEL_HEADER_BYTES)
    return torch.from_numpy(images.reshape(-1, 1, 28, 28).copy()), torch.from_numpy(labels.astype(np.int64))


def load_cifar(row: DataSet, data_dir: Path, split: str) -> tuple[Tensor, Tensor]:
    """Return the images of a CIFAR row, uint8 of shape (N, 3, 32, 32), and (fine) labels, int64 of shape (N,)."""
    layout = find_layout(row, data_dir)
    is_fine = row.name == CIFAR100.name
    images, labels = [], []
    for file in layout.files:
        if file.part != split and not file.part.startswith(f"{split}-"):
            continue
        content = read_verified(layout, data_dir, file.part)
        if layout.layout == "python":
            # As torchvision does: only content with the official checksum is unpickled.
            batch = pickle.loads(content, encoding="bytes")
            images.append(batch[b"data"])
            labels.append(np.asarray(batch[b"fine_labels" if is_fine else b"labels"], np.int64))
        else:  # records of one label byte, or in CIFAR-100 of two, coarse and fine, and of pixels
            num_labels = 2 if is_fine else 1
            records = np.frombuffer(content, np.uint8).reshape(-1, num_labels + _PIXEL_BYTES)
            images.append(records[:, num_labels:])
            labels.append(records[:, num_labels - 1].astype(np.int64))
    return torch.from_numpy(np.concatenate(images).reshape(-1, 3, 32, 32)), torch.from_numpy(np.concatenate(labels))


IMAGE_SETS: dict[str, Callable[[Path, str], tuple[Tensor, Tensor]]] = {
    MNIST.name: partial(load_mnist, MNIST),
    CIFAR10.name: partial(load_cifar, CIFAR10),
    CIFAR100.name: partial(load_cifar, CIFAR100),
}
NUM_IMAGES = {name: facts.num_images for name, facts in IMAGE_FACTS.items()}


def load_images(data_set: str, data_dir: Path | None, split: str) -> tuple[Tensor, Tensor]:
    """Return all images of a split ("train" or "test"), uint8 of shape (N, C, H, W), and labels, int64 of shape (N,).

    After `SYNTHETIC_PREFIX` they are random, as many as the data set has and in its shape, always the same.
    """
    name = data_set.removeprefix(SYNTHETIC_PREFIX)
    if name == data_set:
        assert data_dir is not None, "real data has a folder"
        return IMAGE_SETS[data_set](data_dir, split)
    facts, is_test = IMAGE_FACTS[name], split == "test"
    count = NUM_IMAGES[name][is_test]
    generator = np.random.default_rng(int(is_test))
    images = generator.integers(0, 256, (count, *facts.shape), np.uint8)
    return torch.from_numpy(images), torch.from_numpy(generator.integers(0, facts.num_classes, count))


def resident_batches(data_set: str, data_dir: Path, side: int | None = None) -> MakeBatches:
    """Return a maker of one epoch's full batches of a data set on the device, for steady trials.

    A text's batches come in its order: tokens of shape (35, batch), and the next tokens, flat. Images are shuffled and
    normalised, float32 of shape (batch, C, H, W), with labels, int64 of shape (batch,), and resized to `side` × `side`
    unless it is None. The maker's `count` matters only if images are enlarged, since a device could not hold all of
    them. It raises DataError if files are missing or wrong, or the set is smaller than one batch.
    """

    def make_text(_: int, batch_size: int, device: torch.device, __: torch.Generator) -> Sequence[tuple[Tensor, ...]]:
        batches = segments(batchify(load_wikitext2(data_dir).train, batch_size).to(device))
        return [batch for batch in batches if len(batch[0]) == len(batches[0][0])]

    def make_images(
        count: int, batch_size: int, device: torch.device, generator: torch.Generator
    ) -> Sequence[tuple[Tensor, ...]]:
        images, labels = (part.to(device) for part in IMAGE_SETS[data_set](data_dir, "train"))
        if batch_size > len(labels):
            raise DataError(
                f"{data_set} has {len(labels):,} training images; a batch of {batch_size:,} cannot be made."
            )
        order = torch.randperm(len(labels), generator=generator, device=device)
        mean, deviation = (torch.tensor(part, device=device).view(1, -1, 1, 1) for part in STATISTICS[data_set])
        images, labels = (images[order].float() / 255 - mean) / deviation, labels[order]
        batches = [
            (images[start : start + batch_size], labels[start : start + batch_size])
            for start in range(0, len(labels) - batch_size + 1, batch_size)
        ]
        if side is None or images.shape[-1] == side:
            return batches
        enlarge = partial(torch.nn.functional.interpolate, size=(side, side), mode="bilinear")
        return [(enlarge(part), part_labels) for part, part_labels in batches[:count]]

    return make_text if data_set == WIKITEXT2.name else make_images
