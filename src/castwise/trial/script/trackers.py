"""Experiment trackers of a script, off or in a scratch folder: castwise starts the script several times."""

import os
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from castwise.registry.trackers import OF_ONE_STORE, TRACKER_MODES, TRACKER_PLACES
from castwise.trial.script.replacing import on_import, replaces


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

    on_import("mlflow", ignore_server)
