"""A data set of images on the device as bytes, shuffled and augmented there."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from castwise.apply.pytree import Batch
from castwise.trial.data.sharding import seed_of
from castwise.trial.data.transforms import STATISTICS
from castwise.trial.distributed import Peers

Images = tuple[Tensor, Tensor]

_ALONE = Peers()


@dataclass(frozen=True)
class Augmentation:
    """What is done to training images before they are normalised."""

    padding: int = 0  # pixels added on each side before a random crop of the image's own size
    reflects: bool = False  # these are the image's reflection, not black
    flips: bool = False  # half of the images are mirrored
    hole: int = 0  # the side of a random square that is cut out: its pixels become the data set's mean


_NONE = Augmentation()
_CIFAR = Augmentation(padding=4, flips=True)
_CUTOUT = Augmentation(padding=4, reflects=True, flips=True, hole=8)
# The augmentations of `transforms.py`, by the same names. Validation images are only normalised.
AUGMENTATIONS: dict[str, Augmentation] = {
    "mnist": _NONE,
    "cifar10": _CIFAR,
    "cifar10-cutout": _CUTOUT,
    "cifar100": _CIFAR,
}


@dataclass(frozen=True)
class Epochs:
    """How the epochs of a data set are divided into batches of a rank; the seed decides order and augmentation."""

    batch_size: int
    shuffle: bool = True
    drop_last: bool = False
    seed: int = 0
    peers: Peers = _ALONE

    def rank_samples(self, total: int) -> int:
        """Return the samples of an epoch in this rank, the same number in all ranks."""
        return total // self.peers.world_size if self.drop_last else math.ceil(total / self.peers.world_size)

    def num_batches(self, total: int) -> int:
        count = self.rank_samples(total)
        return count // self.batch_size if self.drop_last else math.ceil(count / self.batch_size)


class DeviceImages:
    """Batches of a data set on the device: images, float32 of shape (batch, C, H, W), and labels.

    The order and the augmentation of an epoch depend on the seed and the epoch's number only. They are drawn first; the
    batch is made from these draws by operations that a CUDA graph can capture. The host never waits for the device.
    """

    def __init__(
        self, images: Images, statistics: str, augmentation: Augmentation, epochs: Epochs, device: torch.device
    ) -> None:
        """Copy images, uint8 of shape (N, C, H, W), and labels, int64 of shape (N,), to the device."""
        self._device, self._epochs, self._augmentation = device, epochs, augmentation
        pixels, labels = images
        self.num_samples = epochs.rank_samples(len(labels))
        self.num_batches = epochs.num_batches(len(labels))
        border = augmentation.padding
        self._side = pixels.shape[-2:]
        if augmentation.reflects:  # torch does not reflect bytes
            rows, columns = (
                side - 1 - (side - 1 - torch.arange(-border, side + border).abs()).abs() for side in self._side
            )
            padded = pixels[:, :, rows[:, None], columns]
        else:
            padded = nn.functional.pad(pixels, (border,) * 4)
        # Channels last: pixels are gathered whole, and convolutions prefer the layout.
        self._pixels = padded.permute(0, 2, 3, 1).contiguous().to(device)
        self._labels = labels.to(device)
        mean, deviation = (torch.tensor(part, device=device) for part in STATISTICS[statistics])
        self._scale, self._shift = 1 / (255 * deviation), -mean / deviation

    def start(self, epoch: int) -> Iterator[Batch]:
        """Yield the draws for the batches of an epoch, by its number from 0.

        They are the indices of samples, of shape (batch,); with augmentation also the crops' first rows, whether they
        are mirrored, and the crops' first columns, each of shape (batch, 1); with a hole its first row and column, too.
        """
        epochs, total = self._epochs, len(self._labels)
        order = torch.arange(total, device=self._device)
        if epochs.shuffle:
            generator = torch.Generator(self._device).manual_seed(seed_of(epochs.seed, epoch))
            order = torch.randperm(total, generator=generator, device=self._device)
        # A rank's samples are every n-th of the order that all ranks share.
        whole = self.num_samples * epochs.peers.world_size
        order = torch.cat([order, order[: max(0, whole - total)]])[:whole]
        own = order[epochs.peers.rank :: epochs.peers.world_size]
        generator = torch.Generator(self._device)
        generator.manual_seed(seed_of(epochs.seed, epoch, epochs.peers.rank))
        for index in range(self.num_batches):
            chosen = own[index * epochs.batch_size : (index + 1) * epochs.batch_size]
            if self._augmentation == _NONE:
                yield (chosen,)
                continue

            def draw(below: int, count: int = len(chosen)) -> Tensor:
                return torch.randint(below, (count, 1), generator=generator, device=self._device)

            num_crops = 2 * self._augmentation.padding + 1
            top = draw(num_crops)
            mirrored = draw(2) if self._augmentation.flips else torch.zeros_like(top)
            left, hole = draw(num_crops), self._augmentation.hole
            corner = [draw(side - hole + 1) for side in self._side] if hole else []
            yield chosen, top, mirrored, left, *corner

    def make(self, drawn: Batch) -> Batch:
        chosen, *crop = drawn
        pixels = self._pixels
        corner: list[Tensor] = []
        if crop:  # mirrored or not, of shape (batch, H, W, C), in one gather
            top, mirrored, left, *corner = crop
            height, width = self._side
            rows = top + torch.arange(height, device=self._device)
            across = torch.arange(width, device=self._device).expand(len(chosen), width)
            columns = left + torch.where(mirrored == 1, across.flip(1), across)
            pixels = pixels[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]
        else:
            pixels = pixels[chosen]
        images = torch.addcmul(self._shift, pixels, self._scale)
        if corner:
            distances = [
                torch.arange(side, device=self._device) - first for side, first in zip(self._side, corner, strict=True)
            ]
            down, right = ((distance >= 0) & (distance < self._augmentation.hole) for distance in distances)
            images = images.masked_fill((down[:, :, None] & right[:, None, :])[..., None], 0.0)
        images = images.permute(0, 3, 1, 2)
        return images, self._labels[chosen]


class DrawnImages:
    """Random images and labels drawn on the device at access, with the distribution of `SyntheticSamples`."""

    def __init__(
        self, total: int, shape: tuple[int, ...], num_classes: int, epochs: Epochs, device: torch.device
    ) -> None:
        """Define an epoch of `total` samples in all ranks, of images of this shape, channels first."""
        self._shape, self._num_classes, self._epochs, self._device = shape, num_classes, epochs, device
        self._num_samples = epochs.rank_samples(total)
        self.num_batches = epochs.num_batches(total)

    def start(self, epoch: int) -> Iterator[Batch]:
        epochs = self._epochs
        generator = torch.Generator(self._device)
        generator.manual_seed(seed_of(epochs.seed, epoch, epochs.peers.rank))
        for index in range(self.num_batches):
            count = min(epochs.batch_size, self._num_samples - index * epochs.batch_size)
            images = torch.rand(count, *self._shape, generator=generator, device=self._device)
            labels = torch.randint(self._num_classes, (count,), generator=generator, device=self._device)
            yield images.mul_(2).sub_(1), labels
