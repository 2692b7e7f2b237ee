"""A data set of images on the device as bytes, shuffled and augmented there."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from castwise.errors import UsageError
from castwise.worker.data.seeding import seed_of
from castwise.worker.data.transforms import STATISTICS
from castwise.worker.distributed import Peers
from castwise.worker.models.task import Batch

Images = tuple[Tensor, Tensor]

_ALONE = Peers()


@dataclass(frozen=True)
class Augmentation:
    """Augmentation of training images, besides normalisation.

    Attributes:
        padding: Black pixels added on each side before a random crop of the image's own size.
        flips: Whether half of the images are mirrored.
    """

    padding: int = 0
    flips: bool = False


_NONE = Augmentation()
_CIFAR = Augmentation(padding=4, flips=True)
# The augmentations of `transforms.py`, by the same names. Validation images are only normalised.
AUGMENTATIONS: dict[str, Augmentation] = {"mnist": _NONE, "cifar10": _CIFAR, "cifar100": _CIFAR}


def find_augmentation(name: str) -> Augmentation:
    """Return the augmentation with this name.

    Raises:
        UsageError: The device cannot do it.
    """
    if name not in AUGMENTATIONS:
        raise UsageError(f"resident-data cannot do the augmentation '{name}' on the device.")
    return AUGMENTATIONS[name]


@dataclass(frozen=True)
class Epochs:
    """How the epochs of a data set are divided into batches.

    Attributes:
        batch_size: Samples in a batch of this rank.
        shuffle: Whether each epoch has a new order.
        drop_last: Whether an incomplete last batch is left out.
        seed: Of order and augmentation.
        peers: The ranks that share the samples.
    """

    batch_size: int
    shuffle: bool = True
    drop_last: bool = False
    seed: int = 0
    peers: Peers = _ALONE


class DeviceImages:
    """Batches of a data set on the device: images, float32 of shape (batch, C, H, W), and labels.

    The order and the augmentation of an epoch follow from the seed and the epoch's number alone. They are drawn first;
    the batch is made from these draws by operations that a CUDA graph can capture. The host never waits for the device.
    """

    def __init__(
        self, images: Images, statistics: str, augmentation: Augmentation, epochs: Epochs, device: torch.device
    ) -> None:
        """Copy the data set to the device.

        Args:
            images: uint8 of shape (N, C, H, W), and labels, int64 of shape (N,).
            statistics: A name of `STATISTICS`.
            augmentation: Besides normalisation.
            epochs: Batches, order and seed.
            device: The device.
        """
        self._device, self._epochs, self._augmentation = device, epochs, augmentation
        pixels, labels = images
        border = augmentation.padding
        self._side = pixels.shape[-2:]
        # Channels last: pixels are gathered whole, and convolutions prefer the layout.
        padded = nn.functional.pad(pixels, (border,) * 4).permute(0, 2, 3, 1)
        self._pixels = padded.contiguous().to(device)
        self._labels = labels.to(device)
        mean, deviation = (torch.tensor(part, device=device) for part in STATISTICS[statistics])
        self._scale, self._shift = 1 / (255 * deviation), -mean / deviation

    @property
    def num_samples(self) -> int:
        """Return the samples of an epoch in this rank, the same number in all ranks."""
        total, world = len(self._labels), self._epochs.peers.world_size
        return total // world if self._epochs.drop_last else math.ceil(total / world)

    @property
    def num_batches(self) -> int:
        """Return the batches of an epoch."""
        size = self._epochs.batch_size
        return self.num_samples // size if self._epochs.drop_last else math.ceil(self.num_samples / size)

    def start(self, epoch: int) -> Iterator[Batch]:
        """Yield the draws for the batches of an epoch, by its number from 0.

        They are the indices of samples, of shape (batch,); with augmentation also the crops' first rows, whether they
        are mirrored, and the crops' first columns, each of shape (batch, 1).
        """
        epochs = self._epochs
        own = self._order(epoch)
        generator = torch.Generator(self._device)
        generator.manual_seed(seed_of(epochs.seed, epoch, epochs.peers.rank))
        for index in range(self.num_batches):
            chosen = own[index * epochs.batch_size : (index + 1) * epochs.batch_size]
            yield (chosen,) if self._augmentation == _NONE else (chosen, *self._draw(len(chosen), generator))

    def make(self, drawn: Batch) -> Batch:
        """Return the batch of these draws."""
        chosen, *crop = drawn
        pixels = self._crop(chosen, *crop) if crop else self._pixels[chosen]
        images = torch.addcmul(self._shift, pixels, self._scale).permute(0, 3, 1, 2)
        return images, self._labels[chosen]

    def _order(self, epoch: int) -> Tensor:
        """Return the indices of this rank's samples: every n-th of the order that all ranks share."""
        epochs, total = self._epochs, len(self._labels)
        order = torch.arange(total, device=self._device)
        if epochs.shuffle:
            generator = torch.Generator(self._device).manual_seed(seed_of(epochs.seed, epoch))
            order = torch.randperm(total, generator=generator, device=self._device)
        whole = self.num_samples * epochs.peers.world_size
        order = torch.cat([order, order[: max(0, whole - total)]])[:whole]
        return order[epochs.peers.rank :: epochs.peers.world_size]

    def _draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        def draw(below: int) -> Tensor:
            return torch.randint(below, (count, 1), generator=generator, device=self._device)

        places = 2 * self._augmentation.padding + 1
        top = draw(places)
        mirrored = draw(2) if self._augmentation.flips else torch.zeros_like(top)
        return top, mirrored, draw(places)

    def _crop(self, chosen: Tensor, top: Tensor, mirrored: Tensor, left: Tensor) -> Tensor:
        """Return crops, mirrored or not, of shape (batch, H, W, C), in one gather."""
        height, width = self._side
        rows = top + torch.arange(height, device=self._device)
        across = torch.arange(width, device=self._device).expand(len(chosen), width)
        columns = left + torch.where(mirrored == 1, across.flip(1), across)
        return self._pixels[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]


class DrawnImages:
    """Random images and labels drawn on the device at access, with the distribution of `SyntheticSamples`."""

    def __init__(
        self, num_samples: int, shape: tuple[int, ...], num_classes: int, epochs: Epochs, device: torch.device
    ) -> None:
        """Define an epoch.

        Args:
            num_samples: Length of an epoch of all ranks.
            shape: Of an image, channels first.
            num_classes: Labels are drawn from [0, num_classes).
            epochs: Batches and seed.
            device: The device.
        """
        self._shape, self._num_classes, self._epochs, self._device = shape, num_classes, epochs, device
        total, world = num_samples, epochs.peers.world_size
        self.num_samples = total // world if epochs.drop_last else math.ceil(total / world)
        size = epochs.batch_size
        self.num_batches = self.num_samples // size if epochs.drop_last else math.ceil(self.num_samples / size)

    def start(self, epoch: int) -> Iterator[Batch]:
        """Return the batches of an epoch, by its number from 0."""
        epochs = self._epochs
        generator = torch.Generator(self._device)
        generator.manual_seed(seed_of(epochs.seed, epoch, epochs.peers.rank))
        for index in range(self.num_batches):
            count = min(epochs.batch_size, self.num_samples - index * epochs.batch_size)
            images = torch.rand(count, *self._shape, generator=generator, device=self._device)
            labels = torch.randint(self._num_classes, (count,), generator=generator, device=self._device)
            yield images.mul_(2).sub_(1), labels
