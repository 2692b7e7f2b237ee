"""The trial's process: carries out one call after another for its parent (`records/messages.py`); never raises."""

import math
import os
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import torch
from pydantic import validate_call

from castwise.apply.hardware import find_device
from castwise.errors import CastwiseError, TechniqueError, UsageError
from castwise.records.messages import Call, Failed, Progress, Returned
from castwise.records.schema import Block, Environment, Epoch, Facts, RankSamples, Resumed, StepProfile, TracedMemory
from castwise.registry.precisions import AS_WRITTEN, precision_row
from castwise.registry.technique_fit import why_unsupported
from castwise.registry.workloads import find_workload
from castwise.spec.trial import TrialSpec
from castwise.spec.user_model import UserModel, UserWorkload
from castwise.trial.classify_error import classify, shortfall_of
from castwise.trial.data.datasets import fetch
from castwise.trial.distributed import Peers, join_peers
from castwise.trial.environment import read_environment
from castwise.trial.memory_trace import trace_batches
from castwise.trial.models import check_workload
from castwise.trial.pretrained import find_weights
from castwise.trial.script.ranks import hand_on
from castwise.trial.script.run import Ranks, ScriptRun, ScriptTrial
from castwise.trial.script.trackers import switch_off
from castwise.trial.script_memory import trace_script
from castwise.trial.steady_run import SteadyRun
from castwise.trial.training_run import TrainingRun
from castwise.trial.user_model.load import error_location, inspect_model
from castwise.trial.user_model.source import print_error, with_line


def serve(connection: Connection, device: str = "cpu", ranks: Ranks | None = None) -> None:
    """Answer calls until the trial is done, a call fails, or the pipe ends; each message is one JSON document.

    Args:
        connection: To the parent.
        device: Until `open` names one.
        ranks: Those of a script that a launcher has started, of which this process is rank 0.
    """
    trial = TrialServer(lambda progress: connection.send_bytes(progress.model_dump_json().encode()), device, ranks)
    with suppress(EOFError, OSError):  # the parent has gone
        while not trial.done:
            message = connection.recv_bytes()
            script = _script_of(message)
            if script is not None and script.launcher and ranks is None:
                hand_on(connection, message, script.launcher, trial.device)
                return
            if script is not None:
                # The script gets this thread, the main one, and another one answers from here on.
                server = threading.Thread(target=_serve_script, args=(trial, connection, message), daemon=True)
                server.start()
                run = trial.scripts.get()
                if run is not None and ranks is None:
                    switch_off(Path(get_temp_dir()))
                if run is not None:
                    run.run()
                server.join()
                return
            connection.send_bytes(_answer(trial, message))


def _script_of(message: bytes) -> UserModel | None:
    """Return the script that a call needs to run; None if it needs none."""
    with suppress(ValueError):
        arguments = Call.model_validate_json(message).arguments
        model = arguments.get("model") or (arguments.get("spec") or {}).get("own")
        if isinstance(model, dict) and model.get("kind") == "script":
            return UserModel.model_validate(model)
    return None


def _serve_script(trial: "TrialServer", connection: Connection, message: bytes) -> None:
    """Answer this call and all others, and stop the script at the end."""
    with suppress(EOFError, OSError):
        connection.send_bytes(_answer(trial, message))
        while not trial.done:
            connection.send_bytes(_answer(trial, connection.recv_bytes()))
    trial.scripts.put(None)
    if trial.script is not None:
        trial.script.end()


def _answer(trial: "TrialServer", message: bytes) -> bytes:
    """Carry out one call; whatever goes wrong becomes an event, and the trial is done."""
    name = ""
    try:
        call = Call.model_validate_json(message)
        name = call.method
        result = _METHODS[name](trial, **call.arguments)
        return Returned(method=name, result=result).model_dump_json().encode()
    except Exception as error:  # noqa: BLE001  the one place: every process ends in a record
        trial.done = True
        print_error(error)
        status, text = classify(error)
        if trial.user_model is not None and status != "oom":
            text = with_line(text, error_location(error, trial.user_model, autocasts=trial.autocasts))
        # An error in the user's code before anything is measured is for the user to correct, like a misspelt name.
        refused = isinstance(error, CastwiseError) and not isinstance(error, TechniqueError)
        refused |= name == "inspect"
        failed = Failed(status=status, message=text, refused=refused, shortfall=shortfall_of(error))
        return failed.model_dump_json().encode()


