"""A script as it is put together: its own lines, and the definitions that it copies from castwise's source."""

import re
import sys
from collections.abc import Iterable

from castwise.render.emit.source import copy_definitions

_IMPORT = re.compile(r"(import \S+( as \w+)?|from \S+ import .+)")


class ScriptBuilder:
    """Collects the lines of a script; imports among them move to its top, copied definitions stand below those."""

    def __init__(self) -> None:
        self._roots: list[str] = []
        self._imports = {"import torch"}
        self._sections: list[list[str]] = [[]]

    def copy(self, *roots: str) -> None:
        """Copy definitions, `package.module:name`, with all that they use."""
        self._roots += roots

    def add(self, *lines: str) -> None:
        """Add lines, or blocks of lines, to the section."""
        for line in "\n".join(lines).split("\n"):
            if _IMPORT.fullmatch(line):
                self._imports.add(line)
            else:
                self._sections[-1].append(line)

    def end_section(self) -> None:
        """End a section: two empty lines follow it."""
        if self._sections[-1]:
            self._sections.append([])

    def add_section(self, *lines: str) -> None:
        """Add lines as a section of their own."""
        self.end_section()
        self.add(*lines)
        self.end_section()

    def text(self, docstring: str) -> str:
        """Return the whole script."""
        imports, definitions = copy_definitions(self._roots)
        sections = ["\n".join(lines) for lines in self._sections if lines]
        body = "\n\n\n".join([definitions, *sections] if definitions else sections)
        return f'"""{docstring}"""\n\n{_import_block({*imports, *self._imports})}\n\n{body}\n'


def _import_block(statements: Iterable[str]) -> str:
    """Return import statements, one for each module: the standard library's first."""
    names: dict[str, set[str]] = {}
    for statement in statements:
        module, found, name = statement.partition(" import ")
        names.setdefault(module, set()).update({name} if found else ())
    lines = [f"{module} import {', '.join(sorted(parts))}" if parts else module for module, parts in names.items()]
    blocks: tuple[list[str], list[str]] = ([], [])
    for line in sorted(lines, key=lambda line: (line.startswith("from"), line)):
        package = line.split()[1].partition(".")[0]
        blocks[package not in sys.stdlib_module_names].append(line)
    return "\n\n".join("\n".join(block) for block in blocks if block)
