"""Files of data sets are found in every official layout, and only the official content is read."""

import gzip
import hashlib
import os
import pickle
import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cifar_files import binary_file, draw, put, python_file

from castwise.errors import DataError, MissingDataError
from castwise.registry.datasets import (
    CIFAR10,
    CIFAR100,
    DATA_VARIABLE,
    MNIST,
    DataFile,
    DataSet,
    default_data_dir,
    find_file,
    find_layout,
    read_verified,
    verify,
)
from castwise.trial.data import datasets
from castwise.trial.data.datasets import fetch, load_cifar, load_mnist, resident_batches
from castwise.trial.data.transforms import STATISTICS

CPU = torch.device("cpu")
NUM_TRAIN, NUM_TEST = 50, 20
MEAN, STD = 0.1307, 0.3081


def idx(num_items: int, shape: tuple[int, ...], seed: int, below: int) -> bytes:
    """Return an IDX file of uint8 items."""
    size = num_items
    for side in shape:
        size *= side
    generator = torch.Generator().manual_seed(seed)
    items = torch.randint(below, (size,), generator=generator, dtype=torch.uint8)
    sizes = b"".join(side.to_bytes(4, "big") for side in (num_items, *shape))
    return bytes([0, 0, 8, 1 + len(shape)]) + sizes + bytes(items.tolist())


CONTENT = {
    "train-images": idx(NUM_TRAIN, (28, 28), 1, 256),
    "train-labels": idx(NUM_TRAIN, (), 2, 10),
    "test-images": idx(NUM_TEST, (28, 28), 3, 256),
    "test-labels": idx(NUM_TEST, (), 4, 10),
}


def small_file(file: DataFile) -> DataFile:
    content = CONTENT[file.part]
    return replace(file, num_bytes=len(content), checksum=f"sha256:{hashlib.sha256(content).hexdigest()}")


SMALL = replace(MNIST, files=tuple(small_file(file) for file in MNIST.files))
IMAGES = SMALL.files[0]


def store(folder: Path, data_set: DataSet = SMALL, *, suffix: str = "") -> Path:
    """Write all files of the small set into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in data_set.files:
        content = CONTENT[file.part]
        (folder / (file.name + suffix)).write_bytes(gzip.compress(content) if suffix else content)
    return folder


@pytest.fixture
def small_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a small set that stands in for MNIST."""
    monkeypatch.setitem(datasets.IMAGE_SETS, "mnist", partial(load_mnist, SMALL))
    return store(tmp_path)


# Finding


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("folder", MNIST.folders)
def test_files_are_found_in_every_layout(folder: str, suffix: str, tmp_path: Path) -> None:
    store(tmp_path / folder, suffix=suffix)
    verify(SMALL, tmp_path)
    for file in SMALL.files:
        assert find_file(SMALL, tmp_path, file.part) == tmp_path / folder / (file.name + suffix)
        assert read_verified(SMALL, tmp_path, file.part) == CONTENT[file.part]


def test_search_order_of_files(tmp_path: Path) -> None:
    store(tmp_path / "MNIST" / "raw")
    store(tmp_path / "mnist", suffix=".gz")
    assert find_file(SMALL, tmp_path, IMAGES.part) == tmp_path / "mnist" / f"{IMAGES.name}.gz"
    (tmp_path / "mnist" / IMAGES.name).write_bytes(CONTENT[IMAGES.part])
    assert find_file(SMALL, tmp_path, IMAGES.part).name == IMAGES.name
    (tmp_path / "mnist" / f"{SMALL.files[3].name}.gz").unlink()
    verify(SMALL, tmp_path)  # files of one set may lie in several folders
    (tmp_path / "MNIST" / "raw" / SMALL.files[3].name).unlink()
    with pytest.raises(MissingDataError, match=r"^mnist: no t10k-labels-idx1-ubyte\[\.gz\] in "):
        verify(SMALL, tmp_path)


