"""Small files in CIFAR's official layouts."""

import hashlib
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from castwise.registry.datasets import DataFile, DataSet

PIXELS = 3 * 32 * 32


def draw(num_images: int, num_classes: int, seed: int = 0) -> tuple[Any, list[int]]:
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 256, (num_images, PIXELS)).astype(np.uint8)
    return pixels, [num_classes - 1, *generator.integers(0, num_classes, num_images - 1).tolist()]


def binary_file(pixels: Any, labels: list[int], num_classes: int) -> bytes:
    rows = [([label] if num_classes == 10 else [label // 5, label]) for label in labels]
    return np.concatenate([np.array(rows, np.uint8), pixels], axis=1).tobytes()


def python_file(pixels: Any, labels: list[int], num_classes: int) -> bytes:
    name = b"labels" if num_classes == 10 else b"fine_labels"
    return pickle.dumps({b"batch_label": b"training batch", b"data": pixels, name: labels}, protocol=2)


def put(folder: Path, layout: DataSet, contents: dict[str, bytes]) -> DataSet:
    """Write files of a layout, and return its row with these files' sizes and checksums."""
    files = []
    (folder / layout.folders[0]).mkdir()
    for file in layout.files:
        content = contents[file.part]
        (folder / layout.folders[0] / file.name).write_bytes(content)
        files.append(DataFile(file.part, file.name, len(content), f"md5:{hashlib.md5(content).hexdigest()}"))
    return replace(layout, files=tuple(files), other=None)
