"""Data of training runs: CIFAR-100 from official files, random stand-ins, and synthetic samples' classes."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cifar_files import binary_file, draw, put
from small_step import cpu_spec

from castwise.registry.datasets import CIFAR100, SYNTHETIC_PREFIX
from castwise.registry.workloads import find_workload
from castwise.spec.recipe import Loader, Recipe
from castwise.trial.data import datasets
from castwise.trial.data.datasets import load_cifar, load_images
from castwise.trial.data.training_data import BatchSource, make_training_data
from castwise.trial.distributed import Peers
from castwise.trial.models import build_task

PLAIN = Loader(num_workers=0, drop_last=True)


def data_of(
    workload: str, data_set: str, data_dir: Path | None, techniques: tuple[str, ...] = (), **recipe: Any
) -> tuple[BatchSource, BatchSource | None]:
    row = find_workload(workload)
    fields = {"epochs": 1, "loader": PLAIN, "validate_each_epoch": True, "validation_workers": 0} | recipe
    spec = cpu_spec(workload=workload, data_set=data_set, recipe=Recipe(**fields), techniques=techniques)
    with torch.device("meta"):
        task = build_task(row)
    return make_training_data(row, task, spec, data_dir, Peers())


@pytest.fixture
def cifar100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with 20 training and 10 test images in the official binary layout."""
    parts = {"train": draw(20, 100, 1), "test": draw(10, 100, 2)}
    contents = {part: binary_file(*images, 100) for part, images in parts.items()}
    small = put(tmp_path, CIFAR100, contents)
    monkeypatch.setitem(datasets.IMAGE_SETS, "cifar100", partial(load_cifar, small))
    return tmp_path


def test_cifar100_comes_pooled_split_and_enlarged(cifar100: Path) -> None:
    training, validation = data_of("fastai-resnet18", "cifar100", cifar100, transform="fastai-224", pooled_split=True)
    assert training.num_batches == 6  # 24 of 30 images
    batches = list(training.start(0))
    assert {tuple(images.shape) for images, _ in batches} == {(4, 3, 224, 224)}
    assert validation is not None
    ((images, labels),) = validation.start(0)
    assert images.shape == (6, 3, 224, 224)
    all_labels = torch.cat([labels, *(part for _, part in batches)])
    assert all_labels.tolist().count(99) >= 2, "the highest label of both files is there"
    assert sorted(all_labels.tolist()) == sorted(draw(20, 100, 1)[1] + draw(10, 100, 2)[1])


# Random stand-ins


@pytest.mark.parametrize(
    ("workload", "name", "shape", "num_train", "num_classes"),
    [
        ("mnist-cnn", "mnist", (1, 28, 28), 60_000, 10),
        ("wrn-28-10", "cifar10", (3, 32, 32), 50_000, 10),
        ("fastai-resnet18", "cifar100", (3, 32, 32), 50_000, 100),
    ],
)
def test_synthetic_image_set_has_the_real_size(
    workload: str, name: str, shape: tuple[int, ...], num_train: int, num_classes: int
) -> None:
    training, validation = data_of(workload, SYNTHETIC_PREFIX + name, None, validation_batch_size=16)
    assert training.num_batches == num_train // 4
    assert validation is not None
    assert validation.num_batches == 10_000 // 16
    images, labels = next(training.start(0))
    assert images.shape == (4, *shape)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    images, labels = load_images(SYNTHETIC_PREFIX + name, None, "test")
    assert images.shape == (10_000, *shape)
    assert images.dtype == torch.uint8
    assert images.float().mean().item() == pytest.approx(127.5, abs=1)
    assert labels.unique().tolist() == list(range(num_classes))
    assert load_images(SYNTHETIC_PREFIX + name, None, "test")[0].equal(images), "the same every time"


def test_synthetic_text_has_the_real_length() -> None:
    loader = Loader(resident=True, num_workers=0, shuffle=False)
    training, validation = data_of("lstm-lm", "synthetic:wikitext-2", None, loader=loader, validation_batch_size=10)
    assert training.num_batches == -(-(2_088_628 // 4 - 1) // 35)
    assert validation is not None
    assert validation.num_batches == -(-(217_646 // 10 - 1) // 35)
    tokens, targets = next(training.start(0))
    assert tokens.shape == (35, 4)
    assert 0 <= targets.min() < targets.max() < 33_278


def test_synthetic_samples_have_the_workload_s_classes() -> None:
    training, _ = data_of("fastai-resnet18", "synthetic", None, samples_per_epoch=400)
    labels = torch.cat([labels for _, labels in (next(training.start(0)) for _ in range(10))])
    assert labels.max() < 100


# Techniques


def test_resident_data_equals_loaded_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(datasets.NUM_IMAGES, "mnist", (50, 10))
    sums, validations = [], []
    for techniques in ((), ("resident-data",)):
        training, validation = data_of(
            "mnist-cnn", "synthetic:mnist", None, techniques, loader=Loader(num_workers=0), validation_batch_size=10
        )
        assert training.num_batches == 13
        images = torch.cat([batch[0] for batch in training.start(0)])
        sums.append(sorted(images.sum((1, 2, 3)).tolist()))
        assert validation is not None
        validations.append(next(validation.start(0)))
    assert sums[0] == pytest.approx(sums[1], rel=1e-4)
    (images, labels), (others, other_labels) = validations
    torch.testing.assert_close(images, others, rtol=1e-5, atol=1e-5)
    assert labels.equal(other_labels)


def test_synthetic_images_are_drawn_on_the_device() -> None:
    training, _ = data_of(
        "resnet18", "synthetic", None, ("resident-data",), samples_per_epoch=10, validate_each_epoch=False
    )
    assert training.num_batches == 2  # the recipe drops the last
    images, labels = next(training.start(0))
    assert images.shape == (4, 3, 224, 224)
    assert -1 <= images.min() < -0.99 < 0.99 < images.max() < 1
    assert images.var() == pytest.approx(1 / 3, rel=0.05)
    assert labels.max() < 1000
    assert next(training.start(0))[0].equal(images)
    assert not next(training.start(1))[0].equal(images)


def test_every_batch_is_prepared() -> None:
    training, _ = data_of("lstm-lm", "synthetic:wikitext-2", None, validation_batch_size=10)
    prepared = training.prepared(None).prepared(lambda batch: batch[:1]).prepared(lambda batch: batch * 2)
    assert len(next(prepared.start(0))) == 2
    assert prepared.num_batches == training.num_batches
