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


def measure(cell: str, pairs: int, seconds: float) -> dict[str, object]:
    """Return both sides' throughputs and the ratio with its interval."""
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
    logs = [math.log(trial / script) for trial, script in zip(found["trial"], found["script"], strict=True)]
    mean = statistics.mean(logs)
    half = float(student.ppf(0.975, pairs - 1)) * statistics.stdev(logs) / math.sqrt(pairs) if pairs > 1 else math.inf
    ratios = {"ratio": math.exp(mean), "ratio_low": math.exp(mean - half), "ratio_high": math.exp(mean + half)}
    return {"cell": cell, **found, **ratios, "environment": environment}


def main() -> int:
    """Measure the named cells and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", default=CELLS)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = []
    for cell in arguments.cells:
        result = measure(cell, arguments.pairs, arguments.seconds)
        results.append(result)
        bias, low, high = (100 * (float(str(result[key])) - 1) for key in ("ratio", "ratio_low", "ratio_high"))
        rates = " ".join(f"{side} {[round(rate) for rate in result[side]]}" for side in ("script", "trial"))
        print(f"{cell:22} trial over script {bias:+.2f} % [{low:+.2f}, {high:+.2f}]  {rates}", flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
