"""Trackers of a script: off, or writing to a scratch folder, as its process and its own children see it."""

import json
import os
import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import json, os
from pathlib import Path
from castwise.registry.trackers import trackers_off
from castwise.trial.script.trackers import switch_off
switch_off(Path("scratch").absolute())
import mlflow
mlflow.set_tracking_uri("http://team")
client = mlflow.MlflowClient("http://team")
print(json.dumps([mlflow.used, client.uri, dict(os.environ), trackers_off()]))
"""
_PACKAGES = {
    "mlflow/__init__.py": """
import os
used = os.environ["MLFLOW_TRACKING_URI"]
def set_tracking_uri(uri): global used; used = uri
def set_registry_uri(uri): global used; used = uri
class MlflowClient:
    def __init__(self, tracking_uri=None): self.uri = tracking_uri or used
""",
}


def test_trackers_are_off_or_write_to_a_folder_that_is_not_the_user_s(tmp_path: Path) -> None:
    for name, text in _PACKAGES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "scratch").mkdir()
    users = {"MLFLOW_TRACKING_URI": "http://team", "MLFLOW_RUN_ID": "7", "NEPTUNE_MODE": "async"}
    variables = {name: value for name, value in os.environ.items() if name != "WANDB_MODE"} | users
    command = [sys.executable, "-c", _SCRIPT]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    used, client, environment, off = json.loads(done.stdout)
    assert used == client == environment["MLFLOW_TRACKING_URI"]
    assert "team" not in used
    assert off == ["mlflow"], "no other was imported"
    assert "MLFLOW_RUN_ID" not in environment
    assert environment["WANDB_MODE"] == "disabled"
    assert environment["NEPTUNE_MODE"] == "async"
