"""What a script imports, and by what names it knows castwise's errors."""

from collections.abc import Sequence

# By import, what a text that needs it has in it.
_IMPORTS = {
    "import argparse": "argparse.",
    "import copy": "copy.copy",
    "import dataclasses": "dataclasses.is_dataclass",
    "import functools": "functools.",
    "import importlib": "importlib.import_module",
    "import inspect": "inspect.",
    "import math": "math.",
    "import statistics": "statistics.",
    "import operator": "operator.",
    "import random": "random.getstate",
    "import sys": "sys.",
    "import time": "time.",
    "from collections.abc import Callable": "Callable",
    "from collections.abc import Hashable": "= Hashable",
    "from collections.abc import Iterable": "Iterable",
    "from collections.abc import Iterator": "Iterator",
    "from collections.abc import Mapping": "Mapping",
    "from collections.abc import Sequence": "Sequence",
    "from contextlib import contextmanager": "@contextmanager",
    "from contextlib import nullcontext": "nullcontext",
    "from dataclasses import dataclass": "@dataclass",
    "from dataclasses import fields": " in fields(",
    "from dataclasses import replace": " replace(contract",
    "from functools import cache": "@cache",
    "from functools import partial": "partial(",
    "from importlib.util import find_spec": "find_spec(",
    "from types import MethodType": "MethodType(",
    "from types import SimpleNamespace": "SimpleNamespace(",
    "from typing import Any": "Any",
    "from typing import ClassVar": "ClassVar[",
    "from typing import Literal": "Literal[",
    "from typing import NamedTuple": "NamedTuple",
    "from typing import cast": "cast(",
    "from typing import get_args": "get_args(",
    "from typing import Protocol": "Protocol",
    "import torch": "torch",
    "from torch import Tensor, nn": "nn.",
    "from torch import fx": "fx.",
    "import triton": "@triton.jit",
    "import triton.language as tl": "tl.",
    "from torch.library import triton_op, wrap_triton": "@triton_op",
    "from torch.nn import functional": "functional.",
    "from torch.optim import SGD, Adadelta, Adam, AdamW, Optimizer": "Optimizer",
    "from torch.optim import lr_scheduler": " lr_scheduler.",
    "from torch.optim.adadelta import adadelta": "(\n        adadelta,",
    "from torch.optim.adam import adam": "(\n        adam,",
    "from torch.optim.adamw import adamw": "(\n        adamw,",
    "from torch.optim.sgd import sgd": "(sgd,",
    "from torch.utils import _pytree as pytree": "pytree.",
    "from torch.utils.checkpoint import checkpoint": "checkpoint(",
    "from torchvision import models": "models.get_model",
    "import torchvision": "torchvision.datasets",
    "import timm": "timm.create_model",
}

# By which techniques and contracts refuse what does not fit them.
_ERRORS = {"TechniqueError": "RuntimeError", "UsageError": "ValueError"}


def imports_of(body: str) -> list[str]:
    """Return the lines above a script's body.

    Args:
        body: All that follows.
    """
    lines = [line for line, sign in _IMPORTS.items() if sign in body or line == "import torch"]
    if "Optimizer" not in body and "SGD" in body and "isinstance(optimizer, SGD)" in body:
        lines.append("from torch.optim import SGD")
    errors = [f"{name} = {own}" for name, own in _ERRORS.items() if name in body]
    return [*_merged(lines), *(["", *errors] if errors else [])]


def _merged(lines: Sequence[str]) -> list[str]:
    """Return import lines with one line a module, in the order in which modules come first."""
    names: dict[str, list[str]] = {}
    for line in lines:
        head, found, name = line.partition(" import ")
        names.setdefault(head + found if found else line, []).append(name)
    return [head + ", ".join(filter(None, parts)) for head, parts in names.items()]
