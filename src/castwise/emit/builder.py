"""Puts a script together: its own lines, and the parts of castwise's source that they call."""

import re
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

from castwise.emit.source import copy_definitions

# With what is copied a script may have so many lines; else that goes into the second file.
MOST_LINES = 160
_WIDTH = 120

_IMPORT = re.compile(r"(import \S+( as \w+)?|from \S+ import .+)")


class ScriptBuilder:
    """Collects the sections of a script; imports among their lines move to its top."""

    def __init__(self, file: Path, without: frozenset[str]) -> None:
        self._file, self._without = file, without  # functions that are not copied
        # The file beside the script, whose name can be imported.
        self._parts_file = file.with_name(re.sub(r"\W", "_", file.stem) + "_parts.py")
        self._copied: dict[str, str] = {}  # what is copied, by its name in the script
        self._body = ""
        self._imports: set[str] = {"import torch"}

    def add(self, *lines: str, spacing: str = "\n\n", hoist: bool = True) -> None:
        """Add lines, or blocks of lines, as a section after an empty line; with `hoist` without their imports."""
        kept: list[str] = []
        for line in "\n".join(lines).split("\n"):
            if hoist and _IMPORT.fullmatch(line):
                self._imports.add(line)
            else:
                kept.append(line)
        if any(kept):
            self._body += spacing + "\n".join(kept).strip("\n")

    def define(self, *lines: str) -> None:
        """Add a function, with two empty lines around it."""
        self.add(*lines, spacing="\n\n\n")
        self._body += "\n"

    def copy(self, root: str) -> str:
        """Copy a definition, `package.module:name`, with all that it uses; return its name."""
        name = root.partition(":")[2]
        self._copied[name] = root
        return name

    def files(self, docstring: str) -> dict[Path, str]:
        """Return the text of each file by its path: the script, and the second file if the script would be too long."""
        body = re.sub(r"\n{4,}", "\n\n\n", self._body)
        needed, definitions = copy_definitions(self._copied.values(), self._without, body)
        text = _file(docstring, {*self._imports, *needed}, f"\n\n\n{definitions}\n\n{body}" if definitions else body)
        if not definitions or text.count("\n") <= MOST_LINES:
            return {self._file: text}
        local = [f"from {self._parts_file.stem} import {name}" for name in self._copied]
        about = f"What {self._file.name} uses of castwise, copied from its source (Apache License 2.0)."
        return {
            self._file: _file(docstring, self._imports, body, local),
            self._parts_file: _file(about, needed, f"\n\n\n{definitions}"),
        }


def _file(docstring: str, imports: Iterable[str], body: str, local: Iterable[str] = ()) -> str:
    """Return the text of a file; what it imports from the second file comes last."""
    if re.search(r"\bnn\.", body):
        imports = {*imports, "from torch import nn"}
    top = "\n\n".join([f'"""{docstring}"""', *(_import_block(block) for block in (imports, local) if block)])
    return f"{top}{body.rstrip()}\n"


def _import_block(statements: Iterable[str]) -> str:
    """Return import statements, one for each module: the standard library's first."""
    names: dict[str, set[str]] = {}
    for statement in statements:
        module, found, name = statement.partition(" import ")
        names.setdefault(module, set()).update(name.split(", ") if found else ())
    lines = []
    for module, parts in names.items():
        listed = ", ".join(sorted(parts))
        line = f"{module} import {listed}" if listed else module
        if len(line) > _WIDTH:
            wrapped = textwrap.fill(f"{listed},", _WIDTH, initial_indent="    ", subsequent_indent="    ")
            line = f"{module} import (\n{wrapped}\n)"
        lines.append(line)
    blocks: tuple[list[str], list[str]] = ([], [])
    for line in sorted(lines, key=lambda line: (line.startswith("from"), line)):
        package = line.split()[1].partition(".")[0]
        blocks[package not in sys.stdlib_module_names].append(line)
    return "\n\n".join("\n".join(block) for block in blocks if block)
