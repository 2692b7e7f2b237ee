"""Definitions copied from castwise's own source with all that they use: what was measured is what is emitted.

A definition is asked for by its dotted name, `castwise.worker.precision:MasterWeights`, and read from its file. That is
not imported: it may import torch.
"""

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

_PACKAGE = "castwise"
# What castwise's errors are in a script.
_ERRORS_MODULE = "castwise.errors"
_ERRORS = {"TechniqueError": "RuntimeError", "UsageError": "ValueError"}


@dataclass
class _Definition:
    """A class, function or constant of a module, with the statements about it (`f.register_autograd(...)`)."""

    text: str  # without imports of castwise's modules
    line: int  # where it begins
    uses: set[str]  # the names that it reads
    foreign: dict[str, tuple[str, str]]  # what it imports from castwise, by name: its module and its name there


@dataclass
class _Module:
    """A module's definitions, and where the other names in it come from; all by name."""

    definitions: dict[str, _Definition] = field(default_factory=dict)
    foreign: dict[str, tuple[str, str]] = field(default_factory=dict)  # imported from castwise: module and name there
    imports: dict[str, str] = field(default_factory=dict)  # imported from other packages: the import statement


def copy_definitions(roots: Iterable[str]) -> tuple[list[str], str]:
    """Return the imports and the text of some definitions and of everything that they use, in an order that runs.

    Raises:
        KeyError: A module does not define such a name.
        ValueError: Two modules define the same name in different ways.
    """
    copy = _Copy()
    for root in roots:
        module, _, name = root.partition(":")
        copy.take(module, name)
    return sorted(copy.imports), copy.text()


class _Copy:
    """Definitions that are copied, with all that they use."""

    def __init__(self) -> None:
        self.imports: set[str] = set()
        self._errors: set[str] = set()
        self._taken: dict[str, set[str]] = {}  # by module, in the order in which modules have to stand

    def take(self, module: str, name: str) -> None:
        """Take a definition, and what it uses."""
        if module == _ERRORS_MODULE:
            self._errors.add(name)
            return
        parsed = _parse(module)
        if name not in parsed.definitions:
            raise KeyError(f"{module} does not define {name}")
        if name in self._taken.get(module, ()):
            return
        self._place(module)
        self._taken[module].add(name)
        definition = parsed.definitions[name]
        foreign = parsed.foreign | definition.foreign
        for used in sorted(definition.uses):
            if used in parsed.definitions:
                self.take(module, used)
            elif used in foreign:
                self.take(*foreign[used])
            elif used in parsed.imports:
                self.imports.add(parsed.imports[used])

    def _place(self, module: str) -> None:
        """Give a module its place, after all modules that it imports."""
        if module in self._taken:
            return
        for other, _ in _parse(module).foreign.values():
            if other != _ERRORS_MODULE:
                self._place(other)
        self._taken[module] = set()

    def text(self) -> str:
        """Return the text of everything that was taken."""
        texts = ["\n".join(f"{name} = {_ERRORS[name]}" for name in sorted(self._errors))] if self._errors else []
        defined: dict[str, str] = {}
        for module, names in self._taken.items():
            definitions = _parse(module).definitions
            for name in sorted(names, key=lambda name: definitions[name].line):
                text = definitions[name].text
                if defined.setdefault(name, text) != text:
                    raise ValueError(f"{name} of {module} is another one than that of a module before it")
                if text not in texts:
                    texts.append(text)
        return "\n\n\n".join(texts)


@lru_cache
def _parse(module: str) -> _Module:
    source = _file_of(module).read_text(encoding="utf-8")
    lines = source.splitlines()
    parsed = _Module()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            foreign, imports = _imported(node)
            parsed.foreign |= foreign
            parsed.imports |= imports
            continue
        names = _bound(node)
        if names:
            parsed.definitions |= dict.fromkeys(names, _read(node, lines))
        elif isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
            # A statement about a definition comes with it: `f.register_autograd(g)` with `f`.
            about = ast.unparse(node).partition(".")[0]
            statement = f"{about} at line {node.lineno}"
            parsed.definitions[statement] = _read(node, lines)
            parsed.definitions[about].uses.add(statement)
    return parsed


def _file_of(module: str) -> Path:
    """Return a module's file; no package is imported to find a module in it, as that may import torch."""
    package, *inner = module.split(".")
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise KeyError(f"there is no module {module}")
    if not inner:
        return Path(spec.origin)
    path = Path(spec.origin).parent.joinpath(*inner)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _imported(node: ast.Import | ast.ImportFrom) -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
    """Return what a statement imports from castwise, and from other packages."""
    foreign: dict[str, tuple[str, str]] = {}
    imports: dict[str, str] = {}
    for alias in node.names:
        name = alias.asname or alias.name.partition(".")[0]
        written = alias.name if alias.asname is None else f"{alias.name} as {alias.asname}"
        if isinstance(node, ast.Import):
            imports[name] = f"import {written}"
        elif str(node.module).startswith(_PACKAGE):
            foreign[name] = (str(node.module), alias.name)
        else:
            imports[name] = f"from {node.module} import {written}"
    return foreign, imports


def _bound(node: ast.stmt) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [n.id for target in targets if target is not None for n in ast.walk(target) if isinstance(n, ast.Name)]


def _read(node: ast.stmt, lines: list[str]) -> _Definition:
    """Return a statement with its decorators and the comments above it, without imports of castwise's modules."""
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
    while first > 1 and lines[first - 2].startswith("#"):
        first -= 1
    foreign: dict[str, tuple[str, str]] = {}
    dropped: set[int] = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.ImportFrom) and str(inner.module).startswith(_PACKAGE):
            foreign |= _imported(inner)[0]
            assert inner.end_lineno is not None
            dropped |= {*range(inner.lineno, inner.end_lineno + 1)}
            if not lines[inner.end_lineno].strip():
                dropped.add(inner.end_lineno + 1)
    assert node.end_lineno is not None
    kept = [lines[number - 1] for number in range(first, node.end_lineno + 1) if number not in dropped]
    uses = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return _Definition("\n".join(kept), first, uses, foreign)
