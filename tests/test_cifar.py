"""CIFAR-10 and CIFAR-100 from small files of the official layouts, hostile ones, and the real ones where they are."""

import gzip
import hashlib
import os
import pickle
import random
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from castwise.errors import DataError, MissingDataError
from castwise.registry.datasets import CIFAR10, CIFAR100, DataFile, DataSet, default_data_dir, find_layout, verify
from castwise.worker.data import cifar, fetch
from castwise.worker.data.cifar import load_cifar10, load_cifar100, parse_binary, parse_python, unpickle

PIXELS = 3 * 32 * 32
Load = Callable[[Path, str], tuple[torch.Tensor, torch.Tensor]]


class Python2Pickler(pickle._Pickler):  # type: ignore[misc, name-defined]
    """Pickles as the official files were: by Python 2, whose strings are bytes, and by a numpy of its time."""

    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]

    def save_bytes(self, value: bytes) -> None:
        self.write(b"T" + struct.pack("<i", len(value)) + value)  # BINSTRING
        self.memoize(value)

    dispatch[bytes] = save_bytes


class Attack:
    """Pickles as a call of os.system."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def pickled(content: object, folder: Path) -> bytes:
    path = folder / "pickled"
    with path.open("wb") as file:
        Python2Pickler(file, protocol=2).dump(content)
    return path.read_bytes().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def draw(num_images: int, num_classes: int, seed: int = 0) -> tuple[Any, list[int]]:
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 256, (num_images, PIXELS)).astype(np.uint8)
    return pixels, [num_classes - 1, *generator.integers(0, num_classes, num_images - 1).tolist()]


def binary_file(pixels: Any, labels: list[int], num_classes: int) -> bytes:
    rows = [([label] if num_classes == 10 else [label // 5, label]) for label in labels]
    return np.concatenate([np.array(rows, np.uint8), pixels], axis=1).tobytes()


def python_file(pixels: Any, labels: list[int], num_classes: int, folder: Path) -> bytes:
    batch = {b"batch_label": b"training batch", b"data": pixels, b"filenames": [b"a.png"] * len(labels)}
    if num_classes == 10:
        return pickled(batch | {b"labels": labels}, folder)
    return pickled(batch | {b"fine_labels": labels, b"coarse_labels": [label // 5 for label in labels]}, folder)


def put(folder: Path, layout: DataSet, contents: dict[str, bytes]) -> DataSet:
    """Write files of a layout, and return its row with these files' sizes and checksums."""
    files = []
    (folder / layout.folders[0]).mkdir()
    for file in layout.files:
        content = contents[file.part]
        (folder / layout.folders[0] / file.name).write_bytes(content)
        files.append(DataFile(file.part, file.name, len(content), md5=hashlib.md5(content).hexdigest()))
    return replace(layout, files=tuple(files), other=None)


# Both layouts


