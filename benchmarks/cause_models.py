"""Small models that are slow for one reason each: the test set of `castwise why`, which causes.py measures."""

from typing import Any

import torch
from torch import nn


def tiny() -> Any:
    """Return a network whose kernels take less time than their launches, as a ResNet-20 on CIFAR."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(128, 128), nn.ReLU())]
    return _classifier(nn.Sequential(*layers, nn.Linear(128, 10)), torch.randn(32, 128))


def stem(channels: int = 3) -> Any:
    """Return a network whose first convolution, of three channels, takes most of its time, as AlexNet's."""
    first = nn.Conv2d(channels, 64, 11, padding=5, bias=False)
    second = nn.Conv2d(64, 64, 3, padding=1, bias=False)
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), *_head(64))
    return _classifier(model, torch.randn(32, channels, 448, 448))


def wide_stem() -> Any:
    """Return the same with eight channels: its first convolution is aligned."""
    return stem(8)


def depthwise() -> Any:
    """Return depthwise convolutions one after another."""
    layers = [nn.Conv2d(256, 256, 5, padding=2, groups=256) for _ in range(6)]
    return _classifier(nn.Sequential(nn.Conv2d(8, 256, 1), *layers, *_head(256)), torch.randn(64, 8, 56, 56))


def grouped() -> Any:
    """Return convolutions of 32 groups of 8 channels, as a ResNeXt has them."""
    layers = [nn.Conv2d(256, 256, 3, padding=1, groups=32, bias=False) for _ in range(6)]
    return _classifier(nn.Sequential(nn.Conv2d(8, 256, 1), *layers, *_head(256)), torch.randn(64, 8, 56, 56))


def dense() -> Any:
    """Return the same without groups."""
    layers = [nn.Conv2d(256, 256, 3, padding=1) for _ in range(6)]
    return _classifier(nn.Sequential(nn.Conv2d(8, 256, 1), *layers, *_head(256)), torch.randn(64, 8, 56, 56))


def vocabulary() -> Any:
    """Return a language model's head over BERT's 30,522 words."""
    return _decoder(30522)


def padded_vocabulary() -> Any:
    """Return the same over 30,528 words, a multiple of 64."""
    return _decoder(30528)


def update() -> Any:
    """Return a wide MLP on few samples with Adam: the update takes longer than forward and backward."""
    return _mlp(8192, 4, 64) | {"optimizer": lambda parameters: torch.optim.Adam(parameters, foreach=True)}


def small_batch() -> Any:
    """Return the same with SGD: casts of the weights take most of its time."""
    return _mlp(8192, 4, 64)


def scaled() -> Any:
    """Return layers whose kernels take as long as the host needs for them: what a wait costs is seen.

    A fused optimizer would scale on the device, and so not wait.
    """
    return _mlp(2048, 24, 4096) | {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, foreach=True)}


def arithmetic() -> Any:
    """Return products so large that the GPU draws all the power it may."""
    return _mlp(8192, 6, 32768)


def moving() -> Any:
    """Return element-wise work between small products."""
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU(), nn.Dropout(0.1), nn.SiLU(), nn.LayerNorm(256)]
    return _classifier(nn.Sequential(*layers, nn.Linear(256, 16)), torch.randn(131072, 256))


def volume() -> Any:
    """Return convolutions in three dimensions."""
    layers = [layer for _ in range(4) for layer in (nn.Conv3d(64, 64, 3, padding=1), nn.ReLU())]
    pool = (nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(64, 10))
    return _classifier(nn.Sequential(nn.Conv3d(8, 64, 1), *layers, *pool), torch.randn(8, 8, 32, 32, 32))


def _mlp(width: int, depth: int, batch: int) -> dict[str, Any]:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width, bias=False), nn.ReLU())]
    model, samples = nn.Sequential(*layers), torch.randn(batch, width)
    return {
        "model": model,
        "batch": (samples, torch.zeros(batch, width)),
        "loss": nn.MSELoss(),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, fused=True),
    }


def _decoder(words: int) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(768, 768), nn.GELU(), nn.LayerNorm(768), nn.Linear(768, words))
    return _classifier(model, torch.randn(8192, 768), words)


def _head(channels: int) -> tuple[nn.Module, ...]:
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)


def _classifier(model: nn.Module, samples: torch.Tensor, classes: int = 10) -> dict[str, Any]:
    return {
        "model": model,
        "batch": (samples, torch.randint(classes, (len(samples),))),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    }
