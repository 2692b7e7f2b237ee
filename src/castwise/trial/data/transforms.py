"""Image transforms on the CPU as in published training scripts, by name: one for training, one for validation."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from PIL import Image
from torch import Tensor, nn
from torchvision import transforms

Transform = Callable[[Image.Image], Tensor]
Channels = tuple[float, ...]

# Mean and standard deviation of each channel, by data set. Sources: pytorch/examples mnist/main.py; kuangliu/
# pytorch-cifar main.py; weiaicunzai/pytorch-cifar100 conf/global_settings.py.
STATISTICS: dict[str, tuple[Channels, Channels]] = {
    "mnist": ((0.1307,), (0.3081,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


class TransformPair(NamedTuple):
    """Transforms for training and for validation: a PIL image in, a float32 tensor out."""

    training: Transform
    validation: Transform


def _normalised(name: str, before: Sequence[Transform] = (), after: Sequence[nn.Module] = ()) -> TransformPair:
    plain = [transforms.ToTensor(), transforms.Normalize(*STATISTICS[name])]
    return TransformPair(transforms.Compose([*before, *plain, *after]), transforms.Compose(plain))


def _fastai_224() -> TransformPair:
    """Return torchvision's nearest to what 003 does: fastai 1.0.41's `get_transforms()` at size 224.

    The transforms, their ranges and probabilities, and bilinear interpolation at 224 × 224 are the same. Differences:
        - fastai composes flip, warp, rotation, zoom and the enlargement from 32 into one interpolation of float
          pixels; here each interpolates bytes by itself, so the CPU time per sample differs;
        - fastai fills the borders with the image's reflection; here they are black;
        - fastai's warp moves opposite corners together, inwards or outwards, by up to 0.2 of half a side; here
          each corner moves by itself, inwards, by as much;
        - fastai changes brightness and contrast in logit space; here pixels are scaled, by factors with the same
          effect at mid-grey.

    Source: fastai/fastai fastai/vision/transform.py at 0d37271f (`get_transforms`) and vision/data.py
    (`cifar_stats`); init27/RTX-2080Ti-Vs-GTX-1080Ti-CIFAR-100-Benchmarks, 2080Ti.ipynb.
    """
    side, bilinear = 224, transforms.InterpolationMode.BILINEAR
    enlarge = transforms.Resize((side, side), bilinear)
    plain = [transforms.ToTensor(), transforms.Normalize((0.491, 0.482, 0.447), (0.247, 0.243, 0.261))]
    # A zoom by up to 1.1 round a random centre is a square crop of up to 1 / 1.1² of the area.
    zoom = transforms.RandomResizedCrop(side, scale=(1 / 1.1**2, 1.0), ratio=(1.0, 1.0), interpolation=bilinear)
    augment = [
        transforms.RandomHorizontalFlip(),
        transforms.RandomPerspective(distortion_scale=0.2, p=0.75, interpolation=bilinear),
        transforms.RandomApply([transforms.RandomRotation(10, bilinear)], p=0.75),
        transforms.RandomApply([zoom], p=0.75),
        transforms.RandomApply([transforms.ColorJitter(brightness=0.2)], p=0.75),
        transforms.RandomApply([transforms.ColorJitter(contrast=(0.8, 1.25))], p=0.75),
    ]
    return TransformPair(transforms.Compose([enlarge, *augment, *plain]), transforms.Compose([enlarge, *plain]))


_CROP_AND_FLIP = (transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip())
_CROP_REFLECTED = (transforms.RandomCrop(32, padding=4, padding_mode="reflect"), transforms.RandomHorizontalFlip())
# A square of 8 × 8 pixels, 1/16 of an image, becomes 0: the data set's mean.
_HOLE = transforms.RandomErasing(p=1.0, scale=(1 / 16, 1 / 16), ratio=(1.0, 1.0))
# Sources: leolui2004/tensorcore mnist_0_512.py; kuangliu/pytorch-cifar main.py at 34075118 and
# ceshine/apex_pytorch_cifar_experiment's notebooks. No source has CIFAR-100 at 32²; it is done as CIFAR-10 is.
# Of the one with a hole: davidcpage/cifar10-fast dawn.py at 0be00c954897.
TRANSFORMS: dict[str, TransformPair] = {
    "mnist": _normalised("mnist"),
    "cifar10": _normalised("cifar10", _CROP_AND_FLIP),
    "cifar10-cutout": _normalised("cifar10", _CROP_REFLECTED, [_HOLE]),
    "cifar100": _normalised("cifar100", _CROP_AND_FLIP),
    "fastai-224": _fastai_224(),
}