@pytest.mark.parametrize("layout", ["binary", "python"])
@pytest.mark.parametrize(("row", "load", "num_classes"), [(CIFAR10, load_cifar10, 10), (CIFAR100, load_cifar100, 100)])
def test_images_and_labels_come_back(
    row: DataSet, load: Load, num_classes: int, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {file.part: draw(4, num_classes, seed) for seed, file in enumerate(row.files)}
    if layout == "python":
        assert row.other is not None
        row = row.other
        contents = {part: python_file(*batch, num_classes, tmp_path) for part, batch in wanted.items()}
    else:
        contents = {part: binary_file(*batch, num_classes) for part, batch in wanted.items()}
    small = put(tmp_path, row, contents)
    monkeypatch.setattr(cifar, row.name.upper(), small)
    verify(small, tmp_path)
    for split in ("train", "test"):
        images, labels = load(tmp_path, split)
        batches = [batch for part, batch in wanted.items() if part.startswith(split)]
        assert images.dtype == torch.uint8
        assert labels.dtype == torch.int64
        assert images.shape == (4 * len(batches), 3, 32, 32)
        assert images.flatten(1).tolist() == np.concatenate([pixels for pixels, _ in batches]).tolist()
        assert labels.tolist() == [label for _, labels in batches for label in labels]


def test_a_python_batch_in_fortran_order_is_read_as_what_it_was(tmp_path: Path) -> None:
    pixels, labels = draw(3, 10)
    parsed, _ = parse_python(python_file(np.asfortranarray(pixels), labels, 10, tmp_path), num_classes=10)
    assert parsed.tolist() == pixels.tolist()


def test_todays_numpy_and_pickle_are_read_too() -> None:
    pixels, labels = draw(3, 10)
    content = pickle.dumps({b"data": pixels, b"labels": labels}, protocol=3)
    parsed, read = parse_python(content, num_classes=10)
    assert parsed.tolist() == pixels.tolist()
    assert read.tolist() == labels


def test_the_python_layout_is_taken_where_the_binary_one_is_not_whole(tmp_path: Path) -> None:
    for file in CIFAR10.files[:-1]:
        (tmp_path / file.name).touch()
    with pytest.raises(MissingDataError, match=r"no test_batch\.bin\[\.gz\] nor the python layout's data_batch_1 in"):
        find_layout(CIFAR10, tmp_path)
    assert CIFAR10.other is not None
    for file in CIFAR10.other.files:
        (tmp_path / file.name).touch()
    assert find_layout(CIFAR10, tmp_path).layout == "python"


@pytest.mark.parametrize("row", [CIFAR10, CIFAR100], ids=lambda row: row.name)
def test_sizes_are_those_of_the_binary_format(row: DataSet) -> None:
    record_bytes = PIXELS + (1 if row is CIFAR10 else 2)
    images = {file.part: file.num_bytes / record_bytes for file in row.files}
    assert images.pop("test") == 10_000
    assert sum(images.values()) == 50_000


# Hostile files


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataSet:
    row = put(tmp_path, CIFAR100, {part: binary_file(*draw(3, 100), 100) for part in ("train", "test")})
    monkeypatch.setattr(cifar, "CIFAR100", row)
    return row


def message(folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        load_cifar100(folder, "test")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda content: content[:-1], "holds 9,221 bytes where cifar100 has 9,222"),
        (lambda content: b"", "holds 0 bytes"),
        (lambda content: content + b"\0", "holds more than 9,222 bytes"),
        (lambda content: b"\xff" + content[1:], "is not cifar100's: its checksum is wrong"),
    ],
    ids=["truncated", "empty", "longer", "changed"],
)
def test_a_damaged_file_is_one_clear_line(
    spoil: Callable[[bytes], bytes], words: str, small: DataSet, tmp_path: Path
) -> None:
    path = tmp_path / "cifar-100-binary" / "test.bin"
    path.write_bytes(spoil(path.read_bytes()))
    assert words in message(tmp_path)
    assert str(path) in message(tmp_path)


def test_a_bomb_is_not_unpacked(small: DataSet, tmp_path: Path) -> None:
    (tmp_path / "cifar-100-binary" / "test.bin").unlink()
    (tmp_path / "cifar-100-binary" / "test.bin.gz").write_bytes(gzip.compress(bytes(50_000_000), 1))
    assert "holds more than 9,222 bytes" in message(tmp_path)


def test_a_missing_file_is_named(small: DataSet, tmp_path: Path) -> None:
    (tmp_path / "cifar-100-binary" / "test.bin").unlink()
    assert message(tmp_path).startswith("cifar100: no test.bin[.gz] in ")


def test_binary_content_that_passed_no_check_is_still_refused() -> None:
    content = binary_file(*draw(3, 100), 100)
    with pytest.raises(DataError, match="9,221 bytes is not made of records of 3,074"):
        parse_binary(content[:-1], num_classes=100)
    with pytest.raises(DataError, match="label is 100; they go from 0 to 99"):
        parse_binary(content[:1] + b"\x64" + content[2:], num_classes=100)
    with pytest.raises(DataError, match="label is 10; they go from 0 to 9"):
        parse_binary(b"\x0a" + bytes(PIXELS), num_classes=10)


