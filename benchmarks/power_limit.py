"""Loops at the GPU's power limit: castwise's figures against each loop alone, running for a minute.

    python benchmarks/power_limit.py [--sessions N] [--seconds S] [--out FILE] [WORKLOAD:PRECISION+PRECISION:LOOP ...]
    python benchmarks/power_limit.py --after-rest WORKLOAD:PRECISION:LOOP [--seconds S] [--out FILE]

Each session is one `castwise run` of all precisions of a workload in one loop, as a user starts it. Alone, one process
trains in one precision for S seconds without a pause; the first two seconds do not count. Throughputs are compared, and
speed-ups over the first precision, which is `default`. A pair agrees if the difference of its logarithms is within the
interval of the session and the spread of single processes together, at 95 %. With --after-rest it shows how a GPU's
speed changes in the two seconds after a rest.
"""

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castwise.analysis.speedup import process_stds
from castwise.records.schema import Trial
from castwise.registry.precisions import find_precision
from castwise.registry.techniques import in_order
from castwise.registry.workloads import find_workload
from castwise.spec.trial import CUDA_ROUND, TrialSpec

if TYPE_CHECKING:
    from castwise.worker.steady_run import SteadyRun

CELLS = (
    "resnet50:default+bf16-mixed+fp16-mixed:channels-last+compile",
    "wrn-28-10:default+bf16-mixed+bf16-true:channels-last+compile",
)
LEAD_SECONDS = 2.0
RESTS = (0.02, 0.3, 1.0)  # seconds


