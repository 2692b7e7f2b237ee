"""How often `castwise tune` and `castwise compare` are right, in simulations of all that they do.

    python benchmarks/answers.py [--draws N] [--out FILE]

Needs no GPU. A whole search runs: candidates, rounds, stop rule, final session. Only the engine is that of the tests,
which makes step times up: each process has a speed of its own. In a comparison each card has one, too.
"""

import argparse
import math
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from stored import write

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from fake_engine import FakeEngine, fake_environment, fake_spec, fake_trial, machine_with

from castwise.report.machine_comparison import Origin, compare_machines, measured_machines
from castwise.spec.trial import TrialSpec
from castwise.tune.options import TuneOptions
from castwise.tune.result import TuningResult
from castwise.tune.search import prepare_tuning

# By name: how many times as fast techniques make a step.
GAINS = {
    "no gain anywhere": {},
    "gains": {"channels-last": 1.6, "cudnn-search": 1.1, "fused-optimizer": 1.03, "compile": 1.2, "cuda-graph": 1.02},
}
PROCESS_STDS = (0.003, 0.017, 0.07)  # of the logarithm of a process's speed
CARD_STDS = (0.004, 0.011, 0.014)  # of a card's: four H200s in fp32, bf16-mixed and fp16-mixed
_STD_ON_A_CARD = 0.002  # of processes of GPU-bound loops on one card
RATIOS = (1.0, 1.05, 1.1)
VERDICTS = ("faster", "slower", "same", "inconclusive")


def true_speed(gains: dict[str, float], spec: TrialSpec) -> float:
    return math.prod(gains.get(name, 1.0) for name in spec.techniques)


def search(gains: dict[str, float], process_std: float, seed: str) -> TuningResult:
    """Return what a search finds if processes of one configuration differ by this standard deviation."""

    def speed(spec: TrialSpec) -> float:
        return true_speed(gains, spec) * math.exp(random.Random(f"{seed} {spec.key}").gauss(0.0, process_std))

    engine: Callable[..., FakeEngine] = FakeEngine
    request = TuneOptions("resnet50", precisions=("fp32",))
    return prepare_tuning(request, find_machine=machine_with(engine(exclusive=False, gain=speed))).run()


def measure(name: str, process_std: float, draws: int) -> dict[str, object]:
    """Return how often a loop was handed over, how often its total holds the truth, and by how much that is off."""
    gains, num_handed_over, num_better, holds, errors = GAINS[name], 0, 0, list[bool](), list[float]()
    for draw in range(draws):
        found = search(gains, process_std, f"{name} {process_std} {draw}")
        num_handed_over += found.winner != found.start
        truth = true_speed(gains, found.winner)
        num_better += truth > 1
        row = found.row_of(found.winner)
        if row["total_speedup_low"] is not None and found.winner != found.start:
            holds.append(row["total_speedup_low"] <= truth <= row["total_speedup_high"])
            errors.append(row["total_speedup"] / truth - 1)
    return {
        "name": name,
        "process_std": process_std,
        "draws": draws,
        "handed_over": num_handed_over / draws,
        "better": num_better / draws,
        "totals": len(holds),
        "totals_hold": sum(holds) / len(holds) if holds else None,
        "wrong_totals": holds.count(False) / draws,  # of all searches
        "mean_error": statistics.fmean(errors) if errors else None,
    }


def compare_cards(card_std: float, ratio: float, draws: int) -> dict[str, object]:
    """Return which verdicts two cards get whose model is in the mean so many times as fast as the other's."""
    kinds = Counter[str]()
    for draw in range(draws):
        rng = random.Random(f"{card_std} {ratio} {draw}")
        origins = []
        for card, speed in enumerate((1.0, ratio)):
            card_speed = speed * math.exp(rng.gauss(0.0, card_std))
            steps = [0.1 / card_speed * math.exp(rng.gauss(0.0, _STD_ON_A_CARD)) for _ in range(3)]
            environment = fake_environment(gpu_uuid=f"GPU-{card}")
            trials = [
                fake_trial(fake_spec(repeat=repeat), step_seconds=(step,) * 4, environment=environment)
                for repeat, step in enumerate(steps)
            ]
            origins.append(Origin(str(card), trials))
        machines = [machine for own in measured_machines(origins) for machine in own]
        ((_, result),) = (row.results for row in compare_machines(machines).rows)
        assert result.verdict is not None
        kinds[result.verdict.kind] += 1
    return {"card_std": card_std, "ratio": ratio, "draws": draws, **{kind: kinds[kind] / draws for kind in VERDICTS}}


def main() -> None:
    """Simulate every scenario and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    cards = [compare_cards(std, ratio, 10 * arguments.draws) for std in CARD_STDS for ratio in RATIOS]
    print(*cards, sep="\n", flush=True)
    searches = []
    for name in GAINS:
        for process_std in PROCESS_STDS:
            searches.append(measure(name, process_std, arguments.draws))
            print(searches[-1], flush=True)
    write(arguments.out, {"searches": searches, "cards": cards})


if __name__ == "__main__":
    main()
