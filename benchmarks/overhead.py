"""How much longer castwise's timed step takes than the same loop written by hand: both in one process, in turns.

    python benchmarks/overhead.py [--out FILE] [WORKLOAD:PRECISION ...]

Prints the difference in per cent, with its 95 % interval.
"""

import argparse
import math
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from hand_loops import HandTask, make_loop
from scipy.stats import ttest_ind
from stored import costs_of, write

from castwise.orchestrator.machine import find_commit
from castwise.registry.precisions import find_precision
from castwise.spec.plan import ParameterGrid, build_plan
from castwise.spec.trial import MeasurementProtocol, TrialSpec
from castwise.worker.environment import read_environment
from castwise.worker.precision import numeric_state
from castwise.worker.steady_run import SteadyRun

CELLS = (
    "resnet50:fp32",
    "resnet50:fp16-mixed",
    "mnist-cnn:fp32",
    "mnist-cnn:fp16-mixed",
    "mnist-cnn:bf16-mixed",
)
_PROTOCOL = MeasurementProtocol(block_seconds=0.05, warm_up_seconds=1.5, num_blocks=1000)
# If the host cannot keep the GPU busy, models differ by per cents: it takes more of them to see half a per cent.
_MODELS_A_SIDE = {"mnist-cnn": 16, "lstm-lm": 16}
_FEW_MODELS = 4

Timed = Callable[[], float]


def measure(cell_name: str, rounds: int, device: torch.device) -> dict[str, object]:
    """Return the ratio of castwise's step time to the hand-written one's.

    Two models of one configuration differ in speed by where their tensors lie, and by more than blocks of one model
    do: the model is the replicate. So both sides are built several times, and all take turns in each round, in a new
    order. The interval is Welch's on the logarithms of the models' median step times.
    """
    workload, _, precision = cell_name.partition(":")
    plan = build_plan(
        ParameterGrid(workloads=(workload,), precisions=(precision,)), device=str(device), protocol=_PROTOCOL
    )
    (spec,) = plan
    with numeric_state(find_precision(precision)):
        sides = [_castwise(spec), _by_hand(spec, device)]
        steps = sides[0][1]
        castwise, by_hand = [sides[0][0]], [sides[1][0]]
        models_a_side = _MODELS_A_SIDE.get(workload, _FEW_MODELS)
        for instance in range(1, models_a_side):
            for side in (castwise, by_hand) if instance % 2 == 0 else (by_hand, castwise):
                side.append(_castwise(spec)[0] if side is castwise else _by_hand(spec, device)[0])
        times: dict[Timed, list[float]] = {timed: [] for timed in (*castwise, *by_hand)}
        order = list(times)
        for _ in range(rounds):
            random.shuffle(order)
            for timed in order:
                times[timed].append(timed())
    ours, theirs = ([math.log(statistics.median(times[timed])) for timed in side] for side in (castwise, by_hand))
    interval = ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    return {
        "cell": cell_name,
        "batch_size": spec.batch_size,
        "rounds": rounds,
        "models_a_side": models_a_side,
        "steps_per_block": steps,
        "hand_step_seconds": math.exp(statistics.mean(theirs)),
        "castwise_step_seconds": math.exp(statistics.mean(ours)),
        "ratio": math.exp(statistics.mean(ours) - statistics.mean(theirs)),
        "ratio_low": math.exp(interval.low),
        "ratio_high": math.exp(interval.high),
    }


def _castwise(spec: TrialSpec) -> tuple[Timed, int]:
    cell = SteadyRun(spec, None)
    cell.warm_up()
    steps = cell.run_block().num_steps

    def timed() -> float:
        block = cell.run_block()
        return block.seconds / block.num_steps

    return timed, steps


def _by_hand(spec: TrialSpec, device: torch.device) -> tuple[Timed, int]:
    loop = make_loop(HandTask(spec.workload, spec.batch_size, spec.precision, str(device)), device)

    def seconds_of(steps: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        start.record()
        loop(steps)
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) / 1e3

    steps = max(1, round(_PROTOCOL.block_seconds / (seconds_of(10) / 10)))
    for _ in range(3):
        seconds_of(steps)
    return (lambda: seconds_of(steps) / steps), steps


def main() -> int:
    """Measure the named cells and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", default=CELLS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("overhead.py needs a GPU", file=sys.stderr)
        return 2
    device = torch.device("cuda:0")
    results = []
    for name in arguments.cells:
        result = measure(name, arguments.rounds, device)
        results.append(result)
        print("{:24} castwise costs {:+.2f} % [{:+.2f}, {:+.2f}]".format(name, *costs_of(result)), flush=True)
        torch.cuda.empty_cache()
    environment = read_environment(device, find_commit()).model_dump(mode="json")
    write(arguments.out, {"environment": environment, "cells": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
