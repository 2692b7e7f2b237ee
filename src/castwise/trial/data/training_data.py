"""The batches of a training run's epochs, as its recipe asks for: from a DataLoader, or from data on the device."""

import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from castwise.apply.pytree import Batch
from castwise.apply.techniques.batch_layout import Prepare
from castwise.registry.datasets import SYNTHETIC_PREFIX, WIKITEXT2
from castwise.registry.techniques import step_config_of
from castwise.registry.workloads import Workload
from castwise.spec.recipe import Loader, Recipe
from castwise.spec.trial import TrialSpec
from castwise.spec.types import SYNTHETIC
from castwise.trial.data.datasets import load_images
from castwise.trial.data.gpu_augmentation import AUGMENTATIONS, Augmentation, DeviceImages, DrawnImages, Epochs, Images
from castwise.trial.data.sharding import rank_batches, rank_columns, seed_generators, seed_of
from castwise.trial.data.transforms import TRANSFORMS, Transform
from castwise.trial.data.wikitext import batchify, load_wikitext2, random_corpus, segments
from castwise.trial.distributed import Peers
from castwise.trial.lifetime import kill_when_parent_dies
from castwise.trial.models.task import Task
from castwise.trial.user_model.batches import to_device

Sample = tuple[Tensor, int]

_SYNTHETIC_SAMPLES = 100_000  # of an epoch of synthetic data, unless the recipe names a number
# Source: init27/RTX-2080Ti-Vs-GTX-1080Ti-CIFAR-100-Benchmarks, 2080Ti.ipynb (np.random.seed(42), valid_pct=0.2).
_SPLIT_SEED = 42
_VALIDATION_FRACTION = 0.2


@dataclass(frozen=True)
class BatchSource:
    """Batches of any epoch.

    Reading and copying to the device are separate so that each can be timed: the copy waits for steps in flight, which
    is not waiting for data.
    """

    num_batches: int  # of an epoch
    read: Callable[[int], Iterator[Batch]]  # iterates over an epoch's batches, or the draws for them; from epoch 0
    place: Prepare = lambda batch: batch  # copies what was read to the device
    make: Prepare | None = None  # makes the step's batch from that, on the device; None if it is the batch

    def start(self, epoch: int) -> Iterator[Batch]:
        """Return an iterator over the batches of an epoch on the device."""
        placed = map(self.place, self.read(epoch))
        return placed if self.make is None else map(self.make, placed)

    def prepared(self, prepare: Prepare | None) -> "BatchSource":
        make = self.make
        if prepare is None or make is None:
            return replace(self, make=prepare or make)
        return replace(self, make=lambda parts: prepare(make(parts)))


def make_training_data(
    row: Workload, task: Task, spec: TrialSpec, data_dir: Path | None, peers: Peers, prepare: Prepare | None = None
) -> tuple[BatchSource, BatchSource | None]:
    """Return a rank's share of a training trial's data, and all validation data if the recipe validates.

    Batches are on the spec's device, where `prepare` is applied to each.
    """
    assert spec.recipe is not None, "a training trial has a recipe"
    if task.training_set is not None:
        return _users_batches(task, spec).prepared(prepare), None
    if spec.data_set == SYNTHETIC:
        return _synthetic_source(row, task, spec, spec.recipe, peers).prepared(prepare), None
    is_text = spec.data_set.removeprefix(SYNTHETIC_PREFIX) == WIKITEXT2.name
    training, validation = (_text_sources if is_text else _image_sources)(spec, spec.recipe, data_dir, peers)
    return training.prepared(prepare), None if validation is None else validation.prepared(prepare)