class TrialServer:
    """What a trial's process does: each public method is called by the parent, with its arguments as JSON."""

    def __init__(
        self, on_progress: Callable[[Progress], None], device: str = "cpu", ranks: Ranks | None = None
    ) -> None:
        self.done = False  # whether the process has nothing left to do
        self.user_model: UserModel | None = None  # once its code runs in this process
        self.autocasts = False
        self._on_progress = on_progress
        self.scripts: queue.SimpleQueue[ScriptRun | None] = queue.SimpleQueue()  # what the main thread is to run
        self.script: ScriptRun | None = None
        self._steady: SteadyRun | ScriptTrial | None = None
        self._training: TrainingRun | None = None
        self.device = device
        self._ranks = ranks
        self._peers = Peers()

    def open(self, device: str, commit: str | None) -> Environment:
        """Open a device ("auto": the first GPU, else the CPU) and describe the machine."""
        self.device = str(find_device(device))
        return read_environment(torch.device(self.device), commit)

    def check(self, workloads: Sequence[str]) -> None:
        """Make sure that the zoos named have these models."""
        for name in workloads:
            check_workload(find_workload(name))

    def inspect(self, model: UserModel, limit_seconds: float = math.inf) -> UserWorkload:
        """Run the user's code and return what is known of their model; a script's steps have limited time."""
        self.user_model = model
        if model.kind == "script":
            script = self._start(ScriptRun(model, AS_WRITTEN, self.device))
            return script.inspect(limit_seconds, lambda note: self._on_progress(Progress(note=note)))
        workload = inspect_model(model)
        self.done = True
        return workload

    def fetch(self, data_set: str, data_dir: Path) -> None:
        fetch(data_set, data_dir)
        self.done = True

    def find_weights(self, models: Sequence[str], where: Path | None) -> dict[str, str | None]:
        """Return the file of pretrained weights of each model of torchvision, None if it cannot be had."""
        files: dict[str, str | None] = {}
        for model in models:
            # If one cannot be downloaded, the others cannot either; each would take seconds to fail.
            is_offline = where is None and None in files.values()
            path = None if is_offline else find_weights(model, where)
            files[model] = None if path is None else str(path)
        self.done = True
        return files

    def trace_memory(
        self, spec: TrialSpec, batch_sizes: tuple[int, ...], rooms: tuple[int, ...], may_compute: bool = True
    ) -> TracedMemory:
        """Return what a step's memory would be on a GPU with so much of it, by batch size."""
        self.user_model = spec.user_model
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU of this machine has no part in it
        if spec.is_script:
            found = trace_script(spec, self._start, lambda note: self._on_progress(Progress(note=note)))
        else:
            found = trace_batches(spec, batch_sizes, rooms, may_compute=may_compute)
        self.done = True
        return found

    def set_up(
        self, spec: TrialSpec, checkpoint: Path | None, data_dir: Path | None, rank: int, rendezvous: str | None
    ) -> None:
        """Build model, data and optimizer; a training trial resumes from its checkpoint if there is one."""
        self.user_model = spec.user_model
        self.autocasts = precision_row(spec.precision).autocast_dtype is not None
        _check_possible(spec)
        if rendezvous is not None:
            self._peers = join_peers(spec, rank, rendezvous)
        if spec.kind == "training":
            self._training = TrainingRun(spec, data_dir, checkpoint, self._peers)
        elif spec.is_script:
            trial = self._steady = ScriptTrial(spec, self.script)
            if trial.run is not self.script:
                self._start(trial.run)
            trial.set_up()
        else:
            self._steady = SteadyRun(spec, data_dir, self._peers)

    def warm_up(self, step_seconds: float | None = None) -> Facts:
        return self._steady_run.warm_up(step_seconds)

    def lead_in(self) -> None:
        self._own_loop.lead_in()

    def run_block(self, length: int = 1) -> Block:
        return self._own_loop.run_block(length)

    def run_stretch(self, lead_in_seconds: float, num_blocks: int, block_seconds: float) -> tuple[Block, ...]:
        return self._steady_run.run_stretch(lead_in_seconds, num_blocks, block_seconds)

    def run_sustained(self, seconds: float) -> Block:
        return self._own_loop.run_sustained(seconds)

    def resume(self) -> Resumed:
        """Return what a training trial runs, and the epochs that are done."""
        run = self._training_run
        return Resumed(facts=run.facts, epochs=run.epochs)

    def run_epoch(self) -> Epoch:
        return self._training_run.run_epoch(lambda done: self._on_progress(Progress(done=done)))

    def finish(self, weights: Path | None = None) -> RankSamples:
        """Return all that was measured; keep a trained model's weights."""
        if self._training is not None and weights is not None:
            self._training.keep_weights(weights)
        samples = (self._training or self._steady_run).finish()
        if self._steady is None or not self._steady.is_to_be_profiled:
            self._end()
        return samples

    def profile(self, num_steps: int, trace: Path | None = None) -> StepProfile:
        profile = self._steady_run.profile(num_steps, trace)
        self._end()
        return profile

    def _end(self) -> None:
        self._peers.close()
        self.done = True

    def _start(self, script: ScriptRun) -> ScriptRun:
        self.script = script
        script.ranks = self._ranks or script.ranks
        self.scripts.put(script)
        return script

    @property
    def _steady_run(self) -> SteadyRun | ScriptTrial:
        assert self._steady is not None, "set_up comes first"
        return self._steady

    @property
    def _own_loop(self) -> SteadyRun:
        run = self._steady_run
        assert not isinstance(run, ScriptTrial), "a script's blocks are timed in one go"
        return run

    @property
    def _training_run(self) -> TrainingRun:
        assert self._training is not None, "set_up comes first"
        return self._training


# Arguments are validated against the methods' annotations: a path arrives as text, a spec as a JSON object.
_METHODS: dict[str, Callable[..., Any]] = {
    name: validate_call(method) for name, method in vars(TrialServer).items() if not name.startswith("_")
}


def _check_possible(spec: TrialSpec) -> None:
    """Raise UsageError if this version cannot run all that a spec asks for: a trial never runs something else."""
    row = find_workload(spec.workload)
    if row.family == "own" and spec.user_model is None:
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
