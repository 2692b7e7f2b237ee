"""Compare the scripts that `castwise tune --emit` writes with the loops that were measured.

    python benchmarks/emitted.py --out benchmarks/records/emitted/DATE-NAME.json [--rounds N] [NAME ...]

NAME is a search under benchmarks/records/searches/ (without one: all). Its fastest loop is measured alone in a process
of castwise's, and its script is run as it stands; the two alternate, and each round begins with the other one.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from search_tables import searches
from stored import by_place, markdown, place_of, write

from castwise.analysis.statistics import estimate
from castwise.analysis.steady_metrics import throughput
from castwise.errors import CastwiseError
from castwise.orchestrator.machine import Machine, detect_machine
from castwise.orchestrator.processes import ForkserverEngine
from castwise.orchestrator.runner import NullListener, TrialRunner
from castwise.registry.techniques import join
from castwise.registry.workloads import find_workload
from castwise.render.emit.script import script_of
from castwise.render.table import markdown_text
from castwise.render.units import format_rate
from castwise.spec.trial import CUDA_ROUND, TrialSpec

CASTWISE, SCRIPT = "rung", "script"  # the names of the sides in records
GOAL = 0.02  # how far a script's speed may be from its loop's
_TIMEOUT_SECONDS = 1800.0


def fastest_of(name: str, device: str = "cuda:0") -> TrialSpec:
    """Return the fastest loop of a search on record."""
    search = searches()[name]
    fastest = search["fastest"]
    return TrialSpec(
        workload=search["workload"],
        precision=fastest["precision"],
        loss_scale=fastest["loss_scale"],
        batch_size=fastest["batch_size"],
        techniques=tuple(fastest["techniques"]),
        device=device,
        protocol=CUDA_ROUND.model_copy(update={"timeout_seconds": _TIMEOUT_SECONDS}),
    )


def measure_loop(spec: TrialSpec, machine: Machine) -> float:
    """Return the units per second of a loop in a process of castwise's.

    Raises:
        RuntimeError: The trial failed.
    """
    (trial,) = TrialRunner(ForkserverEngine(), None, machine.environment, NullListener()).run([spec])
    speed = throughput(trial)
    if trial.status != "ok" or speed is None:
        raise RuntimeError(f"{spec.label}: {trial.status}: {trial.message}")
    return speed


def run_script(file: Path, options: Sequence[str] = ()) -> float:
    """Return the units per second that a script prints.

    Raises:
        RuntimeError: The script failed.
    """
    command = [sys.executable, "-P", file.name, *options]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=file.parent, timeout=_TIMEOUT_SECONDS, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{file.name}: {done.stderr[-2000:]}")
    return float(done.stdout.splitlines()[-1].split()[0])


def compare(spec: TrialSpec, machine: Machine, rounds: int, options: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the speed of each side in each round."""
    spec = spec.model_copy(update={"device": machine.device})
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "train.py"
        file.write_text(script_of(spec))
        for number in range(rounds):
            for side in (CASTWISE, SCRIPT) if number % 2 == 0 else (SCRIPT, CASTWISE):
                speed = measure_loop(spec, machine) if side == CASTWISE else run_script(file, options)
                runs.append({"side": side, "per_second": speed})
    return runs


def table(paths: Sequence[Path]) -> str:
    """Return a line per loop: its speed, and the ratio of its script to it. The last record of a loop counts."""
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        document = json.loads(path.read_text())
        where = place_of(document["environment"], path.name[:10])
        found |= {loop["name"]: loop | {"where": where} for loop in document["loops"]}
    places = "\n\n".join(where for where, _ in by_place(found.values()))
    heading = "workload | loop | castwise | script ÷ castwise | 95 % interval | processes per side | within 2 %"
    return "\n".join([places, "", *markdown(heading, "llrrrrl", map(_cells, found.values()))]) + "\n"


def _cells(loop: Mapping[str, Any]) -> list[object]:
    spec = TrialSpec.model_validate(loop["spec"])
    name = f"{loop['name']}, batch {spec.batch_size}"
    words = markdown_text(f"{spec.precision}, {join(spec.techniques)}")
    ours, script = ([run["per_second"] for run in loop["turns"] if run["side"] == side] for side in (CASTWISE, SCRIPT))
    if not ours or len(ours) != len(script):
        return [name, words, *"––––", markdown_text(loop.get("failure", "not measured")[:200])]
    speed, ratio = estimate(ours), estimate([mine / other for mine, other in zip(script, ours, strict=True)])
    assert speed is not None
    assert ratio is not None
    interval, verdict = "–", "one process"
    if ratio.n > 1:
        interval = f"{ratio.low:.3f} … {ratio.high:.3f}"
        is_within = ratio.low >= 1 - GOAL and ratio.high <= 1 + GOAL
        is_outside = ratio.high < 1 - GOAL or ratio.low > 1 + GOAL
        verdict = "yes" if is_within else "no" if is_outside else "undecided"
    rate = f"{format_rate(speed.value)} {find_workload(spec.workload).unit}/s"
    return [name, words, rate, f"{ratio.value:.3f}", interval, ratio.n, verdict]


def main() -> int:
    """Measure the loops that are named and write the record after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=sorted(searches()))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    machine = detect_machine(None, None)
    loops: list[dict[str, Any]] = []
    for name in arguments.names:
        spec = fastest_of(name, machine.device)
        loop: dict[str, Any] = {"name": name, "spec": spec.model_dump(mode="json"), "turns": []}
        try:
            loop["turns"] = compare(spec, machine, arguments.rounds)
        except (RuntimeError, CastwiseError, subprocess.SubprocessError, ValueError) as error:
            loop["failure"] = str(error)
        loops.append(loop)
        write(arguments.out, {"environment": machine.environment.model_dump(mode="json"), "loops": loops})
        print(*_cells(loop), sep=" | ", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
