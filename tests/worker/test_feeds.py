"""Feeds of training trials: CIFAR-100 from official files, random stand-ins, and synthetic samples' classes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cifar_files import binary_file, draw, put

from castwise.registry.datasets import CIFAR100, SYNTHETIC_PREFIX
from castwise.registry.workloads import find_workload
from castwise.spec.recipe import Loader, Recipe
from castwise.spec.trial import TrialSpec
from castwise.worker.data import images as image_files
from castwise.worker.data import preloaded
from castwise.worker.data.epoch_iterators import Feeds, make_feeds
from castwise.worker.data.preloaded import IMAGE_SETS, random_images
from castwise.worker.data.transforms import find_transform
from castwise.worker.distributed import Peers
from castwise.worker.models import build_task

PLAIN = Loader(num_workers=0, drop_last=True)


def feeds_of(
    workload: str, data_set: str, data_dir: Path | None, techniques: tuple[str, ...] = (), **recipe: Any
) -> Feeds:
    row = find_workload(workload)
    fields = {"epochs": 1, "loader": PLAIN, "validate_each_epoch": True, "validation_workers": 0} | recipe
    spec = TrialSpec(
        workload=workload,
        precision="fp32",
        loss_scale="none",
        batch_size=4,
        device="cpu",
        data_set=data_set,
        kind="training",
        recipe=Recipe(**fields),
        techniques=techniques,
    )
    with torch.device("meta"):
        task = build_task(row)
    return make_feeds(row, task, spec, data_dir, Peers())


@pytest.fixture
def cifar100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with 20 training and 10 test images in the official binary layout."""
    parts = {"train": draw(20, 100, 1), "test": draw(10, 100, 2)}
    contents = {part: binary_file(*images, 100) for part, images in parts.items()}
    monkeypatch.setattr(image_files, "CIFAR100", put(tmp_path, CIFAR100, contents))
    return tmp_path


def test_cifar100_comes_pooled_split_and_enlarged(cifar100: Path) -> None:
    feeds = feeds_of("fastai-resnet18", "cifar100", cifar100, transform="fastai-224", pooled_split=True)
    assert feeds.training.num_batches == 6  # 24 of 30 images
    batches = list(feeds.training.start(0))
    assert {tuple(images.shape) for images, _ in batches} == {(4, 3, 224, 224)}
    assert feeds.validation is not None
    ((images, labels),) = feeds.validation.start(0)
    assert images.shape == (6, 3, 224, 224)
    all_labels = torch.cat([labels, *(part for _, part in batches)])
    assert all_labels.tolist().count(99) >= 2, "the highest label of both files is there"
    assert sorted(all_labels.tolist()) == sorted(draw(20, 100, 1)[1] + draw(10, 100, 2)[1])


def test_cifar100_has_a_transform_of_its_own(cifar100: Path) -> None:
    feeds = feeds_of("fastai-resnet18", "cifar100", cifar100)
    images, _ = next(feeds.training.start(0))
    assert images.shape == (4, 3, 32, 32)


@pytest.mark.parametrize("name", IMAGE_SETS)
def test_every_image_set_has_a_transform(name: str) -> None:
    assert find_transform(name)


# Random stand-ins


@pytest.mark.parametrize(
    ("workload", "name", "shape", "num_train", "num_classes"),
    [
        ("mnist-cnn", "mnist", (1, 28, 28), 60_000, 10),
        ("wrn-28-10", "cifar10", (3, 32, 32), 50_000, 10),
        ("fastai-resnet18", "cifar100", (3, 32, 32), 50_000, 100),
    ],
)
def test_a_stand_in_is_as_large_as_the_real_set(
    workload: str, name: str, shape: tuple[int, ...], num_train: int, num_classes: int
) -> None:
    feeds = feeds_of(workload, SYNTHETIC_PREFIX + name, None, validation_batch_size=16)
    assert feeds.training.num_batches == num_train // 4
    assert feeds.validation is not None
    assert feeds.validation.num_batches == 10_000 // 16
    images, labels = next(feeds.training.start(0))
    assert images.shape == (4, *shape)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    images, labels = random_images(name, "test")
    assert images.shape == (10_000, *shape)
    assert images.dtype == torch.uint8
    assert images.float().mean().item() == pytest.approx(127.5, abs=1)
    assert labels.unique().tolist() == list(range(num_classes))


