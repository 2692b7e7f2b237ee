"""How often castwise's 95 % intervals hold the true value, and its verdicts are right, on simulated block times.

    python benchmarks/coverage.py [--draws N] [--out FILE]

Needs no GPU. Each scenario draws the step times of two cells over rounds of fresh processes: an effect of the
process, drift that both share, autocorrelated noise of each turn, heavy tails, outliers. The intervals are
castwise's own functions', under the stop rule that castwise runs with.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from stored import write

from castwise.analysis.statistics import (
    FEWEST_BLOCKS,
    Estimate,
    between_process_std,
    estimate,
    noise_of,
    paired_ratio,
    pseudomedian,
    verdict_of,
)
from castwise.orchestrator.block_schedule import BlockSchedule, PriorStats
from castwise.orchestrator.rounds import StopRule
from castwise.spec.trial import CUDA_ROUND

TURNS = CUDA_ROUND.num_blocks
_BLOCKS = 3 * TURNS  # more than any process takes
RULE = StopRule()


@dataclass(frozen=True)
class Scenario:
    """How block times vary; standard deviations as shares of the step time."""

    name: str
    process: float  # of a process's own effect
    turn: float  # of the noise of a turn of usual length
    drift: float = 0.0003  # of a turn's step of the random walk that both cells share
    trend: float = 0.0  # shared slowing-down from the first turn to the last
    autocorrelation: float = 0.0  # of the noise, from turn to turn
    outliers: float = 0.0  # share of turns that something hits, lengthened by a fifth on average
    modes: float = 0.0  # how far apart two speeds are that the cell flips between; the baseline has but one
    heavy: bool = False  # noise and process effects have heavy tails (Student's with 3 degrees of freedom)


SCENARIOS = (
    Scenario("GPU-bound", process=0.001, turn=0.0005),
    Scenario("GPU-bound, warming up", process=0.001, turn=0.0005, drift=0.003, trend=0.02),
    # A GradScaler's wait for the device, once a step, seen on an H200: ResNet-50 in fp16-mixed.
    Scenario("two speeds", process=0.001, turn=0.0005, modes=0.023),
    Scenario("in between", process=0.004, turn=0.005, drift=0.001),
    Scenario("heavy tails", process=0.004, turn=0.01, drift=0.001, heavy=True),
    Scenario("host-bound", process=0.01, turn=0.03, drift=0.001, autocorrelation=0.6, outliers=0.05),
    Scenario("host-bound, heavy tails", process=0.01, turn=0.05, autocorrelation=0.5, outliers=0.1, heavy=True),
)


class Process:
    """A process of a session: blocks of the usual length in a row, of which each turn takes one or several."""

    def __init__(self, blocks: np.ndarray, earlier: PriorStats | None) -> None:
        self.turns = BlockSchedule(CUDA_ROUND, earlier)
        self.seconds: list[float] = []
        self.lengths: list[int] = []
        self._blocks = blocks

    def take(self, drift: float, *, may_be_long: bool) -> None:
        """Take a turn, while drift makes the machine slower."""
        length, begun = self.turns.length if may_be_long else 1, sum(self.lengths)
        seconds = float(self._blocks[begun : begun + length].mean()) * math.exp(drift)
        self.turns.add(seconds, 1, length)
        self.seconds.append(seconds)
        self.lengths.append(length)


def draw(
    rng: np.random.Generator, scenario: Scenario, ratio: float, known: tuple[list[Process], list[Process]]
) -> tuple[list[float], list[float]]:
    """Return the seconds a step of each turn of one session, of a baseline and a configuration `ratio` times as fast.

    There are as many turns as castwise takes. `known` are the earlier processes of either; this session's are added.
    """
    drift = np.cumsum(rng.normal(0, scenario.drift, TURNS)) + np.linspace(0, scenario.trend, TURNS)
    sides = []
    for offset, earlier in zip((0.0, -math.log(ratio)), known, strict=True):
        own = _noise(rng, scenario, _BLOCKS) * scenario.turn
        for block in range(1, _BLOCKS):
            rho = scenario.autocorrelation
            own[block] = rho * own[block - 1] + math.sqrt(1 - rho**2) * own[block]
        own += scenario.modes * (rng.integers(0, 2, _BLOCKS) - 0.5) * bool(sides)
        own += (rng.random(_BLOCKS) < scenario.outliers) * rng.exponential(0.2, _BLOCKS)
        process = _noise(rng, scenario, 1)[0] * scenario.process
        sides.append(Process(np.exp(offset + process + own), _earlier_of(earlier)))
    baseline, cell = sides
    for turn in range(TURNS):
        if not (baseline.turns.goes_on or cell.turns.goes_on):
            break
        may_be_long = baseline.turns.is_quiet
        baseline.take(drift[turn], may_be_long=may_be_long)
        cell.take(drift[turn], may_be_long=may_be_long)
    for side, earlier in zip(sides, known, strict=True):
        earlier.append(side)
    return baseline.seconds, cell.seconds


def _earlier_of(known: Sequence[Process]) -> PriorStats | None:
    """Return what processes showed, as `castwise.orchestrator.rounds.prior_stats_of` does of trials."""
    usable = [process for process in known if len(process.seconds) >= FEWEST_BLOCKS]
    if not usable:
        return None
    noise = max(noise_of(each.seconds, [length / min(each.lengths) for length in each.lengths]) for each in usable)
    middles = [pseudomedian(each.seconds) for each in usable]
    return PriorStats(noise, statistics.fmean(middles), between_process_std(middles))


def _noise(rng: np.random.Generator, scenario: Scenario, count: int) -> np.ndarray:
    return rng.standard_t(3, count) / math.sqrt(3) if scenario.heavy else rng.normal(0, 1, count)


def compare(rng: np.random.Generator, scenario: Scenario, ratio: float, *, fixed: int | None = None) -> Estimate:
    """Return the speed-up that castwise would report: rounds until the interval is narrow, or a fixed number."""
    ratios, known = list[float](), (list[Process](), list[Process]())
    while True:
        value = paired_ratio(*draw(rng, scenario, ratio, known))
        assert value is not None
        ratios.append(value)
        found = estimate(ratios)
        assert found is not None
        if len(ratios) == fixed or (fixed is None and (RULE.is_answered(found) or len(ratios) == RULE.max_rounds)):
            return found


def measure(scenario: Scenario, draws: int, seed: int) -> dict[str, object]:
    """Return coverage and verdicts of one scenario."""
    rng = np.random.default_rng(seed)
    truth = 1.3
    fixed = [compare(rng, scenario, truth, fixed=5) for _ in range(draws)]
    stopped = [compare(rng, scenario, truth) for _ in range(draws)]
    verdicts = {
        name: [verdict_of(compare(rng, scenario, ratio)).kind for _ in range(draws)]
        for name, ratio in (("equal", 1.0), ("slower_2", 0.98), ("slower_1", 0.99))
    }
    return {
        **asdict(scenario),
        "draws": draws,
        "coverage_five_rounds": sum(each.low <= truth <= each.high for each in fixed) / draws,
        "coverage_stop_rule": sum(each.low <= truth <= each.high for each in stopped) / draws,
        "mean_rounds": sum(each.n for each in stopped) / draws,
        "equal_called_different": sum(kind in ("faster", "slower") for kind in verdicts["equal"]) / draws,
        "slower_by_2_percent_found": verdicts["slower_2"].count("slower") / draws,
        "slower_by_1_percent_found": verdicts["slower_1"].count("slower") / draws,
    }


def main() -> None:
    """Simulate every scenario and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = []
    for seed, scenario in enumerate(SCENARIOS):
        results.append(measure(scenario, arguments.draws, seed))
        row = results[-1]
        print(
            f"{scenario.name:24} covers {row['coverage_five_rounds']:.1%} of five rounds, "
            f"{row['coverage_stop_rule']:.1%} under the stop rule ({row['mean_rounds']:.1f} rounds); "
            f"A/A called different {row['equal_called_different']:.1%}; "
            f"found: 2 % {row['slower_by_2_percent_found']:.1%}, 1 % {row['slower_by_1_percent_found']:.1%}",
            flush=True,
        )
    write(arguments.out, {"scenarios": results})


if __name__ == "__main__":
    main()
