"""The trial's process: one command in, one event out, both JSON; never raises.

Commands: {"command": "open" | "check" | "inspect" | "fetch" | "find_weights" | "set_up" | "warm_up" | "lead_in" |
          "run_block" | "run_sustained" | "resume" | "run_epoch" | "finish", ...}; "set_up" names a rank and a
          rendezvous where there are several.
Events:   {"event": "progress", "done": 0 to 1} any number of times while an epoch runs, then
          {"event": "opened" | "checked" | "inspected" | "fetched" | "weights" | "ready" | "warm" | "led_in" |
          "block" | "resumed" | "epoch" | "finished" | "failed", ...}.
"""

import json
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from castwise.errors import CastwiseError, TechniqueError, UsageError
from castwise.records.schema import Resumed
from castwise.registry.technique_constraints import why_unsupported
from castwise.registry.workloads import find_workload
from castwise.spec.trial import TrialSpec
from castwise.spec.user_model import UserModel
from castwise.worker.classify_error import classify, shortfall_of
from castwise.worker.data import fetch
from castwise.worker.distributed import Peers, join_peers
from castwise.worker.environment import read_environment
from castwise.worker.models import check_workload
from castwise.worker.pretrained import find_weights
from castwise.worker.steady_run import SteadyRun
from castwise.worker.training_run import TrainingRun
from castwise.worker.user_model.load import error_location, inspect_model


def serve(connection: Connection) -> None:
    """Answer commands until "finish", a failure, or the end of the pipe.

    Args:
        connection: Carries one JSON document a message, both ways.
    """
    worker = _Worker(lambda event: connection.send_bytes(json.dumps(event).encode()))
    with suppress(EOFError, OSError):  # nobody is left to ask, or to be answered
        while not worker.done:
            connection.send_bytes(worker.answer(connection.recv_bytes()))


def _refuse_the_impossible(spec: TrialSpec) -> None:
    """Make sure that this version can run all that a spec asks for: a trial never runs something else.

    Raises:
        UsageError: It cannot.
    """
    row = find_workload(spec.workload)
    if row.family == "own" and (spec.user_model is None or spec.recipe is not None):
        raise UsageError(
            f"{spec.workload} is a model of the user's own, which `castwise run` and castwise.compare take."
        )
    reason = why_unsupported(spec)
    if reason is not None:
        raise UsageError(reason)
    if spec.memory_limit_bytes is not None and spec.kind != "steady":
        raise UsageError("A training run's memory cannot be limited; steady steps' can.")
    if (spec.world_size == 1) != (spec.parallelism == "none"):
        raise UsageError(f"World size {spec.world_size} with parallelism '{spec.parallelism}' is impossible.")
    if spec.parallelism == "dp" and spec.device_type != "cuda":
        raise UsageError("DataParallel spreads a step over GPUs; on a CPU take the parallelism ddp.")
    if spec.parallelism == "dp" and row.family == "rnn_lm":
        raise UsageError(
            f"DataParallel splits dimension 0, which is time in the batches of {spec.workload}; "
            "take the parallelism ddp."
        )


