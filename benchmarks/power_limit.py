"""Loops at the GPU's power limit: castwise's figures against each loop alone, running for a minute.

    python benchmarks/power_limit.py [--sessions N] [--seconds S] [--out FILE] [WORKLOAD:PRECISION+PRECISION:LOOP ...]

Each session is one `castwise run` of all precisions of a workload in one loop, as a user starts it. Alone, one process
trains in one precision for S seconds without a pause; the first two seconds do not count. Throughputs are compared, and
speed-ups over the first precision, which is `default`. A pair agrees if the difference of its logarithms is within the
interval of the session and the spread of single processes together, at 95 %.
"""

import argparse
import itertools
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CELLS = (
    "resnet50:default+bf16-mixed+fp16-mixed:channels-last+compile",
    "wrn-28-10:default+bf16-mixed+bf16-true:channels-last+compile",
)
LEAD_SECONDS = 2.0


def of_session(workload: str, precisions: list[str], loop: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as results:
        command = [sys.executable, "-m", "castwise", "run", workload, "--precision", ",".join(precisions)]
        command += ["--techniques", loop, "--results", results, "--format", "json"]
        return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def of_alone(workload: str, precision: str, loop: str, seconds: float) -> float:
    """Return the units a second of one process that trains for a while; run in a process of its own."""
    command = [sys.executable, __file__, "--alone", workload, precision, loop, str(seconds)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def train_alone(workload: str, precision: str, loop: str, seconds: float) -> None:
    """Train without telemetry, and print the units a second."""
    from castwise.registry.precisions import find_precision
    from castwise.registry.techniques import in_order
    from castwise.registry.workloads import find_workload
    from castwise.spec.trial import CUDA_ROUND, TrialSpec
    from castwise.worker.steady_run import SteadyRun

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
    facts = run.warm_up()
    (block,) = run.run_stretch(LEAD_SECONDS, 1, seconds)
    print(spec.batch_size * facts.units_per_sample * block.num_steps / block.seconds)


def measure(cell: str, sessions: int, seconds: float) -> dict[str, Any]:
    workload, names, loop = cell.split(":")
    precisions = names.split("+")
    alone = dict[str, float]()
    for name in precisions:
        alone[name] = of_alone(workload, name, loop, seconds)
        print(f"{cell}: {name} alone {alone[name]:.5g} a second", file=sys.stderr)
    found = [of_session(workload, precisions, loop) for _ in range(sessions)]
    return {"cell": cell, "alone": alone, "sessions": found}


def compare(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one line for each throughput and each speed-up of each session."""
    alone, lines = measured["alone"], list[dict[str, Any]]()
    first = next(iter(alone))
    stds = process_stds(measured["sessions"])
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


def process_stds(sessions: list[dict[str, Any]]) -> dict[str, float]:
    """Return the standard deviation of each precision's processes, of the logarithms of their rates."""
    logs: dict[str, list[list[float]]] = {}
    for session in sessions:
        by_precision: dict[str, list[float]] = {}
        for trial in session["trials"]:
            blocks = trial["ranks"][0]["blocks"]
            seconds = sum(block["seconds"] for block in blocks) / sum(block["num_steps"] for block in blocks)
            by_precision.setdefault(trial["spec"]["precision"], []).append(math.log(seconds))
        for name, values in by_precision.items():
            logs.setdefault(name, []).append(values)
    return {name: _pooled_std(groups) for name, groups in logs.items()}


def _pooled_std(groups: list[list[float]]) -> float:
    squares = sum((value - sum(group) / len(group)) ** 2 for group in groups for value in group)
    return math.sqrt(squares / max(1, sum(len(group) - 1 for group in groups)))


def main() -> int:
    """Measure the named cells, and print a line for each comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", default=CELLS)
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--alone", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        train_alone(*arguments.alone[:3], float(arguments.alone[3]))
        return 0
    results = []
    for cell in arguments.cells:
        measured = measure(cell, arguments.sessions, arguments.seconds)
        lines = compare(measured)
        environment = measured["sessions"][0]["trials"][0]["environment"]
        results.append({"cell": cell, "alone": measured["alone"], "lines": lines, "environment": environment})
        for line in lines:
            verdict = "agrees" if line["agrees"] else "DIFFERS"
            print(
                f"{line['what']:26} session {line['session']}  {line['castwise']:10.4g} alone {line['alone']:10.4g} "
                f"{100 * line['difference']:+.2f} % of ±{100 * line['allowed']:.2f} %  {verdict}",
                flush=True,
            )
        if arguments.out:
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    every = list(itertools.chain.from_iterable(result["lines"] for result in results))
    print(f"{sum(line['agrees'] for line in every)} of {len(every)} agree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
