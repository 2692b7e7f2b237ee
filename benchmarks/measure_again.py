"""Measure again what the documents quote: the commands behind the records.

    python benchmarks/measure_again.py DIR [--gpus N] [--list] [JOB ...]

A JOB is `trials/WORKLOAD` or `searches/WORKLOAD`; without one, all. What it writes under DIR belongs under
benchmarks/records/. Jobs run on N GPUs side by side, one on each. After an interruption the same command goes on.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from castwise.analysis.steady_metrics import unit_of
from castwise.records.schema import Trial

HERE = Path(__file__).parent
WORKLOADS = ("resnet50", "wrn-28-10", "lstm-lm", "lstm-lm-1500", "mlp-4096", "mnist-cnn", "dpn92")
SEARCHES = (*WORKLOADS, "efficientnet_b0", "fastai-resnet50", "gpt2", "bert-base", "vit-b16", "gpt-d4096", "own-gpt2")
OWN_MODELS = {"own-gpt2": str(HERE / "gpt2.py")}
OPTIONS = {"resnet50": ("--memory", "8GiB")}  # of a search


def main() -> int:
    """Run the jobs, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="DIR")
    parser.add_argument("jobs", nargs="*", metavar="JOB")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    every = [f"trials/{name}" for name in (*WORKLOADS, "gpt2", "own-gpt2")] + [f"searches/{name}" for name in SEARCHES]
    jobs = arguments.jobs or every
    if unknown := set(jobs) - set(every):
        parser.error(f"no such job: {', '.join(sorted(unknown))}")
    if arguments.list:
        print(*jobs, sep="\n")
        return 0
    waiting: SimpleQueue[str] = SimpleQueue()
    for job in jobs:
        waiting.put(job)
    failed: list[str] = []
    lanes = [Thread(target=work, args=(waiting, arguments.out, gpu, failed)) for gpu in range(arguments.gpus)]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
    return 1 if failed else 0


def work(waiting: "SimpleQueue[str]", out: Path, gpu: int, failed: list[str]) -> None:
    """Run jobs on a GPU until none is left."""
    while True:
        try:
            job = waiting.get_nowait()
        except Empty:
            return
        started = time.monotonic()
        is_ok = run(job, out, gpu)
        failed += [] if is_ok else [job]
        print(f"{job}: {'done' if is_ok else 'failed'} in {time.monotonic() - started:.0f} s", flush=True)


def run(job: str, out: Path, gpu: int) -> bool:
    """Run one job; return whether it ended well."""
    kind, _, name = job.partition("/")
    verb, results = ("run", out / "trials") if kind == "trials" else ("tune", out / "results" / name)
    command = [sys.executable, "-m", "castwise", verb, OWN_MODELS.get(name, name), "--results", str(results)]
    command += ["--format", "json", *(OPTIONS.get(name, ()) if verb == "tune" else ())]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
    done = subprocess.run(command, check=False, env=environment, stdout=subprocess.PIPE, text=True)
    if not done.stdout:
        return False
    if verb == "tune":
        (out / "searches").mkdir(parents=True, exist_ok=True)
        account = account_of(json.loads(done.stdout))
        (out / "searches" / f"{name}.json").write_text(json.dumps(account, separators=(",", ":")) + "\n")
    return True


def account_of(document: dict[str, Any]) -> dict[str, Any]:
    """Return what a search printed without its raw trials."""
    trials = document.pop("trials")
    first = min(trials, key=lambda trial: trial["started_at"])
    document |= {key: document["start"][key] for key in ("batch_size", "precision")}
    document |= {key: first[key] for key in ("started_at", "environment")}
    return document | {"unit": unit_of(Trial.model_validate(first)), "num_trials": len(trials)}


if __name__ == "__main__":
    sys.exit(main())
