"""Standard output and error that may be closed, full, or not in UTF-8: what is printed is never a traceback."""

import codecs
import contextlib
import errno
import io
import os
import sys
from typing import Any

from castwise.errors import OutputError

# How characters of castwise's own are written where they cannot be.
_ASCII = {
    "×": "x",
    "±": "+-",
    "…": "...",
    "→": "->",
    "–": "-",
    "—": "-",
    "≥": ">=",
    "≤": "<=",
    "·": ".",
    "µ": "u",
    "²": "2",
}


def prepare_streams() -> None:
    """Make sure that characters can be written in any encoding, and that stderr never fails."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: what is opened next must not get its number
            os.open(os.devnull, os.O_RDWR)
    codecs.register_error("castwise", _replace)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="castwise")
    if sys.stdout is None:
        sys.stdout = _Closed()
    sys.stderr = _Lenient(sys.stderr or io.StringIO())  # type: ignore[assignment]


def check_stdout() -> None:
    """Write what stdout still holds.

    Raises:
        OutputError: It cannot be written; from now on it is discarded.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise  # the reader has seen enough
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OutputError(
            f"Standard output cannot be written: {error.strerror}. What was measured is kept in the records: the same "
            "command prints it again."
        ) from None


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_ASCII.get(each, "?") for each in error.object[error.start : error.end]), error.end


class _Closed(io.StringIO):
    """In the place of a closed stdout: takes everything, and fails at the end."""

    def write(self, text: str) -> int:
        self.is_used = True
        return len(text)

    def flush(self) -> None:
        if getattr(self, "is_used", False):
            raise OSError(errno.EBADF, "it is closed")


class _Lenient:
    """A stream whose failures do not matter: what measures goes on without its progress."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
