"""Emitted scripts: how tests run them, and what they compare them with."""

import ast
import json
import os
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from fake_engine import fake_spec
from traced import traces_only

from castwise.emit.script import script_of
from castwise.registry.workloads import find_workload
from castwise.spec.trial import TrialSpec
from castwise.trial.build import build_trial
from castwise.trial.distributed import Peers
from castwise.trial.user_model.load import inspect_model

STEPS = 20


def spec_of(workload: str, precision: str = "fp32", techniques: tuple[str, ...] = (), **changes: object) -> TrialSpec:
    spec = fake_spec(precision, workload=workload, device="cpu", batch_size=2, techniques=techniques)
    return spec.model_copy(update=changes)


@dataclass(frozen=True)
class Epoch:
    """What a script printed of an epoch."""

    loss: float
    speed: float
    unit: str


def files_of(spec: TrialSpec, folder: Path) -> dict[Path, str]:
    """Return the script of a spec as `train.py` in a folder, and the file beside it; a user's function is called."""
    parts = inspect_model(spec.user_model).parts if spec.user_model is not None else None
    return script_of(spec, folder / "train.py", parts=parts)


def run_script(spec: TrialSpec, folder: Path, steps: int = STEPS) -> list[Epoch]:
    """Return what the script of a spec prints of its first steps, each of which is an epoch."""
    out = output_of(files_of(spec, folder), "--epochs", str(steps), "--steps", "1")
    found = re.findall(r"^epoch \d+: loss (\S+), (\S+) (\w+)/s$", out, flags=re.MULTILINE)
    assert len(found) == steps, out
    return [Epoch(float(loss), float(speed), unit) for loss, speed, unit in found]


def speed_of(out: str) -> float:
    """Return the median speed of a script's epochs but the first, in which it compiles and searches."""
    return statistics.median(float(found) for found in re.findall(r"(\S+) \w+/s$", out, flags=re.MULTILINE)[1:])


def output_of(files: dict[Path, str], *options: str) -> str:
    """Return what a script prints, run to its end in a process that knows nothing of these tests."""
    for path, text in files.items():
        path.write_text(text)
    text = "".join(files.values())
    out, _ = run_forked(next(iter(files)), *options, text=text, traced=traces_only() and ".compile(" in text)
    return out


def run_forked(file: Path, *options: str, text: str, traced: bool = False, **variables: str) -> tuple[str, str]:
    """Run a file of Python to its end in a fork of a process that has imported torch.

    Args:
        file: Its folder is the process's, and output goes there.
        options: What follows the file on the command line.
        text: It tells what else is imported before the fork.
        traced: Make no code of what is compiled.
        variables: Those of the environment that this process has not.

    Returns:
        What it printed, and its errors.
    """
    out, err = file.parent / "out.txt", file.parent / "err.txt"
    request: dict[str, Any] = {
        "command": [str(file), *options],
        "folder": str(file.parent),
        "out": str(out),
        "err": str(err),
        "text": text,
        "traced": traced,
    }
    host = _host(**variables)
    assert host.stdin is not None
    assert host.stdout is not None
    try:
        host.stdin.write(json.dumps(request) + "\n")
        host.stdin.flush()
        code = host.stdout.readline().strip()
        if not code:
            raise RuntimeError(f"the host of scripts died: {err.read_text()}")
    except BaseException:  # pytest's time limit for one: the next script has another host
        with suppress(ProcessLookupError):
            os.killpg(host.pid, signal.SIGKILL)
        host.wait()
        _host.cache_clear()
        raise
    assert code == "0", (code, err.read_text())
    return out.read_text(), err.read_text()


@cache
def _host(**variables: str) -> "subprocess.Popen[str]":
    """Return the process that scripts are forked from; it ends with this one, whose pipe it reads."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-P", str(Path(__file__).with_name("script_host.py"))]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment | variables,
        start_new_session=True,
    )


def measured_losses(spec: TrialSpec, steps: int = STEPS) -> list[float]:
    """Return the losses of the same steps in castwise's own loop."""
    row = find_workload(spec.workload)
    with ExitStack() as stack:
        setup = build_trial(spec, stack, Peers())
        generator = torch.Generator("cpu").manual_seed(spec.seed)
        batches = setup.task.make_batches(row.resident_batches, spec.batch_size, torch.device("cpu"), generator)
        if setup.prepare is not None:
            batches = [setup.prepare(batch) for batch in batches]
        losses = [setup.step(batches[index % len(batches)]).item() for index in range(steps)]
    return [float(f"{loss:.9g}") for loss in losses]  # as scripts print them, which tells float32 apart


def check_whole(texts: Iterable[str], wrapped: set[str], folder: Path) -> None:
    """Make sure that scripts import no castwise, bind every name that they read, and no name to two things.

    Args:
        texts: The scripts.
        wrapped: Names that they may bind again, to what wraps what they were.
        folder: An empty one.
    """
    for number, text in enumerate(set(texts)):
        (folder / f"{number}.py").write_text(text)
        tree = ast.parse(text)
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        modules = {str(getattr(node, "module", None) or alias.name) for node in imports for alias in node.names}
        assert not any(name.startswith("castwise") for name in modules), text
        assert not any("._" in name for name in modules), "a private module"
        assert _rebound_names(tree) <= wrapped, text
    undefined_names = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F821", folder]
    done = subprocess.run(undefined_names, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _rebound_names(tree: ast.Module) -> set[str]:
    """Return the names that a script binds to two things."""
    defined: dict[str, set[str]] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [each.id for each in targets if isinstance(each, ast.Name)]
        names += [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
        for name in names:
            defined.setdefault(name, set()).add(ast.unparse(node))
    return {name for name, texts in defined.items() if len(texts) > 1}
