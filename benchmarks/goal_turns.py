"""Measure a row's loops in turns, a process each: by hand in a child, castwise's as ordinary trials."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from goal_rows import GoalRow, HandLoop, OurLoop
from goal_specs import Setting, hand_task, our_spec
from goal_summary import HAND, OURS, Turn, turn_of_run

from castwise.analysis.statistics import pseudomedian
from castwise.analysis.steady_metrics import step_times
from castwise.analysis.training_metrics import epochs_of
from castwise.orchestrator.job import build_job
from castwise.orchestrator.machine import Machine
from castwise.records.schema import Trial
from castwise.records.store import ResumePolicy, Store

HERE = Path(__file__).resolve().parent
_LAST_LINES = 12
_LONGEST_PHASE_SECONDS = 600.0
# Enough for a loop to compile all, and to capture its graph.
_WARM_SECONDS, _WARM_STEPS = 0.05, 12

Loop = HandLoop | OurLoop


class ChildFailedError(Exception):
    """A child ended without an answer; the message is what it said last."""


@dataclass(frozen=True)
class Referee:
    """Gives each loop its turns."""

    bench: Machine  # where castwise's trials run
    setting: Setting  # how long
    store: Store | None  # keeps castwise's trials; None keeps none
    sides: tuple[str, ...]  # which sides are measured
    rounds: int  # turns of castwise's fastest loop
    time_limit_seconds: float  # when no turn of the row is begun any more
    tell: Callable[[GoalRow, Turn], None]  # is told of every turn when it has ended
    only_first: bool = False  # a side's further loops are tried only where those before failed
    is_warmed: bool = False  # code was compiled before: how long a start takes is not told then

    def warm(self, rows: Sequence[GoalRow]) -> "Referee":
        """Run the loops of rows for a few steps, side by side; return a referee whose turns find their code compiled.

        A loop that fails here fails in its turn. One of several GPUs, of which there is one, is left out.
        """
        setting = replace(self.setting, seconds=_WARM_SECONDS, epochs=1, max_steps=_WARM_STEPS)
        brief = replace(self, setting=setting, store=None)
        deadline = time.monotonic() + self.time_limit_seconds
        loops = [(row, loop) for row in rows if row.world_size == 1 for loop in self._first_loops(row)]
        with ThreadPoolExecutor(max(1, len(loops))) as pool:
            list(pool.map(lambda each: brief._begun(*each, deadline, number=0), loops))
        return replace(self, is_warmed=True)

    def _first_loops(self, row: GoalRow) -> list[Loop]:
        sides = (_loops(row, side) for side in self.sides)
        return [loop for loops in sides for loop in (loops[:1] if self.only_first else loops)]

    def turns(self, row: GoalRow) -> list[Turn]:
        """Return all turns of a row, in order: every loop once, hand first, and then the fastest of each side."""
        deadline = time.monotonic() + self.time_limit_seconds
        done: list[Turn] = []
        for loops in (row.hand if HAND in self.sides else (), row.ours if OURS in self.sides else ()):
            for loop in loops:
                if self.only_first and any(turn.seconds and turn.side == _side_of(loop) for turn in done):
                    break
                done.append(self._turn(row, loop, deadline, number=0))
        # Hand, castwise, hand: then castwise, hand for every further round.
        for number in range(1, 2 * self.rounds):
            side = HAND if number % 2 else OURS
            best = _fastest(done, side) if len(self.sides) == 2 else None
            if best is not None:
                loop = next(each for each in _loops(row, side) if each.label == best)
                done.append(self._turn(row, loop, deadline, number=number))
        return done

    def _turn(self, row: GoalRow, loop: Loop, deadline: float, number: int) -> Turn:
        turn = self._begun(row, loop, deadline, number)
        if self.is_warmed and row.world_size == 1:
            turn = replace(turn, start_seconds=None, total_seconds=None)
        self.tell(row, turn)
        return turn

    def _begun(self, row: GoalRow, loop: Loop, deadline: float, number: int) -> Turn:
        turn = Turn(side=_side_of(loop), loop=loop.label, precision=loop.precision)
        if time.monotonic() >= deadline:
            return replace(turn, message="no time was left")
        try:
            turn = self._measured(row, loop, turn, deadline, row.world_size, number)
            if row.world_size > 1:
                alone = self._measured(row, loop, turn, deadline, 1, number)
                turn = replace(turn, alone_seconds=alone.seconds)
        except ChildFailedError as failure:
            return replace(turn, seconds=None, message=str(failure))
        return turn

    def _measured(self, row: GoalRow, loop: Loop, turn: Turn, deadline: float, world_size: int, number: int) -> Turn:
        left = max(1.0, deadline - time.monotonic())
        if isinstance(loop, HandLoop):
            return _by_hand(turn, hand_task(row, loop, self.setting, world_size), left)
        timeout = min(_LONGEST_PHASE_SECONDS, left)
        spec = our_spec(row, loop, self.setting, world_size, timeout).model_copy(update={"repeat": number})
        (trial,) = build_job(self.bench, self.store, [spec], ResumePolicy(again=True)).run()
        return _of_trial(turn, trial)


def _side_of(loop: Loop) -> str:
    return HAND if isinstance(loop, HandLoop) else OURS


def _loops(row: GoalRow, side: str) -> Sequence[Loop]:
    return row.hand if side == HAND else row.ours


def _fastest(turns: Sequence[Turn], side: str) -> str | None:
    measured = [turn for turn in turns if turn.side == side and turn.seconds is not None]
    return min(measured, key=lambda turn: turn.seconds or 0.0).loop if measured else None


def _by_hand(turn: Turn, task: dict[str, Any], timeout_seconds: float) -> Turn:
    answer = run_child([str(HERE / "goal_hand.py"), json.dumps(task)], timeout_seconds)
    if "epochs" in answer:
        return turn_of_run(turn, answer["epochs"], answer["accuracy"])
    return replace(turn, seconds=pseudomedian(answer["blocks"]), start_seconds=answer["start_seconds"])


def _of_trial(turn: Turn, trial: Trial) -> Turn:
    blocks, epochs = step_times(trial), epochs_of(trial)
    if trial.status not in ("ok", "diverged") or not (blocks or epochs):
        log = trial.log or ""
        raise ChildFailedError(f"{trial.status}: {trial.message} {' '.join(log.splitlines()[-_LAST_LINES:])}".strip())
    if epochs:
        seconds = [epoch.seconds + epoch.validation_seconds for epoch in epochs]
        return turn_of_run(turn, seconds, epochs[-1].accuracy)
    facts = trial.facts
    start = facts.first_step_seconds if facts is not None else None
    return replace(turn, seconds=pseudomedian(blocks), start_seconds=start)


def run_child(arguments: Sequence[str], timeout_seconds: float) -> dict[str, Any]:
    """Run a script of this folder and return the JSON that is the last line of what it prints.

    Raises:
        ChildFailedError: It fails, says nothing, or takes longer; all its processes are ended then.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        raise ChildFailedError(f"took longer than {timeout_seconds:.0f} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode != 0 or not out.strip():
        said = " ".join(err.strip().splitlines()[-_LAST_LINES:])
        raise ChildFailedError(f"ended with {process.returncode}: {said}")
    answer: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return answer
