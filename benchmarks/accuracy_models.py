"""An MLP on MNIST, sound and with three faults of a precision, for `accuracy_study.py`.

Each function is a model of one's own as docs/accuracy.md describes it. MNIST's files are read from the folder
CASTWISE_DATA.
"""

import gzip
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

BATCH_SIZE = 256
Batch = tuple[Tensor, Tensor]


@cache
def mnist(part: str) -> Batch:
    """Return the images of `train` or `t10k`, shape (N, 784) from 0 to 1, and their labels."""
    folder = Path(os.environ["CASTWISE_DATA"]) / "mnist"
    raw = [
        gzip.decompress((folder / f"{part}-{name}-ubyte.gz").read_bytes()) for name in ("images-idx3", "labels-idx1")
    ]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = torch.from_numpy(np.frombuffer(raw[0], np.uint8, offset=16).copy()).to(device)
    labels = torch.from_numpy(np.frombuffer(raw[1], np.uint8, offset=8).copy()).to(device)
    return images.view(-1, 784).float() / 255, labels.long()


class Shuffled:
    """The training set's batches, in a new order each epoch."""

    def __len__(self) -> int:
        """Return how many batches an epoch has."""
        return len(mnist("train")[1]) // BATCH_SIZE

    def __iter__(self) -> Iterator[Batch]:
        """Return an epoch's batches."""
        images, labels = mnist("train")
        order = torch.randperm(len(labels)).to(labels.device)
        for start in range(0, len(self) * BATCH_SIZE, BATCH_SIZE):
            chosen = order[start : start + BATCH_SIZE]
            yield images[chosen], labels[chosen]


def validate(model: nn.Module) -> float:
    """Return the accuracy on the 10,000 test images, in per cent."""
    images, labels = mnist("t10k")
    weight = next(model.parameters())
    return 100 * float((model(images.to(weight.device, weight.dtype)).argmax(1) == labels).float().mean())


class Rounded(nn.Module):
    """Rounds half of its inputs to multiples of 1/4 where autocast is on: the bug is that their gradient is zero."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the inputs, half of them rounded under autocast."""
        if not torch.is_autocast_enabled(inputs.device.type):
            return inputs
        rounded, sound = inputs.chunk(2, dim=1)
        return torch.cat([(rounded * 4).round() / 4, sound], dim=1)


def _parts(loss_factor: float = 1.0, learning_rate: float = 0.0, between: nn.Module | None = None) -> dict[str, Any]:
    """Return the model with Adam, or with SGD at a rate."""
    model = nn.Sequential(
        nn.Linear(784, 256), nn.ReLU(), between or nn.Identity(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    optimizer = (
        torch.optim.SGD(model.parameters(), learning_rate, momentum=0.9)
        if learning_rate
        else torch.optim.Adam(model.parameters())
    )
    loss = nn.CrossEntropyLoss()
    return {
        "model": model,
        "optimizer": optimizer,
        "batch": next(iter(Shuffled())),
        "loss": lambda outputs, targets: loss_factor * loss(outputs, targets),
        "training_set": Shuffled(),
        "validate": validate,
        "higher_is_better": True,
    }


def sound() -> dict[str, Any]:
    """Return the model without a fault."""
    return _parts()


def small_gradients() -> dict[str, Any]:
    """Return it with a loss so small that float16 without loss scaling has no gradients; Adam makes up for the size."""
    return _parts(loss_factor=2e-4)


def small_updates() -> dict[str, Any]:
    """Return it with a learning rate so small that weights in bfloat16 do not change."""
    return _parts(learning_rate=1e-2)


def rounding_bug() -> dict[str, Any]:
    """Return it with a layer that loses its gradient under autocast."""
    return _parts(between=Rounded())
