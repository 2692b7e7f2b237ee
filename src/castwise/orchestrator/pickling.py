"""Pickle the objects of a Python session for the trials' processes, with the code that defines them."""

import hashlib
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from castwise.errors import StoreError, UsageError
from castwise.spec.user_model import pickle_reference

# What pickling raises. A `__getstate__` may raise others, which reach the user as they are.
_FAILURES = (pickle.PicklingError, TypeError, AttributeError, RuntimeError, ValueError, OSError)
_MAX_DEPTH = 12


def pickle_user_objects(parts: Mapping[str, Any], folder: Path) -> str:
    """Write the parts of a user's model to a file in a folder, and return the reference of the workload that they are.

    cloudpickle includes the code of what is defined in `__main__`, in a notebook cell or in a function; what is
    defined in a module is imported there again.

    Raises:
        UsageError: cloudpickle is not installed, or one of the objects cannot be pickled.
        StoreError: The file cannot be written.
    """
    try:
        content = _dumps(dict(parts))
    except _FAILURES as error:
        where, culprit = _culprit(dict(parts))
        raise UsageError(
            f"{where} ({type(culprit).__name__}) cannot travel to the process that measures: {error}. Leave it out, or "
            "give a function that returns the model in its place, and makes it there."
        ) from None
    path = folder.absolute() / f"{hashlib.sha256(content).hexdigest()[:12]}.pickle"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise StoreError(f"The model cannot be written to '{path}': {error.strerror or error}.") from None
    return pickle_reference(path, name_of(parts["model"]))


def name_of(model: Any) -> str:
    """Return what a model is called in reports: its class, or the function that makes it."""
    name = getattr(model, "__name__", None) or type(model).__name__
    return str(name) if str(name).isidentifier() else "model"


def _dumps(value: Any) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        raise UsageError(
            "castwise.compare needs cloudpickle, which is not installed. Install it with: "
            "pip install 'castwise[measure]'"
        ) from None
    content: bytes = cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return content


def _culprit(parts: dict[str, Any]) -> tuple[str, Any]:
    """Return the innermost object that cannot be pickled, found through attributes and items, and its name."""
    where, found = "", parts
    for _ in range(_MAX_DEPTH):
        inner = next(((name, value) for name, value in _children(found) if not _can_be_pickled(value)), None)
        if inner is None:
            break
        where, found = f"{where}{inner[0]}", inner[1]
    return where.lstrip("."), found


def _can_be_pickled(value: Any) -> bool:
    try:
        _dumps(value)
    except _FAILURES:
        return False
    return True


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f".{key}", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    else:
        own = getattr(value, "__dict__", {})
        yield from ((f".{name}", part) for name, part in own.items() if not name.startswith("_"))
        yield from ((f".{name}", part) for name, part in (own.get("_modules") or {}).items())
        code = getattr(value, "__code__", None)
        for name, cell in zip(
            getattr(code, "co_freevars", ()), getattr(value, "__closure__", None) or (), strict=False
        ):
            yield f" → {name}", cell.cell_contents
        names = getattr(code, "co_names", ())
        yield from ((f" → {name}", part) for name, part in getattr(value, "__globals__", {}).items() if name in names)
