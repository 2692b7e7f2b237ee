"""The speed goals: castwise's best loop and the best one by hand, in turns in one process tree, and their ratio.

    python benchmarks/goals.py [--rows resnet50,mlp] [--out FILE] [--data DIR] [--first] [--warm] ...

Every turn is a process of its own: each loop by hand, each of castwise's, then the fastest by hand again, so that a
noisy machine shows. `goal_rows.py` has the rows.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from goal_rows import GoalRow, HandLoop, OurLoop, find_rows, tiny
from goal_tables import HAND, OURS, cells_of
from stored import write

from castwise.analysis.statistics import pseudomedian
from castwise.analysis.steady_metrics import step_times
from castwise.analysis.training_metrics import epochs_of
from castwise.errors import MissingDataError
from castwise.orchestrator.job import build_job
from castwise.orchestrator.machine import Machine, detect_machine
from castwise.records.schema import Trial
from castwise.records.store import ResumePolicy
from castwise.registry.datasets import default_data_dir, find_data_set, synthetic_like, verify
from castwise.registry.precisions import find_precision
from castwise.registry.suites import SuiteFilter, find_suite, specs_of
from castwise.registry.techniques import compiles, for_one_gpu, parse_techniques, why_unsupported
from castwise.registry.workloads import find_workload
from castwise.spec.trial import CUDA_PROTOCOL, MeasurementProtocol, TrialSpec
from castwise.worker.models import build_task

_HAND_LOOPS = Path(__file__).resolve().with_name("hand_loops.py")
_NUM_BLOCKS = 20
_LAST_LINES = 12  # of what a process printed, for a message
_LONGEST_PHASE_SECONDS = 600.0
_WARM_UP_SECONDS = 1.5
_TINY_SECONDS, _TINY_RUN = 0.05, SuiteFilter(epochs=2, max_steps=3)
# Enough for a loop to compile everything, and to capture its graph.
_COMPILE_SECONDS, _COMPILE_RUN = 0.05, SuiteFilter(epochs=1, max_steps=12)

Loop = HandLoop | OurLoop


class TurnFailedError(Exception):
    """A turn measured nothing; the message says why."""


@dataclass(frozen=True)
class Setting:
    """Where and how long rows are measured."""

    device: str
    data_dir: Path
    seconds: float  # of the timed blocks of a turn
    cut: SuiteFilter  # how runs are cut short
    is_tiny: bool = False  # the smallest sizes, to try the program itself


@dataclass(frozen=True)
class Turn:
    """One process's measurement of one loop."""

    side: str
    loop: str  # in words
    precision: str
    # of a step, or of the median epoch after a run's first, with its validation
    seconds: float | None = None
    alone_seconds: float | None = None  # of a step of the same loop on one GPU, if this one is on several
    # of the first steps, which search and compile; of a run, what its first epoch took longer than the others
    start_seconds: float | None = None
    total_seconds: float | None = None  # of a whole run
    accuracy: float | None = None  # after a run's last epoch
    message: str = ""  # why nothing was measured


def data_set_of(row: GoalRow, setting: Setting) -> str | None:
    """Return the data of a run: real, or random samples of the same shape and number if it is not there."""
    if row.data_set is None:
        return None
    if setting.is_tiny:
        return synthetic_like(row.data_set)
    try:
        verify(find_data_set(row.data_set), setting.data_dir)
    except MissingDataError:
        return synthetic_like(row.data_set)
    return row.data_set


def run_of(row: GoalRow, setting: Setting) -> TrialSpec | None:
    """Return the published run of a row, in float32; None for a row of steps."""
    if row.suite is None:
        return None
    choice = replace(setting.cut, workloads=(row.workload,), precisions=("fp32",))
    return specs_of(find_suite(row.suite), device=setting.device, choice=choice)[0]


