"""Functions that stand in for torch's for the rest of a script's process."""

import functools
from collections.abc import Callable
from typing import Any


def replaces(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a function stand in for a function or method, which it gets as its first argument."""
    original = getattr(owner, name)

    def install(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        setattr(owner, name, call)
        return function

    return install
