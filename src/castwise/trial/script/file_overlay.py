"""Files that a script writes: they lie in a folder of its process, and it sees them where it wrote them.

A command runs a script several times, and some of its processes at the same time. Each finds the user's files as they
are, and with them what it has written itself. It is done in Python's functions, and in those of some libraries in C and
Rust that open files themselves: what another library or program opens is opened as always.
"""

import errno
import functools
import importlib
import importlib.util
import os
import shutil
import sqlite3
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import torch

from castwise.trial.script.replacing import on_import, replace_copies, replaces

_KEYWORDS = (
    "path",
    "file",
    "f",
    "filename",
    "src",
    "name",
    "database",
    "source",
    "where",
)  # how functions name their file
_CACHES = ("_CACHE", "_CACHE_DIR", "_HOME")  # endings of variables that name a folder for all programs
_READING = ("stat", "lstat", "access", "readlink", "listxattr", "getxattr", "statvfs", "pathconf")
_CHANGING = ("chmod", "chown", "utime", "truncate", "setxattr", "removexattr")
_WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_Call = Callable[..., Any]  # the original function, with another path or two in the place of its own


class FileOverlay:
    """A process's view of the file system: the user's files below, and above them a folder with what it has written.

    Caches, and hidden folders of the user's home are written as always, and so is what the script names in TMPDIR: it
    may be a cache, too. Temporary files that `tempfile` gives names have a folder of their own there.

    Args:
        folder: For what is written.
        temporary: For temporary files.
        own: Folders that are the script's even if they lie in one of those.
        kept: Folders that are written as always.
    """

    def __init__(self, folder: str, temporary: str, own: Iterable[str], kept: Iterable[str]) -> None:
        self._upper, self._temporary = os.path.realpath(folder), temporary
        caches = [value for name, value in os.environ.items() if name.endswith(_CACHES) and os.path.isabs(value)]
        kept = [*kept, *caches, folder, temporary, tempfile.gettempdir(), sys.prefix, "/dev", "/proc", "/sys", "/run"]
        self._is_own = dict.fromkeys(map(os.path.realpath, kept), False) | dict.fromkeys(
            map(os.path.realpath, own), True
        )
        self._home = os.path.realpath(os.path.expanduser("~"))
        self._folders: dict[str, tuple[str, bool]] = {}  # real names of folders, and whether they are the script's
        self._gone: set[str] = set()  # files and folders of the user's that the script has removed
        self._thread = threading.local()  # has `is_off` if functions do what they always do
        self._install()

    def switch_off(self) -> None:
        """Let this thread see the files as they are."""
        self._thread.is_off = True

    def written(self) -> list[Path]:
        """Return the files that were written, by their own names."""
        found = [os.path.join(folder, name) for folder, _, names in os.walk(self._upper) for name in names]
        return sorted(Path(name.removeprefix(self._upper)) for name in found)

    def _replaced(self) -> list[tuple[Any, str, int, Callable[..., Any]]]:
        """Return the functions to replace, each with the index of its path and what is done in its stead."""
        table: list[tuple[Any, str, int, Callable[..., Any]]] = [
            *((os, name, 0, _at(self._visible)) for name in _READING),
            *((os, name, 0, _at(self._changeable)) for name in _CHANGING),
            *((os, name, 0, self._drop_file) for name in ("remove", "unlink")),
            (os, "rmdir", 0, self._drop_empty),
            *((os, name, 0, self._move) for name in ("rename", "replace")),
            *((os, name, 0, self._link) for name in ("link", "symlink")),
            *((os, name, 0, self._list) for name in ("listdir", "scandir")),
            (os, "open", 0, self._open_descriptor),
            (os, "mkdir", 0, self._make),
            (os, "chdir", 0, self._enter),
            (shutil, "rmtree", 0, self._drop),
            *((importlib.import_module(name), "open", 0, self._open) for name in ("io", "builtins")),
            (sqlite3, "connect", 0, _at(self._database)),
            *((module, "save", 1, _at(self._ready)) for module in (torch, torch.jit)),
            *((module, "load", 0, _at(self._visible)) for module in (torch, torch.jit)),
        ]
        if importlib.util.find_spec("safetensors") is not None:
            module = importlib.import_module("safetensors.torch")
            table += [(module, "serialize_file", 1, _at(self._ready)), (module, "safe_open", 0, _at(self._visible))]
        return table

    def _replaced_in_libraries(self) -> list[tuple[str, str, int, Callable[..., Any]]]:
        """Return likewise the functions of libraries that open files in C or Rust, by module and name."""
        reads, writes = (_at(path_of) for path_of in (self._visible, self._ready))
        return [
            ("tokenizers", "Tokenizer.save", 1, writes),
            ("tokenizers", "Tokenizer.from_file", 0, reads),
            ("tokenizers.models", "Model.save", 1, writes),
            ("sentencepiece", "SentencePieceProcessor.LoadFromFile", 1, reads),
            *(("h5py.h5f", name, 0, self._open_hdf5) for name in ("open", "create")),
            *(("cv2", name, 0, reads) for name in ("imread", "imreadmulti")),
            *(("cv2", name, 0, writes) for name in ("imwrite", "imwritemulti")),
            ("torchvision.io.image", "read_file", 0, reads),
            ("torchvision.io.image", "write_file", 0, writes),
            *(("pyarrow", name, 0, self._open) for name in ("OSFile", "memory_map")),
            ("soundfile", "SoundFile.__init__", 1, self._open),
            ("pyarrow.parquet", "read_table", 0, reads),
            ("pyarrow.parquet", "write_table", 1, writes),
        ]

    def _install(self) -> None:
        """Replace functions, also where modules hold them by names of their own."""
        # TensorBoard's own writer, in Python, not TensorFlow's. Source: tensorboard/compat/__init__.py.
        sys.modules.setdefault("tensorboard.compat.notf", ModuleType("notf"))
        new: dict[int, Any] = {}
        for owner, name, index, method in self._replaced():
            original = getattr(owner, name)
            replaces(owner, name)(self._with_path(method, index))
            new[id(original)] = getattr(owner, name)
            for supporting in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
                if original in supporting:
                    supporting.add(new[id(original)])
        for module_name, path, index, method in self._replaced_in_libraries():
            on_import(module_name, functools.partial(self._replace_in, path, self._with_path(method, index)))
        replaces(tempfile, "_sanitize_params")(self._place)
        replaces(os, "getcwd")(lambda get: get().removeprefix(self._upper) or "/")
        replace_copies(new)

    def _place(self, place: _Call, prefix: Any, suffix: Any, folder: Any) -> tuple[Any, ...]:
        *names, where, kind = place(prefix, suffix, folder)
        # Not multiprocessing's: the paths of its sockets may not be longer.
        if folder is None and prefix != "pymp-" and not getattr(self._thread, "is_off", False):
            where = os.fsencode(self._temporary) if kind is bytes else self._temporary
        return *names, where, kind

    @staticmethod
    def _replace_in(path: str, function: Callable[..., Any], module: ModuleType) -> None:
        owner, _, name = path.rpartition(".")
        found = getattr(module, owner, None) if owner else module
        if hasattr(found, name):  # in this version
            replaces(found, name)(function)

    def _with_path(self, method: Callable[..., Any], index: int) -> Callable[..., Any]:
        """Return what stands in for a function that has a path among its arguments, at this index or by its name."""

        def call(original: Any, *args: Any, **kwargs: Any) -> Any:
            keyword = next((name for name in _KEYWORDS if name in kwargs), "")
            path = args[index] if len(args) > index else kwargs.get(keyword, None if args or kwargs else ".")
            if isinstance(path, bytes) and method != self._list:  # TensorBoard's
                path = os.fsdecode(path)
            has_folder = any(kwargs.get(name) is not None for name in ("dir_fd", "src_dir_fd", "dst_dir_fd"))
            if getattr(self._thread, "is_off", False) or has_folder or not isinstance(path, str | os.PathLike):
                return original(*args, **kwargs)

            def with_other(other: Any, *more: Any) -> Any:
                if len(args) <= index:
                    return original(*args, **({**kwargs, keyword: other} if keyword else {"path": other}))
                return original(*args[:index], other, *more, *args[index + 1 + len(more) :], **kwargs)

            self._thread.is_off = True
            try:
                others = {name: value for name, value in kwargs.items() if name != keyword}
                return method(with_other, path, *args[index + 1 :], **others)
            finally:
                self._thread.is_off = False

        return call

    def _full(self, path: Any) -> str:
        """Return a path in full; empty if it is written as always."""
        head, tail = os.path.split(os.path.abspath(os.fspath(path)))
        if head not in self._folders:
            real = above = os.path.realpath(head)
            while above not in self._is_own and above != "/":
                parent, name = os.path.split(above)
                if parent == self._home and name.startswith("."):  # a hidden folder
                    break
                above = parent
            self._folders[head] = real, self._is_own.get(above, above == "/")
        real, is_own = self._folders[head]
        full = os.path.join(real, tail)
        return full if self._is_own.get(full, is_own) else ""

    def _has_below(self, full: str) -> bool:
        """Return whether the user has such a file, and the script has not removed it."""
        if self._gone and not self._gone.isdisjoint([full, *map(str, Path(full).parents)]):
            return False
        return os.path.lexists(full)

    def _exists(self, full: str) -> bool:
        return os.path.lexists(self._upper + full) or self._has_below(full)

    def _visible(self, path: Any) -> Any:
        full = self._full(path)
        if not full or not (os.path.lexists(self._upper + full) or (self._gone and not self._has_below(full))):
            return path
        return self._upper + full

    def _ready(self, path: Any, *, keeps: bool = False) -> Any:
        """Return where a file or folder is to be written; with what it has now, if that is kept."""
        full = self._full(path)
        upper = self._upper + full
        if not full or os.path.lexists(upper):
            return upper if full else path
        if self._exists(os.path.dirname(full)):
            os.makedirs(os.path.dirname(upper), exist_ok=True)
        if self._has_below(full):
            if os.path.isdir(full):
                os.makedirs(upper)
            elif os.path.exists(full) and not os.path.isfile(full):  # a pipe
                return path
            elif keeps:
                shutil.copy2(full, upper)
        return upper

    def _refuse_existing(self, path: Any) -> None:
        full = self._full(path)
        if full and self._exists(full):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(path))

    def _changeable(self, path: Any) -> Any:
        full = self._full(path)
        return self._ready(path, keeps=True) if full and self._exists(full) else path

    def _database(self, path: Any) -> Any:
        return path if str(path).startswith((":", "file:")) or not path else self._ready(path, keeps=True)

    def _open(self, call: _Call, path: Any, mode: str = "r", *_: Any, opener: Any = None, **__: Any) -> Any:
        if opener is not None:  # it opens by other functions of these, as tempfile does in a folder that it is given
            self._thread.is_off = False
            return call(path)
        if "x" in mode:
            self._refuse_existing(path)
        if not set("wax+") & set(mode):
            return call(self._visible(path))
        return call(self._ready(path, keeps="a" in mode or "r" in mode))

    def _open_descriptor(self, call: _Call, path: Any, flags: int, *_: Any, **__: Any) -> Any:
        if flags & os.O_CREAT and flags & os.O_EXCL:
            self._refuse_existing(path)
        if not flags & _WRITING_FLAGS or os.path.isdir(path):
            return call(self._visible(path))
        is_new = bool(flags & os.O_CREAT) or self._exists(self._full(path))
        return call(self._ready(path, keeps=not flags & os.O_TRUNC) if is_new else self._visible(path))

    def _open_hdf5(self, call: _Call, path: Any, flags: int = 1, *_: Any, **__: Any) -> Any:
        if flags & 4:  # H5F_ACC_EXCL; 1 is RDWR, 0 RDONLY
            self._refuse_existing(path)
        return call(os.fsencode(self._ready(path, keeps=flags == 1) if flags else self._visible(path)))

    def _make(self, call: _Call, path: Any, *_: Any, **__: Any) -> Any:
        self._refuse_existing(path)
        folder, name = os.path.split(self._full(path))
        is_hidden = folder == self._home and name.startswith(".")  # what will be in it is written as always
        return call(path if is_hidden else self._ready(path))

    def _enter(self, call: _Call, path: Any) -> Any:
        full = self._full(path)
        return call(full if full and self._has_below(full) else self._visible(path))

    def _drop(self, call: _Call, path: Any, *_: Any, **__: Any) -> Any:
        full = self._full(path)
        if not full:
            return call(path)
        is_below = self._has_below(full)
        if os.path.lexists(self._upper + full) or not is_below:
            call(self._upper + full)
        if is_below:
            self._gone.add(full)
        return None

    def _drop_file(self, call: _Call, path: Any, *_: Any, **__: Any) -> Any:
        visible = self._visible(path)
        return call(visible) if os.path.isdir(visible) and not os.path.islink(visible) else self._drop(call, path)

    def _drop_empty(self, call: _Call, path: Any, *_: Any, **__: Any) -> Any:
        if self._full(path) and self._names(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), os.fspath(path))
        return self._drop(call, path)

    def _lifted(self, path: Any) -> Any:
        """Return where a file or a folder with all that is in it can be moved from."""
        lifted = self._ready(path, keeps=True)
        if self._full(path) and os.path.isdir(lifted):
            for name in self._names(path):
                self._lifted(os.path.join(path, name))
        return lifted

    def _move(self, _: _Call, path: Any, to: Any = None, **kwargs: Any) -> Any:
        full, lifted, to = self._full(path), self._lifted(path), kwargs.get("dst", to)
        target = self._ready(to)
        try:
            os.replace(lifted, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            shutil.move(lifted, target)
        if full and os.path.lexists(full):
            self._gone.add(full)

    def _link(self, call: _Call, path: Any, to: Any, *_: Any, **__: Any) -> Any:
        self._refuse_existing(to)
        beside = os.path.join(os.path.dirname(os.path.abspath(to)), path)  # as a symbolic link has it
        path = next((each for each in (path, beside) if self._full(each) and self._exists(self._full(each))), path)
        return call(self._visible(os.path.abspath(path)), self._ready(to))

    def _names(self, path: Any) -> list[str]:
        full = self._full(path)
        below = os.listdir(full) if self._has_below(full) and os.path.isdir(full) else []
        names = {name for name in below if os.path.join(full, name) not in self._gone}
        return sorted(names.union(os.listdir(self._upper + full) if os.path.isdir(self._upper + full) else ()))

    def _list(self, call: _Call, path: Any) -> Any:
        full = self._full(path)
        if not full or not (self._gone or os.path.lexists(self._upper + full)):
            return call(path)
        found = call(self._visible(path))  # which raises, if it is no folder
        if isinstance(found, list):
            return self._names(path)
        found.close()
        entries = list[_Entry]()
        for folder in (full, self._upper + full):
            if os.path.isdir(folder):
                with os.scandir(folder) as each:
                    entries += [_Entry(entry, os.path.join(os.fspath(path), entry.name)) for entry in each]
        by_name = {entry.name: entry for entry in entries}
        return _Entries(by_name[name] for name in self._names(path))


def _at(path_of: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda call, path, *_, **__: call(path_of(path))


class _Entry:
    """An entry of a folder, with the path that the script knows it by."""

    def __init__(self, entry: os.DirEntry[str], path: str) -> None:
        self._entry, self.name, self.path = entry, entry.name, path

    def __fspath__(self) -> str:
        return self.path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)


class _Entries:
    def __init__(self, entries: Iterable[_Entry]) -> None:
        self._entries = iter(list(entries))

    def __iter__(self) -> Iterator[_Entry]:
        return self._entries

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End it, which needs nothing."""

    close = __exit__
