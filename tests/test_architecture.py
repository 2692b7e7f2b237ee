"""The walls of docs/architecture.md, read off the source."""

import ast
import graphlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

import castwise
from castwise.spec.frozen import FrozenModel
from castwise.spec.trial import MeasurementProtocol

ROOT = Path(castwise.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# Who may import whom, besides its own room: each room and what lies below it.
_BASE = {"_version", "errors", "spec", "registry"}
_RECORDS = {*_BASE, "records"}
_MEASURED = {*_RECORDS, "telemetry"}
_CORE = {*_MEASURED, "analysis", "orchestrator", "render"}
ALLOWED = {
    "_version": set[str](),
    "errors": set[str](),
    "spec": _BASE,
    "registry": _BASE,
    "records": _RECORDS,
    "telemetry": _MEASURED,
    "worker": _MEASURED,
    "analysis": _RECORDS,
    "orchestrator": {*_MEASURED, "analysis", "worker"},  # the latter through worker/entry.py alone
    "render": {*_RECORDS, "analysis"},
    "max_batch": _CORE,
    "suites": {*_CORE, "max_batch"},
    "tune": _CORE,
    "report": {*_CORE, "max_batch", "suites"} - {"orchestrator"},
    "api": _CORE,
    "cli": {*_CORE, "max_batch", "suites", "tune", "report", "api"},
    "__main__": {"cli"},
}
TORCH_FAMILY = {"torch", "torchvision", "torchaudio", "torchtext", "timm", "triton"}


def name_of(path: Path) -> str:
    return ".".join(("castwise", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {name_of(path): path for path in FILES}


@dataclass(frozen=True)
class Import:
    """One import: of which module, and whether it happens when the importing module is imported."""

    target: str
    at_import: bool


def imports_of(source: str) -> Iterator[Import]:
    """Return the imports in a module's source, those for type checkers and those inside functions included."""
    yield from _imports(ast.parse(source), at_import=True)


def _imports(node: ast.AST, at_import: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, at_import) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            assert child.module is not None
            for alias in child.names:
                inner = f"{child.module}.{alias.name}"
                yield Import(inner if inner in MODULES else child.module, at_import)
        else:
            is_later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
                isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            )
            yield from _imports(child, at_import and not is_later)


IMPORTS = {name: list(imports_of(path.read_text())) for name, path in MODULES.items()}


def room(module: str) -> str:
    """Return the folder or file of the package that a module belongs to; "" for the package itself."""
    return [*module.split("."), ""][1]


def test_the_reading_of_imports_misses_none() -> None:
    source = """
import a, b.c as d
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import for_types_only
try:
    from e import f
except ImportError:
    f = None
class Class:
    import g
    def method(self):
        import h
        from castwise.spec import plan
        from castwise import __version__
"""
    found = [(each.target, each.at_import) for each in imports_of(source)]
    assert found == [
        ("a", True),
        ("b.c", True),
        ("typing", True),
        ("for_types_only", False),
        ("e", True),
        ("g", True),
        ("h", False),
        ("castwise.spec.plan", False),
        ("castwise", False),
    ]
    assert len(MODULES) > 40


def test_only_worker_imports_the_torch_family() -> None:
    found = {name: {each.target.partition(".")[0] for each in imports} for name, imports in IMPORTS.items()}
    assert {name for name, packages in found.items() if packages & TORCH_FAMILY and room(name) != "worker"} == set()


def test_each_management_library_has_one_door() -> None:
    found = {
        (name, each.target)
        for name, imports in IMPORTS.items()
        for each in imports
        if each.target in ("pynvml", "amdsmi")
    }
    assert found == {("castwise.telemetry.nvml", "pynvml"), ("castwise.telemetry.amdsmi", "amdsmi")}


def test_a_module_imports_only_what_lies_below_it() -> None:
    for name, imports in IMPORTS.items():
        own = room(name)
        may = {own, *ALLOWED[own]} if own else set(ALLOWED)
        targets = {each.target for each in imports if each.target.partition(".")[0] == "castwise"}
        assert {target for target in targets if room(target) not in may} == set(), name


def test_the_rooms_form_no_circle() -> None:
    graph = {name: below - {name} for name, below in ALLOWED.items() if name not in ("spec", "registry")}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_only_the_door_leads_into_worker() -> None:
    doors = {
        (name, each.at_import)
        for name, imports in IMPORTS.items()
        for each in imports
        if each.target.startswith("castwise.worker") and room(name) != "worker"
    }
    assert doors == {("castwise.orchestrator.processes", True)}


def test_there_is_no_import_cycle() -> None:
    """Between modules, imports inside functions and those for type checkers included."""
    # castwise's own kernels of batch norm are to lose this one.
    but = ("castwise.worker.kernels.batch_norm.module", "castwise.worker.kernels.batch_norm.ops")
    graph = {
        name: {each.target for each in imports if each.target in MODULES and (name, each.target) != but}
        for name, imports in IMPORTS.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_only_the_root_and_the_command_line_import_the_package_itself() -> None:
    assert {name for name, imports in IMPORTS.items() if any(each.target == "castwise" for each in imports)} == set()


def test_nothing_prints_but_the_command_line_and_the_reports() -> None:
    printing = set()
    for path in FILES:
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        if any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls):
            printing.add(path.relative_to(ROOT).parts[0])
    assert printing <= {"cli", "report", "render"}


def _handlers() -> Iterator[tuple[str, ast.ExceptHandler]]:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                yield str(path.relative_to(ROOT)), node


def _catches(handler: ast.ExceptHandler, name: str) -> bool:
    assert handler.type is not None
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(handler.type))


def test_no_handler_is_bare() -> None:
    assert [where for where, handler in _handlers() if handler.type is None] == []


def test_three_handlers_catch_every_exception() -> None:
    # A model's code may raise anything, where it is traced and where it runs, and so may a management library.
    catching = [where for where, handler in _handlers() if _catches(handler, "Exception")]
    assert sorted(catching) == ["telemetry/sampler.py", "worker/kernels/batch_norm/tracing.py", "worker/server.py"]


def test_what_catches_an_interrupt_raises_it_again() -> None:
    for where, handler in _handlers():
        if _catches(handler, "BaseException"):
            assert isinstance(handler.body[-1], ast.Raise), where
            assert handler.body[-1].exc is None, where


def test_no_module_is_a_drawer_for_odds_and_ends() -> None:
    drawers = {"utils", "util", "common", "helpers", "helper", "base", "manager", "misc"}
    assert {name for name in MODULES if drawers & set(name.split("."))} == set()


@pytest.mark.parametrize("module", ["castwise", "castwise.cli.app"])
def test_the_command_line_starts_without_torch(module: str) -> None:
    heavy = TORCH_FAMILY | {"numpy", "pydantic"}
    assert not imported_with([module]) & heavy


def test_all_but_the_worker_work_without_torch() -> None:
    outside = [name for name in MODULES if room(name) != "worker" and name != "castwise.__main__"]
    assert not imported_with(outside) & TORCH_FAMILY


def imported_with(modules: list[str]) -> set[str]:
    """Return the top-level packages that a new interpreter has after importing these modules."""
    code = f"import {', '.join(modules)}; import sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def _documents() -> list[type[BaseModel]]:
    modules = [import_module(name) for name in MODULES if room(name) in ("spec", "registry", "records")]
    found = [value for module in modules for _, value in inspect.getmembers(module, inspect.isclass)]
    return sorted(
        {each for each in found if issubclass(each, BaseModel) and each.__name__[0] != "_"} - {BaseModel},
        key=lambda each: each.__name__,
    )


@pytest.mark.parametrize("model", _documents(), ids=lambda model: model.__name__)
def test_documents_are_frozen_and_take_no_unknown_keys(model: type[BaseModel]) -> None:
    assert issubclass(model, FrozenModel)
    assert model.model_config.get("frozen") is True
    assert model.model_config.get("extra") == "forbid"


def test_what_frozen_and_forbidden_mean() -> None:
    protocol = MeasurementProtocol()
    with pytest.raises(ValidationError, match="frozen"):
        protocol.num_blocks = 3
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        MeasurementProtocol.model_validate({"num_blocs": 3})
    assert hash(protocol) == hash(MeasurementProtocol())
