"""Definitions taken from castwise's own source, as they stand there: what was measured is what is emitted."""

import ast
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib import resources


def definitions(module: str, names: Sequence[str]) -> str:
    """Return these classes, functions and constants of a module, in its order, decorators and comments included.

    Args:
        module: A file below the package: `worker/techniques/cuda_graph.py`.
        names: What is wanted.

    Raises:
        KeyError: The module does not define one of them.
    """
    found = _nodes(module)
    missing = [name for name in names if name not in found]
    if missing:
        raise KeyError(f"{module} does not define {', '.join(missing)}")
    return _join(text for name, text in found.items() if name in names)


def all_definitions(module: str) -> str:
    """Return everything a module defines.

    Args:
        module: As in `definitions`.
    """
    return _join(_nodes(module).values())


def plain_definitions(module: str) -> str:
    """Return everything a module defines that uses nothing of castwise's, nor anything that does."""
    found, foreign = dict(_nodes(module)), _imported_from_castwise(module)
    while True:
        refused = {name for name, text in found.items() if foreign & _names_in(text)}
        if not refused:
            return _join(found.values())
        foreign |= refused
        found = {name: text for name, text in found.items() if name not in refused}


def _join(texts: Iterable[str]) -> str:
    return "\n\n\n".join(texts)


@lru_cache
def _text(module: str) -> str:
    return resources.files("castwise").joinpath(*module.split("/")).read_text(encoding="utf-8")


@lru_cache
def _nodes(module: str) -> dict[str, str]:
    lines = _text(module).splitlines()
    found: dict[str, str] = {}
    for node in ast.parse(_text(module)).body:
        name = _name_of(node)
        if name is None or name.startswith("__"):
            continue
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(each.lineno for each in decorators)]) - 1
        while first and lines[first - 1].startswith("#"):
            first -= 1
        found[name] = "\n".join(lines[first : node.end_lineno])
    return found


def _name_of(node: ast.stmt) -> str | None:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return node.name
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    return target.id if isinstance(target, ast.Name) else None


def _imported_from_castwise(module: str) -> set[str]:
    return {
        alias.asname or alias.name
        for node in ast.parse(_text(module)).body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("castwise")
        for alias in node.names
    }


def _names_in(text: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