def _synthetic_source(row: Workload, task: Task, spec: TrialSpec, recipe: Recipe, peers: Peers) -> BatchSource:
    device = torch.device(spec.device)
    if recipe.loader.resident:
        joint = spec.batch_size * spec.world_size
        count = max(1, (recipe.samples_per_epoch or joint) // joint)
        return _resident(rank_batches(row, task, spec, count, peers))
    total, side = recipe.samples_per_epoch or _SYNTHETIC_SAMPLES, row.input_shape[-1]
    num_classes = task.num_classes or 1000
    if step_config_of(spec.techniques).resident_data:
        images = DrawnImages(total, (3, side, side), num_classes, _epochs(spec, recipe, peers), device)
        return BatchSource(images.num_batches, images.start)
    samples = SyntheticSamples(total, side, num_classes)
    return load_batches(samples, recipe.loader, spec.process_batch_size, spec.seed, device, peers)


def _users_batches(task: Task, spec: TrialSpec) -> BatchSource:
    """Return the user's own batches, in tuples of those of one optimizer step if there are several.

    The global generators are seeded at the begin of each epoch: what a data loader shuffles by, and dropout draws from.
    """
    own: Any = task.training_set
    parts = 1 if task.user_loop is None else task.user_loop.accumulate

    def read(epoch: int) -> Iterator[Batch]:
        seed_generators(seed_of(spec.seed, epoch))
        batches = iter(own)
        while len(step := tuple(itertools.islice(batches, parts))) == parts:
            yield step if parts > 1 else step[0]

    return BatchSource(len(own) // parts, read, partial(to_device, device=torch.device(spec.device)))


def _text_sources(
    spec: TrialSpec, recipe: Recipe, data_dir: Path | None, peers: Peers
) -> tuple[BatchSource, BatchSource | None]:
    device = torch.device(spec.device)
    if spec.data_set.startswith(SYNTHETIC_PREFIX):
        corpus = random_corpus()
    else:
        assert data_dir is not None, "real data has a folder"
        corpus = load_wikitext2(data_dir)
    columns = rank_columns(batchify(corpus.train, spec.batch_size * peers.world_size), peers)
    training = _resident(segments(columns.to(device)))
    if not recipe.validates:
        return training, None
    return training, _resident(segments(batchify(corpus.valid, recipe.validation_batch_size).to(device)))


def _image_sources(
    spec: TrialSpec, recipe: Recipe, data_dir: Path | None, peers: Peers
) -> tuple[BatchSource, BatchSource | None]:
    device = torch.device(spec.device)
    name, own = spec.data_set.removeprefix(SYNTHETIC_PREFIX), recipe.loader
    transform = recipe.transform or name
    training, validation = (load_images(spec.data_set, data_dir, split) for split in ("train", "test"))
    if recipe.pooled_split:
        training, validation = fastai_split(training, validation)
    if step_config_of(spec.techniques).resident_data:
        images = DeviceImages(training, name, AUGMENTATIONS[transform], _epochs(spec, recipe, peers), device)
        source = BatchSource(images.num_batches, images.start, make=images.make)
        if not recipe.validates:
            return source, None
        once = Epochs(recipe.validation_batch_size, shuffle=False)
        judged = DeviceImages(validation, name, Augmentation(), once, device)
        return source, BatchSource(judged.num_batches, judged.start, make=judged.make)
    pair = TRANSFORMS[transform]
    samples = ImageSamples(*training, pair.training)
    source = load_batches(samples, own, spec.process_batch_size, spec.seed, device, peers)
    if not recipe.validates:
        return source, None
    workers = max(recipe.validation_workers, own.num_workers) if own.persistent else recipe.validation_workers
    plain = own.model_copy(update={"num_workers": workers, "shuffle": False, "drop_last": False})
    judged_samples = ImageSamples(*validation, pair.validation)
    return source, load_batches(judged_samples, plain, recipe.validation_batch_size, spec.seed, device)


def _epochs(spec: TrialSpec, recipe: Recipe, peers: Peers) -> Epochs:
    return Epochs(spec.process_batch_size, recipe.loader.shuffle, recipe.loader.drop_last, spec.seed, peers)


def _resident(batches: Sequence[Batch]) -> BatchSource:
    return BatchSource(len(batches), lambda _: iter(batches))


class ImageSamples(Dataset[Sample]):
    """Images that are converted to PIL and transformed one by one, as in torchvision's data sets."""

    def __init__(self, images: Tensor, labels: Tensor, transform: Transform) -> None:
        """Keep images, uint8 of shape (N, 1 or 3, height, width), and labels, int64 of shape (N,)."""
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
    """Random images of `side` × `side` pixels and labels, each drawn on the CPU at access.

    Source: jorism1993/nvidia_amd_gpu_comparison dataset.py at 573a94ff (`SyntheticDataDataset`).
    """

    def __init__(self, num_samples: int, side: int, num_classes: int = 1000) -> None:
        self._num_samples, self._side, self._num_classes = num_samples, side, num_classes

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        image = torch.rand(3, self._side, self._side) * 2 - 1
        return image, random.randint(0, self._num_classes - 1)


def load_batches(
    dataset: Dataset[Sample],
    loader: Loader,
    batch_size: int,
    seed: int,
    device: torch.device,
    peers: Peers | None = None,
) -> BatchSource:
    """Return the batches of a DataLoader; the order depends on seed and epoch only, so that a run can be resumed."""
    made = make_loader(dataset, loader, batch_size, seed, peers)
    first_seed = made.generator.initial_seed()

    def read(epoch: int) -> Iterator[Batch]:
        made.generator.manual_seed(first_seed + epoch)
        if isinstance(made.sampler, DistributedSampler):
            made.sampler.set_epoch(epoch)
        return iter(made)

    def place(batch: Batch) -> Batch:
        return tuple(part.to(device, non_blocking=loader.non_blocking) for part in batch)

    return BatchSource(len(made), read, place)


def make_loader(
    dataset: Dataset[Sample], loader: Loader, batch_size: int, seed: int, peers: Peers | None = None
) -> DataLoader[Any]:
    """Return a loader whose batches are images, float32 of shape (batch, C, H, W), and labels, int64 of (batch,).

    Its processes start anew each epoch, as in the published training scripts, unless they persist, and end with this
    process; the main thread must start the epoch. Order and augmentation follow from the seed; without processes
    (`num_workers` 0) augmentation follows from this process's random state.

    Each rank has a loader of its own, with `loader.num_workers` processes, over a share of the samples of equal length:
    without `drop_last` the first samples are repeated at the end.
    """
    assert not loader.resident, "resident batches need no loader"
    peers, sampler, parent_pid = peers or Peers(), None, os.getpid()
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
        worker_init_fn=lambda _: kill_when_parent_dies(parent_pid),
        multiprocessing_context="fork" if loader.num_workers else None,
        persistent_workers=loader.persistent and loader.num_workers > 0,
        prefetch_factor=loader.prefetch_batches if loader.num_workers else None,
    )


def fastai_split(train: Images, test: Images) -> tuple[Images, Images]:
    """Pool both splits of a data set and draw the validation data from all of it, as fastai does in the source.

    CIFAR's 60,000 images become 48,000 and 12,000. The random draw is fastai's, but over images in CIFAR's order, not
    in that of fastai's folders, so that other images are drawn.
    Source: fastai/fastai fastai/data_block.py at 0d37271f (`random_split_by_pct`, `split_by_idx`).
    """
    images, labels = (torch.cat(parts) for parts in zip(train, test, strict=True))
    drawn = torch.from_numpy(np.random.RandomState(_SPLIT_SEED).permutation(len(labels)))
    validation = drawn[: int(_VALIDATION_FRACTION * len(labels))]
    is_training = torch.ones(len(labels), dtype=torch.bool)
    is_training[validation] = False
    return (images[is_training], labels[is_training]), (images[validation], labels[validation])
