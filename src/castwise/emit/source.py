"""Definitions copied from castwise's own source with all that they use: what was measured is what is emitted.

A definition is asked for by its dotted name, `castwise.apply.precision:MasterWeights`, and read from its file. That is
not imported: it may import torch.
"""

import ast
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

_PACKAGE = "castwise"
# What castwise's errors are in a script.
_ERRORS_MODULE = "castwise.errors"
_ERRORS = {"TechniqueError": "RuntimeError", "UsageError": "ValueError"}
_FOR_CHECKERS = re.compile(r"  # (type: ignore|noqa).*")


@dataclass(frozen=True)
class _Import:
    """Where a name comes from."""

    module: str
    name: str  # there
    statement: str

    @property
    def is_own(self) -> bool:
        return self.module.startswith(_PACKAGE)


@dataclass
class _Definition:
    """A class, function or constant of a module, with the statements about it (`f.register_autograd(...)`)."""

    text: str  # without imports of castwise's modules
    line: int  # where it begins
    uses: set[str]  # the names that it reads
    imports: dict[str, _Import]  # what it imports from castwise, by name


@dataclass
class _Module:
    """A module's definitions and imports by name."""

    definitions: dict[str, _Definition] = field(default_factory=dict)
    imports: dict[str, _Import] = field(default_factory=dict)


def copy_definitions(
    roots: Iterable[str], without: frozenset[str] = frozenset(), script: str | None = None
) -> tuple[list[str], str]:
    """Return the imports and the text of some definitions and of everything that they use, in an order that runs.

    Args:
        roots: The definitions.
        without: Functions that are left out, and with them the `if` statements that call them.
        script: What uses the definitions. Methods that neither it nor they read are left out.

    Raises:
        KeyError: A module does not define such a name.
        ValueError: Two modules define the same name in different ways.
    """
    roots = list(roots)
    unread: frozenset[str] = frozenset()
    imports, text = _copy(roots, without, unread)
    while script is not None and (more := _unread_methods(text, script)):
        unread |= more
        imports, text = _copy(roots, without, unread)
    return imports, text


def _unread_methods(text: str, script: str) -> frozenset[str]:
    """Return the methods of copied classes, of which none but castwise's may be called, that nothing reads."""
    trees = [ast.parse(text), ast.parse(script)]
    read = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    classes = {node.name: node for node in trees[0].body if isinstance(node, ast.ClassDef)}
    defined = {
        inner.name
        for node in classes.values()
        if {ast.unparse(base) for base in node.bases} <= classes.keys()
        for inner in node.body
        if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("__")
    }
    return frozenset(defined - read)


def _copy(roots: Iterable[str], without: frozenset[str], unread: frozenset[str]) -> tuple[list[str], str]:
    """Return the imports and the text of definitions, and of what they use, without some functions and methods."""
    imports: set[str] = set()
    errors: set[str] = set()
    taken: dict[str, set[str]] = {}  # names by module, in the order in which modules have to stand

    def add_module(module: str) -> None:
        """Give a module its place, after all modules that it imports."""
        if module not in taken and module != _ERRORS_MODULE:
            for imported in _parse(module, without, unread).imports.values():
                if imported.is_own:
                    add_module(imported.module)
            taken[module] = set()

    def take(module: str, name: str) -> None:
        """Take a definition, and what it uses."""
        if module == _ERRORS_MODULE:
            errors.add(name)
            return
        parsed = _parse(module, without, unread)
        if name not in parsed.definitions:
            raise KeyError(f"{module} does not define {name}")
        add_module(module)
        if name in taken[module]:
            return
        taken[module].add(name)
        definition = parsed.definitions[name]
        for used in sorted(definition.uses):
            source = definition.imports.get(used) or parsed.imports.get(used)
            if used in parsed.definitions:
                take(module, used)
            elif source is not None and source.is_own:
                take(source.module, source.name)
            elif source is not None:
                imports.add(source.statement)

    for root in roots:
        take(*root.split(":"))
    defined = "\n".join(f"{name} = {_ERRORS[name]}" for name in sorted(errors))
    return sorted(imports), "\n\n\n".join(filter(None, [defined, *_texts(taken, without, unread)]))


