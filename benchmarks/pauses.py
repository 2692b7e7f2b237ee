"""Whether pauses between timed blocks make a GPU at its power limit faster than steps that run on and on.

    python benchmarks/pauses.py --out FILE [--rounds N] [--seconds S] [NAME ...]

NAME is a climb under benchmarks/records/climbs/ (without one: wrn-28-10); its fastest loop is set up in this process,
as NAME:PRECISION in another precision: whether the one that is faster in blocks is so at a stretch.
Each round goes through all patterns in an order of its own: steps at a stretch; blocks with pauses of several lengths
between them; blocks as castwise times them; blocks with telemetry's pauses between them; and such blocks behind steps
that are not timed. Of each pattern S seconds pass before S seconds count; clock and power are those of both. At a
round's end the GPU rests, and then steps run for some seconds, of which each half, or a launch more, counts for itself:
how long a speed behind a rest lasts.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from clocks import with_clock
from emitted import fastest_of

from castwise.orchestrator.machine import Machine, detect_machine
from castwise.records.schema import Block
from castwise.registry.precisions import find_precision
from castwise.spec.plan import TrialSpec
from castwise.telemetry.sampler import Telemetry
from castwise.worker.steady_run import SteadyRun

AT_A_STRETCH, AS_CASTWISE = "at a stretch", "blocks as castwise times them"
RESTED = "blocks behind telemetry's looks, without steps that lead to them"
_PAUSES = (0.0, 0.003, 0.01, 0.03, 0.1)
_BEFORE = 0.1
_REST_SECONDS, _PART_SECONDS, _NUM_PARTS = 2.0, 0.5, 10


@dataclass(frozen=True)
class Turn:
    """What one pattern's turn gave.

    Attributes:
        pattern: Its name.
        step_seconds: The middle block's seconds a step; at a stretch the mean.
        idle_share: Share of the time that was no step's.
        clock_hertz: The middle SM clock of the time in which most power was drawn; None without a GPU.
        power_watts: The middle power of that time.
    """

    pattern: str
    step_seconds: float
    idle_share: float
    clock_hertz: float | None = None
    power_watts: float | None = None


Timed = Callable[[], tuple[Block, float]]  # a block, and the seconds of steps before it that are not timed


def patterns_of(cell: SteadyRun, gpus: Mapping[str, str], seconds: float) -> dict[str, Timed]:
    """Return what times a block, by the pattern's name.

    Args:
        cell: The loop, warmed up.
        gpus: What telemetry watches.
        seconds: How long a stretch is.
    """
    telemetry = Telemetry()

    def after(pause: float) -> Timed:
        def timed() -> tuple[Block, float]:
            if pause:
                time.sleep(pause)
            return cell.run_block(), 0.0

        return timed

    def rested(before: float) -> Timed:
        def timed() -> tuple[Block, float]:
            with telemetry.watch(gpus):
                seconds = cell.run_sustained(before).seconds if before else 0.0
                return cell.run_block(), seconds

        return timed

    def as_castwise() -> tuple[Block, float]:
        with telemetry.watch(gpus):
            block = cell.run_block()
            cell.lead_in()
        return block, block.lead_steps * block.seconds / block.num_steps

    return {
        AT_A_STRETCH: lambda: (cell.run_sustained(seconds), 0.0),
        **{f"blocks, {1e3 * pause:.0f} ms between them": after(pause) for pause in _PAUSES},
        AS_CASTWISE: as_castwise,
        RESTED: rested(0.0),
        f"{RESTED}, each behind {1e3 * _BEFORE:.0f} ms of steps": rested(_BEFORE),  # or a launch more
    }


def measure(pattern: str, timed: Timed, seconds: float) -> Turn:
    """Let a pattern go on for so long, and again for so long to measure it.

    Args:
        pattern: Its name.
        timed: Times a block.
        seconds: How long.
    """
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        timed()
    began = time.perf_counter()
    blocks: list[Block] = []
    busy = 0.0
    while not blocks or time.perf_counter() - began < seconds:
        block, before = timed()
        blocks.append(block)
        busy += block.seconds + before
    idle = 1 - busy / (time.perf_counter() - began)
    return Turn(pattern, statistics.median(block.seconds / block.num_steps for block in blocks), idle)


def after_a_rest(cell: SteadyRun) -> list[Turn]:
    """Return what steps take from a rest on, part by part of the time."""
    time.sleep(_REST_SECONDS)
    parts = [cell.run_sustained(_PART_SECONDS) for _ in range(_NUM_PARTS)]
    return [
        Turn(
            f"{number * _PART_SECONDS:.1f} to {(number + 1) * _PART_SECONDS:.1f} s after a rest of {_REST_SECONDS:g} s",
            part.seconds / part.num_steps,
            0.0,
        )
        for number, part in enumerate(parts)
    ]


def turns_of(spec: TrialSpec, bench: Machine, rounds: int, seconds: float) -> list[Turn]:
    """Return what all patterns gave of a loop, round by round."""
    spec = spec.model_copy(update={"device": bench.device})
    gpus = {device: uuid for device, uuid in bench.environment.gpus_of(spec).items() if uuid}
    cell = SteadyRun(spec, None)
    try:
        cell.warm_up()
        cell.run_block()  # what a stretch goes by
        patterns = patterns_of(cell, gpus, seconds)
        turns: list[Turn] = []
        order = list(patterns)
        for number in range(rounds):
            random.Random(number).shuffle(order)
            for name in order:
                timed = partial(measure, name, patterns[name], seconds)
                turns.append(with_clock(bench.environment.gpu_uuid, timed))
            turns += after_a_rest(cell)
        return turns
    finally:
        cell.finish()


def step_config_of(name: str) -> TrialSpec:
    """Return the loop that is named `NAME` or `NAME:PRECISION`."""
    climb, _, precision = name.partition(":")
    spec = fastest_of(climb)
    scale = {"loss_scale": find_precision(precision).loss_scale} if precision else {}
    return spec.model_copy(update={"precision": precision or spec.precision, **scale})


def main() -> int:
    """Measure the loops that are named and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["wrn-28-10"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1.0)
    arguments = parser.parse_args()
    bench = detect_machine(None, None)
    loops: list[dict[str, Any]] = []
    for name in arguments.names:
        spec = step_config_of(name)
        turns = turns_of(spec, bench, arguments.rounds, arguments.seconds)
        loops.append({"name": name, "spec": spec.model_dump(mode="json"), "turns": [asdict(turn) for turn in turns]})
        document = {"environment": bench.environment.model_dump(mode="json"), "loops": loops}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
        for turn in turns:
            print(f"{name}: {turn.pattern}: {1e3 * turn.step_seconds:.3f} ms", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
