"""How much castwise's timed step costs beyond the same loop written by hand: both in one process, taking turns.

    python benchmarks/overhead.py [--out FILE] [WORKLOAD:PRECISION ...]

Prints the median over turns of castwise's block time over the hand-written loop's, with the interval that order
statistics give the median. A positive percentage is what castwise costs.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from hand_loops import Loop, hand_loop
from scipy.stats import quantile_test

from castwise.measure.environment import read_environment
from castwise.measure.precision import numeric_state
from castwise.measure.steady import SteadyCell
from castwise.plan import Axes, Protocol, build_plan
from castwise.precisions import find_precision
from castwise.sweep.job import find_commit
from castwise.workloads import find_workload

CELLS = (
    "resnet50:fp32",
    "resnet50:fp16-mixed",
    "resnet50:bf16-mixed",
    "mnist-cnn:fp32",
    "mnist-cnn:fp16-mixed",
    "mnist-cnn:bf16-mixed",
    "wrn-28-10:fp16-mixed",
    "lstm-lm:fp32",
    "lstm-lm:fp16-mixed",
)
_PROTOCOL = Protocol(block_seconds=0.25, warm_up_seconds=10.0)


def measure(cell_name: str, turns: int, device: torch.device) -> dict[str, object]:
    """Return the ratio of castwise's step time to the hand-written one's, over turns in ABBA order."""
    workload, _, precision = cell_name.partition(":")
    plan = build_plan(Axes(workloads=(workload,), precisions=(precision,)), device=str(device), protocol=_PROTOCOL)
    (spec,) = plan.specs
    with numeric_state(find_precision(precision)):
        loop = hand_loop(find_workload(workload), precision, spec.batch_size, device)
        time_by_hand(loop, 20, device)
        cell = SteadyCell(spec, None)
        cell.warm_up()
        cell.run_block()
        ours, theirs = [], []
        for turn in range(turns):
            if turn % 2 == 0:
                block = cell.run_block()
                by_hand = time_by_hand(loop, block.num_steps, device)
            else:
                by_hand = time_by_hand(loop, block.num_steps, device)
                block = cell.run_block()
            ours.append(block.seconds / block.num_steps)
            theirs.append(by_hand / block.num_steps)
        cell.finish()
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    interval = quantile_test(ratios, q=1.0, p=0.5).confidence_interval(0.95)
    return {
        "cell": cell_name,
        "batch_size": spec.batch_size,
        "turns": turns,
        "steps_per_block": block.num_steps,
        "hand_step_seconds": statistics.median(theirs),
        "castwise_step_seconds": statistics.median(ours),
        "ratio": statistics.median(ratios),
        "ratio_low": float(interval.low),
        "ratio_high": float(interval.high),
    }


def time_by_hand(loop: Loop, steps: int, device: torch.device) -> float:
    """Return the seconds of some steps, by CUDA events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    start.record()
    loop(steps)
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1e3


def main() -> int:
    """Measure the named cells and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", default=CELLS)
    parser.add_argument("--turns", type=int, default=24)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("overhead.py needs a GPU", file=sys.stderr)
        return 2
    device = torch.device("cuda:0")
    results = []
    for name in arguments.cells:
        result = measure(name, arguments.turns, device)
        results.append(result)
        cost, low, high = (100 * (float(str(result[key])) - 1) for key in ("ratio", "ratio_low", "ratio_high"))
        print(f"{name:24} castwise costs {cost:+.2f} % [{low:+.2f}, {high:+.2f}]", flush=True)
        torch.cuda.empty_cache()
    if arguments.out:
        environment = read_environment(device, find_commit()).model_dump(mode="json")
        arguments.out.write_text(json.dumps({"environment": environment, "cells": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