def hand_task(row: GoalRow, loop: HandLoop, setting: Setting, world_size: int) -> dict[str, Any]:
    """Return the task of a loop by hand, as `hand_loops.py` reads it."""
    run = run_of(row, setting)
    return {
        **asdict(loop),
        "workload": row.workload,
        "batch_size": row.batch_size,
        "device": setting.device,
        "seconds": setting.seconds,
        "block_seconds": row.block_seconds,
        "warm_up_seconds": _TINY_SECONDS if setting.is_tiny else _WARM_UP_SECONDS,
        "world_size": world_size,
        "recipe": None if run is None or run.recipe is None else run.recipe.model_dump(mode="json"),
        "data_set": data_set_of(row, setting),
        "data_dir": str(setting.data_dir),
    }


def our_spec(row: GoalRow, loop: OurLoop, setting: Setting, world_size: int, timeout_seconds: float) -> TrialSpec:
    """Return the trial of a loop of castwise's."""
    precision = find_precision(loop.precision)
    techniques = parse_techniques(loop.techniques)
    protocol = MeasurementProtocol(
        num_blocks=max(_NUM_BLOCKS, round(setting.seconds / row.block_seconds)),
        lead_in_seconds=CUDA_PROTOCOL.lead_in_seconds,  # the loops by hand have no pauses between blocks, either
        block_seconds=row.block_seconds,
        max_seconds=setting.seconds,
        timeout_seconds=timeout_seconds,
    )
    if setting.is_tiny:
        changes = {"warm_up_steps": 2, "warm_up_seconds": _TINY_SECONDS, "num_blocks": 3, "lead_in_seconds": 0.0}
        protocol = protocol.model_copy(update=changes)
    fields: dict[str, Any] = {
        "precision": precision.name,
        "loss_scale": precision.loss_scale,
        "batch_size": row.batch_size,
        "techniques": techniques if world_size > 1 else for_one_gpu(techniques),
        "world_size": world_size,
        "parallelism": "ddp" if world_size > 1 else "none",
        "protocol": protocol,
    }
    run = run_of(row, setting)
    if run is None:
        spec = TrialSpec(workload=row.workload, device=setting.device, **fields)
    else:
        spec = run.model_copy(update={**fields, "data_set": data_set_of(row, setting)})
    if setting.is_tiny and setting.device == "cpu":  # on which compiling takes half a minute
        kept = [
            name
            for name in spec.techniques
            if not compiles([name]) and why_unsupported(spec.model_copy(update={"techniques": (name,)})) is None
        ]
        spec = spec.model_copy(update={"techniques": tuple(kept)})
    return spec


