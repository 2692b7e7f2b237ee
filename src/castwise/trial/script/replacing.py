"""Functions that stand in for torch's for the rest of a script's process."""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_functions: dict[int, tuple[Any, str]] = {}  # of modules, that are replaced, by the originals' ids


def replaces(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a function stand in for a function or method, which it gets as its first argument."""
    original = getattr(owner, name)
    if isinstance(owner, ModuleType):
        _functions[id(original)] = owner, name

    def install(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        setattr(owner, name, call)
        return function

    return install


_changes: dict[str, list[Callable[[ModuleType], None]]] = {}  # of modules that were not imported yet


def on_import(name: str, change: Callable[[ModuleType], None]) -> None:
    """Change a module, now or as soon as it is imported."""
    if name in sys.modules:
        change(sys.modules[name])
        return
    if not _changes:
        sys.meta_path.insert(0, _Finder())
    _changes.setdefault(name, []).append(change)


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        changes = _changes.get(name)
        spec = PathFinder.find_spec(name, path, target) if changes else None
        if not changes or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for change in changes:
                change(sys.modules[name])  # it may have put another in its place

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def replace_copies(new: Mapping[int, Any], *, without: tuple[str, ...] = ("castwise",)) -> None:
    """Replace functions, by the originals' ids, where modules hold them by names of their own.

    Modules of some packages keep them.
    """
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            names = object.__getattribute__(module, "__dict__")  # a lazy module stays as it is
            # Those without a file are the interpreter's own, by which it imports modules.
            if names.get("__file__") and str(names.get("__name__")).partition(".")[0] not in without:
                names.update({name: new[id(value)] for name, value in list(names.items()) if id(value) in new})


def replace_copies_in_libraries() -> None:
    """Replace all such functions in modules that were imported before: as if they were imported from now on."""
    new = {key: getattr(owner, name) for key, (owner, name) in _functions.items()}
    replace_copies(new, without=("castwise", "torch"))
