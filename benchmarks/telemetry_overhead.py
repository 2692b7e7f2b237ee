"""How much longer the timed step takes with telemetry: processes of real trials, with and without it in turns.

    python benchmarks/telemetry_overhead.py [--models N] [--rounds N] [--out FILE] [WORKLOAD:PRECISION ...]

Prints the difference in per cent, with its 95 % interval.
"""

import argparse
import math
import random
import statistics
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path

from scipy.stats import ttest_1samp
from stored import costs_of, write

from castwise.orchestrator.machine import choose_device, find_commit
from castwise.orchestrator.processes import ForkserverEngine
from castwise.orchestrator.session import Engine, Session
from castwise.records.schema import Environment
from castwise.registry.datasets import default_data_dir
from castwise.spec.plan import ParameterGrid, build_plan
from castwise.spec.trial import MeasurementProtocol, TrialSpec
from castwise.telemetry.sampler import Telemetry

CELLS = ("resnet50:fp16-mixed", "mnist-cnn:fp32", "mnist-cnn:bf16-mixed", "lstm-lm:fp32")
# Long blocks, so that each watched one has several samples in it: 5 at 10 Hz, and those before and after.
_PROTOCOL = MeasurementProtocol(block_seconds=0.5, warm_up_seconds=2.0, num_blocks=1000)
_TIMEOUT_SECONDS = 600.0


def measure(cell_name: str, models: int, rounds: int, engine: Engine, environment: Environment) -> dict[str, object]:
    """Return the ratio of the watched step time to the unwatched one.

    Each model is a process of its own, as in a sweep, and is its own control: in each round every model runs one
    block watched and one not, all in a new order. The model is the replicate: the interval is Student's, on the
    logarithms of the models' ratios of median step times.
    """
    workload, _, precision = cell_name.partition(":")
    plan = build_plan(
        ParameterGrid(workloads=(workload,), precisions=(precision,)), device="cuda:0", protocol=_PROTOCOL
    )
    (spec,) = plan
    telemetry = Telemetry()
    with ExitStack() as stack:
        stack.callback(telemetry.close)
        gpus = environment.gpus_of(spec)
        telemetry.note_processes(gpus)
        sessions = [_start(engine, spec, stack) for _ in range(models)]
        times: dict[tuple[int, bool], list[float]] = {
            (index, watched): [] for index in range(models) for watched in (False, True)
        }
        num_samples, missing = list[int](), dict[str, str]()
        for _ in range(rounds):
            order = list(times)
            random.shuffle(order)
            for index, watched in order:
                with telemetry.watch(gpus) if watched else nullcontext() as watch:
                    block = sessions[index].run_block()
                times[index, watched].append(block.seconds / block.num_steps)
                if watch is not None:
                    num_samples.append(watch.reading.num_samples)
                    missing |= watch.reading.missing
    if "gpu" in missing:
        raise SystemExit(f"nothing was watched: {missing['gpu']}")
    logs = [
        math.log(statistics.median(times[index, True]) / statistics.median(times[index, False]))
        for index in range(models)
    ]
    interval = ttest_1samp(logs, 0.0).confidence_interval(0.95)
    return {
        "cell": cell_name,
        "batch_size": spec.batch_size,
        "models": models,
        "rounds": rounds,
        "samples_per_block": statistics.mean(num_samples),
        "step_seconds": statistics.median(statistics.median(times[index, False]) for index in range(models)),
        "ratio": math.exp(statistics.mean(logs)),
        "ratio_low": math.exp(interval.low),
        "ratio_high": math.exp(interval.high),
        "missing": missing,
    }


def _start(engine: Engine, spec: TrialSpec, stack: ExitStack) -> Session:
    session = engine.start(_TIMEOUT_SECONDS)
    stack.callback(session.close)
    session.open(spec.device)
    session.set_up(spec)
    session.warm_up()
    session.run_block()
    return session


def main() -> int:
    """Measure the named cells and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", default=CELLS)
    parser.add_argument("--models", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    engine = ForkserverEngine(default_data_dir(), find_commit())
    environment = choose_device(engine, None)
    if environment.gpu is None:
        print("telemetry_overhead.py needs a GPU", file=sys.stderr)
        return 2
    results = []
    for name in arguments.cells:
        result = measure(name, arguments.models, arguments.rounds, engine, environment)
        results.append(result)
        print("{:24} telemetry costs {:+.2f} % [{:+.2f}, {:+.2f}]".format(name, *costs_of(result)), flush=True)
    write(arguments.out, {"environment": environment.model_dump(mode="json"), "cells": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
