"""Things put together that have something in common."""

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

_T = TypeVar("_T")
_Key = TypeVar("_Key", bound=Hashable)


def grouped(things: Iterable[_T], key_of: Callable[[_T], _Key]) -> dict[_Key, list[_T]]:
    """Return things by their keys, both in the order in which they come."""
    found: dict[_Key, list[_T]] = {}
    for thing in things:
        found.setdefault(key_of(thing), []).append(thing)
    return found
