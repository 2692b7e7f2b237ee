"""The walls of docs/architecture.md, read off the source."""

import ast
import graphlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from pydantic import BaseModel

import castwise
from castwise.spec.frozen import FrozenModel

ROOT = Path(castwise.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# Who may import whom, besides its own room: each room and what lies below it.
_BASE = {"_version", "errors", "spec", "registry"}
_RECORDS = {*_BASE, "records"}
_MEASURED = {*_RECORDS, "telemetry"}
_CORE = {*_MEASURED, "analysis", "orchestrator", "show"}
ALLOWED = {
    "_version": set[str](),
    "errors": set[str](),
    "spec": _BASE,
    "registry": _BASE,
    "records": _RECORDS,
    "telemetry": _MEASURED,
    "apply": _RECORDS,
    "trial": {*_MEASURED, "apply"},
    "analysis": _RECORDS,
    "orchestrator": {*_MEASURED, "analysis", "trial"},  # the latter through trial/entry.py alone
    "show": {*_RECORDS, "analysis"},
    "emit": _BASE,
    "accuracy": _CORE,
    "max_batch": _CORE,
    "fits": {*_CORE, "max_batch"},
    "suites": {*_CORE, "max_batch"},
    "tune": _CORE,
    "cluster": {*_CORE},
    "report": {*_CORE, "accuracy", "max_batch", "suites", "tune"} - {"orchestrator"},
    "api": {*_CORE, "accuracy", "fits", "max_batch", "tune", "report"},
    "cli": {*_CORE, "accuracy", "cluster", "emit", "fits", "max_batch", "suites", "tune", "report", "api"},
    "__main__": {"cli"},
}
TORCH_FAMILY = {"torch", "torchvision", "torchaudio", "torchtext", "timm", "triton"}


def name_of(path: Path) -> str:
    return ".".join(("castwise", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {name_of(path): path for path in FILES}


def imports_of(path: Path) -> Iterator[str]:
    """Yield the modules that a module imports, for type checkers and inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            inner = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in MODULES else node.module for name in inner)


IMPORTS = {name: set(imports_of(path)) for name, path in MODULES.items()}


def room(module: str) -> str:
    """Return the folder or file of the package that a module belongs to; "" for the package itself."""
    return [*module.split("."), ""][1]


def test_only_apply_and_trial_import_the_torch_family() -> None:
    found = {name for name, targets in IMPORTS.items() if TORCH_FAMILY & {each.partition(".")[0] for each in targets}}
    assert {room(name) for name in found} == {"apply", "trial"}


def test_each_management_library_has_one_door() -> None:
    found = {(name, target) for name, targets in IMPORTS.items() for target in targets & {"pynvml", "amdsmi"}}
    assert found == {("castwise.telemetry.nvml", "pynvml"), ("castwise.telemetry.amdsmi", "amdsmi")}


def test_a_module_imports_only_what_lies_below_it() -> None:
    for name, imports in IMPORTS.items():
        own = room(name)
        may = {own, *ALLOWED[own]} if own else set(ALLOWED)
        targets = {target for target in imports if target.partition(".")[0] == "castwise"}
        assert {target for target in targets if room(target) not in may} == set(), name


def test_the_rooms_form_no_circle() -> None:
    graph = {name: below - {name} for name, below in ALLOWED.items() if name not in ("spec", "registry")}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_only_two_doors_lead_into_apply_and_trial() -> None:
    inside = {name for name in MODULES if room(name) in ("apply", "trial")}
    doors = {name: targets & inside for name, targets in IMPORTS.items() if name not in inside and targets & inside}
    # The package's is for `castwise.apply`, which changes objects of the caller's process.
    assert doors == {
        "castwise": {"castwise.apply.applied"},
        "castwise.orchestrator.processes": {"castwise.trial.entry", "castwise.trial.lifetime"},
    }


def test_there_is_no_import_cycle() -> None:
    """Between modules, imports inside functions and those for type checkers included."""
    graph = {name: targets & MODULES.keys() for name, targets in IMPORTS.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_no_module_imports_the_package_itself() -> None:
    assert {name for name, targets in IMPORTS.items() if "castwise" in targets} == set()


def _handlers() -> Iterator[tuple[str, ast.ExceptHandler]]:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                yield str(path.relative_to(ROOT)), node


def _catches(handler: ast.ExceptHandler, name: str) -> bool:
    assert handler.type is not None
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(handler.type))


def test_five_handlers_catch_every_exception() -> None:
    # A model's code may raise anything, where it is traced, counted and run, and so may a management library.
    catching = [where for where, handler in _handlers() if _catches(handler, "Exception")]
    in_trial = ["trial/flops.py", "trial/kernels/batch_norm/tracing.py", "trial/script/run.py", "trial/server.py"]
    assert sorted(catching) == ["telemetry/sampler.py", *in_trial]


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


def test_all_but_apply_and_trial_work_without_torch() -> None:
    outside = [name for name in MODULES if room(name) not in ("apply", "trial") and name != "castwise.__main__"]
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
