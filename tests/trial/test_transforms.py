"""What every transform pair makes of an image, and how far it may move it."""

import numpy as np
import pytest
import torch
from PIL import Image

from castwise.trial.data.transforms import STATISTICS, TRANSFORMS

_SMALL = dict.fromkeys(("cifar10", "cifar10-cutout", "cifar100"), (3, 32, 32))
SHAPES = {"mnist": (1, 28, 28), **_SMALL, "fastai-224": (3, 224, 224)}
FASTAI_MEAN, FASTAI_STD = (0.491, 0.482, 0.447), (0.247, 0.243, 0.261)

every_pair = pytest.mark.parametrize("name", TRANSFORMS)


def image_for(name: str) -> Image.Image:
    shape = (28, 28) if name == "mnist" else (32, 32, 3)
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8))


@every_pair
def test_shapes_and_dtypes(name: str) -> None:
    for transform in TRANSFORMS[name]:
        made = transform(image_for(name))
        assert made.dtype == torch.float32
        assert made.shape == SHAPES[name]
        assert made.isfinite().all()


@pytest.mark.parametrize("name", ["cifar10", "cifar10-cutout", "cifar100", "fastai-224"])
def test_training_transform_follows_the_seed(name: str) -> None:
    def draw(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return TRANSFORMS[name].training(image_for(name))

    assert not draw(0).equal(draw(1))
    assert draw(0).equal(draw(0))


@pytest.mark.parametrize("name", STATISTICS)
def test_validation_is_only_normalised(name: str) -> None:
    image = image_for(name)
    mean, std = (torch.tensor(part).view(-1, 1, 1) for part in STATISTICS[name])
    pixels = torch.from_numpy(np.array(image)).float() / 255
    expected = ((pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)) - mean) / std
    torch.testing.assert_close(TRANSFORMS[name].validation(image), expected)
    assert TRANSFORMS[name].training(image).equal(expected) == (name == "mnist"), "digits are not augmented"


def test_fastai_borders_are_black() -> None:
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
