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


class Checkpoints:
    """The files that a script has saved tensors in since it began.

    Each is written without a name of its own: on the same disk, which takes as long, and gone when the process ends.
    What the script then does with the name is done with that file.
    """

    def __init__(self) -> None:
        self.saved = ""  # the name of the first file that was written elsewhere
        self.opened = ""  # of the first that the script had opened itself
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
        for name in ("copyfile", "copy", "copy2"):
            replaces(shutil, name)(self._copy)

    def _save(self, save: Any, *args: Any, **kwargs: Any) -> None:
        file = _argument(args, kwargs, 1)
        if not isinstance(file, str | os.PathLike):
            if isinstance(name := getattr(file, "name", None), str):
                self.opened = self.opened or Path(name).name
            save(*args, **kwargs)
            return
        self.saved = self.saved or Path(file).name
        descriptor, other = tempfile.mkstemp(dir=_absolute(file).parent, prefix="castwise-")
        os.close(descriptor)
        try:
            args, kwargs = _replaced(args, kwargs, 1, other)
            save(*args, **kwargs)
            self._keep(file, os.open(other, os.O_RDONLY))
        finally:
            os.remove(other)

    def _keep(self, file: Any, descriptor: int) -> None:
        path = str(_absolute(file))
        if path in self._files:
            os.close(self._files[path])
        self._files[path] = descriptor

    def _descriptor(self, file: Any) -> int | None:
        return self._files.get(str(_absolute(file))) if isinstance(file, str | os.PathLike) else None

    def _load(self, load: Any, *args: Any, **kwargs: Any) -> Any:
        descriptor = self._descriptor(_argument(args, kwargs, 0))
        if descriptor is not None:
            args, kwargs = _replaced(args, kwargs, 0, f"/dev/fd/{descriptor}")
        return load(*args, **kwargs)

    def _move(self, move: Any, *args: Any, **kwargs: Any) -> None:
        descriptor = self._descriptor(args[0]) if len(args) == 2 and not kwargs else None
        if descriptor is None:
            move(*args, **kwargs)
            return
        del self._files[str(_absolute(args[0]))]
        self._keep(args[1], descriptor)

    def _remove(self, remove: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs or self._descriptor(args[0]) is None:  # a name within a folder's descriptor is another file
            remove(*args, **kwargs)
        else:
            os.close(self._files.pop(str(_absolute(args[0]))))

    def _copy(self, copy: Any, *args: Any, **kwargs: Any) -> Any:
        descriptor = self._descriptor(args[0]) if len(args) > 1 else None
        if descriptor is None:
            return copy(*args, **kwargs)
        to = Path(args[1], Path(args[0]).name) if os.path.isdir(args[1]) else args[1]
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