def run_by_hand(task: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
    """Measure a loop by hand in a process of its own, and return what it prints.

    Raises:
        TurnFailedError: It fails, prints nothing, or takes longer; all its processes are ended then.
    """
    process = subprocess.Popen(
        [sys.executable, str(_HAND_LOOPS), json.dumps(task)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        raise TurnFailedError(f"took longer than {timeout_seconds:.0f} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode != 0 or not out.strip():
        lines = " ".join(err.strip().splitlines()[-_LAST_LINES:])
        raise TurnFailedError(f"ended with {process.returncode}: {lines}")
    answer: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return answer


def figures_of(trial: Trial) -> dict[str, Any]:
    """Return what a trial of castwise's measured, as `hand_loops.py` prints it.

    Raises:
        TurnFailedError: It measured nothing.
    """
    blocks, epochs = step_times(trial), epochs_of(trial)
    if trial.status not in ("ok", "diverged") or not (blocks or epochs):
        lines = " ".join((trial.log or "").splitlines()[-_LAST_LINES:])
        raise TurnFailedError(f"{trial.status}: {trial.message} {lines}".strip())
    if epochs:
        seconds = [epoch.seconds + epoch.validation_seconds for epoch in epochs]
        return {"epochs": seconds, "accuracy": epochs[-1].accuracy}
    return {"blocks": blocks, "start_seconds": trial.facts.first_step_seconds if trial.facts is not None else None}


@dataclass(frozen=True)
class Referee:
    """Gives each loop its turns."""

    machine: Machine
    setting: Setting
    rounds: int  # turns of castwise's fastest loop
    time_limit_seconds: float  # no turn of a row begins later
    only_first: bool  # a side's further loops are tried only if those before failed
    is_warm: bool = False  # code was compiled before: a start's time says nothing

    def warm(self, rows: Sequence[GoalRow]) -> "Referee":
        """Run the loops of rows for a few steps, side by side; return a referee whose turns find their code compiled.

        A loop that fails here fails in its turn, too. Rows of several GPUs are left out.
        """
        setting = replace(self.setting, seconds=_COMPILE_SECONDS, cut=_COMPILE_RUN)
        brief = replace(self, setting=setting)
        deadline = time.monotonic() + self.time_limit_seconds
        loops = [
            (row, loop)
            for row in rows
            if row.world_size == 1
            for side in (row.hand, row.ours)
            for loop in (side[:1] if self.only_first else side)
        ]
        with ThreadPoolExecutor(max(1, len(loops))) as pool:
            list(pool.map(lambda each: brief.turn(*each, deadline, number=0), loops))
        return replace(self, is_warm=True)

    def turns(self, row: GoalRow) -> list[Turn]:
        """Return all turns of a row, in order: every loop once, hand first, and then the fastest of each side."""
        deadline = time.monotonic() + self.time_limit_seconds
        done: list[Turn] = []

        def take(loop: Loop, number: int) -> Turn:
            turn = self.turn(row, loop, deadline, number)
            _print_turn(row, turn)
            done.append(turn)
            return turn

        loops: tuple[Sequence[Loop], ...] = (row.hand, row.ours)
        for side in loops:
            for loop in side:
                turn = take(loop, number=0)
                if self.only_first and turn.seconds:
                    break
        # Hand, castwise, hand: then castwise, hand for every further round.
        for number in range(1, 2 * self.rounds):
            name, side = (HAND, row.hand) if number % 2 else (OURS, row.ours)
            measured = [turn for turn in done if turn.side == name and turn.seconds]
            if measured:
                fastest = min(measured, key=lambda turn: turn.seconds or 0.0)
                take(next(loop for loop in side if loop.label == fastest.loop), number)
        return done

    def turn(self, row: GoalRow, loop: Loop, deadline: float, number: int) -> Turn:
        """Return one turn of a loop; on several GPUs, the same loop is measured on one of them as well."""
        turn = Turn(HAND if isinstance(loop, HandLoop) else OURS, loop.label, loop.precision)
        if time.monotonic() >= deadline:
            return replace(turn, message="no time was left")
        try:
            figures = self._measure(row, loop, deadline, row.world_size, number)
            if row.world_size > 1:
                alone = self._measure(row, loop, deadline, 1, number)
                turn = replace(turn, alone_seconds=pseudomedian(alone["blocks"]))
        except TurnFailedError as failure:
            return replace(turn, message=str(failure))
        is_start_known = not self.is_warm or row.world_size > 1
        if "blocks" in figures:
            start = figures["start_seconds"] if is_start_known else None
            return replace(turn, seconds=pseudomedian(figures["blocks"]), start_seconds=start)
        epochs = figures["epochs"]
        median = statistics.median(epochs[1:] or epochs)
        turn = replace(turn, seconds=median, accuracy=figures["accuracy"])
        if not is_start_known:
            return turn
        return replace(turn, start_seconds=max(0.0, epochs[0] - median), total_seconds=sum(epochs))

    def _measure(self, row: GoalRow, loop: Loop, deadline: float, world_size: int, number: int) -> dict[str, Any]:
        left = max(1.0, deadline - time.monotonic())
        if isinstance(loop, HandLoop):
            return run_by_hand(hand_task(row, loop, self.setting, world_size), left)
        spec = our_spec(row, loop, self.setting, world_size, min(_LONGEST_PHASE_SECONDS, left))
        spec = spec.model_copy(update={"repeat": number})
        (trial,) = build_job(self.machine, None, [spec], ResumePolicy(again=True)).run()
        return figures_of(trial)


def _print_turn(row: GoalRow, turn: Turn) -> None:
    # As it comes: if the machine is taken away, what it has measured is in the output.
    figure = f"{1e3 * turn.seconds:.4f} ms" if turn.seconds is not None else turn.message
    alone = f", alone {1e3 * turn.alone_seconds:.4f} ms" if turn.alone_seconds is not None else ""
    start = f", start {turn.start_seconds:.1f} s" if turn.start_seconds is not None else ""
    print(f"    {row.name}, {turn.side}, {turn.loop}: {figure}{alone}{start}", flush=True)


def measure(row: GoalRow, referee: Referee) -> dict[str, Any]:
    """Return a row's record."""
    started = time.monotonic()
    run = run_of(row, referee.setting)
    workload = find_workload(row.workload)
    turns = [asdict(turn) for turn in referee.turns(row)]
    return {
        "name": row.name,
        "workload": row.workload,
        "batch_size": row.batch_size,
        "world_size": row.world_size,
        "measure": row.measure,
        "goal": row.goal,
        "unit": workload.unit,
        "units_per_step": row.batch_size * build_task(workload).units_per_sample * row.world_size,
        "times": row.num_steps if run is None or run.recipe is None else run.recipe.epochs,
        "data_set": data_set_of(row, referee.setting),
        "is_whole": not referee.setting.is_tiny,  # only then do its figures count
        "turns": [{name: value for name, value in turn.items() if value not in (None, "")} for turn in turns],
        "seconds": time.monotonic() - started,
    }


def main() -> int:
    """Measure the rows and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help="names joined by commas; all by default")
    parser.add_argument("--device", help="cpu, cuda:N; the first GPU by default")
    parser.add_argument("--data", type=Path, default=default_data_dir(), help="where real data lies")
    parser.add_argument("--seconds", type=float, default=4.0, help="of the timed blocks of a turn")
    parser.add_argument(
        "--rounds", type=int, default=1, help="further turns by hand, with castwise's in between; 0: one turn per loop"
    )
    parser.add_argument("--time-limit", type=float, default=540.0, help="seconds of a row")
    parser.add_argument("--first", action="store_true", help="a side's next loop is tried only if the first fails")
    parser.add_argument("--warm", action="store_true", help="compile all loops side by side first; no start is shown")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes, to try this program itself")
    parser.add_argument("--out", type=Path, help="benchmarks/records/goals/DATE-NAME.json keeps a run")
    arguments = parser.parse_args()
    try:
        rows = find_rows(arguments.rows)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2

    machine = detect_machine(arguments.device, arguments.data)
    setting = Setting(machine.device, arguments.data, arguments.seconds, SuiteFilter())
    if arguments.tiny:
        setting = replace(setting, seconds=_TINY_SECONDS, cut=_TINY_RUN, is_tiny=True)
        rows = [tiny(row, machine.device) for row in rows]
    referee = Referee(machine, setting, arguments.rounds, arguments.time_limit, arguments.first)
    if arguments.warm:
        referee = referee.warm(rows)

    document: dict[str, Any] = {"environment": machine.environment.model_dump(mode="json"), "rows": []}
    for row in rows:
        num_gpus = machine.environment.num_gpus
        if row.world_size > num_gpus and machine.device != "cpu":
            print(f"{row.name} needs {row.world_size} GPUs; this machine has {num_gpus}", flush=True)
            continue
        record = measure(row, referee)
        print(f"{row.name}: {' | '.join(cells_of(record))} ({record['seconds']:.0f} s)", flush=True)
        document["rows"].append(record)
        write(arguments.out, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
