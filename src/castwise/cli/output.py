"""How commands print: results on stdout, everything else on stderr.

Both may be closed, full, or not in UTF-8: what is printed is never a traceback.
"""

import codecs
import io
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from castwise.errors import OutputError, printable
from castwise.show.units import pluralize

if TYPE_CHECKING:
    from rich.console import Console

    from castwise.show.presentation import Presentation


def show(output_format: str, shown: "Presentation", ending: str = "") -> None:
    """Print what a command shows on stdout: in a "table" with the ending below it, or as a text of another format."""
    if output_format == "table":
        from castwise.show.console import print_ending, result_console
        from castwise.show.presentation import print_parts

        console = result_console()
        print_parts(shown.parts, console)
        print_ending(console, ending)
    else:
        text = printable(shown.text(output_format))
        sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
    sys.stdout.flush()


def error_console() -> "Console":
    from castwise.show.console import SafeConsole

    return SafeConsole(stderr=True)


def say(line: str, style: str | None = None) -> None:
    """Print a line on stderr; only a terminal wraps it, so that `grep` finds it whole."""
    from castwise.show.console import print_line

    print_line(error_console(), line, style)


def format_size(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"


def say_problems(problems: list[tuple[str, str]]) -> None:
    """Say which files were left out: first the records of a newer castwise, which are no accident."""
    ordered = sorted(problems, key=lambda problem: not problem[1].startswith("a record of schema"))
    for path, reason in ordered[:5]:
        say(f"Left out: {path}: {reason}")
    if len(problems) > 5:
        say(f"Left out: {pluralize(len(problems) - 5, 'more file')} without a record to read")


# How characters of castwise's own are written where they cannot be.
_ASCII = dict(zip("×±→≥≤·µ²…\u2013\u2014", ["x", "+-", "->", ">=", "<=", ".", "u", "2", "...", "-", "-"], strict=True))


def prepare_streams() -> None:
    """Make sure that characters can be written in any encoding, and that no stream fails."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: what is opened next must not get its number
            os.open(os.devnull, os.O_RDWR)
    codecs.register_error("castwise", _replace)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="castwise")
        setattr(sys, name, _Lenient(stream._stream if isinstance(stream, _Lenient) else stream))


def check_stdout() -> None:
    """Write what stdout still holds.

    Raises:
        OutputError: It could not be written.
    """
    sys.stdout.flush()
    failure = sys.stdout.failure if isinstance(sys.stdout, _Lenient) else ""
    if failure:
        raise OutputError(
            f"Standard output cannot be written: {failure}. What was measured is kept in the records: the same command "
            "prints it again."
        )


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_ASCII.get(character, "?") for character in error.object[error.start : error.end]), error.end


class _Lenient:
    """A stream whose failures are noted: what measures goes on, without its progress. None is a closed one."""

    def __init__(self, stream: Any) -> None:
        self.failure = ""
        self._stream = stream if stream is not None else io.StringIO()
        self._is_closed = stream is None

    def write(self, text: str) -> int:
        if self._is_closed:
            self.failure = "it is closed"
        self._attempt(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, act: Any, *arguments: str) -> None:
        try:
            act(*arguments)
        except BrokenPipeError:  # the reader has seen enough
            raise
        except OSError as error:
            self.failure = error.strerror or str(error)
            with suppress(OSError, ValueError):  # what is left of it must not fail when Python ends
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
