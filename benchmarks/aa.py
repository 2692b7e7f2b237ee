"""How often castwise calls a cell different from itself, and finds a slowdown that was put into one arm.

    python benchmarks/aa.py [--comparisons N] [--pairs N] [--max-rounds N] [--budget SECONDS] [--out FILE] [CELL ...]

CELL is WORKLOAD:PRECISION:BATCH. Each sitting holds, beside N plain processes, as many more plain ones and as many
that are slowed down by 1 % and by 2 %: after every step the device spins, and the host waits, for that share of the
step's time, so that whichever sets the pace is slowed down. Each comparison is castwise's own: rounds of fresh
processes that take turns, its stop rule, its interval, its verdict.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import slowed

from castwise.analyze.estimates import estimate, judge, paired_ratio
from castwise.analyze.metrics import step_times
from castwise.plan import Protocol, TrialSpec
from castwise.precisions import find_precision
from castwise.record import Trial
from castwise.sweep.bench import Bench, find_bench
from castwise.sweep.engine import Session
from castwise.sweep.launcher import ForkserverEngine
from castwise.sweep.rounds import Rule
from castwise.sweep.runner import Silent, Sweep
from castwise.sweep.sitting import sit

CELLS = ("mnist-cnn:fp16-mixed:512", "resnet50:fp16-mixed:128")
SLOWDOWNS = (0.0, 0.01, 0.02)
_PROTOCOL = Protocol(block_seconds=0.1, num_blocks=8, min_blocks=4, warm_up_seconds=5.0)


class Arms:
    """Starts each process of a sitting with the slowdown of its place."""

    def __init__(self, pairs: int) -> None:
        plain = ForkserverEngine()
        arms = (
            plain,
            plain,
            ForkserverEngine(target=slowed.by_1_percent),
            ForkserverEngine(target=slowed.by_2_percent),
        )
        self._order = [engine for engine in arms for _ in range(pairs)]
        self._started = 0

    def start(self, timeout_seconds: float, num_processes: int = 1) -> Session:
        engine = self._order[self._started % len(self._order)]
        self._started += 1
        return engine.start(timeout_seconds, num_processes)


def one_set(spec: TrialSpec, pairs: int, bench: Bench, rule: Rule) -> list[dict[str, object]]:
    """Return the comparisons of one set of rounds: for each slowdown as many as there are pairs."""
    ratios: dict[tuple[int, int], list[float]] = {(arm, n): [] for arm in range(len(SLOWDOWNS)) for n in range(pairs)}
    ended: dict[tuple[int, int], dict[str, object]] = {}
    sweep = Sweep(Arms(pairs), None, bench.environment, Silent())
    number = 0
    while len(ended) < len(ratios):
        number += 1
        specs = [spec.model_copy(update={"repeat": n}) for n in range(pairs * (1 + len(SLOWDOWNS)))]
        trials = sit(sweep, specs, together=True, number=number).trials
        _check(trials, len(specs))
        for (arm, n), seen in ratios.items():
            ratio = paired_ratio(step_times(trials[n]), step_times(trials[(arm + 1) * pairs + n]))
            assert ratio is not None
            seen.append(ratio)
            found = estimate(seen)
            assert found is not None
            narrow = len(seen) >= rule.min_rounds and found.half_width <= rule.half_width
            if (arm, n) not in ended and (narrow or len(seen) >= rule.max_rounds):
                verdict = judge(found)
                ended[arm, n] = {
                    "slowdown": SLOWDOWNS[arm],
                    "verdict": verdict.kind,
                    "speedup": found.value,
                    "low": found.low,
                    "high": found.high,
                    "rounds": found.n,
                }
    return list(ended.values())


def _check(trials: Sequence[Trial], count: int) -> None:
    bad = [trial for trial in trials if trial.status not in ("ok", "diverged")]
    if bad or len(trials) != count:
        sys.exit(f"{len(trials)} of {count} processes ended well: {bad[0].message if bad else 'out of memory'}")


def main() -> int:
    """Compare the cells and print what the verdicts were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", default=CELLS)
    parser.add_argument("--comparisons", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--max-rounds", type=int, default=Rule.max_rounds)
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds a cell, after which no set begins")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    bench = find_bench(None, None)
    rule = Rule(min_rounds=min(3, arguments.max_rounds), max_rounds=arguments.max_rounds)
    results = []
    for cell in arguments.cells:
        workload, precision, batch_size = cell.split(":")
        spec = TrialSpec(
            workload=workload,
            precision=precision,
            loss_scale=find_precision(precision).loss_scale,
            batch_size=int(batch_size),
            device=bench.device,
            protocol=_PROTOCOL,
        )
        started, comparisons = time.perf_counter(), list[dict[str, object]]()
        while len(comparisons) < arguments.comparisons * len(SLOWDOWNS):
            if comparisons and time.perf_counter() - started > arguments.budget:
                break
            comparisons += one_set(spec, arguments.pairs, bench, rule)
        results.append({"cell": cell, "seconds": time.perf_counter() - started, "comparisons": comparisons})
        for slowdown in SLOWDOWNS:
            kinds = [str(each["verdict"]) for each in comparisons if each["slowdown"] == slowdown]
            counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
            print(f"{cell}, slowed by {slowdown:.0%}: {len(kinds)} comparisons, {counts}", flush=True)
    if arguments.out:
        environment = bench.environment.model_dump(mode="json")
        arguments.out.write_text(json.dumps({"environment": environment, "cells": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
