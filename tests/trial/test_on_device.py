"""Data sets that lie on the device: every sample once an epoch, normalised and augmented as the CPU's transforms do."""

import math
from collections.abc import Iterator

import pytest
import torch
from PIL import Image
from torch import Tensor

from castwise.apply.pytree import Batch
from castwise.registry.datasets import CIFAR10, CIFAR100, MNIST
from castwise.registry.technique_conditions import ON_DEVICE_TRANSFORMS
from castwise.trial.data.gpu_augmentation import AUGMENTATIONS, Augmentation, DeviceImages, Epochs
from castwise.trial.data.transforms import STATISTICS, TRANSFORMS
from castwise.trial.distributed import Peers

CPU = torch.device("cpu")
PLAIN = Augmentation()
CIFAR = AUGMENTATIONS["cifar10"]


def make_images(count: int = 50, channels: int = 3, side: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    # Black would be taken for what comes in from outside.
    images = torch.randint(1, 256, (count, channels, side, side), dtype=torch.uint8, generator=generator)
    return images, torch.arange(count)


def rank_of(rank: int, world_size: int) -> Peers:
    peers = Peers()
    peers.rank, peers.world_size = rank, world_size
    return peers


def batches_of(data: DeviceImages, epoch: int) -> Iterator[Batch]:
    return map(data.make, data.start(epoch))


def labels_of(data: DeviceImages, epoch: int) -> list[int]:
    return torch.cat([labels for _, labels in batches_of(data, epoch)]).tolist()


def test_registry_lists_device_transforms() -> None:
    assert set(ON_DEVICE_TRANSFORMS) == set(AUGMENTATIONS) < set(TRANSFORMS)


@pytest.mark.parametrize(
    ("name", "channels", "side"), [(MNIST.name, 1, 28), (CIFAR10.name, 3, 32), (CIFAR100.name, 3, 32)]
)
def test_images_are_normalised_as_on_the_cpu(name: str, channels: int, side: int) -> None:
    images, labels = make_images(8, channels, side)
    data = DeviceImages((images, labels), name, PLAIN, Epochs(8, shuffle=False), CPU)
    ((found, found_labels),) = batches_of(data, 0)
    assert found.is_contiguous(memory_format=torch.channels_last)
    pixels = images.permute(0, 2, 3, 1).numpy()
    expected = [
        TRANSFORMS[name].validation(Image.fromarray(each[..., 0] if channels == 1 else each)) for each in pixels
    ]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-5, atol=1e-5)
    assert found.dtype == torch.float32
    assert torch.equal(found_labels, labels)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_an_epoch_has_every_sample_once(shuffle: bool, drop_last: bool) -> None:
    data = DeviceImages(make_images(), "cifar10", CIFAR, Epochs(16, shuffle, drop_last), CPU)
    sizes = [len(labels) for _, labels in batches_of(data, 0)]
    assert sizes == [16, 16, 16] + ([] if drop_last else [2])
    assert data.num_batches == len(sizes)
    labels = labels_of(data, 0)
    assert len(set(labels)) == len(labels)
    assert (labels == sorted(labels)) != shuffle


def test_epochs_are_reproducible() -> None:
    """So that a run that goes on from a checkpoint sees what it would have seen."""
    first, second = (DeviceImages(make_images(), "cifar10", CIFAR, Epochs(16, seed=3), CPU) for _ in range(2))
    list(batches_of(first, 0))
    for (images, labels), (others, other_labels) in zip(batches_of(first, 1), batches_of(second, 1), strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, other_labels)
    assert labels_of(first, 0) != labels_of(first, 1)
    assert labels_of(first, 0) != labels_of(DeviceImages(make_images(), "cifar10", CIFAR, Epochs(16, seed=4), CPU), 0)


