"""Whether waiting processes disturb the one that is timed: a cell alone, beside residents that wait, and in turns.

    python benchmarks/residents.py [--rounds N] [--blocks N] [--out FILE] [CELL ...]

CELL is WORKLOAD:PRECISION:BATCH. Each round a fresh process of the cell times blocks alone, then beside one process of
each of five other precisions that is set up and waits, then in turns with them, then alone again. Prints by how many
per cent each way lengthens the step, with its 95 % interval over the rounds.
"""

import argparse
import json
import math
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from trust_tables import lengthening

from castwise.analysis.statistics import noise_of, pseudomedian
from castwise.orchestrator.machine import Machine, detect_machine
from castwise.orchestrator.session import Session
from castwise.registry.precisions import find_precision
from castwise.spec.plan import CUDA_ROUND, TrialSpec

CELLS = ("resnet50:fp16-mixed:256", "resnet50:bf16-mixed:256", "mnist-cnn:fp16-mixed:512")
WAYS = ("beside waiting processes", "in turns with them", "alone again")
_NEIGHBOURS = ("fp32", "tf32", "fp16-mixed", "bf16-mixed", "fp16-true", "bf16-true")
_TIMEOUT_SECONDS = 120.0


def measure(cell: str, rounds: int, blocks: int, bench: Machine) -> dict[str, object]:
    """Return the logarithms of step time over that of the same process alone, by way, a number a round."""
    workload, precision, batch_size = cell.split(":")
    others = [
        name for name in _NEIGHBOURS if name != precision and (find_precision(name).on_cpu or bench.device != "cpu")
    ]
    logs: dict[str, list[float]] = {way: [] for way in WAYS}
    spreads: dict[str, list[float]] = {way: [] for way in ("alone", *WAYS)}
    for _ in range(rounds):
        with ExitStack() as stack:
            timed = _start(bench, stack, workload, precision, int(batch_size))
            timed.warm_up()
            alone = _time(timed, blocks)
            with ExitStack() as residents:
                with ThreadPoolExecutor(len(others)) as pool:
                    starts = [pool.submit(_start, bench, residents, workload, name, int(batch_size)) for name in others]
                waiting = [start.result() for start in starts]
                for each in waiting:
                    each.warm_up()
                beside = _time(timed, blocks)
                in_turns = _time(timed, blocks, waiting)
            again = _time(timed, blocks)
        for way, seconds in zip(WAYS, (beside, in_turns, again), strict=True):
            logs[way].append(math.log(pseudomedian(seconds) / pseudomedian(alone)))
            spreads[way].append(noise_of(seconds))
        spreads["alone"].append(noise_of(alone))
    return {"cell": cell, "blocks": blocks, "logs": logs, "spreads": spreads}


def _start(bench: Machine, stack: ExitStack, workload: str, precision: str, batch_size: int) -> Session:
    session = bench.engine.start(_TIMEOUT_SECONDS)
    stack.callback(session.close)
    session.open(bench.device)
    session.set_up(
        TrialSpec(
            workload=workload,
            precision=precision,
            loss_scale=find_precision(precision).loss_scale,
            batch_size=batch_size,
            device=bench.device,
            protocol=CUDA_ROUND,
        )
    )
    return session


def _time(session: Session, blocks: int, others: list[Session] | None = None) -> list[float]:
    """Return the seconds a step of so many blocks, each after one of every other process if there are any."""
    found = []
    for _ in range(blocks):
        for other in others or ():
            other.run_block()
        block = session.run_block()
        found.append(block.seconds / block.num_steps)
    return found


def main() -> int:
    """Measure the named cells and print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", default=CELLS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    bench = detect_machine(None, None)
    results = []
    for cell in arguments.cells:
        results.append(measure(cell, arguments.rounds, arguments.blocks, bench))
        for way, logs in results[-1]["logs"].items():  # type: ignore[attr-defined]
            cost, low, high = (100 * share for share in lengthening(logs))
            spread = statistics.fmean(results[-1]["spreads"][way])  # type: ignore[index]
            said = f"{cost:+.2f} % [{low:+.2f}, {high:+.2f}], blocks differ by {spread:.2%}"
            print(f"{cell:26} {way:26} {said}", flush=True)
    if arguments.out:
        document = {"environment": bench.environment.model_dump(mode="json"), "cells": results}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
