"""How often castwise's verdicts on accuracy are right, and wrong, on simulated paired scores.

    python benchmarks/accuracy_errors.py [--draws N] [--out FILE]

Needs no GPU. Scores of pairs are drawn around a true difference, and judged by castwise's own functions under its stop
rule: after 5, 8, 12, 20 … pairs, until there is a verdict.
"""

import argparse
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from stored import RECORDS, markdown, write

from castwise.analysis.equivalence import AccuracyVerdict, verdict_after

MARGIN = 0.003  # of accuracy: 0.3 points
SPREADS = (0.0005, 0.0015, 0.003, 0.006, 0.018)  # standard deviations of a difference: up to six margins
SEEDS = (12, 80)  # planned at the most
_LATER = (12, 30, 50, 80)  # seeds of one command after the other, until there is a verdict
_PRECISIONS = 7
_MIRRORED = ", other side"  # not in the table: better and worse change places
_COLLAPSE = 50 * MARGIN  # of one run in 50: the mean is worse by the margin
TRUTHS = {"no difference": 0.0, "worse by the margin": -MARGIN, "better by the margin": MARGIN}

Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray[Any, Any]]
# Each with mean 0 and standard deviation 1.
NOISES: dict[str, Draw] = {
    "normal": lambda random, size: random.standard_normal(size),
    "heavy tails": lambda random, size: random.standard_t(3, size) / math.sqrt(3),
    "skewed": lambda random, size: random.standard_exponential(size) - 1,
    f"skewed{_MIRRORED}": lambda random, size: 1 - random.standard_exponential(size),
}


Scores = np.ndarray[Any, Any]  # of runs, by search and seed; NaN of a run that diverged


def verdict(theirs: Scores, own: Scores, plans: Sequence[int]) -> AccuracyVerdict:
    """Return the first verdict of commands that plan so many seeds, one after the other."""
    sides = [[None if math.isnan(score) else score for score in scores.tolist()] for scores in (theirs, own)]
    for seeds in plans:
        found = verdict_after(*(side[:seeds] for side in sides), MARGIN, larger_is_better=True, num_seeds=seeds)
        if found.is_decided:
            break
    return found


def verdicts(own: Scores, theirs: Scores | None = None, plans: Sequence[int] = ()) -> list[AccuracyVerdict]:
    """Return the verdict of each search; the baseline's scores are 0 unless they are given."""
    theirs = np.zeros_like(own) if theirs is None else theirs
    return [verdict(*scores, plans or own.shape[1:]) for scores in zip(theirs, own, strict=True)]


def rates(noise: str, truth: float, spread: float, seeds: int, draws: int) -> dict[str, Any]:
    """Return how often each verdict was reached, as a share of the draws, and the mean number of pairs."""
    found = verdicts(truth + spread * NOISES[noise](np.random.default_rng(0), (draws, seeds)))
    kinds = Counter(each.kind for each in found)
    return {name.replace(" ", "_"): kinds[name] / draws for name in ("as good", "worse", "better")} | {
        "mean_pairs": sum(each.num_pairs for each in found) / draws
    }


def other_errors(draws: int) -> Iterator[tuple[str, int, float]]:
    """Yield other ways to be wrong: what is, and what is said of it; the seeds; and the share of such searches."""
    random = np.random.default_rng(0)

    def is_one_of(kinds: Sequence[str], found: Iterable[AccuracyVerdict]) -> list[bool]:
        return [each.kind in kinds for each in found]

    for seeds, size in ((seeds, (draws, seeds)) for seeds in SEEDS):
        for risk in (0.02, 0.05, 0.1):
            theirs, own = (np.where(random.random(size) < risk, math.nan, 0.0) for _ in range(2))
            wrong = is_one_of(["diverged"], verdicts(own, theirs))
            yield f"{risk:.0%} of runs diverge in both: *diverged*", seeds, sum(wrong) / draws
        for spread in SPREADS[:3]:
            lost = (random.random(size) < MARGIN / _COLLAPSE) * _COLLAPSE
            wrong = is_one_of(["as good"], verdicts(spread * random.standard_normal(size) - lost))
            yield f"1 run in 50 loses 15 points, spread {100 * spread:.2f}: *as good*", seeds, sum(wrong) / draws
        for spread in SPREADS[:4]:
            theirs, *others = spread / math.sqrt(2) * random.standard_normal((1 + _PRECISIONS, *size))
            several = [is_one_of(["worse", "better"], verdicts(own, theirs)) for own in others]
            share = sum(map(any, zip(*several, strict=True))) / draws
            yield f"{_PRECISIONS} equal precisions, spread {100 * spread:.2f}: one *worse* or *better*", seeds, share
    for spread in SPREADS[2:4]:
        found = verdicts(spread * random.standard_normal((draws, _LATER[-1])), plans=_LATER)
        share = sum(is_one_of(["worse", "better"], found)) / draws
        yield f"12 seeds, and 30, 50, 80 while undecided, spread {100 * spread:.2f}: *worse* or *better*", 80, share


def table(name: str) -> str:
    """Return the rates of one run of this script: a row for each noise and spread, and the other cases."""
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
            row["seeds"],
            f"{100 * row['spread']:.2f}",
            f"{row['as_good']:.1%}",
            f"{row['worse'] + row['better']:.1%}",
            f"{rate('worse by the margin', 'as_good', row):.1%}",
            f"{rate('better by the margin', 'as_good', row):.1%}",
            f"{row['mean_pairs']:.1f}",
        )
        for row in rows
        if row["truth"] == "no difference" and not row["noise"].endswith(_MIRRORED)
    ]
    heading = (
        "differences | seeds | spread, points | no difference: as good | no difference: worse or better "
        "| worse by the margin: as good | better by the margin: as good | pairs"
    )
    others: dict[str, dict[int, str]] = {}
    for case, seeds, share in record["others"]:
        others.setdefault(case, {})[seeds] = f"{share:.1%}"
    shares = [(case, *(found.get(seeds, "–") for seeds in SEEDS)) for case, found in others.items()]
    titles = " | ".join(f"searches of {seeds} seeds" for seeds in SEEDS)
    tables = markdown(heading, "lrrrrrrr", cells), markdown(f"case: what is said | {titles}", "lrr", shares)
    return "\n\n".join("\n".join(table) for table in tables) + "\n"


def main() -> None:
    """Simulate every case and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows, others = [], []
    for other in other_errors(arguments.draws):
        others.append(other)
        print(*other, flush=True)
    for noise, seeds, spread in itertools.product(NOISES, SEEDS, SPREADS):
        for truth, value in TRUTHS.items():
            case = {"noise": noise, "spread": spread, "seeds": seeds, "truth": truth}
            rows.append(case | rates(noise, value, spread, seeds, arguments.draws))
            print(rows[-1], flush=True)
    write(arguments.out, {"margin": MARGIN, "draws": arguments.draws, "rows": rows, "others": others})


if __name__ == "__main__":
    main()