@pytest.mark.parametrize("drop_last", [True, False])
def test_ranks_share_out_the_samples_evenly(drop_last: bool) -> None:
    orders = [Epochs(4, True, drop_last, 0, rank_of(rank, 3)) for rank in range(3)]
    shares = [labels_of(DeviceImages(make_images(50), "cifar10", PLAIN, order, CPU), 0) for order in orders]
    assert {len(share) for share in shares} == {16 if drop_last else 17}
    together = [label for share in shares for label in share]
    assert len(set(together)) == (48 if drop_last else 50)


def undone(found: Tensor) -> Tensor:
    """Return the bytes of normalised images."""
    mean, deviation = (torch.tensor(part).view(1, -1, 1, 1) for part in STATISTICS["cifar10"])
    return ((found * deviation + mean) * 255).round().to(torch.uint8)


def test_crops_and_flips_are_uniform() -> None:
    """Every image is one of the 9 × 9 crops, or its mirror image; all of them come, about equally often."""
    images, labels = make_images(4, side=8)
    data = DeviceImages((images, labels), "cifar10", CIFAR, Epochs(4, shuffle=False), CPU)
    padded = torch.nn.functional.pad(images, (4, 4, 4, 4))
    seen: dict[tuple[int, int, bool], int] = {}
    for epoch in range(500):
        ((found, _),) = batches_of(data, epoch)
        for image, whole in zip(undone(found), padded, strict=True):
            place = place_of(image, whole)
            seen[place] = seen.get(place, 0) + 1
    num_samples, num_places = 2000, 9 * 9 * 2
    assert len(seen) == num_places
    expected = num_samples / num_places
    chi_squared = sum((count - expected) ** 2 / expected for count in seen.values())
    assert abs(chi_squared - (num_places - 1)) < 5 * math.sqrt(2 * (num_places - 1))


def test_reflected_images_with_a_hole_are_as_on_the_cpu() -> None:
    """Outside a square of 8 × 8 zeros, an image is a crop of its reflection; both loops cut evenly."""
    augmentation = AUGMENTATIONS["cifar10-cutout"]
    images, labels = make_images(64)
    data = DeviceImages((images, labels), "cifar10", augmentation, Epochs(64, shuffle=False), CPU)
    whole = Augmentation(padding=4, reflects=True, flips=True)
    uncut = DeviceImages((images, labels), "cifar10", whole, Epochs(64, shuffle=False), CPU)
    padded = torch.nn.functional.pad(images.float(), (4, 4, 4, 4), mode="reflect").byte()
    holes = torch.zeros(2, 32, 32)
    for epoch in range(20):
        (drawn,) = data.start(epoch)
        found, _ = data.make(drawn)
        expected, _ = uncut.make(drawn[:4])
        hole = (found == 0).all(1)
        assert (hole.sum((1, 2)) == 64).all()
        torch.testing.assert_close(found, expected.masked_fill(hole[:, None], 0.0))
        holes[0] += hole.sum(0)
        pixels = images.permute(0, 2, 3, 1).numpy()
        on_cpu = torch.stack([TRANSFORMS["cifar10-cutout"].training(Image.fromarray(each)) for each in pixels])
        holes[1] += (on_cpu == 0).all(1).sum(0)
    shares = holes / holes.sum((1, 2), keepdim=True)
    assert (shares[:, 12:20, 12:20] - shares[:, 12:20, 12:20].mean()).abs().max() < 0.3 * shares.max()
    for image, other in zip(undone(expected)[:8], padded[:8], strict=True):
        place_of(image, other)


def place_of(image: Tensor, padded: Tensor) -> tuple[int, int, bool]:
    for flipped in (False, True):
        wanted = image.flip(2) if flipped else image
        side = image.shape[1]
        windows = padded.unfold(1, side, 1).unfold(2, side, 1).permute(1, 2, 0, 3, 4)
        hits = (windows == wanted).flatten(2).all(2).nonzero()
        if len(hits):
            return int(hits[0, 0]), int(hits[0, 1]), flipped
    raise AssertionError("no crop of the image")