def test_a_stand_in_is_the_same_every_time_and_its_splits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(preloaded.NUM_IMAGES, "cifar100", (40, 40))
    images, labels = random_images("cifar100", "train")
    again, same_labels = random_images("cifar100", "train")
    other, _ = random_images("cifar100", "test")
    assert images.equal(again)
    assert labels.equal(same_labels)
    assert not images.equal(other)


def test_a_stand_in_is_pooled_and_transformed_as_the_real_set_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(preloaded.NUM_IMAGES, "cifar100", (50, 10))
    feeds = feeds_of("fastai-resnet18", "synthetic:cifar100", None, transform="fastai-224", pooled_split=True)
    assert feeds.training.num_batches == 12
    assert feeds.validation is not None
    ((images, _),) = feeds.validation.start(0)
    assert images.shape == (12, 3, 224, 224)


def test_a_stand_in_for_a_text_has_its_lengths() -> None:
    loader = Loader(resident=True, num_workers=0, shuffle=False)
    feeds = feeds_of("lstm-lm", "synthetic:wikitext-2", None, loader=loader, validation_batch_size=10)
    assert feeds.training.num_batches == -(-(2_088_628 // 4 - 1) // 35)
    assert feeds.validation is not None
    assert feeds.validation.num_batches == -(-(217_646 // 10 - 1) // 35)
    tokens, targets = next(feeds.training.start(0))
    assert tokens.shape == (35, 4)
    assert 0 <= targets.min() < targets.max() < 33_278


def test_synthetic_samples_have_the_workload_s_classes() -> None:
    feeds = feeds_of("fastai-resnet18", "synthetic", None, samples_per_epoch=400)
    labels = torch.cat([labels for _, labels in (next(feeds.training.start(0)) for _ in range(10))])
    assert labels.max() < 100


# Techniques


def test_resident_data_has_the_same_samples_and_the_same_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(preloaded.NUM_IMAGES, "mnist", (50, 10))
    loaded = feeds_of("mnist-cnn", "synthetic:mnist", None, loader=Loader(num_workers=0))
    on_device = feeds_of("mnist-cnn", "synthetic:mnist", None, ("resident-data",), loader=Loader(num_workers=0))
    assert on_device.training.num_batches == loaded.training.num_batches == 13
    sums = [
        sorted(images.sum((1, 2, 3)).tolist())
        for feeds in (loaded, on_device)
        for images in [torch.cat([batch[0] for batch in feeds.training.start(0)])]
    ]
    assert sums[0] == pytest.approx(sums[1], rel=1e-4)
    assert loaded.validation is not None
    assert on_device.validation is not None
    for (images, labels), (others, other_labels) in zip(
        loaded.validation.start(0), on_device.validation.start(0), strict=True
    ):
        torch.testing.assert_close(images, others, rtol=1e-5, atol=1e-5)
        assert labels.equal(other_labels)


def test_synthetic_images_are_drawn_on_the_device() -> None:
    feeds = feeds_of("resnet18", "synthetic", None, ("resident-data",), samples_per_epoch=10, validate_each_epoch=False)
    assert feeds.training.num_batches == 2  # the recipe drops the last
    images, labels = next(feeds.training.start(0))
    assert images.shape == (4, 3, 224, 224)
    assert labels.max() < 1000


def test_every_batch_is_prepared() -> None:
    feeds = feeds_of("lstm-lm", "synthetic:wikitext-2", None, validation_batch_size=10)
    assert feeds.prepared(None) is feeds
    prepared = feeds.prepared(lambda batch: batch[:1])
    assert len(next(prepared.training.start(0))) == 1
    assert prepared.training.num_batches == feeds.training.num_batches
    assert prepared.validation is not None
    assert len(next(prepared.validation.start(0))) == 1
