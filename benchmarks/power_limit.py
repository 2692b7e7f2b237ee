"""Loops at the GPU's power limit: castwise's figures against the same loops alone, running for a while.

    python benchmarks/power_limit.py [--turns N] [--seconds S] [--out FILE] [WORKLOAD:PRECISION+PRECISION:LOOP ...]

A turn is one `castwise run` of all precisions of a workload in one loop, as a user starts it, and for each precision a
process that trains alone for S seconds without a pause, after two seconds that do not count. Throughputs are compared,
and speed-ups over the first precision, which is `default`: both sides have one value a turn. They agree if the 95 %
interval of their ratio lies within 1 %, and differ if it lies outside.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from stored import RECORDS, markdown, place_of, write

from castwise.analysis.statistics import independent_ratio
from castwise.registry.precisions import find_precision
from castwise.registry.techniques import parse_techniques
from castwise.registry.workloads import find_workload
from castwise.spec.trial import CUDA_ROUND, TrialSpec

CELLS = (
    "resnet50:default+bf16-mixed+fp16-mixed:channels-last+compile",
    "wrn-28-10:default+bf16-mixed+bf16-true:channels-last+compile",
)
TOLERANCE = 0.01
_LEAD_IN_SECONDS = 2.0
Turn = dict[str, dict[str, float]]  # throughputs by side and precision


def of_session(workload: str, precisions: list[str], loop: str) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the throughputs of one `castwise run`, and where it ran."""
    with tempfile.TemporaryDirectory() as results:
        command = [sys.executable, "-m", "castwise", "run", workload, "--precision", ",".join(precisions)]
        command += ["--techniques", loop, "--results", results, "--format", "json"]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    speeds = {row["precision"]: row["throughput_per_second"] for row in found["rows"]}
    return speeds, found["trials"][0]["environment"]


def train_alone(workload: str, precision: str, loop: str, seconds: float) -> None:
    """Train on this process's GPU without a pause or telemetry, and print the units a second."""
    from castwise.trial.steady_run import SteadyRun  # imports torch

    spec = TrialSpec(
        workload=workload,
        precision=precision,
        loss_scale=find_precision(precision).loss_scale,
        batch_size=find_workload(workload).batch_size,
        device="cuda:0",
        techniques=parse_techniques(loop),
        protocol=CUDA_ROUND,
    )
    run = SteadyRun(spec, None)
    units = spec.batch_size * run.warm_up().units_per_sample
    (block,) = run.run_stretch(_LEAD_IN_SECONDS, 1, seconds)
    print(units * block.num_steps / block.seconds)


def measure(cell: str, seconds: float) -> tuple[Turn, dict[str, Any]]:
    """Return the throughputs of one turn, and where it was measured."""
    workload, names, loop = cell.split(":")
    session, environment = of_session(workload, names.split("+"), loop)
    alone = {}
    for name in session:
        command = [sys.executable, __file__, "--alone", workload, name, loop, str(seconds)]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        alone[name] = float(printed.split()[-1])
    return {"castwise": session, "alone": alone}, environment


def rows_of(cell: str, turns: list[Turn]) -> list[list[str]]:
    """Return a line for each throughput and each speed-up."""
    workload, names, _ = cell.split(":")
    first, *others = names.split("+")
    figures = [(f"throughput of {name}", name, None) for name in (first, *others)]
    figures += [(f"speed-up of {name}", name, first) for name in others]
    rows = []
    for what, name, base in figures:
        sides = [
            [turn[side][name] / (turn[side][base] if base else 1.0) for turn in turns] for side in ("castwise", "alone")
        ]
        ratio = independent_ratio(*sides)
        ends = [100 * (end - 1) for end in (ratio.value, ratio.low, ratio.high)]
        is_within = ratio.low > 1 - TOLERANCE and ratio.high < 1 + TOLERANCE
        is_outside = ratio.high < 1 - TOLERANCE or ratio.low > 1 + TOLERANCE
        verdict = "yes" if is_within else "no" if is_outside else "not shown"
        rows.append([workload, what, str(len(turns)), "{:+.2f} % [{:+.2f}, {:+.2f}]".format(*ends), verdict])
    return rows


def table(name: str) -> str:
    """Return how far the figures of one record are from those of the loops alone."""
    record = json.loads((RECORDS / "power_limit" / f"{name}.json").read_text())
    rows = [row for cell, turns in record["cells"].items() for row in rows_of(cell, turns)]
    place = place_of(record["environment"], name[:10])
    heading = "model | figure | turns | castwise over alone | within 1 %"
    return "\n".join([place, "", *markdown(heading, "llrrl", rows)]) + "\n"


def main() -> None:
    """Measure the named cells turn by turn, and write the record after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", default=CELLS)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--alone", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        train_alone(*arguments.alone[:3], float(arguments.alone[3]))
        return
    cells: dict[str, list[Turn]] = {cell: [] for cell in arguments.cells}
    for number in range(arguments.turns):
        for cell, turns in cells.items():
            turn, environment = measure(cell, arguments.seconds)
            turns.append(turn)
            print(f"turn {number + 1}, {cell}: {turn}", flush=True)
            write(arguments.out, {"cells": cells, "environment": environment})
    for cell, turns in cells.items():
        for row in rows_of(cell, turns):
            print(*row, sep="  ", flush=True)


if __name__ == "__main__":
    main()
