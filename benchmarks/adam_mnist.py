"""A network for MNIST that Adam trains, to judge the precision of Adam's state where no GPU is at hand.

castwise accuracy benchmarks/adam_mnist.py:build --precision fp32,bf16-sr --optimizer-state
    fp32,bf16,8-bit,fp8,4-bit --seeds 5
"""

import gzip
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_FOLDER = Path(os.environ.get("CASTWISE_DATA", "~/.cache/castwise/data")).expanduser() / "mnist"


def _read(name: str) -> Tensor:
    """Return what a file of MNIST has, in bytes; its header has a byte that says how many dimensions there are."""
    data = gzip.decompress((_FOLDER / f"{name}.gz").read_bytes())
    return torch.frombuffer(bytearray(data[4 + 4 * data[3] :]), dtype=torch.uint8)


def _images(part: str) -> Tensor:
    return (_read(f"{part}-images-idx3-ubyte").view(-1, 784) / 255 - 0.1307) / 0.3081


class Batches:
    """The training images in another order each epoch; indexing 256 at once takes less time than a step."""

    def __init__(self) -> None:
        self._images, self._labels = _images("train"), _read("train-labels-idx1-ubyte").long()

    def __len__(self) -> int:
        return len(self._images) // 256

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in torch.randperm(len(self._images)).split(256)[: len(self)]:
            yield self._images[chosen], self._labels[chosen]


def build() -> dict[str, Any]:
    """Return two hidden layers, whose Adam state has several blocks, and MNIST."""
    tested, labels = _images("t10k"), _read("t10k-labels-idx1-ubyte").long()

    def validate(model: nn.Module) -> Tensor:
        return (model(tested).argmax(1) == labels).float().mean()

    training_set = Batches()
    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    return {
        "model": model,
        "batch": next(iter(training_set)),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "training_set": training_set,
        "validate": validate,
        "higher_is_better": True,
    }
