"""How often castwise calls a configuration different from itself, and how often it finds an artificial slowdown.

    python benchmarks/aa.py [--comparisons N] [--places N,N,N] [--max-rounds N] [--budget SECONDS] [--out FILE]
                             [CELL ...]

CELL is WORKLOAD:PRECISION:BATCH or WORKLOAD:PRECISION:BATCH:LOOP, or the command of a script, such as
"python train.py", which cannot be slowed down (--places 5,0,0). Each session has five plain processes, two that are
slowed down by 1 % and two by 2 %: after every step the device spins and the host waits for that share of the step's
time, so that the slower of both is slowed down. All pairs of plain processes are compared (10), and each slowed one
with each plain one (10 and 10), as castwise does it: rounds of fresh processes that are timed in turn, its stop rule,
interval and verdict. Comparisons of one set share processes, as configurations of one command share their baseline:
100 comparisons are 10 sets.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import slowed
from stored import markdown, place_of, write

from castwise.analysis.statistics import Estimate, estimate, noise_of, paired_ratio, verdict_of
from castwise.analysis.steady_metrics import step_seconds, step_times
from castwise.orchestrator.job import prepare
from castwise.orchestrator.machine import Machine, detect_machine
from castwise.orchestrator.processes import ForkserverEngine
from castwise.orchestrator.rounds import StopRule, prior_stats_of
from castwise.orchestrator.runner import InterleavedSession, NullListener, TrialRunner
from castwise.orchestrator.session import Session
from castwise.records.schema import Trial
from castwise.registry.precisions import AS_WRITTEN
from castwise.spec.options import RunOptions
from castwise.spec.trial import TrialSpec
from castwise.spec.user_model import is_script

CELLS = ("mnist-cnn:fp16-mixed:512", "resnet50:fp16-mixed:128")
SLOWDOWNS = (0.0, 0.01, 0.02)
_VERDICTS = ("same", "inconclusive", "faster", "slower")


class SlowdownEngine:
    """Starts each process of a session with its slowdown."""

    def __init__(self) -> None:
        self._engines = (
            ForkserverEngine(),
            ForkserverEngine(target=slowed.by_1_percent),
            ForkserverEngine(target=slowed.by_2_percent),
        )
        self._next: list[int] = []

    def set_slowdowns(self, slowdowns: Sequence[int]) -> None:
        """Set the slowdown of each of the next processes, as a place in `SLOWDOWNS`."""
        self._next = list(slowdowns)

    def start(self, timeout_seconds: float, num_processes: int = 1) -> Session:
        return self._engines[self._next.pop(0)].start(timeout_seconds, num_processes)


@dataclass
class Comparison:
    """One process compared with another, round after round; processes are numbered within their session."""

    before: int  # the plain process
    after: int  # the other
    slowdown: int  # of the other, as a place in `SLOWDOWNS`
    ratios: list[float] = field(default_factory=list)
    is_over: bool = False

    def take(self, before: Trial, after: Trial, rule: StopRule) -> None:
        """Add a round."""
        ratio = paired_ratio(step_times(before), step_times(after))
        assert ratio is not None
        self.ratios.append(ratio)
        self.is_over = rule.is_answered(self.estimate) or len(self.ratios) >= rule.max_rounds

    @property
    def estimate(self) -> Estimate:
        found = estimate(self.ratios)
        assert found is not None
        return found

    def record(self) -> dict[str, object]:
        """Return what a record keeps."""
        verdict, found = verdict_of(self.estimate), self.estimate
        return {
            "slowdown": SLOWDOWNS[self.slowdown],
            "verdict": verdict.kind,
            "speedup": found.value,
            "low": found.low,
            "high": found.high,
            "rounds": found.n,
            "ratios": self.ratios,
        }


def spec_of(cell: str) -> TrialSpec:
    """Return what a cell measures, as `castwise run` does."""
    if is_script(cell):
        options = RunOptions(workloads=(cell,), precisions=(AS_WRITTEN,))
    else:
        workload, precision, batch_size, loop = [*cell.split(":"), "none"][:4]
        sizes = (int(batch_size),)
        options = RunOptions(workloads=(workload,), precisions=(precision,), batch_sizes=sizes, techniques=(loop,))
    return next(spec for spec in prepare(options).specs if spec.precision == options.precisions[0])


def pairs_of(slowdowns: Sequence[int]) -> list[Comparison]:
    """Return what is compared: every two plain processes, and every slowed one with every plain one."""
    plain = [index for index, slowdown in enumerate(slowdowns) if slowdown == 0]
    found = [Comparison(before, after, 0) for before, after in itertools.combinations(plain, 2)]
    slowed_down = [index for index, slowdown in enumerate(slowdowns) if slowdown]
    return found + [Comparison(before, after, slowdowns[after]) for after in slowed_down for before in plain]


def one_set(
    spec: TrialSpec, slowdowns: Sequence[int], machine: Machine, rule: StopRule, deadline: float
) -> list[dict[str, object]]:
    """Return the comparisons of one set of rounds, of processes with these slowdowns.

    There are none if the deadline comes first: those that had ended by then would be the easy ones.
    """
    comparisons = pairs_of(slowdowns)
    engine, number, known = SlowdownEngine(), 0, list[Trial]()
    runner = TrialRunner(engine, None, machine.environment, NullListener())
    while going := [each for each in comparisons if not each.is_over]:
        if time.perf_counter() > deadline:
            return []
        number += 1
        indices = sorted({index for each in going for index in (each.before, each.after)})
        engine.set_slowdowns([slowdowns[index] for index in indices])
        specs = [spec.model_copy(update={"repeat": index}) for index in indices]
        started = time.perf_counter()
        earlier = prior_stats_of(known)
        trials = InterleavedSession(
            runner, specs, round_number=number, earlier={spec.configuration: earlier} if earlier else {}
        ).run()
        bad = [trial for trial in trials if trial.status not in ("ok", "diverged")]
        if bad or len(trials) != len(specs):
            reason = bad[0].message if bad else "out of memory"
            sys.exit(f"{len(trials)} of {len(specs)} processes ended well: {reason}")
        trial_of = dict(zip(indices, trials, strict=True))
        known += [trial for index, trial in trial_of.items() if slowdowns[index] == 0]
        for each in going:
            each.take(trial_of[each.before], trial_of[each.after], rule)
        print(f"  round {number}: {_summary(trials)}, {time.perf_counter() - started:.1f} s", file=sys.stderr)
    return [each.record() for each in comparisons]


def _summary(trials: Sequence[Trial]) -> str:
    spreads = [noise_of(step_times(trial)) for trial in trials]
    blocks = [len(step_times(trial)) for trial in trials]
    warm = [trial.facts.warm_up_seconds for trial in trials if trial.facts is not None]
    middles = [seconds for trial in trials if (seconds := step_seconds(trial)) is not None]
    apart = statistics.stdev(middles) / statistics.fmean(middles)
    slowest = max(middles)
    behind = slowest / statistics.median(middles) - 1
    return (
        f"{len(trials)} processes of {statistics.fmean(blocks):.1f} blocks, warmed up in "
        f"{statistics.fmean(warm):.1f} s, blocks differ by {statistics.median(spreads):.2%}, processes by {apart:.2%}, "
        f"the slowest, in place {middles.index(slowest) + 1}, is {behind:.2%} above the median"
    )


def independent_contrasts(comparisons: Sequence[dict[str, Any]]) -> Counter[float]:
    """Return how many comparisons with each slowdown are independent of each other, of a cell's in their order.

    A set compares all pairs of its plain processes, of which all but one are free, and each slowed one with all these.
    """
    found, plain = Counter[float](), 0
    for slowdown, own in itertools.groupby(each["slowdown"] for each in comparisons):
        count = len(list(own))
        plain = plain if slowdown else round((1 + math.sqrt(1 + 8 * count)) / 2)
        found[slowdown] += count // plain if slowdown else plain - 1
    return found


def table(paths: Sequence[Path]) -> str:
    """Return what the runs on record found: a row per configuration and slowdown, all runs together."""
    found: dict[tuple[str, float], list[dict[str, Any]]] = {}
    contrasts = Counter[tuple[str, float]]()
    places: list[str] = []
    for path in paths:
        document = json.loads(path.read_text())
        places.append(place_of(document["environment"], path.stem[:10]))
        for cell in document["cells"]:
            for each in cell["comparisons"]:
                found.setdefault((cell["cell"], each["slowdown"]), []).append(each)
            for slowdown, count in independent_contrasts(cell["comparisons"]).items():
                contrasts[cell["cell"], slowdown] += count
    cells = []
    for (cell, slowdown), comparisons in sorted(found.items()):
        counts = [sum(each["verdict"] == verdict for each in comparisons) for verdict in _VERDICTS]
        # Between two equal sides nothing can be found: every verdict that is not wrong is right.
        right = counts[0] + counts[1] if slowdown == 0 else counts[3]
        width = statistics.fmean((each["high"] - each["low"]) / 2 / each["speedup"] for each in comparisons)
        rounds = statistics.fmean(each["rounds"] for each in comparisons)
        first = (cell, f"{slowdown:.0%}" if slowdown else "–", len(comparisons), contrasts[cell, slowdown])
        cells.append((*first, *counts, f"{right / len(comparisons):.0%}", f"{rounds:.1f}", f"{width:.2%}"))
    verdicts = " | ".join(_VERDICTS)
    heading = f"configuration | slowed down by | comparisons | independent | {verdicts} | right | rounds | half-width"
    table = markdown(heading, "l" + "r" * (len(_VERDICTS) + 6), cells)
    return "\n".join(["; ".join(dict.fromkeys(places)), "", *table]) + "\n"


def main() -> int:
    """Compare the cells and print what the verdicts were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", default=CELLS)
    parser.add_argument("--comparisons", type=int, default=100)
    parser.add_argument(
        "--places", default="5,2,2", help="plain processes, and those slowed down by 1 and by 2 per cent"
    )
    parser.add_argument("--max-rounds", type=int, default=StopRule.max_rounds)
    parser.add_argument(
        "--budget", type=float, default=float("inf"), help="seconds a cell; what has not ended then is left out"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    machine = detect_machine(None, None)
    counts = [int(count) for count in arguments.places.split(",")]
    slowdowns = [slowdown for slowdown, count in enumerate(counts) for _ in range(count)]
    rule = StopRule(min_rounds=min(3, arguments.max_rounds), max_rounds=arguments.max_rounds)
    results, account = list[dict[str, object]](), dict[str, object]()
    for cell in arguments.cells:
        spec = spec_of(cell)
        started, comparisons = time.perf_counter(), list[dict[str, object]]()
        deadline = started + arguments.budget
        while len(comparisons) < arguments.comparisons * len(SLOWDOWNS) and time.perf_counter() < deadline:
            comparisons += one_set(spec, slowdowns, machine, rule, deadline)
            # Set by set: if the machine is taken away, what it has measured is on the disk.
            account = {"cell": cell, "seconds": time.perf_counter() - started, "comparisons": comparisons}
            environment = machine.environment.model_dump(mode="json")
            write(arguments.out, {"environment": environment, "cells": [*results, account]})
        results.append(account)
        for slowdown in SLOWDOWNS:
            kinds = [str(each["verdict"]) for each in comparisons if each["slowdown"] == slowdown]
            counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
            print(f"{cell}, slowed by {slowdown:.0%}: {len(kinds)} comparisons, {counts}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