def of_session(workload: str, precisions: list[str], loop: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as results:
        command = [sys.executable, "-m", "castwise", "run", workload, "--precision", ",".join(precisions)]
        command += ["--techniques", loop, "--results", results, "--format", "json"]
        return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def of_alone(workload: str, precision: str, loop: str, seconds: float) -> float:
    """Return the units a second of one process that trains for a while; run in a process of its own."""
    command = [sys.executable, __file__, "--alone", workload, precision, loop, str(seconds)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def warmed_up(workload: str, precision: str, loop: str) -> tuple["SteadyRun", float]:
    """Return a loop on this process's GPU, without telemetry, and the units of a step."""
    from castwise.worker.steady_run import SteadyRun  # imports torch

    spec = TrialSpec(
        workload=workload,
        precision=precision,
        loss_scale=find_precision(precision).loss_scale,
        batch_size=find_workload(workload).batch_size,
        device="cuda:0",
        techniques=in_order(loop.split("+")),
        protocol=CUDA_ROUND,
    )
    run = SteadyRun(spec, None)
    return run, spec.batch_size * run.warm_up().units_per_sample


def train_alone(workload: str, precision: str, loop: str, seconds: float) -> None:
    """Train without a pause, and print the units a second."""
    run, units = warmed_up(workload, precision, loop)
    (block,) = run.run_stretch(LEAD_SECONDS, 1, seconds)
    print(units * block.num_steps / block.seconds)


def train_after_rests(cell: str, seconds: float, out: Path | None) -> None:
    """Print how much longer or shorter steps after a rest are than in a long stretch, by when they ran."""
    workload, precision, loop = cell.split(":")
    run, _ = warmed_up(workload, precision, loop)
    (block,) = run.run_stretch(LEAD_SECONDS, 1, seconds)
    long = block.seconds / block.num_steps
    found: dict[str, list[float]] = {}
    for rest in RESTS:
        run.run_stretch(LEAD_SECONDS, 1, long)
        time.sleep(rest)
        found[f"{rest:g} s"] = steps = [each.seconds for each in run.run_stretch(0.0, round(2.0 / long), long)]
        for begin, end in itertools.pairwise((0.0, 0.8, 1.1, 2.0)):
            part = [step for step, at in zip(steps, itertools.accumulate(steps), strict=True) if begin <= at < end]
            change = 100 * (statistics.fmean(part) / long - 1)
            print(f"{cell} after a rest of {rest:g} s, {begin:g} to {end:g} s: {change:+.2f} %")
    if out is not None:
        out.write_text(json.dumps({"cell": cell, "long_step_seconds": long, "step_seconds_after_rest": found}) + "\n")


def measure(cell: str, sessions: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield what is known of a cell after each session."""
    workload, names, loop = cell.split(":")
    precisions = names.split("+")
    alone = dict[str, float]()
    for name in precisions:
        alone[name] = of_alone(workload, name, loop, seconds)
        print(f"{cell}: {name} alone {alone[name]:.5g} a second", file=sys.stderr)
    found = list[dict[str, Any]]()
    for _ in range(sessions):
        found.append(of_session(workload, precisions, loop))
        yield {"cell": cell, "alone": alone, "sessions": found}


def compare(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one line for each throughput and each speed-up of each session."""
    alone, lines = measured["alone"], list[dict[str, Any]]()
    first = next(iter(alone))
    stds = {name: std_of(name, measured["sessions"]) for name in alone}
    for number, session in enumerate(measured["sessions"], start=1):
        rows = {row["precision"]: row for row in session["rows"]}
        for name in alone:
            sides = [("throughput", rows[name]["throughput_per_second"], alone[name], (name,))]
            if name != first:
                sides.append(("speed-up", rows[name]["default_speedup"], alone[name] / alone[first], (name, first)))
            for what, value, reference, names in sides:
                key = "throughput" if what == "throughput" else "default_speedup"
                half = math.log(rows[name][f"{key}_high"] / rows[name][f"{key}_low"]) / 2
                allowed = math.hypot(half, 1.96 * math.hypot(*(stds[each] for each in names)))
                difference = math.log(value / reference)
                lines.append(
                    {"what": f"{what} of {name}", "session": number, "castwise": value, "alone": reference}
                    | {"difference": difference, "half_width": half, "allowed": allowed}
                    | {"agrees": abs(difference) <= allowed}
                )
    return lines


def std_of(precision: str, sessions: list[dict[str, Any]]) -> float:
    """Return the standard deviation of a precision's processes, as a share of their step time."""
    stds = [process_stds([each for each in trials_of(one) if each.spec.precision == precision]) for one in sessions]
    return math.sqrt(statistics.fmean(std**2 for std in stds))


def trials_of(session: dict[str, Any]) -> list[Trial]:
    return [Trial.model_validate(trial) for trial in session["trials"]]


def main() -> int:
    """Measure the named cells, and print a line for each comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", default=CELLS)
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--alone", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--after-rest", metavar="CELL", help="one loop's steps after rests, instead")
    arguments = parser.parse_args()
    if arguments.after_rest:
        train_after_rests(arguments.after_rest, arguments.seconds, arguments.out)
        return 0
    if arguments.alone:
        train_alone(*arguments.alone[:3], float(arguments.alone[3]))
        return 0
    results = dict[str, dict[str, Any]]()
    for cell in arguments.cells:
        for measured in measure(cell, arguments.sessions, arguments.seconds):
            environment = measured["sessions"][0]["trials"][0]["environment"]
            lines = compare(measured)
            results[cell] = {"cell": cell, "alone": measured["alone"], "lines": lines, "environment": environment}
            if arguments.out:
                arguments.out.write_text(json.dumps(list(results.values()), indent=1) + "\n")
        for line in results[cell]["lines"]:
            verdict = "agrees" if line["agrees"] else "DIFFERS"
            print(
                f"{line['what']:26} session {line['session']}  {line['castwise']:10.4g} alone {line['alone']:10.4g} "
                f"{100 * line['difference']:+.2f} % of ±{100 * line['allowed']:.2f} %  {verdict}",
                flush=True,
            )
    every = list(itertools.chain.from_iterable(result["lines"] for result in results.values()))
    print(f"{sum(line['agrees'] for line in every)} of {len(every)} agree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
