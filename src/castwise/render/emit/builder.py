"""A script as it is put together, and the file beside it with what is copied from castwise's source."""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from castwise.render.emit.source import copy_definitions

_IMPORT = re.compile(r"(import \S+( as \w+)?|from \S+ import .+)")


class ScriptBuilder:
    """Collects the sections of a script; imports among their lines move to its top."""

    def __init__(self, file: Path) -> None:
        self._file = file
        # The file beside the script, whose name can be imported.
        self._parts_file = file.with_name(re.sub(r"\W", "_", file.stem) + "_parts.py")
        self._borrowed: list[str] = []
        self._imports = {"import torch"}
        self._sections: list[str] = []

    def add(self, *lines: str, spacing: str = "\n\n", hoist: bool = True) -> None:
        """Add lines, or blocks of lines, as a section after an empty line; with `hoist` without their imports."""
        kept: list[str] = []
        for line in "\n".join(lines).split("\n"):
            if hoist and _IMPORT.fullmatch(line):
                self._imports.add(line)
            else:
                kept.append(line)
        if any(kept):
            self._sections.append(spacing + "\n".join(kept).strip("\n"))

    def define(self, *lines: str) -> None:
        """Add a function or a class, with two empty lines around it."""
        self.add(*lines, spacing="\n\n\n")
        self._sections.append("\n")

    def copy(self, *roots: str) -> None:
        """Copy definitions, `package.module:name`, into the script, with all that they use."""
        imports, text = copy_definitions(roots)
        self._imports.update(imports)
        self.define(text)

    def borrow(self, root: str) -> str:
        """Copy a definition into the file beside the script, import it from there, and return its name."""
        self._borrowed.append(root)
        name = root.partition(":")[2]
        self._imports.add(f"from {self._parts_file.stem} import {name}")
        return name

    def files(self, docstring: str) -> dict[Path, str]:
        """Return the text of the script and of the file beside it, if there is one, by their paths."""
        body = re.sub(r"\n{4,}", "\n\n\n", "".join(self._sections))
        if re.search(r"\bnn\.", body):
            self._imports.add("from torch import nn")
        local = {line for line in self._imports if line.startswith(f"from {self._parts_file.stem} ")}
        top = _import_block(self._imports - local)
        imports = f"{top}\n\n{_import_block(local)}" if local else top
        files = {self._file: f'"""{docstring}"""\n\n{imports}{body.rstrip()}\n'}
        if self._borrowed:
            needed, definitions = copy_definitions(self._borrowed)
            about = f"What {self._file.name} uses of castwise's layers, kernels and data (Apache License 2.0)."
            imports = _import_block({"import torch", *needed})
            files[self._parts_file] = f'"""{about}"""\n\n{imports}\n\n\n{definitions}\n'
        return files


def _import_block(statements: Iterable[str]) -> str:
    """Return import statements, one for each module: the standard library's first."""
    names: dict[str, set[str]] = {}
    for statement in statements:
        module, found, name = statement.partition(" import ")
        names.setdefault(module, set()).update(name.split(", ") if found else ())
    lines = [f"{module} import {', '.join(sorted(parts))}" if parts else module for module, parts in names.items()]
    blocks: tuple[list[str], list[str]] = ([], [])
    for line in sorted(lines, key=lambda line: (line.startswith("from"), line)):
        package = line.split()[1].partition(".")[0]
        blocks[package not in sys.stdlib_module_names].append(line)
    return "\n\n".join("\n".join(block) for block in blocks if block)
