"""How a trial of castwise compares with a plain script of the same training step: pairs of processes, in turn.

    python benchmarks/against_plain.py [--pairs N] [--seconds S] [--out FILE] [WORKLOAD:PRECISION ...]

The plain script is `plain_loop.py`, which shares no code with castwise. Each pair is one process of each, in an order
that changes from pair to pair. Prints the ratio of the throughputs, trial over script, with its 95 % interval.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from scipy.stats import t as student

HERE = Path(__file__).parent
CELLS = ("resnet50:fp16-mixed", "resnet50:bf16-mixed", "wrn-28-10:fp16-mixed", "wrn-28-10:bf16-mixed")


def of_script(workload: str, precision: str, seconds: float) -> tuple[float, dict[str, object]]:
    command = [sys.executable, str(HERE / "plain_loop.py"), workload, precision, str(seconds)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(json.loads(output)["images_per_second"]), {}


def of_trial(workload: str, precision: str, seconds: float) -> tuple[float, dict[str, object]]:
    with tempfile.TemporaryDirectory() as results:
        command = [sys.executable, "-m", "castwise", "run", workload, "--precision", precision, "--rounds", "1"]
        command += ["--seconds", str(seconds), "--results", results, "--format", "json"]
        document = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    (row,) = document["rows"]
    return float(row["throughput_per_second"]), document["trials"][0]["environment"]


def measure(cell: str, pairs: int, seconds: float) -> Iterator[dict[str, object]]:
    """Yield both sides' throughputs and the ratio with its interval after each pair."""
    workload, _, precision = cell.partition(":")
    found: dict[str, list[float]] = {"script": [], "trial": []}
    sides = [("script", of_script), ("trial", of_trial)]
    environment: dict[str, object] = {}
    for pair in range(pairs):
        for name, run in sides if pair % 2 == 0 else sides[::-1]:
            rate, seen = run(workload, precision, seconds)
            found[name].append(rate)
            environment = seen or environment
        print(f"{cell} pair {pair + 1}: {[round(rates[-1], 1) for rates in found.values()]}", file=sys.stderr)
        yield {"cell": cell, **found, **ratios_of(found["trial"], found["script"]), "environment": environment}


def ratios_of(trials: list[float], scripts: list[float]) -> dict[str, float]:
    logs = [math.log(trial / script) for trial, script in zip(trials, scripts, strict=True)]
    mean, n = statistics.mean(logs), len(logs)
    half = float(student.ppf(0.975, n - 1)) * statistics.stdev(logs) / math.sqrt(n) if n > 1 else math.inf
    return {"ratio": math.exp(mean), "ratio_low": math.exp(mean - half), "ratio_high": math.exp(mean + half)}


def main() -> int:
    """Measure the named cells and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", default=CELLS)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = dict[str, dict[str, object]]()
    for cell in arguments.cells:
        for result in measure(cell, arguments.pairs, arguments.seconds):
            results[cell] = result
            if arguments.out:
                arguments.out.write_text(json.dumps(list(results.values()), indent=1) + "\n")
        bias, low, high = (100 * (float(str(result[key])) - 1) for key in ("ratio", "ratio_low", "ratio_high"))
        print(f"{cell:22} trial over script {bias:+.2f} % [{low:+.2f}, {high:+.2f}]", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
