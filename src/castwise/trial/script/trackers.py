"""Experiment trackers of a script, off or in a scratch folder: castwise starts the script several times."""

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from castwise.registry.trackers import OF_ONE_STORE, TRACKER_MODES, TRACKER_PLACES
from castwise.trial.script.replacing import replaces


def switch_off(parent: Path) -> None:
    """Switch off the trackers of the script that this process is to run, or let them write below a folder."""
    scratch = tempfile.mkdtemp(dir=parent)
    for variables in TRACKER_MODES.values():
        for name, value in variables.items():
            os.environ.setdefault(name, value)
    os.environ.update(dict.fromkeys(TRACKER_PLACES.values(), scratch))
    os.environ |= {"MLFLOW_TRACKING_URI": Path(scratch, "mlruns").as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    for name in OF_ONE_STORE:
        os.environ.pop(name, None)

    def ignore_server(module: ModuleType) -> None:
        replaces(module, "set_tracking_uri")(lambda *_: None)
        replaces(module, "set_registry_uri")(lambda *_: None)

        @replaces(module.MlflowClient, "__init__")
        def of_scratch(make: Any, client: Any, *_: Any, **__: Any) -> None:
            make(client)

    if "mlflow" in sys.modules:
        ignore_server(sys.modules["mlflow"])
    else:
        sys.meta_path.insert(0, _Finder("mlflow", ignore_server))


class _Finder(MetaPathFinder):
    """Changes a module as soon as it is imported."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name, self._change = name, change

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        self._name = ""  # once is enough
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
