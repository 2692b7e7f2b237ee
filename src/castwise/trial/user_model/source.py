"""The user's code: distinguish it from libraries, locate it in tracebacks, and compute its digest."""

import hashlib
import inspect
import itertools
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, Self

from castwise.errors import CastwiseError
from castwise.spec.user_model import digest_of

_CASTWISE = Path(__file__).parents[2]
_LIBRARIES = tuple(
    {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_PACKAGES = {"site-packages", "dist-packages"}


def is_users(file: str | None) -> bool:
    """Return whether a source file is the user's: neither castwise's, nor Python's, nor an installed package's."""
    if not file or file.startswith("<"):
        return False
    path = Path(file)
    if _PACKAGES & set(path.parts):
        return False
    path = path.resolve()
    libraries = (_CASTWISE, *_LIBRARIES, *_installed_packages(tuple(sys.path)), *_compiled_code())
    return not any(path.is_relative_to(folder) for folder in libraries)


is_own = cache(is_users)  # for what asks of the same few files time and again


@cache
def _installed_packages(search_path: tuple[str, ...]) -> tuple[Path, ...]:
    """Return the folders of a search path that packages were installed into, by `pip install --target` under any name.

    Source: PyPA, "Recording installed projects": an installer leaves a folder NAME-VERSION.dist-info.
    """
    folders = (Path(each) for each in search_path if each)
    return tuple(each.resolve() for each in folders if next(each.glob("*.dist-info"), None) is not None)


def _compiled_code() -> tuple[Path, ...]:
    """Return the folder of what torch.compile has made, if it is loaded."""
    inductor = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    if inductor is None:
        return ()
    return (Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or inductor.default_cache_dir()).resolve(),)


def where(error: BaseException) -> str | None:
    """Return the innermost line of the user's code in an exception's traceback: `train_me.py:12, in forward`.

    For a syntax error it is the faulty line; None if the traceback has no code of the user.
    """
    if isinstance(error, SyntaxError) and is_users(error.filename):
        return f"{_shown(str(error.filename))}:{error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename):
            return f"{_shown(frame.filename)}:{frame.lineno}, in {frame.name}"
    return None


def phase_of(error: BaseException) -> str | None:
    """Return in which part of a step torch raised an exception: `in backward`; None if it was in none."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in frames:
        folder, _, module = frame.filename.rpartition("/torch/")
        if not folder:
            continue
        if module == "autograd/graph.py" and "backward" in frame.name:
            return "in backward"
        if module.startswith("optim/"):
            return "in the optimizer's step"
        if module == "nn/functional.py" or (module == "nn/modules/module.py" and "call_impl" in frame.name):
            return "in the forward pass or the loss"
    return None


def line_in_backward(error: BaseException) -> str | None:
    """Return the line of a `backward` of the user's, of an autograd function, in which an exception was raised."""
    for caller, frame in itertools.pairwise(traceback.extract_tb(error.__traceback__)):
        if caller.filename.endswith("/torch/autograd/function.py") and is_users(frame.filename):
            return f"{_shown(frame.filename)}:{frame.lineno}"
    return None


def print_error(error: BaseException) -> None:
    """Print an exception's traceback from the user's first line on.

    Without a line of theirs it is whole, but an error that castwise raised is in words and has none.
    """
    own = error.__traceback__
    while own is not None and not is_users(own.tb_frame.f_code.co_filename):
        own = own.tb_next
    if own is None and isinstance(error, CastwiseError):
        if error.__cause__ is not None and where(error.__cause__) is not None:
            print_error(error.__cause__)
        return
    is_faulty = isinstance(error, SyntaxError) and is_users(error.filename)  # it has the line itself
    traceback.print_exception(type(error), error, own if own or is_faulty else error.__traceback__)


def with_line(text: str, line: str | None) -> str:
    """Return a message with the line that it is about, unless it begins with one: `train_me.py:12 converts …`."""
    return text if line is None or re.match(r"\S+\.py:\d+ ", text) else f"{text} ({line})"


def calling_line() -> str:
    """Return the innermost line of the user's code that is being run: `train_me.py:12`; empty if there is none."""
    for frame, line in traceback.walk_stack(sys._getframe()):
        if is_own(frame.f_code.co_filename):
            return f"{_shown(frame.f_code.co_filename)}:{line}"
    return ""


def defined_at(function: object) -> str | None:
    """Return where a function of the user begins: `train_me.py:8, in build`; None for any other object."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    if not isinstance(code, CodeType) or not is_users(code.co_filename):
        return None
    return f"{_shown(code.co_filename)}:{code.co_firstlineno}, in {code.co_name}"


def _shown(file: str) -> str:
    # Jupyter gives every cell a file of its own, under the kernel's number.
    return "a notebook's cell" if "ipykernel_" in file else Path(file).name


def user_files(files: Iterable[Path], before: Iterable[str]) -> frozenset[Path]:
    """Return some files that are no modules, and those of the user's modules whose names were not imported `before`."""
    known = set(before)
    # A lazy module is imported when it is asked for anything, and that may fail.
    named = [
        inspect.getattr_static(module, "__file__", None)
        for name, module in list(sys.modules.items())
        if name not in known
    ]
    return frozenset({*(Path(file) for file in named if isinstance(file, str) and is_users(file)), *files})


def digest(files: Iterable[Path]) -> str:
    """Return 12 hexadecimal digits that identify the content of some files."""
    content = hashlib.sha256()
    for part in sorted(hashlib.sha256(file.read_bytes()).hexdigest() for file in files):
        content.update(part.encode())
    return content.hexdigest()[:12]


class Sources:
    """Notes which files this process reads and which folders it lists, while a `with` block runs."""

    def __init__(self) -> None:
        self._paths: set[str] = set()
        self._is_open = False  # whether the process asked somebody else: another process, or the network
        self._is_over = False

    def __enter__(self) -> Self:
        """Begin to note; a hook cannot be removed."""
        sys.addaudithook(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True

    def digests(self, files: Iterable[Path]) -> dict[str, str] | None:
        """Return what was read, with some more files, each with its digest; None if there were other sources."""
        if self._is_open:
            return None
        read = {path for path in self._paths if is_users(path) and not any(part in path for part in _NO_SOURCES)}
        return {path: digest_of(path) for path in sorted(read.union(map(str, files)))}

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        # Source: the table of audit events in Python's documentation.
        if self._is_over:
            return
        if event in ("open", "os.listdir", "os.scandir"):
            path = arguments[0] if arguments[0] is not None else "."
            if isinstance(path, str | bytes):  # an open file's number is of a path that was noted
                self._paths.add(os.path.abspath(os.fsdecode(path)))
        elif event in _OTHER_SOURCES:
            self._is_open = True


# Bytecode; where castwise looks for started processes; the CPUs' counters, which psutil reads when it is imported.
_NO_SOURCES = ("__pycache__", "/proc/self/task", "/proc/stat")
_OTHER_SOURCES = {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen"}
_OTHER_SOURCES |= {"socket.connect", "socket.getaddrinfo", "urllib.Request", "sqlite3.connect", "mmap.__new__"}
