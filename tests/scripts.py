"""Emitted scripts: how tests run them, and what they compare them with."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path

import torch
from fake_engine import fake_spec

from castwise.registry.workloads import find_workload
from castwise.spec.trial import TrialSpec
from castwise.worker.build import build_trial
from castwise.worker.distributed import Peers

STEPS = 3


def spec_of(workload: str, precision: str = "fp32", techniques: tuple[str, ...] = (), **changes: object) -> TrialSpec:
    spec = fake_spec(precision, workload=workload, device="cpu", batch_size=2, techniques=techniques)
    return spec.model_copy(update=changes)


def run_script(text: str, folder: Path) -> tuple[float, float, str]:
    """Return the last loss, the speed and its unit of a script run for a few steps."""
    out = output_of(text, folder, "--steps", "1", "--warm-up", str(STEPS - 1))
    found = re.fullmatch(r"loss (\S+)\n(\S+) (\w+)/s\n", out)
    assert found is not None, out
    return float(found[1]), float(found[2]), found[3]


def output_of(text: str, folder: Path, *options: str) -> str:
    """Return what a script prints, run to its end in a process that knows nothing of these tests."""
    file, out, err = (folder / name for name in ("train.py", "out.txt", "err.txt"))
    file.write_text(text)
    request = {"command": [str(file), *options], "folder": str(folder), "out": str(out), "err": str(err)}
    host = _host()
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
    return out.read_text()


@cache
def _host() -> "subprocess.Popen[str]":
    """Return the process that scripts are forked from; it ends with this one, whose pipe it reads."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", str(Path(__file__).with_name("script_host.py"))]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, start_new_session=True)


def measured_loss(spec: TrialSpec) -> float:
    """Return the loss of the same step in castwise's own loop."""
    row = find_workload(spec.workload)
    with ExitStack() as stack:
        cell = build_trial(spec, stack, Peers())
        generator = torch.Generator("cpu").manual_seed(spec.seed)
        batches = cell.task.make_batches(row.resident_batches, spec.batch_size, torch.device("cpu"), generator)
        if cell.prepare is not None:
            batches = [cell.prepare(batch) for batch in batches]
        for index in range(STEPS):
            loss = cell.step(batches[index % len(batches)])
        return loss.item()


def check_whole(text: str, wrapped: set[str]) -> None:
    """Make sure that a script imports no castwise, binds every name that it reads, and no name to two things.

    Args:
        text: The script.
        wrapped: Names that it may bind again, to what wraps what they were.
    """
    tree = ast.parse(text)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {str(getattr(node, "module", None) or alias.name) for node in imports for alias in node.names}
    assert not any(name.startswith("castwise") for name in modules)
    undefined_names = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "-"]
    done = subprocess.run(undefined_names, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert _rebound_names(tree) <= wrapped


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
