"""What Python's users give: one value or several, names in lists or in one text."""

from collections.abc import Sequence
from typing import TypeVar

_T = TypeVar("_T")


def as_tuple(value: _T | Sequence[_T] | None) -> tuple[_T, ...] | None:
    """Return one value or several as a tuple, and None as it is."""
    if value is None:
        return None
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(value)
    return (value,)


def split_names(value: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Return names, in a list or separated by commas, as a tuple, and None as it is."""
    names: tuple[str, ...] | None = as_tuple(value)
    if names is None:
        return None
    parts = (part.strip() for item in names for part in item.split(","))
    return tuple(part for part in parts if part)
