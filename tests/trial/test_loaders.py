"""Samples, the loader's batches and processes, and the split of the source 003."""

import multiprocessing
import os
import time
from itertools import pairwise, product
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from programs import PATIENCE_SECONDS
from torch import Tensor
from torch.utils.data import Dataset
from torch.utils.data._utils.worker import ManagerWatchdog

from castwise.orchestrator.processes import _PRELOAD
from castwise.spec.recipe import Loader
from castwise.trial.data.sharding import seed_of
from castwise.trial.data.training_data import ImageSamples, SyntheticSamples, fastai_split, make_loader
from castwise.trial.data.transforms import TRANSFORMS


def draw(num_images: int, channels: int = 3, side: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    size = (num_images, channels, side, side)
    images = torch.randint(256, size, generator=generator, dtype=torch.uint8)
    return images, torch.arange(num_images) % 10


def keep(image: Any) -> Tensor:
    return torch.from_numpy(np.array(image))


# Samples


@pytest.mark.parametrize("channels", [3, 1])
def test_image_samples(channels: int) -> None:
    """Channels last in colour, and none in grey."""
    images, labels = draw(3, channels)
    samples = ImageSamples(images, labels, keep)
    assert len(samples) == 3
    for index in range(3):
        pixels, label = samples[index]
        assert pixels.equal(images[index].permute(1, 2, 0) if channels == 3 else images[index, 0])
        assert (label, type(label)) == (labels[index], int)


# Batches


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_images_and_labels(num_workers: int) -> None:
    samples = ImageSamples(*draw(10), TRANSFORMS["cifar10"].training)
    batches = list(make_loader(samples, Loader(num_workers=num_workers, shuffle=False), 4, seed=0))
    assert [images.shape for images, _ in batches] == [(4, 3, 32, 32), (4, 3, 32, 32), (2, 3, 32, 32)]
    assert torch.cat([labels for _, labels in batches]).tolist() == list(range(10))
    assert batches[0][0].dtype == torch.float32
    assert batches[0][1].dtype == torch.int64


def test_order_and_augmentation_follow_the_seed() -> None:
    samples = ImageSamples(*draw(10), TRANSFORMS["cifar10"].training)
    loaders = (make_loader(samples, Loader(num_workers=2), 3, seed) for seed in (1, 1, 2))
    first, again, other = ([torch.cat(parts) for parts in zip(*loader, strict=True)] for loader in loaders)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[1], other[1])
    assert sorted(first[1].tolist()) == sorted(other[1].tolist()) == list(range(10))


def test_epochs_differ_and_processes_draw_different_numbers() -> None:
    loader = make_loader(SyntheticSamples(4, 2), Loader(num_workers=2, shuffle=False), 1, seed=0)
    epochs = [[(images.flatten().tolist(), labels.item()) for images, labels in loader] for _ in range(2)]
    drawn = [tuple(image) for epoch in epochs for image, _ in epoch]
    assert len(set(drawn)) == 8
    assert len({label for epoch in epochs for _, label in epoch}) > 2
    assert min(map(min, drawn)) < -0.8
    assert max(map(max, drawn)) > 0.8


# Processes


class EndlessSamples(Dataset):  # type: ignore[type-arg]
    """Says which process has loaded a sample."""

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(0.01)
        return torch.zeros(1), os.getpid()


def load_for_ever(loads: Connection) -> None:
    """Load samples as a trial does, and answer once two processes have loaded one."""
    ManagerWatchdog.is_alive = lambda _: True  # type: ignore[method-assign]  # torch's own would end them, too
    seen: set[int] = set()
    for _, (pid,) in make_loader(EndlessSamples(), Loader(num_workers=2), 1, seed=0):
        seen.add(int(pid))
        if len(seen) == 2:
            loads.send_bytes(b"two")
            seen.add(0)


@pytest.mark.parametrize("end", ["kill", "terminate"])
def test_loader_processes_end_with_the_trial(end: str) -> None:
    context = multiprocessing.get_context("forkserver")  # trials are forked from it, too
    context.set_forkserver_preload(_PRELOAD)
    alive, held_open = context.Pipe()  # the trial and its loader's processes hold its other end
    trial = context.Process(target=load_for_ever, args=(held_open,))
    trial.start()
    held_open.close()
    try:
        assert alive.poll(PATIENCE_SECONDS)
        assert alive.recv_bytes() == b"two"
        assert not alive.poll()
        getattr(trial, end)()
        assert alive.poll(PATIENCE_SECONDS), "a process outlived the trial"
        with pytest.raises(EOFError):  # nobody holds the other end
            alive.recv_bytes()
    finally:
        trial.kill()
        trial.join()
        alive.close()


# 003's split


def test_fastai_split() -> None:
    train = torch.arange(50_000)[:, None], torch.arange(50_000)
    test = torch.arange(50_000, 60_000)[:, None], torch.arange(50_000, 60_000)
    (images, labels), (validation_images, validation_labels) = fastai_split(train, test)
    assert (len(labels), len(validation_labels)) == (48_000, 12_000)
    assert images[:, 0].equal(labels)
    assert validation_images[:, 0].equal(validation_labels)
    assert sorted(torch.cat([labels, validation_labels]).tolist()) == list(range(60_000))
    np.random.seed(42)  # as the source does
    assert validation_labels.tolist() == np.random.permutation(60_000)[:12_000].tolist()
    assert labels.equal(labels.sort().values)


# Seeds of epochs, runs and ranks

RUNS = (0, 1, 2, 9293, 2**43, 2**43 + 1, 2**63 - 1)  # all that --seed takes


def test_seeds_are_distinct() -> None:
    seeds = [seed_of(*each) for each in product(RUNS, (0, 1, 2, 299), (0, 1, 7))]
    assert len(set(seeds)) == len(seeds)
    assert max(seeds) + 10**6 < 2**64, "what torch takes"


def test_seeds_are_distinct_in_32_bits() -> None:
    seeds = sorted(seed_of(run, rank=rank) % 2**32 for run in range(100) for rank in range(64))
    apart = [after - before for before, after in pairwise([*seeds, seeds[0] + 2**32])]
    assert min(apart) > 100_000
