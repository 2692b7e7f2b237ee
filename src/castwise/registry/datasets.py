"""Find and verify the files of real data sets, in their official layouts, without torch."""

import gzip
import hashlib
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from castwise.errors import DataError, MissingDataError, unknown_name
from castwise.spec.types import SYNTHETIC

DATA_VARIABLE = "CASTWISE_DATA"
# Before a data set's name: random data of the same size and shape in its place.
SYNTHETIC_PREFIX = "synthetic:"


@dataclass(frozen=True)
class DataFile:
    """A file of a data set."""

    part: str  # what it holds ("train-images")
    name: str  # its official name, without ".gz"
    num_bytes: int  # uncompressed; nothing longer is read
    checksum: str  # of the uncompressed content: "sha256:ba89…"
    aliases: tuple[str, ...] = ()  # other official names of the same content


@dataclass(frozen=True)
class ImageFacts:
    """What is known of a data set's images before they are read. Source: the sets' own pages."""

    torchvision: str  # its class there
    shape: tuple[int, int, int]  # of one, channels first
    num_classes: int
    num_images: tuple[int, int]  # for training, and for tests


@dataclass(frozen=True)
class DataSet:
    """A data set in one official layout."""

    name: str  # the same in each of its layouts
    files: tuple[DataFile, ...]
    folders: tuple[str, ...]  # sub-folders in which files are looked for, in this order
    layout: str = ""  # its name at the source ("binary"), if there are several
    other: "DataSet | None" = None  # the same data in another layout, used if files of this one are missing
    images: ImageFacts | None = None  # None of a text


