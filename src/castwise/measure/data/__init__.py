"""Real data sets, read into tensors; `data_sets.py` finds and verifies their files without torch."""

from pathlib import Path


def fetch(name: str, data_dir: Path) -> None:
    """Download a data set into a folder, through torchvision.

    Args:
        name: A name of the data set registry.
        data_dir: Where it goes; made where it does not exist.

    Raises:
        RuntimeError: No mirror could be reached.
    """
    from torchvision import datasets

    makers = {"mnist": datasets.MNIST}
    makers[name](root=str(data_dir), download=True)
