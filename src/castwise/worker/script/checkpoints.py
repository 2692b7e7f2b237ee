"""Files that a script saves tensors in: they are written beside the script's own, which stay, and are read back."""

import importlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from castwise.worker.script.replacing import replaces

_KEYWORDS = ("f", "filename")  # of the file, as torch and safetensors name it
_remove = os.remove


class Checkpoints:
    """The files that a script has saved tensors in since it began.

    Each is written without a name of its own: on the same disk, which takes as long, and gone when the process ends.
    What the script then does with the name is done with that file.
    """

    def __init__(self) -> None:
        self.saved: dict[str, None] = {}  # the names of files that were written elsewhere
        self.opened: dict[str, None] = {}  # of those that the script had opened itself
        self._files: dict[str, int] = {}  # open descriptors by path
        replaces(torch, "save")(self._save)
        replaces(torch, "load")(self._load)
        if importlib.util.find_spec("safetensors") is not None:  # Accelerate and transformers save with it
            module = importlib.import_module("safetensors.torch")
            replaces(module, "serialize_file")(self._save)
            replaces(module, "load_file")(self._load)
        for name in ("replace", "rename"):
            replaces(os, name)(self._move)
        for name in ("remove", "unlink"):
            replaces(os, name)(self._remove)
        replaces(shutil, "copyfile")(self._copy)

    def _save(self, save: Any, *args: Any, **kwargs: Any) -> None:
        file = _argument(args, kwargs, 1)
        if not isinstance(file, str | os.PathLike):
            if isinstance(name := getattr(file, "name", None), str):
                self.opened[Path(name).name] = None
            save(*args, **kwargs)
            return
        self.saved[Path(file).name] = None
        descriptor, other = tempfile.mkstemp(dir=_absolute(file).parent, prefix="castwise-")
        os.close(descriptor)
        try:
            args, kwargs = _replaced(args, kwargs, 1, other)
            save(*args, **kwargs)
            self._keep(file, os.open(other, os.O_RDONLY))
        finally:
            _remove(other)

    def _keep(self, file: Any, descriptor: int) -> None:
        self._forget(file)
        self._files[str(_absolute(file))] = descriptor

    def _forget(self, file: Any) -> int | None:
        """Close a file that takes another's place, or is removed; return its descriptor, None if it is not of these."""
        descriptor = self._files.pop(str(_absolute(file)), None)
        if descriptor is not None:
            os.close(descriptor)
        return descriptor

    def _descriptor(self, file: Any) -> int | None:
        return self._files.get(str(_absolute(file))) if isinstance(file, str | os.PathLike) else None

    def _load(self, load: Any, *args: Any, **kwargs: Any) -> Any:
        descriptor = self._descriptor(_argument(args, kwargs, 0))
        if descriptor is not None:
            args, kwargs = _replaced(args, kwargs, 0, f"/dev/fd/{descriptor}")
        return load(*args, **kwargs)

    def _move(self, move: Any, file: Any, to: Any, **kwargs: Any) -> None:
        descriptor = None if kwargs else self._descriptor(file)  # not of a folder's descriptor
        if descriptor is None:
            move(file, to, **kwargs)
            return
        self._keep(to, os.dup(descriptor))
        self._forget(file)

    def _remove(self, remove: Any, file: Any, **kwargs: Any) -> None:
        if kwargs or self._descriptor(file) is None or self._forget(file) is None:
            remove(file, **kwargs)

    def _copy(self, copy: Any, file: Any, to: Any, **kwargs: Any) -> Any:
        descriptor = self._descriptor(file)
        if descriptor is None:
            return copy(file, to, **kwargs)
        self._keep(to, os.dup(descriptor))
        return to


def _argument(args: Any, kwargs: Any, index: int) -> Any:
    return next((kwargs[name] for name in _KEYWORDS if name in kwargs), None if len(args) <= index else args[index])


def _replaced(args: Any, kwargs: Any, index: int, file: str) -> tuple[Any, Any]:
    """Return arguments with another file."""
    if len(args) > index:
        return (*args[:index], file, *args[index + 1 :]), kwargs
    return args, {name: file if name in _KEYWORDS else value for name, value in kwargs.items()}


def _absolute(file: Any) -> Path:
    return Path(os.path.abspath(os.fspath(file)))
