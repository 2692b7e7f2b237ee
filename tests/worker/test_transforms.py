"""What every transform pair makes of an image, and how far it may move it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from castwise.worker.data.transforms import TRANSFORMS

SHAPES = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32), "cifar100": (3, 32, 32), "fastai-224": (3, 224, 224)}
CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
CIFAR100_MEAN, CIFAR100_STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
FASTAI_MEAN, FASTAI_STD = (0.491, 0.482, 0.447), (0.247, 0.243, 0.261)

every_pair = pytest.mark.parametrize("name", TRANSFORMS)


def image_for(name: str, paint: Callable[[Any], Any] = lambda pixels: pixels) -> Image.Image:
    shape = (28, 28) if name == "mnist" else (32, 32, 3)
    pixels = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    return Image.fromarray(paint(pixels))


def normalized(pixels: torch.Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
    return (pixels - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)


def pixels_of(image: Image.Image) -> torch.Tensor:
    pixels = torch.from_numpy(np.array(image)).float() / 255
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)


@every_pair
def test_both_give_float32_of_the_right_shape(name: str) -> None:
    for transform in TRANSFORMS[name]:
        made = transform(image_for(name))
        assert made.dtype == torch.float32
        assert made.shape == SHAPES[name]
        assert made.isfinite().all()


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "fastai-224"])
def test_training_differs_from_draw_to_draw_and_follows_the_seed(name: str) -> None:
    def draw(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return TRANSFORMS[name].training(image_for(name))

    assert not draw(0).equal(draw(1))
    assert draw(0).equal(draw(0))


@pytest.mark.parametrize(
    ("name", "mean", "std"),
    [
        ("mnist", (0.1307,), (0.3081,)),
        ("cifar10", CIFAR_MEAN, CIFAR_STD),
        ("cifar100", CIFAR100_MEAN, CIFAR100_STD),
    ],
)
def test_validation_is_only_normalised(name: str, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    image = image_for(name)
    expected = normalized(pixels_of(image), mean, std)
    torch.testing.assert_close(TRANSFORMS[name].validation(image), expected)
    assert TRANSFORMS[name].training(image).equal(expected) == (name == "mnist"), "digits are not augmented"


@pytest.mark.parametrize(
    ("name", "mean", "std"), [("cifar10", CIFAR_MEAN, CIFAR_STD), ("cifar100", CIFAR100_MEAN, CIFAR100_STD)]
)
def test_cifar_is_a_crop_of_the_padded_image_or_of_its_mirror_image(
    name: str, mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    image = image_for(name)
    padded = torch.nn.functional.pad(pixels_of(image), (4, 4, 4, 4))
    windows = {
        (row, column, mirrored): window.flip(2) if mirrored else window
        for row in range(9)
        for column in range(9)
        for window in [normalized(padded[:, row : row + 32, column : column + 32], mean, std)]
        for mirrored in (False, True)
    }
    found = set()
    for _ in range(40):
        made = TRANSFORMS[name].training(image)
        (place,) = [place for place, window in windows.items() if torch.allclose(made, window, atol=1e-6)]
        found.add(place)
    assert len(found) > 20
    assert {mirrored for _, _, mirrored in found} == {False, True}


def test_fastai_fills_what_comes_in_with_black_and_keeps_the_middle() -> None:
    grey = Image.new("RGB", (32, 32), (128, 128, 128))
    darkest, brightest = [], []
    for _ in range(60):
        made = TRANSFORMS["fastai-224"].training(grey)
        raw = made * torch.tensor(FASTAI_STD).view(-1, 1, 1) + torch.tensor(FASTAI_MEAN).view(-1, 1, 1)
        darkest.append(raw.min().item())
        brightest.append(raw.max().item())
        assert raw[:, 80:144, 80:144].min() > 0.5 * 0.8 * 0.8 - 0.02, "the middle is never out of the picture"
    assert min(darkest) < 0.01
    assert 0.5 < max(brightest) < 0.5 * 1.2 * 1.25 + 0.02
