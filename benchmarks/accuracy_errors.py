"""How often castwise's verdicts on accuracy are right, and wrong, on simulated paired scores.

    python benchmarks/accuracy_errors.py [--draws N] [--out FILE]

Needs no GPU. Differences of pairs are drawn around a true one, and judged by castwise's own functions under its stop
rule: after 5, 8, 12, 20 and 30 pairs, until there is a verdict.
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from stored import RECORDS, markdown, write

from castwise.analysis.equivalence import verdict_after

MARGIN = 0.003  # of accuracy: 0.3 points
SPREADS = (0.0005, 0.0015, 0.003)  # standard deviations of a difference: 0.05, 0.15 and 0.3 points
SEEDS = (5, 12, 30)  # planned at the most
_SHOWN = 12
TRUTHS = {"no difference": 0.0, "worse by the margin": -MARGIN, "better by the margin": MARGIN}

Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray[Any, Any]]
# Each with mean 0 and standard deviation 1.
NOISES: dict[str, Draw] = {
    "normal": lambda random, size: random.standard_normal(size),
    "heavy tails": lambda random, size: random.standard_t(3, size) / math.sqrt(3),
    "skewed": lambda random, size: random.standard_exponential(size) - 1,
    "skewed, other side": lambda random, size: 1 - random.standard_exponential(size),
}


def rates(noise: str, truth: float, spread: float, seeds: int, draws: int) -> dict[str, Any]:
    """Return how often each verdict was reached, as a share of the draws, and the mean number of pairs."""
    random = np.random.default_rng(0)
    gaps = truth + spread * NOISES[noise](random, (draws, seeds))
    found, pairs = Counter[str](), 0
    baseline = [0.9] * seeds
    for row in gaps:
        verdict = verdict_after(baseline, (0.9 + row).tolist(), MARGIN, larger_is_better=True, num_seeds=seeds)
        found[verdict.kind] += 1
        pairs += verdict.num_pairs
    return {name.replace(" ", "_"): found[name] / draws for name in ("as good", "worse", "better")} | {
        "mean_pairs": pairs / draws
    }


def table(name: str) -> str:
    """Return the rates of one run of this script with 12 seeds: a row for each noise and spread."""
    record = json.loads((RECORDS / "accuracy" / f"{name}.json").read_text())
    rows = record["rows"]

    def rate(truth: str, kind: str, row: dict[str, Any]) -> float:
        same = ("noise", "spread", "seeds")
        return next(
            each[kind] for each in rows if each["truth"] == truth and all(each[key] == row[key] for key in same)
        )

    cells = [
        (
            row["noise"],
            f"{100 * row['spread']:.2f}",
            f"{row['as_good']:.1%}",
            f"{row['worse'] + row['better']:.1%}",
            f"{rate('worse by the margin', 'as_good', row):.1%}",
            f"{rate('better by the margin', 'as_good', row):.1%}",
            f"{row['mean_pairs']:.1f}",
        )
        for row in rows
        if row["truth"] == "no difference" and row["seeds"] == _SHOWN
    ]
    heading = (
        "differences | spread, points | no difference: as good | no difference: worse or better "
        "| worse by the margin: as good | better by the margin: as good | pairs"
    )
    return "\n".join(markdown(heading, "lrrrrrr", cells)) + "\n"


def main() -> None:
    """Simulate every case and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=5000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for noise in NOISES:
        for spread in SPREADS:
            for seeds in SEEDS:
                for truth, value in TRUTHS.items():
                    case = {"noise": noise, "spread": spread, "seeds": seeds, "truth": truth}
                    rows.append(case | rates(noise, value, spread, seeds, arguments.draws))
                    print(rows[-1], flush=True)
    write(arguments.out, {"margin": MARGIN, "draws": arguments.draws, "rows": rows})


if __name__ == "__main__":
    main()
