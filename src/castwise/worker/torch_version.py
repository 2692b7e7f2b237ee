"""What differs between versions of torch, from 2.6 on, and the versions of other packages."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch


@dataclass(frozen=True)
class Fp32Switch:
    """A place where torch decides how a float32 product is computed."""

    name: str  # below torch.backends, as torch has called it since 2.9
    read: Callable[[], str]
    write: Callable[[str], object]


def newer_switches() -> tuple[Fp32Switch, ...]:
    """Return every switch that torch 2.9 and newer have, parents first: `cudnn` is also cuda.matmul's.

    `mkldnn` itself is left out: writing it writes the one for all.
    """
    parts = ("cudnn", "cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
    return (_newer("all", torch.backends), *(_newer(part, _backend(part)) for part in parts))


def older_switches() -> tuple[Fp32Switch, ...]:
    """Return the switches of torch before 2.9: flags, one for all that cuDNN does, and a name for matrix products."""
    flags = ["cuda.matmul", "cudnn.conv", "cudnn.rnn"]
    flags += ["mkldnn.conv"] if hasattr(torch.backends.mkldnn, "allow_tf32") else []  # since torch 2.7
    return (
        *(_older(part, _backend(part if part == "cuda.matmul" else part.partition(".")[0])) for part in flags),
        Fp32Switch(
            "mkldnn.matmul",
            lambda: "bf16" if torch.get_float32_matmul_precision() == "medium" else "ieee",
            lambda value: torch.set_float32_matmul_precision("medium") if value == "bf16" else None,
        ),
    )


def _backend(path: str) -> Any:
    return reduce(getattr, path.split("."), torch.backends)


def _newer(name: str, owner: Any) -> Fp32Switch:
    return Fp32Switch(name, lambda: str(owner.fp32_precision), lambda value: setattr(owner, "fp32_precision", value))


def _older(name: str, owner: Any) -> Fp32Switch:
    return Fp32Switch(
        name,
        lambda: "tf32" if owner.allow_tf32 else "ieee",
        lambda value: setattr(owner, "allow_tf32", value == "tf32"),
    )


FP32_SWITCHES = newer_switches() if hasattr(torch.backends, "fp32_precision") else older_switches()


def version_of(package: str) -> str | None:
    """Return a package's version without importing it, None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
