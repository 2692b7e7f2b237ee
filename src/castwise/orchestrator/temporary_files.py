"""Folders of trials' temporary files, and those that killed commands left behind.

A process holds a lock on each of its folders for as long as it lives, so one that can be locked is nobody's. A new
folder gets its name, by which others look for it, only once it is locked.
"""

import fcntl
import multiprocessing
import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import util
from pathlib import Path

from castwise.errors import EngineError

_PREFIX, _LOCKED = "castwise-", ".tmp"


@dataclass(frozen=True)
class TemporaryFolder:
    """A folder in TMPDIR that is locked until it is removed."""

    path: Path
    descriptor: int

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.descriptor)


def make_folder(*files: str) -> TemporaryFolder:
    """Make a folder with some empty files.

    Raises:
        EngineError: It cannot be made.
    """
    try:
        name = tempfile.mkdtemp(prefix=_PREFIX)
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        with suppress(OSError):  # a file system without locks: nothing is swept there either
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder = TemporaryFolder(Path(name).rename(name + _LOCKED), descriptor)
        for file in files:
            (folder.path / file).touch()
        return folder
    except OSError as error:
        raise EngineError(f"No folder could be made for a trial: {error}. TMPDIR names its place.") from None


def take_multiprocessing_along() -> None:
    """Give multiprocessing a folder that is swept, too, unless it has one already."""
    # Source: multiprocessing.util.get_temp_dir.
    config = getattr(multiprocessing.current_process(), "_config", {"tempdir": ""})
    if config.get("tempdir") is None:
        folder = make_folder()
        config["tempdir"] = str(folder.path)
        util.Finalize(None, folder.remove, exitpriority=-101)  # after all else of multiprocessing's


def sweep() -> None:
    """Remove what commands of this user left behind that were killed; whatever fails is left as it is."""
    with suppress(OSError):  # there is no TMPDIR
        for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*{_LOCKED}"):
            with suppress(OSError):  # it is in use, or another command has removed it
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.fstat(descriptor).st_uid == os.getuid():
                        shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(descriptor)
