"""How often castwise calls a cell different from itself, and finds a slowdown that was put into one arm.

    python benchmarks/aa.py [--comparisons N] [--places N,N,N] [--max-rounds N] [--budget SECONDS] [--out FILE]
                             [CELL ...]

CELL is WORKLOAD:PRECISION:BATCH. Each sitting holds five plain processes, two that are slowed down by 1 % and two by
2 %: after every step the device spins, and the host waits, for that share of the step's time, so that whichever sets
the pace is slowed down. Compared are all pairs of plain ones (10), and each slowed one with each plain one (10 and 10),
as castwise does: rounds of fresh processes that take turns, its stop rule, its interval, its verdict. Comparisons of
one set share processes, as the cells of one command share their baseline: 100 of them are 10 sets.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import slowed
from stored import markdown, place_of

from castwise.analysis.statistics import Estimate, estimate, noise_of, paired_ratio, verdict_of
from castwise.analysis.steady_metrics import step_seconds, step_times
from castwise.orchestrator.machine import Machine, detect_machine
from castwise.orchestrator.processes import ForkserverEngine
from castwise.orchestrator.rounds import StopRule, prior_stats_of
from castwise.orchestrator.runner import TrialRunner, run_interleaved
from castwise.orchestrator.session import Session
from castwise.orchestrator.trial import NullListener
from castwise.records.schema import Trial
from castwise.registry.precisions import find_precision
from castwise.spec.trial import CUDA_ROUND, TrialSpec

CELLS = ("mnist-cnn:fp16-mixed:512", "resnet50:fp16-mixed:128")
SLOWDOWNS = (0.0, 0.01, 0.02)
_PROTOCOL = CUDA_ROUND
_VERDICTS = ("same", "inconclusive", "faster", "slower")


class Arms:
    """Starts each process of a sitting with the slowdown of its place."""

    def __init__(self) -> None:
        self._engines = (
            ForkserverEngine(),
            ForkserverEngine(target=slowed.by_1_percent),
            ForkserverEngine(target=slowed.by_2_percent),
        )
        self._next: list[int] = []

    def seat(self, arms: Sequence[int]) -> None:
        """Say which slowdown each of the next processes has."""
        self._next = list(arms)

    def start(self, timeout_seconds: float, num_processes: int = 1) -> Session:
        return self._engines[self._next.pop(0)].start(timeout_seconds, num_processes)


@dataclass
class Comparison:
    """One place's process against another's, round after round."""

    before: int  # place of the plain process
    after: int  # that of the other
    arm: int  # how the other is slowed down, as a place in `SLOWDOWNS`
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
        """Return what came of it."""
        verdict, found = verdict_of(self.estimate), self.estimate
        return {
            "slowdown": SLOWDOWNS[self.arm],
            "verdict": verdict.kind,
            "speedup": found.value,
            "low": found.low,
            "high": found.high,
            "rounds": found.n,
            "ratios": self.ratios,
        }


def pairs_of(arms: Sequence[int]) -> list[Comparison]:
    """Return what is compared: every two plain places, and every slowed one with every plain one."""
    plain = [place for place, arm in enumerate(arms) if arm == 0]
    found = [Comparison(before, after, 0) for before, after in itertools.combinations(plain, 2)]
    slowed_down = [place for place, arm in enumerate(arms) if arm]
    return found + [Comparison(before, after, arms[after]) for after in slowed_down for before in plain]


def one_set(
    spec: TrialSpec, seats: Sequence[int], bench: Machine, rule: StopRule, deadline: float
) -> list[dict[str, object]]:
    """Return the comparisons of one set of rounds, for places that are slowed down so.

    None where the deadline comes first: those that had ended by then would be the easy ones.
    """
    comparisons = pairs_of(seats)
    arms, number, known = Arms(), 0, list[Trial]()
    runner = TrialRunner(arms, None, bench.environment, NullListener())
    while going := [each for each in comparisons if not each.is_over]:
        if time.perf_counter() > deadline:
            return []
        number += 1
        places = sorted({place for each in going for place in (each.before, each.after)})
        arms.seat([seats[place] for place in places])
        specs = [spec.model_copy(update={"repeat": place}) for place in places]
        started = time.perf_counter()
        earlier = prior_stats_of(known)
        trials = run_interleaved(
            runner, specs, number=number, earlier={spec.configuration: earlier} if earlier else None
        ).trials
        _check(trials, len(specs))
        trial_at = dict(zip(places, trials, strict=True))
        known += [trial for place, trial in trial_at.items() if seats[place] == 0]
        for each in going:
            each.take(trial_at[each.before], trial_at[each.after], rule)
        print(f"  round {number}: {_how_it_went(trials)}, {time.perf_counter() - started:.1f} s", file=sys.stderr)
    return [each.record() for each in comparisons]


def _how_it_went(trials: Sequence[Trial]) -> str:
    spreads = [noise_of(step_times(trial)) for trial in trials]
    blocks = [len(step_times(trial)) for trial in trials]
    warm = [trial.facts.warm_up_seconds for trial in trials if trial.facts is not None]
    middles = [seconds for trial in trials if (seconds := step_seconds(trial)) is not None]
    apart = statistics.stdev(middles) / statistics.fmean(middles)
    return (
        f"{len(trials)} processes of {statistics.fmean(blocks):.1f} blocks, warmed up in "
        f"{statistics.fmean(warm):.1f} s, blocks differ by {statistics.median(spreads):.2%}, processes by {apart:.2%}"
    )


def _check(trials: Sequence[Trial], count: int) -> None:
    bad = [trial for trial in trials if trial.status not in ("ok", "diverged")]
    if bad or len(trials) != count:
        sys.exit(f"{len(trials)} of {count} processes ended well: {bad[0].message if bad else 'out of memory'}")


def _write(path: Path | None, bench: Machine, accounts: Sequence[dict[str, object]]) -> None:
    if path is not None:
        environment = bench.environment.model_dump(mode="json")
        path.write_text(json.dumps({"environment": environment, "cells": accounts}, indent=1) + "\n")


def table(paths: Sequence[Path]) -> str:
    """Return what the runs on record found: a row per configuration and slowdown, all runs together."""
    found: dict[tuple[str, float], list[dict[str, Any]]] = {}
    places: list[str] = []
    for path in paths:
        document = json.loads(path.read_text())
        places.append(place_of(document["environment"], path.stem[:10]))
        for cell in document["cells"]:
            for each in cell["comparisons"]:
                found.setdefault((cell["cell"], each["slowdown"]), []).append(each)
    cells = []
    for (cell, slowdown), comparisons in sorted(found.items()):
        counts = [sum(each["verdict"] == verdict for each in comparisons) for verdict in _VERDICTS]
        # Of two equal sides nothing can be found: not to be wrong is right.
        right = counts[0] + counts[1] if slowdown == 0 else counts[3]
        width = statistics.fmean((each["high"] - each["low"]) / 2 / each["speedup"] for each in comparisons)
        rounds = statistics.fmean(each["rounds"] for each in comparisons)
        first = (cell, f"{slowdown:.0%}" if slowdown else "–", len(comparisons))
        cells.append((*first, *counts, f"{right / len(comparisons):.0%}", f"{rounds:.1f}", f"{width:.2%}"))
    heading = f"configuration | slowed down by | comparisons | {' | '.join(_VERDICTS)} | right | rounds | half-width"
    table = markdown(heading, "l" + "r" * (len(_VERDICTS) + 5), cells)
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
    bench = detect_machine(None, None)
    seats = [arm for arm, count in enumerate(arguments.places.split(",")) for _ in range(int(count))]
    rule = StopRule(min_rounds=min(3, arguments.max_rounds), max_rounds=arguments.max_rounds)
    results, account = list[dict[str, object]](), dict[str, object]()
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
        deadline = started + arguments.budget
        while len(comparisons) < arguments.comparisons * len(SLOWDOWNS) and time.perf_counter() < deadline:
            comparisons += one_set(spec, seats, bench, rule, deadline)
            # Set by set: what a machine that is taken away has measured stands on the disk.
            account = {"cell": cell, "seconds": time.perf_counter() - started, "comparisons": comparisons}
            _write(arguments.out, bench, [*results, account])
        results.append(account)
        for slowdown in SLOWDOWNS:
            kinds = [str(each["verdict"]) for each in comparisons if each["slowdown"] == slowdown]
            counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
            print(f"{cell}, slowed by {slowdown:.0%}: {len(kinds)} comparisons, {counts}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