@pytest.mark.parametrize("name", [".", "nowhere", "file", "x" * 300])
def test_missing_files_are_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / IMAGES.name).mkdir()
    folder = tmp_path / name
    with pytest.raises(MissingDataError) as caught:
        verify(SMALL, folder)
    for words in ("mnist", "train-images-idx3-ubyte[.gz]", f"'{folder}'", "MNIST/raw", "--data DIR", DATA_VARIABLE):
        assert words in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({DATA_VARIABLE: "/data", "XDG_CACHE_HOME": "/cache"}, "/data"),
        ({DATA_VARIABLE: "", "XDG_CACHE_HOME": "/cache"}, "/cache/castwise/data"),
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/castwise/data"),
        ({"XDG_CACHE_HOME": ""}, "/home/user/.cache/castwise/data"),
        ({}, "/home/user/.cache/castwise/data"),
    ],
)
def test_where_data_is_looked_for(variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (DATA_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/user", **variables}.items():
        monkeypatch.setenv(name, value)
    assert default_data_dir() == Path(expected)


# Verifying


DIGITS = CONTENT[IMAGES.part]
PACKED = gzip.compress(DIGITS, mtime=0)  # the same in all test processes


@pytest.mark.parametrize(
    ("content", "suffix", "message"),
    [
        (DIGITS[:-1], "", r"holds 39,215 bytes where mnist has 39,216\."),
        (DIGITS + b"\0", "", r"holds more than 39,216 bytes where mnist has 39,216\."),
        (DIGITS[:-1] + bytes([DIGITS[-1] ^ 1]), "", r"is not mnist's: its checksum is wrong\."),
        (gzip.compress(DIGITS[:-1], mtime=0), ".gz", r"holds 39,215 bytes where mnist has 39,216\."),
        (PACKED[:-1], ".gz", r"cannot be read \(.* ended before the end-of-stream marker .*\)\."),
        (PACKED[:-8] + bytes(4) + PACKED[-4:], ".gz", r"cannot be read \(.*CRC check failed.*\)\."),
        (PACKED[:10] + b"\xff" * 50 + PACKED[60:], ".gz", r"cannot be read \(.*while decompressing.*\)\."),
        (b"<html>moved</html>", ".gz", r"cannot be read \(.*Not a gzipped file.*\)\."),
    ],
    ids=["short", "long", "changed", "packed-short", "cut", "crc", "damaged", "html"],
)
def test_wrong_content_is_refused(content: bytes, suffix: str, message: str, tmp_path: Path) -> None:
    path = store(tmp_path, suffix=suffix) / (IMAGES.name + suffix)
    path.write_bytes(content)
    refuse(tmp_path, path, message)


def refuse(folder: Path, path: Path, message: str) -> None:
    for check in (lambda: read_verified(SMALL, folder, IMAGES.part), lambda: verify(SMALL, folder)):
        with pytest.raises(DataError, match=rf"^'{path}' {message} Put the official file there\.$") as caught:
            check()
        assert not isinstance(caught.value, MissingDataError), "it would be downloaded over the user's file"
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_too_long_file_is_not_read(suffix: str, tmp_path: Path) -> None:
    """Nor is an archive unpacked that would be as long."""
    path = store(tmp_path, suffix=suffix) / (IMAGES.name + suffix)
    with path.open("wb") as stream:
        if suffix:
            stream.write(gzip.compress(bytes(200 * 2**20), compresslevel=1))
        else:
            stream.truncate(2**33)
    tracemalloc.start()
    try:
        refuse(tmp_path, path, r"holds more than 39,216 bytes where mnist has 39,216\.")
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()


def test_a_file_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store(tmp_path) / IMAGES.name

    def refuse_to_open(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse_to_open)
    refuse(tmp_path, path, r"cannot be read \(\[Errno 13\] Permission denied\)\.")


# MNIST


def test_mnist_is_read_without_headers(small_mnist: Path) -> None:
    for split, count in (("train", NUM_TRAIN), ("test", NUM_TEST)):
        digits, labels = load_mnist(SMALL, small_mnist, split)
        assert (digits.shape, digits.dtype) == ((count, 1, 28, 28), torch.uint8)
        assert (labels.shape, labels.dtype) == ((count,), torch.int64)
        assert bytes(digits.flatten().tolist()) == CONTENT[f"{split}-images"][16:]
        assert bytes(labels.tolist()) == CONTENT[f"{split}-labels"][8:]


def make_batches(folder: Path, batch_size: int, seed: int = 0) -> list[tuple[torch.Tensor, ...]]:
    return list(resident_batches("mnist", folder)(7, batch_size, CPU, torch.Generator().manual_seed(seed)))


def test_batches_are_the_images_shuffled_and_normalised(small_mnist: Path) -> None:
    raw, raw_labels = load_mnist(SMALL, small_mnist, "train")
    batches = make_batches(small_mnist, 10)
    assert {(tuple(images.shape), images.dtype) for images, _ in batches} == {((10, 1, 28, 28), torch.float32)}
    assert len(make_batches(small_mnist, 8)) == NUM_TRAIN // 8, "all are full"
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    pixels = ((images * STD + MEAN) * 255).round().to(torch.uint8)
    place = {bytes(image.flatten().tolist()): index for index, image in enumerate(raw)}
    order = [place[bytes(image.flatten().tolist())] for image in pixels]
    assert sorted(order) == list(range(NUM_TRAIN)), "each image once"
    assert order != sorted(order)
    assert torch.equal(labels, raw_labels[order]), "each with its own label"
    first, again, other = (make_batches(small_mnist, 50, seed)[0][1].tolist() for seed in (0, 0, 1))
    assert first == again != other


def test_a_batch_larger_than_the_set(small_mnist: Path) -> None:
    with pytest.raises(DataError, match=r"^mnist has 50 training images; a batch of 1,000 cannot be made\.$"):
        make_batches(small_mnist, 1000)


# CIFAR


@pytest.mark.parametrize("layout", ["binary", "python"])
@pytest.mark.parametrize(("row", "num_classes"), [(CIFAR10, 10), (CIFAR100, 100)])
def test_cifar_in_both_layouts(row: DataSet, num_classes: int, layout: str, tmp_path: Path) -> None:
    wanted = {file.part: draw(4, num_classes, seed) for seed, file in enumerate(row.files)}
    content_of = python_file if layout == "python" else binary_file
    row = row.other if layout == "python" and row.other is not None else row
    small = put(tmp_path, row, {part: content_of(*batch, num_classes) for part, batch in wanted.items()})
    verify(small, tmp_path)
    for split in ("train", "test"):
        pixels, labels = load_cifar(small, tmp_path, split)
        batches = [batch for part, batch in wanted.items() if part.startswith(split)]
        assert (pixels.dtype, labels.dtype) == (torch.uint8, torch.int64)
        assert pixels.shape == (4 * len(batches), 3, 32, 32)
        assert pixels.flatten(1).tolist() == np.concatenate([each for each, _ in batches]).tolist()
        assert labels.tolist() == [label for _, each in batches for label in each]


def test_python_layout_is_used_if_binary_is_incomplete(tmp_path: Path) -> None:
    for file in CIFAR10.files[:-1]:
        (tmp_path / file.name).touch()
    with pytest.raises(MissingDataError, match=r"no test_batch\.bin\[\.gz\] nor the python layout's data_batch_1 in"):
        find_layout(CIFAR10, tmp_path)
    assert CIFAR10.other is not None
    for file in CIFAR10.other.files:
        (tmp_path / file.name).touch()
    assert find_layout(CIFAR10, tmp_path).layout == "python"


class Attack:
    """Pickles as a call of os.system."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.mark.parametrize("has_size", [True, False])
def test_unverified_pickle_is_never_opened(has_size: bool, tmp_path: Path) -> None:
    content = pickle.dumps(Attack(f"touch {tmp_path}/executed"))
    row = CIFAR100.other
    assert row is not None
    for file in row.files:
        (tmp_path / file.name).write_bytes(content.ljust(file.num_bytes, b"\0") if has_size else content)
    with pytest.raises(DataError, match="checksum is wrong" if has_size else "where cifar100 has"):
        load_cifar(CIFAR100, tmp_path, "test")
    assert not (tmp_path / "executed").exists()
    pickle.loads(content)
    assert (tmp_path / "executed").exists(), "the attack itself works"


# Downloads


def test_wikitext_is_not_downloaded(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"put train\.txt \(or wiki\.train\.tokens\), .*into '.*wikitext-2'"):
        fetch("wikitext-2", tmp_path)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_is_downloaded_by_checksum(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str, Any]] = []
    monkeypatch.setattr(
        "torchvision.datasets.utils.download_and_extract_archive",
        lambda url, root, **rest: calls.append((url, root, rest)),
    )
    fetch(name, tmp_path)
    ((url, root, rest),) = calls
    assert url == f"https://www.cs.toronto.edu/~kriz/{name.replace('cifar', 'cifar-')}-python.tar.gz"
    assert root == str(tmp_path)
    assert len(rest["md5"]) == 32


# The real files, if they are there


@pytest.mark.parametrize("row", [MNIST, CIFAR10, CIFAR100], ids=lambda row: row.name)
def test_real_images_have_the_statistics(row: DataSet) -> None:
    try:
        verify(row, default_data_dir())
    except MissingDataError as missing:
        pytest.skip(str(missing))
    for split, count in zip(("train", "test"), datasets.NUM_IMAGES[row.name], strict=True):
        images, labels = datasets.load_images(row.name, default_data_dir(), split)
        assert len(images) == len(labels) == count
        means = (images.float().mean((0, 2, 3)) / 255).tolist()
        assert means == pytest.approx(STATISTICS[row.name][0], abs=1e-4 if split == "train" else 0.01)
