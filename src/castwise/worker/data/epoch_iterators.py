"""Epochs of batches on the device, as a recipe asks for: through a DataLoader, or from data on the device."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import DataLoader, DistributedSampler

from castwise.registry.datasets import SYNTHETIC_PREFIX, WIKITEXT2
from castwise.registry.techniques import step_config_of
from castwise.registry.workloads import Workload
from castwise.spec.recipe import Loader, Recipe
from castwise.spec.trial import TrialSpec
from castwise.spec.types import SYNTHETIC
from castwise.worker.data.dataloaders import Images, ImageSamples, SyntheticSamples, fastai_split, make_loader
from castwise.worker.data.gpu_augmentation import Augmentation, DeviceImages, DrawnImages, Epochs, find_augmentation
from castwise.worker.data.preloaded import load_images
from castwise.worker.data.sharding import rank_batches, rank_columns
from castwise.worker.data.transforms import find_transform
from castwise.worker.data.wikitext import Corpus, batchify, load_wikitext2, random_corpus, segments
from castwise.worker.distributed import Peers
from castwise.worker.models.task import Batch, Task
from castwise.worker.techniques.batch_layout import Prepare

_SYNTHETIC_SAMPLES = 100_000  # of an epoch of synthetic data, unless the recipe names a number


@dataclass(frozen=True)
class Feed:
    """Batches of any epoch.

    Reading and copying to the device are separate so that each can be timed: the copy waits for steps in flight, which
    is not waiting for data.

    Attributes:
        num_batches: Batches in an epoch.
        read: Returns an iterator over the batches of an epoch, by its number from 0, or over the draws for them.
        place: Copies what was read to the device.
        make: Makes the step's batch from that, on the device; None if it is the batch.
    """

    num_batches: int
    read: Callable[[int], Iterator[Batch]]
    place: Prepare = lambda batch: batch
    make: Prepare | None = None

    def start(self, epoch: int) -> Iterator[Batch]:
        """Return an iterator over the batches of an epoch on the device."""
        placed = map(self.place, self.read(epoch))
        return placed if self.make is None else map(self.make, placed)


@dataclass(frozen=True)
class Feeds:
    """What a training run reads: training data, and validation data where the recipe validates."""

    training: Feed
    validation: Feed | None

    def prepared(self, prepare: Prepare | None) -> "Feeds":
        """Return the same feeds with a function applied to every batch on the device."""
        if prepare is None:
            return self
        return Feeds(
            _prepared(self.training, prepare), None if self.validation is None else _prepared(self.validation, prepare)
        )


def make_feeds(row: Workload, task: Task, spec: TrialSpec, data_dir: Path | None, peers: Peers) -> Feeds:
    """Return the feeds of a training trial: a rank's share of the training data, all validation data.

    Args:
        row: The workload.
        task: Its task, for synthetic resident batches.
        spec: The trial's spec; it has a recipe. Batches go to its device.
        data_dir: The folder with real data; synthetic data (`synthetic`, `synthetic:cifar10`) needs none.
        peers: The ranks that share the training data.

    Raises:
        DataError: Real data is missing or is not what its name says.
    """
    recipe, device = spec.recipe, torch.device(spec.device)
    assert recipe is not None, "a training trial has a recipe"
    if spec.data_set.removeprefix(SYNTHETIC_PREFIX) == WIKITEXT2.name:
        return _text_feeds(spec, recipe, _load_corpus(spec, data_dir), peers)
    if spec.data_set == SYNTHETIC and recipe.loader.resident:
        joint = spec.batch_size * spec.world_size
        count = max(1, (recipe.samples_per_epoch or joint) // joint)
        return Feeds(_resident(rank_batches(row, task, spec, count, peers)), None)
    if spec.data_set == SYNTHETIC:
        if step_config_of(spec.techniques).resident_data:
            return Feeds(_random_feed(row, task, spec, recipe, peers), None)
        samples = SyntheticSamples(
            recipe.samples_per_epoch or _SYNTHETIC_SAMPLES, row.input_shape[-1], task.num_classes or 1000
        )
        loader = make_loader(samples, recipe.loader, spec.process_batch_size, spec.seed, peers)
        return Feeds(_loaded(loader, device, recipe.loader.non_blocking), None)
    return _image_feeds(spec, recipe, data_dir, peers)


def _image_feeds(spec: TrialSpec, recipe: Recipe, data_dir: Path | None, peers: Peers) -> Feeds:
    device = torch.device(spec.device)
    training, validation = (load_images(spec.data_set, data_dir, split) for split in ("train", "test"))
    if recipe.pooled_split:
        training, validation = fastai_split(training, validation)
    if step_config_of(spec.techniques).resident_data:
        return _resident_image_feeds(spec, recipe, (training, validation), peers)
    transform, validation_transform = find_transform(recipe.transform or spec.data_set.removeprefix(SYNTHETIC_PREFIX))
    samples = ImageSamples(*training, transform)
    loader = make_loader(samples, recipe.loader, spec.process_batch_size, spec.seed, peers)
    if not recipe.validates:
        return Feeds(_loaded(loader, device, recipe.loader.non_blocking), None)
    plain = _validation_loader(recipe)
    judged_samples = ImageSamples(*validation, validation_transform)
    judged = make_loader(judged_samples, plain, recipe.validation_batch_size, spec.seed)
    return Feeds(_loaded(loader, device, recipe.loader.non_blocking), _loaded(judged, device, plain.non_blocking))


def _validation_loader(recipe: Recipe) -> Loader:
    own = recipe.loader
    workers = max(recipe.validation_workers, own.num_workers) if own.persistent else recipe.validation_workers
    return own.model_copy(update={"num_workers": workers, "shuffle": False, "drop_last": False})


def _resident_image_feeds(spec: TrialSpec, recipe: Recipe, splits: tuple[Images, Images], peers: Peers) -> Feeds:
    device, name = torch.device(spec.device), spec.data_set.removeprefix(SYNTHETIC_PREFIX)
    augmentation = find_augmentation(recipe.transform or name)
    training = DeviceImages(splits[0], name, augmentation, _epochs(spec, recipe, peers), device)
    feed = Feed(training.num_batches, training.start, make=training.make)
    if not recipe.validates:
        return Feeds(feed, None)
    once = Epochs(recipe.validation_batch_size, shuffle=False)
    validation = DeviceImages(splits[1], name, Augmentation(), once, device)
    return Feeds(feed, Feed(validation.num_batches, validation.start, make=validation.make))


def _random_feed(row: Workload, task: Task, spec: TrialSpec, recipe: Recipe, peers: Peers) -> Feed:
    side, total = row.input_shape[-1], recipe.samples_per_epoch or _SYNTHETIC_SAMPLES
    images = DrawnImages(
        total, (3, side, side), task.num_classes or 1000, _epochs(spec, recipe, peers), torch.device(spec.device)
    )
    return Feed(images.num_batches, images.start)


def _epochs(spec: TrialSpec, recipe: Recipe, peers: Peers) -> Epochs:
    return Epochs(spec.process_batch_size, recipe.loader.shuffle, recipe.loader.drop_last, spec.seed, peers)


def _prepared(feed: Feed, prepare: Prepare) -> Feed:
    make = feed.make
    made = prepare if make is None else lambda parts: prepare(make(parts))
    return Feed(feed.num_batches, feed.read, feed.place, made)


def _load_corpus(spec: TrialSpec, data_dir: Path | None) -> Corpus:
    if spec.data_set.startswith(SYNTHETIC_PREFIX):
        return random_corpus()
    assert data_dir is not None, "real data has a folder"
    return load_wikitext2(data_dir)


def _text_feeds(spec: TrialSpec, recipe: Recipe, corpus: Corpus, peers: Peers) -> Feeds:
    device = torch.device(spec.device)
    columns = rank_columns(batchify(corpus.train, spec.batch_size * peers.world_size), peers)
    training = segments(columns.to(device))
    if not recipe.validates:
        return Feeds(_resident(training), None)
    validation = segments(batchify(corpus.valid, recipe.validation_batch_size).to(device))
    return Feeds(_resident(training), _resident(validation))


def _resident(batches: Sequence[Batch]) -> Feed:
    return Feed(len(batches), lambda _: iter(batches))


def _loaded(loader: DataLoader[Batch], device: torch.device, non_blocking: bool = False) -> Feed:
    seed = loader.generator.initial_seed()

    def read(epoch: int) -> Iterator[Batch]:
        # The order depends on the epoch only, so that a run resumed from a checkpoint sees the same batches.
        loader.generator.manual_seed(seed + epoch)
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        return iter(loader)

    def place(batch: Batch) -> Batch:
        return tuple(part.to(device, non_blocking=non_blocking) for part in batch)

    return Feed(len(loader), read, place)
