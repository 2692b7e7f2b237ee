"""How often `castwise run` says "take", and how often it is wrong: many repetitions on a quiet and on a busy CPU.

    python benchmarks/advice_study.py [--runs N] [--lanes N] [--out FILE] [MODEL ...]

MODEL is a function of small_models.py. Each command runs on two CPUs; --lanes commands run at a time, on CPUs of their
own. The busy machine has two more processes on the same CPUs that compute all the time. What is right comes from all
runs on the quiet machine together: the geometric mean of each precision's speed-ups over fp32. "Take" is wrong if that
precision is not faster, "stay" if one with float32 weights is at least 1.03 times as fast.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

HERE = Path(__file__).parent
WORTH = 1.03
KEEPS_WEIGHTS = ("tf32", "fp16-mixed", "bf16-mixed", "fp16-master", "bf16-master")


def pinned(cpus: str, *command: str) -> list[str]:
    return ["taskset", "-c", cpus, sys.executable, *command]


@contextmanager
def load_on(cpus: str, *, busy: bool) -> Iterator[None]:
    hogs = [subprocess.Popen(pinned(cpus, "-c", "while True: pass")) for _ in range(2 if busy else 0)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def run(model: str, cpus: str, *, busy: bool) -> dict[str, Any]:
    """Return what one command advises, and the speed-ups that it found."""
    with tempfile.TemporaryDirectory() as results, load_on(cpus, busy=busy):
        command = ["-m", "castwise", "run", f"{HERE / 'small_models.py'}:{model}", "--device", "cpu"]
        command += ["--results", results, "--format", "json"]
        output = subprocess.run(pinned(cpus, *command), check=True, capture_output=True, text=True).stdout
    document = json.loads(output)
    (advice,) = document["advice"]
    rows = [row for row in document["rows"] if row["status"] == "ok" and row["speedup"]]
    return {
        "decision": advice["decision"],
        "precision": advice["precision"],
        "speedups": {row["precision"]: row["speedup"] for row in rows},
        "processes": {row["precision"]: row["processes"] for row in rows},
        "environment": document["trials"][0]["environment"],
    }


def run_all(model: str, runs: int, lanes: int, *, busy: bool) -> list[dict[str, Any]]:
    """Return what so many commands found, `lanes` of them at a time."""
    cpus = sorted(os.sched_getaffinity(0))[-2 * lanes :]
    free: SimpleQueue[str] = SimpleQueue()
    for lane in range(lanes):
        free.put(",".join(map(str, cpus[2 * lane : 2 * lane + 2])))

    def one(_: int) -> dict[str, Any]:
        mine = free.get()
        try:
            return run(model, mine, busy=busy)
        finally:
            free.put(mine)

    with ThreadPoolExecutor(lanes) as pool:
        return list(pool.map(one, range(runs)))


def is_wrong(found: dict[str, Any], truth: dict[str, float]) -> bool:
    if found["decision"] == "take":
        return truth.get(found["precision"], 0.0) <= 1
    return found["decision"] == "stay" and any(truth.get(name, 0.0) >= WORTH for name in KEEPS_WEIGHTS)


def main() -> int:
    """Run all repetitions, and print a line for each model and state of the machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=("unet", "gpt"))
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = []
    for model in arguments.models:
        truth: dict[str, float] = {}
        for busy in (False, True):
            runs = run_all(model, arguments.runs, arguments.lanes, busy=busy)
            if not busy:
                names = {name for each in runs for name in each["speedups"]}
                logs = {name: [math.log(r["speedups"][name]) for r in runs if name in r["speedups"]] for name in names}
                truth = {name: math.exp(statistics.fmean(values)) for name, values in logs.items()}
            wrong = sum(is_wrong(each, truth) for each in runs)
            decisions = Counter(each["decision"] for each in runs)
            environment = runs[0]["environment"]
            for each in runs:
                del each["environment"]
            result = {"model": model, "busy": busy, "lanes": arguments.lanes, "decisions": decisions, "wrong": wrong}
            results.append(result | {"truth": truth, "runs": runs, "environment": environment})
            words = ", ".join(f"{name} {count}" for name, count in sorted(decisions.items()))
            best = ", ".join(f"{name} {value:.2f}" for name, value in sorted(truth.items()))
            print(
                f"{model:6}{'busy' if busy else 'quiet':6} {len(runs)} runs: {words}; wrong {wrong}  ({best})",
                flush=True,
            )
            if arguments.out:
                arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
