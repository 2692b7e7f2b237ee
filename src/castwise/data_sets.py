"""Find and verify the files of real data sets, in their official layouts, without torch."""

import gzip
import hashlib
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from castwise.errors import DataError, MissingDataError, unknown_name

DATA_VARIABLE = "CASTWISE_DATA"


@dataclass(frozen=True)
class DataFile:
    """One file of a data set.

    Attributes:
        part: What it holds, castwise's name ("train-images").
        name: Its official name, without ".gz".
        num_bytes: Its uncompressed size; nothing longer is ever read.
        sha256: The checksum of its uncompressed content.
    """

    part: str
    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class DataSet:
    """A data set's name, its files and the sub-folders it is looked for in."""

    name: str
    files: tuple[DataFile, ...]
    folders: tuple[str, ...]


# The checksums were taken of the uncompressed official files, whose compressed forms have the md5s that
# torchvision.datasets.MNIST.resources lists.
MNIST = DataSet(
    name="mnist",
    folders=(".", "mnist", "MNIST", "MNIST/raw", "mnist/MNIST/raw"),
    files=(
        DataFile(
            part="train-images",
            name="train-images-idx3-ubyte",
            num_bytes=47_040_016,
            sha256="ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        ),
        DataFile(
            part="train-labels",
            name="train-labels-idx1-ubyte",
            num_bytes=60_008,
            sha256="65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        ),
        DataFile(
            part="test-images",
            name="t10k-images-idx3-ubyte",
            num_bytes=7_840_016,
            sha256="0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        ),
        DataFile(
            part="test-labels",
            name="t10k-labels-idx1-ubyte",
            num_bytes=10_008,
            sha256="ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    ),
)

DATA_SETS: tuple[DataSet, ...] = (MNIST,)


def find_data_set(name: str) -> DataSet:
    """Return the row with this name.

    Raises:
        UsageError: There is none; the message offers the nearest.
    """
    for row in DATA_SETS:
        if row.name == name.strip().lower():
            return row
    raise unknown_name("data set", name, ("synthetic", *(row.name for row in DATA_SETS)))


def default_data_dir() -> Path:
    """Return the folder data sets are looked for in and downloaded to: CASTWISE_DATA, or the user's cache."""
    named = os.environ.get(DATA_VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "castwise" / "data"


def find_file(data_set: DataSet, data_dir: Path, part: str) -> Path:
    """Return the path of one file of a data set, compressed or not.

    Raises:
        MissingDataError: It is in none of the data set's folders.
    """
    file = _file(data_set, part)
    for folder in data_set.folders:
        for name in (file.name, file.name + ".gz"):
            path = data_dir / folder / name
            if path.is_file():
                return path
    raise MissingDataError(
        f"{data_set.name}: no {file.name}[.gz] in '{data_dir}' (nor its {', '.join(data_set.folders[1:])}). "
        f"Name the folder with --data DIR or {DATA_VARIABLE}."
    )


def read_verified(data_set: DataSet, data_dir: Path, part: str) -> bytes:
    """Return the uncompressed content of one file, after its size and checksum were found right.

    Raises:
        DataError: The file is missing, unreadable, or not the official one.
    """
    file, path = _file(data_set, part), find_file(data_set, data_dir, part)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            content = stream.read(file.num_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"'{path}' cannot be read ({error}). Put the official file there.") from None
    if len(content) != file.num_bytes:
        length = f"more than {file.num_bytes:,}" if len(content) > file.num_bytes else f"{len(content):,}"
        raise DataError(
            f"'{path}' holds {length} bytes where {data_set.name} has {file.num_bytes:,}. Put the official file there."
        )
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise DataError(f"'{path}' is not {data_set.name}'s: its checksum is wrong. Put the official file there.")
    return content


def verify(data_set: DataSet, data_dir: Path) -> None:
    """Check every file of a data set.

    Raises:
        DataError: A file is missing, unreadable, or not the official one.
    """
    for file in data_set.files:
        read_verified(data_set, data_dir, file.part)


def _file(data_set: DataSet, part: str) -> DataFile:
    return next(file for file in data_set.files if file.part == part)