# The checksums were taken of the uncompressed official files, whose compressed forms have the md5s that
# torchvision.datasets.MNIST.resources lists.
MNIST = DataSet(
    name="mnist",
    images=ImageFacts("MNIST", (1, 28, 28), 10, (60_000, 10_000)),
    folders=(".", "mnist", "MNIST", "MNIST/raw", "mnist/MNIST/raw"),
    files=(
        DataFile(
            "train-images",
            "train-images-idx3-ubyte",
            47_040_016,
            "sha256:ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        ),
        DataFile(
            "train-labels",
            "train-labels-idx1-ubyte",
            60_008,
            "sha256:65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        ),
        DataFile(
            "test-images",
            "t10k-images-idx3-ubyte",
            7_840_016,
            "sha256:0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        ),
        DataFile(
            "test-labels",
            "t10k-labels-idx1-ubyte",
            10_008,
            "sha256:ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    ),
)


# Sizes and md5s of the python layouts: torchvision.datasets.CIFAR10 and CIFAR100 (train_list, test_list), and the
# git-annex keys of datasets-mila/datasets--cifar10 and datasets--cifar100, which pair these md5s with the sizes.
# The class names (batches.meta, meta) are not read.
_CIFAR10_PYTHON = DataSet(
    name="cifar10",
    layout="python",
    folders=("cifar-10-batches-py", "cifar10", "cifar10/cifar-10-batches-py", "."),
    files=(
        DataFile("train-1", "data_batch_1", 31_035_704, "md5:c99cafc152244af753f735de768cd75f"),
        DataFile("train-2", "data_batch_2", 31_035_320, "md5:d4bba439e000b95fd0a9bffe97cbabec"),
        DataFile("train-3", "data_batch_3", 31_035_999, "md5:54ebc095f3ab1f0389bbae665268c751"),
        DataFile("train-4", "data_batch_4", 31_035_696, "md5:634d18415352ddfa80567beed471001a"),
        DataFile("train-5", "data_batch_5", 31_035_623, "md5:482c414d41f54cd18b22e5b47cb7c3cb"),
        DataFile("test", "test_batch", 31_035_526, "md5:40351d587109b95175f43aff81a1287e"),
    ),
)

# Source: apache/mxnet gluon/data/vision/datasets.py publishes the sha1s of both binary layouts' files. CIFAR-10's
# were compared with real files; CIFAR-100's were not.
CIFAR10 = DataSet(
    name="cifar10",
    layout="binary",
    folders=("cifar-10-batches-bin", "cifar10", "cifar10/cifar-10-batches-bin", "."),
    other=_CIFAR10_PYTHON,
    images=ImageFacts("CIFAR10", (3, 32, 32), 10, (50_000, 10_000)),
    files=(
        DataFile("train-1", "data_batch_1.bin", 30_730_000, "sha1:aadd24acce27caa71bf4b10992e9e7b2d74c2540"),
        DataFile("train-2", "data_batch_2.bin", 30_730_000, "sha1:c0ba65cce70568cd57b4e03e9ac8d2a5367c1795"),
        DataFile("train-3", "data_batch_3.bin", 30_730_000, "sha1:1dd00a74ab1d17a6e7d73e185b69dbf31242f295"),
        DataFile("train-4", "data_batch_4.bin", 30_730_000, "sha1:aab85764eb3584312d3c7f65fd2fd016e36a258e"),
        DataFile("train-5", "data_batch_5.bin", 30_730_000, "sha1:26e2849e66a845b7f1e4614ae70f4889ae604628"),
        DataFile("test", "test_batch.bin", 30_730_000, "sha1:67eb016db431130d61cd03c7ad570b013799c88c"),
    ),
)

_CIFAR100_PYTHON = DataSet(
    name="cifar100",
    layout="python",
    folders=("cifar-100-python", "cifar100", "cifar100/cifar-100-python", "."),
    files=(
        DataFile("train", "train", 155_249_918, "md5:16019d7e3df5f24257cddd939b257f8d"),
        DataFile("test", "test", 31_049_707, "md5:f0ef6b0ae62326f3e7ffdfab6717acfc"),
    ),
)

CIFAR100 = DataSet(
    name="cifar100",
    layout="binary",
    folders=("cifar-100-binary", "cifar100", "cifar100/cifar-100-binary", "."),
    other=_CIFAR100_PYTHON,
    images=ImageFacts("CIFAR100", (3, 32, 32), 100, (50_000, 10_000)),
    files=(
        DataFile("train", "train.bin", 153_700_000, "sha1:e207cd2e05b73b1393c74c7f5e7bea451d63e08e"),
        DataFile("test", "test.bin", 30_740_000, "sha1:8fb6623e830365ff53cf14adec797474f5478006"),
    ),
)

# The checksums were taken of the files of pytorch/examples word_language_model/data/wikitext-2. The official
# wiki.*.tokens are the same bytes: apache/mxnet gluon/contrib/data/text.py publishes the sha1s of these files for them.
WIKITEXT2 = DataSet(
    name="wikitext-2",
    folders=("wikitext-2", "wikitext-2/wikitext-2", "."),
    files=(
        DataFile(
            "train",
            "train.txt",
            10_797_148,
            "sha256:9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
            ("wiki.train.tokens",),
        ),
        DataFile(
            "valid",
            "valid.txt",
            1_121_681,
            "sha256:f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
            ("wiki.valid.tokens",),
        ),
        DataFile(
            "test",
            "test.txt",
            1_256_449,
            "sha256:d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
            ("wiki.test.tokens",),
        ),
    ),
)

DATA_SETS: tuple[DataSet, ...] = (MNIST, CIFAR10, CIFAR100, WIKITEXT2)
IMAGE_FACTS = {row.name: row.images for row in DATA_SETS if row.images is not None}


def find_data_set(name: str) -> DataSet:
    """Return the row with this name, or raise UsageError, which names the nearest."""
    for row in DATA_SETS:
        if row.name == name.strip().lower():
            return row
    raise unknown_name("data set", name, ("synthetic", *(row.name for row in DATA_SETS)))


def synthetic_like(data_set: str) -> str:
    """Return the name of random samples in the shape and number of a real data set's: `synthetic:mnist`."""
    return SYNTHETIC_PREFIX + data_set


def imitated_data_set(data_set: str) -> str | None:
    """Return the real data set that random samples stand in for, or None where they are no stand-in."""
    return data_set.removeprefix(SYNTHETIC_PREFIX) if data_set.startswith(SYNTHETIC_PREFIX) else None


def is_real(data_set: str) -> bool:
    return data_set != SYNTHETIC and imitated_data_set(data_set) is None


def default_data_dir() -> Path:
    """Return the folder data sets are looked for in and downloaded to: CASTWISE_DATA, or the user's cache."""
    named = os.environ.get(DATA_VARIABLE)
    return Path(named) if named else cache_dir() / "data"


def cache_dir() -> Path:
    """Return the folder of what castwise keeps to be faster."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "castwise"


def find_layout(data_set: DataSet, data_dir: Path) -> DataSet:
    """Return the first layout of a data set that lies in a folder with all its files.

    Raises:
        MissingDataError: None does; the message names a missing file of the layout that is nearest to whole.
    """
    missing = {}
    for layout in filter(None, (data_set, data_set.other)):
        missing[layout] = [file for file in layout.files if _path(layout, data_dir, file) is None]
        if not missing[layout]:
            return layout
    nearest = max(missing, key=lambda layout: len(layout.files) - len(missing[layout]))
    raise _missing(nearest, data_dir, missing[nearest][0], tuple(layout for layout in missing if layout is not nearest))


def find_file(data_set: DataSet, data_dir: Path, part: str) -> Path:
    """Return the path of one file of this layout, compressed or not, or raise MissingDataError."""
    file = _file(data_set, part)
    path = _path(data_set, data_dir, file)
    if path is None:
        raise _missing(data_set, data_dir, file)
    return path


def read_verified(data_set: DataSet, data_dir: Path, part: str) -> bytes:
    """Return the uncompressed content of one file of this layout; raise DataError if it is not the official one."""
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
    algorithm, _, digest = file.checksum.partition(":")
    if hashlib.new(algorithm, content, usedforsecurity=False).hexdigest() != digest:
        raise DataError(f"'{path}' is not {data_set.name}'s: its checksum is wrong. Put the official file there.")
    return content


def verify(data_set: DataSet, data_dir: Path) -> None:
    """Raise DataError unless each file of a data set is the official one, in the layout in which it is there."""
    layout = find_layout(data_set, data_dir)
    for file in layout.files:
        read_verified(layout, data_dir, file.part)


def train_samples(name: str) -> int | None:
    """Return the samples of a data set's training part, one epoch; None where a sample is the user's choice (text)."""
    facts = IMAGE_FACTS.get(name)
    return None if facts is None else facts.num_images[0]


def _file(data_set: DataSet, part: str) -> DataFile:
    return next(file for file in data_set.files if file.part == part)


def _path(data_set: DataSet, data_dir: Path, file: DataFile) -> Path | None:
    for folder in data_set.folders:
        for name in (file.name, *file.aliases):
            for path in (data_dir / folder / name, data_dir / folder / f"{name}.gz"):
                if os.path.isfile(path):  # unlike Path.is_file, it takes a forbidden folder for an empty one
                    return path
    return None


def _missing(
    data_set: DataSet, data_dir: Path, file: DataFile, other_layouts: tuple[DataSet, ...] = ()
) -> MissingDataError:
    folders = ", ".join(folder for folder in data_set.folders if folder != ".")
    names = " or ".join(f"{name}[.gz]" for name in (file.name, *file.aliases))
    others = "".join(f" nor the {other.layout} layout's {other.files[0].name}" for other in other_layouts)
    return MissingDataError(
        f"{data_set.name}: no {names}{others} in '{data_dir}' (nor its {folders}). "
        f"Name the folder with --data DIR or {DATA_VARIABLE}."
    )
