"""Data sets of single samples, and the DataLoader whose processes make batches of them on the CPU."""

import os
import random
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from castwise.spec.recipe import Loader
from castwise.worker.data.seeding import seed_of
from castwise.worker.data.transforms import Transform
from castwise.worker.distributed import Peers
from castwise.worker.lifetime import kill_when_parent_dies

Images = tuple[Tensor, Tensor]
Sample = tuple[Tensor, int]

# Source: init27/RTX-2080Ti-Vs-GTX-1080Ti-CIFAR-100-Benchmarks, 2080Ti.ipynb (np.random.seed(42), valid_pct=0.2).
_SPLIT_SEED = 42
_VALIDATION_FRACTION = 0.2


class ImageSamples(Dataset[Sample]):
    """Images that are converted to PIL and transformed one by one, as in torchvision's data sets."""

    def __init__(self, images: Tensor, labels: Tensor, transform: Transform) -> None:
        """Keep all images.

        Args:
            images: uint8 of shape (N, 1 or 3, height, width).
            labels: int64 of shape (N,).
            transform: Converts a PIL image to a tensor.
        """
        # PIL has channels last, and no channel dimension in a grey image.
        self._pixels = np.ascontiguousarray(images.permute(0, 2, 3, 1).numpy())
        if images.shape[1] == 1:
            self._pixels = self._pixels[..., 0]
        self._labels: list[int] = labels.tolist()
        self._transform = transform

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Sample:
        return self._transform(Image.fromarray(self._pixels[index])), self._labels[index]


class SyntheticSamples(Dataset[Sample]):
    """Random images and labels, each drawn on the CPU at access.

    Source: jorism1993/nvidia_amd_gpu_comparison dataset.py at 573a94ff (`SyntheticDataDataset`).
    """

    def __init__(self, num_samples: int, side: int, num_classes: int = 1000) -> None:
        """Define an epoch.

        Args:
            num_samples: Length of an epoch.
            side: Height and width in pixels.
            num_classes: Labels are drawn from [0, num_classes).
        """
        self._num_samples, self._side, self._num_classes = num_samples, side, num_classes

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        image = torch.rand(3, self._side, self._side) * 2 - 1
        return image, random.randint(0, self._num_classes - 1)


def make_loader(
    dataset: Dataset[Sample], loader: Loader, batch_size: int, seed: int, peers: Peers | None = None
) -> DataLoader[Any]:
    """Return a loader whose batches are images, float32 of shape (batch, C, H, W), and labels, int64 of (batch,).

    Its processes start anew each epoch, as in the published training scripts, unless they persist, and end with this
    process; the main thread must start the epoch. Order and augmentation follow from the seed; without processes
    (`num_workers` 0) augmentation follows from this process's random state.

    Each rank has a loader of its own, with `loader.num_workers` processes, over a share of the samples of equal length:
    without `drop_last` the first samples are repeated at the end.

    Args:
        dataset: The samples.
        loader: The loader's options.
        batch_size: Samples in a batch of this rank.
        seed: Of the order, and through the loader of every process's random numbers.
        peers: The ranks that share the samples; None if there is one.
    """
    assert not loader.resident, "resident batches need no loader"
    peers, sampler = peers or Peers(), None
    if peers.world_size > 1:
        sampler = DistributedSampler[Sample](
            dataset,
            num_replicas=peers.world_size,
            rank=peers.rank,
            shuffle=loader.shuffle,
            seed=seed_of(seed),
            drop_last=loader.drop_last,
        )
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=loader.shuffle and sampler is None,
        sampler=sampler,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        generator=torch.Generator().manual_seed(seed_of(seed, rank=peers.rank)),
        worker_init_fn=partial(_start_worker, os.getpid()),
        multiprocessing_context="fork" if loader.num_workers else None,
        persistent_workers=loader.persistent and loader.num_workers > 0,
        prefetch_factor=loader.prefetch_batches if loader.num_workers else None,
    )


def _start_worker(parent_pid: int, _: int) -> None:
    kill_when_parent_dies(parent_pid)


def fastai_split(train: Images, test: Images) -> tuple[Images, Images]:
    """Pool both splits of a data set and draw the validation data from all of it, as fastai does in the source.

    CIFAR's 60,000 images become 48,000 and 12,000. The random draw is fastai's, but over images in CIFAR's order, not
    in that of fastai's folders, so that other images are drawn.

    Source: fastai/fastai fastai/data_block.py at 0d37271f (`random_split_by_pct`, `split_by_idx`).

    Args:
        train: Images of shape (N, ...) and labels of shape (N,).
        test: The same.

    Returns:
        Training and validation images and labels.
    """
    images, labels = (torch.cat(parts) for parts in zip(train, test, strict=True))
    drawn = torch.from_numpy(np.random.RandomState(_SPLIT_SEED).permutation(len(labels)))
    validation = drawn[: int(_VALIDATION_FRACTION * len(labels))]
    is_training = torch.ones(len(labels), dtype=torch.bool)
    is_training[validation] = False
    return (images[is_training], labels[is_training]), (images[validation], labels[validation])