def _texts(taken: Mapping[str, Iterable[str]], without: frozenset[str], unread: frozenset[str]) -> Iterable[str]:
    """Return the texts of definitions, by module; one that several modules have only once."""
    texts: dict[str, str] = {}
    for module, names in taken.items():
        definitions = _parse(module, without, unread).definitions
        for name in sorted(names, key=lambda name: definitions[name].line):
            text = definitions[name].text
            if texts.setdefault(name, text) != text:
                raise ValueError(f"{name} of {module} is another one than that of a module before it")
    return dict.fromkeys(texts.values())


@lru_cache
def _parse(module: str, without: frozenset[str], unread: frozenset[str]) -> _Module:
    package, *inner = module.split(".")
    spec = find_spec(package)  # of the package alone: to find a module in it, it would be imported
    if spec is None or spec.origin is None:
        raise KeyError(f"there is no module {module}")
    path = Path(spec.origin).parent.joinpath(*inner) if inner else Path(spec.origin)
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
    lines = source.splitlines()
    parsed = _Module()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            parsed.imports |= _imported(node)
        elif names := _bound(node):
            parsed.definitions |= dict.fromkeys(names, _read(node, lines, without, unread))
        elif isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
            # A statement about a definition comes with it: `f.register_autograd(g)` with `f`.
            about = ast.unparse(node).partition(".")[0]
            statement = f"{about} at line {node.lineno}"
            parsed.definitions[statement] = _read(node, lines, without, unread)
            parsed.definitions[about].uses.add(statement)
    return parsed


def _imported(node: ast.Import | ast.ImportFrom) -> dict[str, _Import]:
    """Return what a statement imports, by name."""
    start = "" if isinstance(node, ast.Import) else f"from {node.module} "
    imports = {}
    for alias in node.names:
        written = alias.name if alias.asname is None else f"{alias.name} as {alias.asname}"
        module = alias.name if isinstance(node, ast.Import) else str(node.module)
        name = alias.asname or alias.name.partition(".")[0]
        imports[name] = _Import(module, alias.name, f"{start}import {written}")
    return imports


def _bound(node: ast.stmt) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [n.id for target in targets if target is not None for n in ast.walk(target) if isinstance(n, ast.Name)]


def _read(node: ast.stmt, lines: list[str], without: frozenset[str], unread: frozenset[str]) -> _Definition:
    """Return a statement with its decorators and the comments above it, without imports of castwise's modules."""
    first = _first_line(node)
    while first > 1 and lines[first - 2].startswith("#"):
        first -= 1
    left_out = _left_out(node, without, unread)
    unused = {id(inner) for part in left_out for inner in ast.walk(part)}
    own = [n for n in ast.walk(node) if isinstance(n, ast.ImportFrom) and str(n.module).startswith(_PACKAGE)]
    imports = {name: source for inner in own if id(inner) not in unused for name, source in _imported(inner).items()}
    dropped = {number for part in (*own, *left_out) for number in _lines_of(part, lines)}
    last = node.end_lineno or node.lineno
    text = "\n".join(lines[number - 1] for number in range(first, last + 1) if number not in dropped)
    return _Definition(_FOR_CHECKERS.sub("", text).rstrip(), first, _names(node, unused), imports)


def _left_out(node: ast.stmt, without: frozenset[str], unread: frozenset[str]) -> list[ast.stmt]:
    """Return the parts of a statement that are not copied: `if` statements that call some functions, and methods."""
    branches = [inner for inner in ast.walk(node) if isinstance(inner, ast.If) and without & _names(inner)]
    assert not any(branch.orelse for branch in branches), "it would be left out, too"
    members = node.body if isinstance(node, ast.ClassDef) else []
    return [*branches, *(member for member in members if isinstance(member, ast.FunctionDef) and member.name in unread)]


def _lines_of(node: ast.stmt, lines: list[str]) -> range:
    """Return the numbers of a statement's lines, with an empty one behind it."""
    end = node.end_lineno or node.lineno
    has_empty_line = end == len(lines) or not lines[end].strip()
    return range(_first_line(node), end + 1 + has_empty_line)


def _first_line(node: ast.stmt) -> int:
    """Return the line in which a statement begins, with its decorators."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _names(node: ast.AST, unused: Collection[int] = ()) -> set[str]:
    """Return the names in a statement, but for those in some parts of it."""
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and id(inner) not in unused}
