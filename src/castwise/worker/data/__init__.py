"""Real data sets as tensors; `registry/datasets.py` finds and verifies their files without torch."""

from pathlib import Path

from castwise.errors import DataError
from castwise.registry.datasets import CIFAR10, CIFAR100, MNIST, WIKITEXT2


def fetch(name: str, data_dir: Path) -> None:
    """Download a data set into a folder, through torchvision; no pickle is opened here.

    Args:
        name: A name of the data set registry.
        data_dir: The folder; created if it does not exist.

    Raises:
        DataError: It cannot be downloaded; the message says where to put its files.
        OSError: Its server could not be reached.
        RuntimeError: No mirror could be reached, or the download has a wrong checksum.
    """
    if name == WIKITEXT2.name:
        files = ", ".join(f"{file.name} (or {file.aliases[0]})" for file in WIKITEXT2.files)
        raise DataError(
            f"{name} is not downloaded by castwise: put {files} of pytorch/examples "
            f"word_language_model/data/wikitext-2 into '{data_dir / WIKITEXT2.folders[0]}'"
        )
    from torchvision import datasets

    if name == MNIST.name:
        datasets.MNIST(root=str(data_dir), download=True)
        return
    archive = {CIFAR10.name: datasets.CIFAR10, CIFAR100.name: datasets.CIFAR100}[name]
    datasets.utils.download_and_extract_archive(
        archive.url, str(data_dir), filename=archive.filename, md5=archive.tgz_md5, remove_finished=True
    )
