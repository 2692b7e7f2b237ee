"""The trial's process: one command in, one event out, both JSON; never raises; dies with its parent.

Commands: {"command": "open" | "check" | "fetch" | "set_up" | "warm_up" | "run_block" | "finish", ...}.
Events:   {"event": "opened" | "checked" | "fetched" | "ready" | "warm" | "block" | "finished" | "failed", ...}.
"""

import ctypes
import json
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from castwise.errors import CastwiseError
from castwise.measure.data import fetch
from castwise.measure.environment import read_environment
from castwise.measure.failures import classify
from castwise.measure.steady import SteadyCell
from castwise.measure.workloads import check_workload
from castwise.plan import TrialSpec
from castwise.workloads import find_workload

_PR_SET_PDEATHSIG = 1  # Source: Linux, include/uapi/linux/prctl.h


def serve(connection: Connection) -> None:
    """Answer commands until "finish", the end of the pipe, or the death of the parent.

    Args:
        connection: Carries one JSON document a message, both ways.
    """
    _die_with_parent()
    # Ctrl-C reaches the whole process group; what becomes of the trial is the parent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = _Worker()
    while not worker.done:
        try:
            command = json.loads(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(json.dumps(worker.answer(command)).encode())


class _Worker:
    def __init__(self) -> None:
        self.done = False
        self._cell: SteadyCell | None = None
        self._handlers: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "open": self._open,
            "check": self._check,
            "fetch": self._fetch,
            "set_up": self._set_up,
            "warm_up": self._warm_up,
            "run_block": self._run_block,
            "finish": self._finish,
        }

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carry out one command; whatever goes wrong becomes an event."""
        try:
            return self._handlers[command["command"]](command)
        except Exception as error:  # noqa: BLE001  the one place: every process ends in a record
            self.done = True
            traceback.print_exc()
            status, message = classify(error)
            return {
                "event": "failed",
                "status": status,
                "message": message,
                "usage": isinstance(error, CastwiseError),
            }

    def _open(self, command: dict[str, Any]) -> dict[str, Any]:
        device = command["device"]
        if device == "auto":
            device = "cuda:0" if torch.cuda.is_available() else "cpu"
        environment = read_environment(torch.device(device), command["commit"])
        return {"event": "opened", "environment": environment.model_dump(mode="json")}

    def _check(self, command: dict[str, Any]) -> dict[str, Any]:
        for name in command["workloads"]:
            check_workload(find_workload(name))
        return {"event": "checked"}

    def _fetch(self, command: dict[str, Any]) -> dict[str, Any]:
        fetch(command["data_set"], Path(command["data_dir"]))
        self.done = True
        return {"event": "fetched"}

    def _set_up(self, command: dict[str, Any]) -> dict[str, Any]:
        data_dir = Path(command["data_dir"]) if command["data_dir"] else None
        self._cell = SteadyCell(TrialSpec.model_validate(command["spec"]), data_dir)
        return {"event": "ready"}

    def _warm_up(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"event": "warm", "facts": self._running_cell().warm_up().model_dump(mode="json")}

    def _run_block(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"event": "block", "block": self._running_cell().run_block().model_dump(mode="json")}

    def _finish(self, _: dict[str, Any]) -> dict[str, Any]:
        samples = self._running_cell().finish()
        self.done = True
        return {"event": "finished", "samples": samples.model_dump(mode="json")}

    def _running_cell(self) -> SteadyCell:
        assert self._cell is not None, "set_up comes first"
        return self._cell


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when the forkserver is gone, whatever killed that."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent or parent == 1:  # it died before the kernel was asked
        os._exit(1)
