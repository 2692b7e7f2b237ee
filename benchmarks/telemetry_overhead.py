"""How much longer the timed step takes with telemetry: real trials, without it, with it, and with it but no counters.

    python benchmarks/telemetry_overhead.py [--models N] [--rounds N] [--out FILE] [WORKLOAD:PRECISION ...]

Prints the differences in per cent, with their 95 % intervals. Counters are the GPU's hardware counters (NVML's GPM).
"""

import argparse
import math
import random
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from scipy.stats import ttest_1samp
from stored import costs_of, write

from castwise.orchestrator.machine import choose_device, find_commit
from castwise.orchestrator.processes import ForkserverEngine
from castwise.orchestrator.session import Engine, Session
from castwise.records.schema import Environment
from castwise.registry.datasets import default_data_dir
from castwise.spec.plan import ParameterGrid, build_plan
from castwise.spec.trial import MeasurementProtocol, TrialSpec
from castwise.telemetry.gpu import CounterReading
from castwise.telemetry.nvml import NvmlMonitor
from castwise.telemetry.sampler import Telemetry
from castwise.telemetry.summary import mean_counters

CELLS = ("resnet50:fp16-mixed", "mnist-cnn:fp32", "mnist-cnn:bf16-mixed", "lstm-lm:fp32")
# Long blocks, so that each watched one has several samples in it: 5 at 10 Hz, and those before and after.
_PROTOCOL = MeasurementProtocol(block_seconds=0.5, warm_up_seconds=2.0, num_blocks=1000)
_TIMEOUT_SECONDS = 600.0


def measure(cell_name: str, models: int, rounds: int, engine: Engine, environment: Environment) -> dict[str, Any]:
    """Return the ratio of the watched step time to the unwatched one, and to the one watched without counters.

    Each model is a process of its own, as in a sweep, and is its own control: in each round every model runs one
    block watched, one watched without counters, and one not watched, all in a new order. The model is the replicate:
    the interval is Student's, on the logarithms of the models' ratios of median step times.
    """
    workload, _, precision = cell_name.partition(":")
    plan = build_plan(
        ParameterGrid(workloads=(workload,), precisions=(precision,)), device="cuda:0", protocol=_PROTOCOL
    )
    (spec,) = plan
    watchers = {"watched": Telemetry(), "without counters": Telemetry(_Uncounted)}
    with ExitStack() as stack:
        gpus = environment.gpus_of(spec)
        for telemetry in watchers.values():
            stack.callback(telemetry.close)
            telemetry.note_processes(gpus)
        sessions = [_start(engine, spec, stack) for _ in range(models)]
        times: dict[tuple[int, str], list[float]] = {
            (index, name): [] for index in range(models) for name in (*watchers, "unwatched")
        }
        num_samples, missing, counters = list[int](), dict[str, str](), list[dict[str, CounterReading]]()
        for _ in range(rounds):
            order = list(times)
            random.shuffle(order)
            for index, name in order:
                with watchers[name].watch(gpus) if name in watchers else nullcontext() as watch:
                    block = sessions[index].run_block()
                times[index, name].append(block.seconds / block.num_steps)
                if watch is not None and name == "watched":
                    num_samples.append(watch.reading.num_samples)
                    missing |= watch.reading.missing
                    counters.append(watch.counters)
    if "gpu" in missing:
        raise SystemExit(f"nothing was watched: {missing['gpu']}")
    medians = {key: statistics.median(values) for key, values in times.items()}
    found, why_no_counters = mean_counters(counters)
    return {
        "cell": cell_name,
        "batch_size": spec.batch_size,
        "models": models,
        "rounds": rounds,
        "samples_per_block": statistics.mean(num_samples),
        "step_seconds": statistics.median(medians[index, "unwatched"] for index in range(models)),
        **_ratio([medians[index, "watched"] / medians[index, "unwatched"] for index in range(models)]),
        "of_counters": _ratio(
            [medians[index, "watched"] / medians[index, "without counters"] for index in range(models)]
        ),
        "counters": found and found.model_dump(),
        "missing": missing | ({"counters": why_no_counters} if why_no_counters else {}),
    }


class _Uncounted(NvmlMonitor):
    """A monitor that reads no hardware counters."""

    def begin_counters(self) -> None:
        pass

    def read_counters(self) -> CounterReading:
        return CounterReading()


def _ratio(of_models: Sequence[float]) -> dict[str, float]:
    logs = [math.log(ratio) for ratio in of_models]
    interval = ttest_1samp(logs, 0.0).confidence_interval(0.95)
    return {
        "ratio": math.exp(statistics.mean(logs)),
        "ratio_low": math.exp(interval.low),
        "ratio_high": math.exp(interval.high),
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
        for what, costs in (("telemetry", result), ("of it counters", result["of_counters"])):
            print("{:24} {:14} costs {:+.2f} % [{:+.2f}, {:+.2f}]".format(name, what, *costs_of(costs)), flush=True)
        print(f"{'':24} counters: {result['counters'] or result['missing']}", flush=True)
    write(arguments.out, {"environment": environment.model_dump(mode="json"), "cells": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