class _Worker:
    def __init__(self, send_event: Callable[[dict[str, Any]], None]) -> None:
        self.done = False
        self._own: UserModel | None = None  # whose code has had a part in this process
        self._send_event = send_event
        self._cell: SteadyRun | None = None
        self._run: TrainingRun | None = None
        self._peers = Peers()
        self._handlers: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "open": self._open,
            "check": self._check,
            "inspect": self._inspect,
            "fetch": self._fetch,
            "find_weights": self._find_weights,
            "set_up": self._set_up,
            "warm_up": self._warm_up,
            "lead_in": self._lead_in,
            "run_block": self._run_block,
            "run_sustained": self._run_sustained,
            "resume": self._resume,
            "run_epoch": self._run_epoch,
            "finish": self._finish,
        }

    def answer(self, message: bytes) -> bytes:
        """Carry out one command; whatever goes wrong becomes an event."""
        name = ""
        try:
            command = json.loads(message)
            name = command["command"]
            return json.dumps(self._handlers[name](command)).encode()
        except Exception as error:  # noqa: BLE001  the one place: every process ends in a record
            self.done = True
            traceback.print_exc()
            status, text = classify(error)
            place = error_location(error, self._own) if self._own is not None and status != "oom" else None
            text += f" ({place})" if place is not None else ""
            # What the user's code raises before anything is measured is theirs to mend, as a misspelt name is.
            refused = isinstance(error, CastwiseError) and not isinstance(error, TechniqueError)
            usage = refused or name == "inspect"
            event: dict[str, Any] = {"event": "failed", "status": status, "message": text, "usage": usage}
            shortfall = shortfall_of(error)
            if shortfall is not None:
                event["shortfall"] = shortfall.model_dump(mode="json")
            return json.dumps(event).encode()

    def _open(self, command: dict[str, Any]) -> dict[str, Any]:
        device = command["device"]
        if device == "auto":
            device = "cuda:0" if torch.cuda.is_available() else "cpu"
        elif device != "cpu" and not torch.cuda.is_available():
            raise UsageError(
                f"There is no device '{device}': torch sees no GPU. `castwise doctor` shows what there is."
            )
        environment = read_environment(torch.device(device), command["commit"])
        return {"event": "opened", "environment": environment.model_dump(mode="json")}

    def _check(self, command: dict[str, Any]) -> dict[str, Any]:
        for name in command["workloads"]:
            check_workload(find_workload(name))
        return {"event": "checked"}

    def _inspect(self, command: dict[str, Any]) -> dict[str, Any]:
        self._own = UserModel.model_validate(command["own"])
        workload = inspect_model(self._own)
        self.done = True
        return {"event": "inspected", "workload": workload.model_dump(mode="json")}

    def _fetch(self, command: dict[str, Any]) -> dict[str, Any]:
        fetch(command["data_set"], Path(command["data_dir"]))
        self.done = True
        return {"event": "fetched"}

    def _find_weights(self, command: dict[str, Any]) -> dict[str, Any]:
        where = Path(command["where"]) if command["where"] else None
        files: dict[str, str | None] = {}
        for model in command["models"]:
            # Where one cannot be had from the network, the others cannot either: nobody should wait for each.
            gone = where is None and None in files.values()
            path = None if gone else find_weights(model, where)
            files[model] = None if path is None else str(path)
        self.done = True
        return {"event": "weights", "weights": {"files": files}}

    def _set_up(self, command: dict[str, Any]) -> dict[str, Any]:
        data_dir = Path(command["data_dir"]) if command["data_dir"] else None
        spec = TrialSpec.model_validate(command["spec"])
        self._own = spec.user_model
        _refuse_the_impossible(spec)
        if spec.num_processes > 1:
            self._peers = join_peers(spec, command["rank"], command["rendezvous"])
        if spec.kind == "training":
            checkpoint = Path(command["checkpoint"]) if command["checkpoint"] else None
            self._run = TrainingRun(spec, data_dir, checkpoint, self._peers)
        else:
            self._cell = SteadyRun(spec, data_dir, self._peers)
        return {"event": "ready"}

    def _warm_up(self, command: dict[str, Any]) -> dict[str, Any]:
        facts = self._running_cell().warm_up(command.get("step_seconds"))
        return {"event": "warm", "facts": facts.model_dump(mode="json")}

    def _lead_in(self, _: dict[str, Any]) -> dict[str, Any]:
        self._running_cell().lead_in()
        return {"event": "led_in"}

    def _run_block(self, command: dict[str, Any]) -> dict[str, Any]:
        block = self._running_cell().run_block(command.get("length", 1))
        return {"event": "block", "block": block.model_dump(mode="json")}

    def _run_sustained(self, command: dict[str, Any]) -> dict[str, Any]:
        block = self._running_cell().run_sustained(float(command["seconds"]))
        return {"event": "block", "block": block.model_dump(mode="json")}

    def _resume(self, _: dict[str, Any]) -> dict[str, Any]:
        run = self._training_run()
        resumed = Resumed(facts=run.facts, epochs=run.epochs)
        return {"event": "resumed", "resumed": json.loads(resumed.model_dump_json())}

    def _run_epoch(self, _: dict[str, Any]) -> dict[str, Any]:
        epoch = self._training_run().run_epoch(lambda done: self._send_event({"event": "progress", "done": done}))
        return {"event": "epoch", "epoch": json.loads(epoch.model_dump_json())}

    def _finish(self, command: dict[str, Any]) -> dict[str, Any]:
        if self._run is not None and command.get("weights"):
            self._run.keep_weights(Path(command["weights"]))
        samples = (self._run or self._running_cell()).finish()
        self._peers.close()
        self.done = True
        return {"event": "finished", "samples": samples.model_dump(mode="json")}

    def _running_cell(self) -> SteadyRun:
        assert self._cell is not None, "set_up comes first"
        return self._cell

    def _training_run(self) -> TrainingRun:
        assert self._run is not None, "set_up comes first"
        return self._run
