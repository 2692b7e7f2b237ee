"""One tree of errors.

CastwiseError            anything castwise raises on purpose; carries the exit code of the command line
├── UsageError      2    a request that cannot be carried out as it stands
│   ├── DataError   2    a data set that is missing, damaged or not what its name says
│   │   └── MissingDataError   a data set that is not where it was looked for
│   └── TechniqueError     a technique that a model, an optimizer or a step does not allow: a trial's result
├── StoreError      3    a results folder that cannot be read or written
├── EngineError     1    the measuring processes could not be started
└── OutputError     4    standard output cannot be written

Every message says what (with the offending value quoted), why it cannot be, and what to do.
"""

import difflib
import re
from collections.abc import Iterable

_LONGEST = 4000  # characters of a text that is not castwise's own; more of an exception helps nobody
# What would command a terminal, or turn the order of its characters around; and what is no character.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class CastwiseError(Exception):
    """Base of all errors that castwise raises on purpose.

    `details` is what a trial's process printed, the user's own traceback included; empty if there was none.
    """

    exit_code = 1

    def __init__(self, message: str = "", details: str = "") -> None:
        super().__init__(message)
        self.details = details


class UsageError(CastwiseError):
    """A request that cannot be carried out as it stands."""

    exit_code = 2


class DataError(UsageError):
    """A data set that is missing, damaged or not what its name says."""


class MissingDataError(DataError):
    """A data set that is not where it was looked for."""


class TechniqueError(UsageError):
    """A technique that a model, an optimizer or a step does not allow: no mistake in it, but a trial's result."""


class StoreError(CastwiseError):
    """A results folder that cannot be read or written."""

    exit_code = 3


class EngineError(CastwiseError):
    """The measuring processes could not be started."""


class OutputError(CastwiseError):
    """Standard output cannot be written."""

    exit_code = 4


def printable(text: str) -> str:
    """Return a text that commands no terminal: "?" stands for each character that might."""
    return _UNPRINTABLE.sub("?", text)


def shortened(text: str) -> str:
    """Return a text that is not castwise's own, printable and of a bounded length."""
    text = printable(text)
    half = _LONGEST // 2 - 1
    return text if len(text) <= _LONGEST else f"{text[:half]} … {text[-half:]}"


def file_exists(path: object) -> UsageError:
    """Return the error for a file that castwise was to write, and that is the user's."""
    return UsageError(f"'{path}' exists already, and is left as it is. Name another file.")


def unknown_name(kind: str, name: str, known: Iterable[str], hint: str = "") -> UsageError:
    """Return the error for a name that is not among the known ones of its kind ("precision"), with the nearest names.

    The hint says what to do if no name is near.
    """
    names, asked = {each.lower(): each for each in known}, name.lower()
    near = [each for each in names if each.startswith(asked + "-") or _begins_like(each, asked)]
    near += [each for each in difflib.get_close_matches(asked, names, n=3, cutoff=0.5) if each not in near]
    if near:
        *others, last = (names[each] for each in near[:3])
        either = f"{', '.join(others)} or {last}" if others else last
        return UsageError(f"No {kind} named '{name}'. Did you mean {either}?")
    return UsageError(f"No {kind} named '{name}'. {hint or 'Known: ' + ', '.join(names.values()) + '.'}")


def _begins_like(name: str, asked: str) -> bool:
    """Return whether a name's first part is what was asked for but for a letter: fp16-mixed, if that was fp17."""
    first, _, rest = name.partition("-")
    return bool(rest) and sum(a != b for a, b in zip(first, asked, strict=False)) == 1 and len(first) == len(asked)