def test_an_unverified_pickle_is_never_opened(small: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CIFAR100.other is not None
    monkeypatch.setattr(cifar, "CIFAR100", CIFAR100.other)
    monkeypatch.setattr(cifar, "unpickle", lambda content: pytest.fail("opened"))
    for name in ("train", "test"):
        (tmp_path / name).write_bytes(pickle.dumps(Attack(f"touch {tmp_path}/executed")))
    assert "where cifar100 has 31,049,707" in message(tmp_path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_the_unpickler_itself_runs_nothing(protocol: int, tmp_path: Path) -> None:
    executed = tmp_path / "executed"
    content = pickle.dumps(Attack(f"touch {executed}"), protocol)
    with pytest.raises(DataError, match=r"no pickle of plain data: it asks for posix\.system"):
        unpickle(content)
    assert not executed.exists()
    pickle.loads(content)
    assert executed.exists(), "the attack itself works"


@pytest.mark.parametrize(
    "opened",
    [b"cbuiltins\neval\n(Vprint()\ntR.", b"(Vprint()\nibuiltins\nexec\n.", b"cnumpy\nload\n.", b"Pposix.system\n."],
)
def test_no_other_opcode_finds_a_way_out(opened: bytes) -> None:
    with pytest.raises(DataError, match="no pickle of plain data"):
        unpickle(opened)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({b"data": 7}, "no usable data"),
        ({b"data": np.zeros((2, PIXELS), np.float32)}, "not an array of bytes"),
        ({b"data": np.zeros((2, PIXELS), object)}, "not an array of bytes"),
        ({b"data": np.zeros((2, PIXELS - 1), np.uint8)}, "pixels of shape"),
        ({b"labels": None}, "object labels"),
        ({b"labels": [1]}, "labels of shape"),
        ({b"labels": [1, 10]}, "label is 10"),
        ({b"labels": [1, -1]}, "label is -1"),
        ({b"labels": [1, 2**80]}, "object labels"),
        ({b"labels": [1.5, 2.5]}, "float64 labels"),
        ({b"labels": [[1], [1, 2]]}, "no usable data or labels"),
    ],
)
def test_a_pickle_of_something_else_is_refused(change: dict[bytes, Any], words: str) -> None:
    batch = {b"data": np.zeros((2, PIXELS), np.uint8), b"labels": [0, 1]}
    with pytest.raises(DataError, match=words):
        parse_python(pickle.dumps(batch | change, protocol=3), num_classes=10)


def test_a_size_that_is_merely_stated_allocates_nothing() -> None:
    content = pickle.dumps({b"data": np.zeros((2, PIXELS), np.uint8), b"labels": [0, 1]}, protocol=3)
    two_rows = b"K\x02M\x00\x0c\x86"  # the shape, as pickled
    assert content.count(two_rows) == 1
    hostile = content.replace(two_rows, b"\x8a\x08" + struct.pack("<q", 2**62) + b"M\x00\x0c\x86")
    with pytest.raises(DataError, match="no usable data"):
        parse_python(hostile, num_classes=10)


def test_damaged_pickles_never_raise_anything_else() -> None:
    content = pickle.dumps({b"data": np.zeros((1, PIXELS), np.uint8), b"labels": [0]}, protocol=3)
    code = [place for place in range(len(content)) if content[place]]  # all but the pixels
    chance = random.Random(0)
    for _ in range(3000):
        mutated = bytearray(content)
        for place in chance.sample(code, 2):
            mutated[place] = chance.choice([opcode for opcode in range(256) if opcode not in b"r"])  # no huge memo
        with suppress(DataError):
            parse_python(bytes(mutated[: chance.choice([None, place])]), num_classes=10)


# Downloads and real data


def test_wikitext_is_not_fetched_but_said_where_to_put(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"put train\.txt \(or wiki\.train\.tokens\), .*into '.*wikitext-2'"):
        fetch("wikitext-2", tmp_path)


@pytest.mark.parametrize(
    ("name", "archive"), [("cifar10", "cifar-10-python.tar.gz"), ("cifar100", "cifar-100-python.tar.gz")]
)
def test_cifar_is_fetched_by_checksum_and_not_opened(
    name: str, archive: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str, Any]] = []
    monkeypatch.setattr(
        "torchvision.datasets.utils.download_and_extract_archive",
        lambda url, root, **rest: calls.append((url, root, rest)),
    )
    fetch(name, tmp_path)
    ((url, root, rest),) = calls
    assert url == f"https://www.cs.toronto.edu/~kriz/{archive}"
    assert root == str(tmp_path)
    assert len(rest["md5"]) == 32


@pytest.mark.parametrize(("row", "load"), [(CIFAR10, load_cifar10), (CIFAR100, load_cifar100)])
def test_the_real_images(row: DataSet, load: Load) -> None:
    try:
        layout = find_layout(row, default_data_dir())
    except MissingDataError as missing:
        pytest.skip(str(missing))
    images, labels = load(default_data_dir(), "test")
    num_classes = 10 if row is CIFAR10 else 100
    assert images.shape == (10_000, 3, 32, 32)
    assert labels.bincount().tolist() == [10_000 // num_classes] * num_classes
    if row is CIFAR10 and layout.layout == "binary":
        images, labels = load(default_data_dir(), "train")
        # Source: kuangliu/pytorch-cifar main.py; these are the means that the transforms subtract.
        assert (images.float().mean((0, 2, 3)) / 255).tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-4)
