"""A script as it is put together, and the file beside it with what is copied from castwise's source."""

import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from castwise.render.emit.source import copy_definitions

# Definitions that the loop only uses move to the second file if the script would be longer.
MOST_LINES = 150
_WIDTH = 120

_IMPORT = re.compile(r"(import \S+( as \w+)?|from \S+ import .+)")


@dataclass
class _Section:
    """Lines of the script, with the imports that they need."""

    text: str
    imports: set[str] = field(default_factory=set)
    moved_name: str = ""  # of the definition that may stand in the second file; empty if it may not
    root: str = ""  # where castwise defines it, if it does


class ScriptBuilder:
    """Collects the sections of a script; imports among their lines move to its top."""

    def __init__(self, file: Path, without: frozenset[str]) -> None:
        self._file, self._without = file, without  # functions that are not copied
        # The file beside the script, whose name can be imported.
        self._parts_file = file.with_name(re.sub(r"\W", "_", file.stem) + "_parts.py")
        self._borrowed: list[str] = []
        self._local: set[str] = set()  # names that the script imports from the second file
        self._sections: list[_Section] = []

    def add(self, *lines: str, spacing: str = "\n\n", hoist: bool = True) -> _Section:
        """Add lines, or blocks of lines, as a section after an empty line; with `hoist` without their imports."""
        section = _Section("")
        kept: list[str] = []
        for line in "\n".join(lines).split("\n"):
            if hoist and _IMPORT.fullmatch(line):
                section.imports.add(line)
            else:
                kept.append(line)
        if any(kept):
            section.text = spacing + "\n".join(kept).strip("\n")
        self._sections.append(section)
        return section

    def define(self, *lines: str, moved_name: str = "") -> _Section:
        """Add a function or a class, with two empty lines around it; in a long script one with a name may move."""
        section = self.add(*lines, spacing="\n\n\n")
        section.moved_name = moved_name
        section.text += "\n"
        return section

    def copy(self, root: str) -> None:
        """Copy a definition, `package.module:name`, with all that it uses; in a long script into the second file."""
        imports, text = copy_definitions([root], self._without)
        section = self.define(*imports, text, moved_name=root.partition(":")[2])
        section.root = root

    def borrow(self, root: str) -> str:
        """Copy a definition into the file beside the script, import it from there, and return its name."""
        self._borrowed.append(root)
        name = root.partition(":")[2]
        self._local.add(name)
        return name

    def files(self, docstring: str) -> dict[Path, str]:
        """Return the text of the script and of the file beside it, if there is one, by their paths."""
        moved: list[_Section] = []
        movable = sorted((each for each in self._sections if each.moved_name), key=lambda each: each.text.count("\n"))
        while (text := self._script(docstring)).count("\n") > MOST_LINES and movable:
            moved.append(movable.pop())  # the longest
            self._sections.remove(moved[-1])
            self._local.add(moved[-1].moved_name)
        files = {self._file: text}
        if self._borrowed or moved:
            roots = [*self._borrowed, *(section.root for section in moved if section.root)]
            needed, definitions = copy_definitions(roots, self._without)
            own = [section for section in moved if not section.root]
            texts = [*filter(None, [definitions]), *(section.text.strip("\n") for section in own)]
            imports = {"import torch", *needed}.union(*(section.imports for section in own))
            about = f"What {self._file.name} uses of castwise's layers, kernels and data (Apache License 2.0)."
            files[self._parts_file] = _file(about, imports, "\n\n\n" + "\n\n\n".join(texts))
        return files

    def _script(self, docstring: str) -> str:
        body = re.sub(r"\n{4,}", "\n\n\n", "".join(section.text for section in self._sections))
        imports = {"import torch"}.union(*(section.imports for section in self._sections))
        local = {f"from {self._parts_file.stem} import {name}" for name in self._local}
        return _file(docstring, imports, body, local)


def _file(docstring: str, imports: set[str], body: str, local: Iterable[str] = ()) -> str:
    """Return the text of a file; what it imports from the second file comes last."""
    if re.search(r"\bnn\.", body):
        imports = {*imports, "from torch import nn"}
    top = "\n\n".join([f'"""{docstring}"""', *(_import_block(each) for each in (imports, local) if each)])
    return f"{top}{body.rstrip()}\n"


def _import_block(statements: Iterable[str]) -> str:
    """Return import statements, one for each module: the standard library's first."""
    names: dict[str, set[str]] = {}
    for statement in statements:
        module, found, name = statement.partition(" import ")
        names.setdefault(module, set()).update(name.split(", ") if found else ())
    lines = [_import(module, sorted(parts)) for module, parts in names.items()]
    blocks: tuple[list[str], list[str]] = ([], [])
    for line in sorted(lines, key=lambda line: (line.startswith("from"), line)):
        package = line.split()[1].partition(".")[0]
        blocks[package not in sys.stdlib_module_names].append(line)
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _import(module: str, names: Sequence[str]) -> str:
    statement = f"{module} import {', '.join(names)}" if names else module
    if len(statement) <= _WIDTH:
        return statement
    listed = textwrap.fill(f"{', '.join(names)},", _WIDTH, initial_indent="    ", subsequent_indent="    ")
    return f"{module} import (\n{listed}\n)"
