"""Compare the scripts that `castwise tune --emit` writes with the loops that were measured.

    python benchmarks/emitted.py --out benchmarks/records/emitted/DATE-NAME.json [--rounds N] [NAME ...]
    python benchmarks/emitted.py --lines    # print how long the scripts are

NAME is a search under benchmarks/records/searches/ (without one: all), whose fastest loop is measured, or a loop as
WORKLOAD,PRECISION,TECHNIQUES,BATCH: `benchmarks/gpt2.py,bf16-mixed,fused-optimizer+compile,16`. It is measured alone in
a process of castwise's, and its script is run as it stands; the two alternate, and each round begins with the other.
"""

import argparse
import json
import statistics
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
from castwise.emit.script import script_of
from castwise.errors import CastwiseError, UsageError
from castwise.orchestrator.machine import Machine, detect_machine, inspect_user_model
from castwise.orchestrator.processes import ForkserverEngine
from castwise.orchestrator.runner import NullListener, TrialRunner
from castwise.registry.gpus import short_device_name
from castwise.registry.precisions import find_precision
from castwise.registry.techniques import join, parse_techniques
from castwise.registry.workloads import find_workload
from castwise.show.table import markdown_text
from castwise.show.units import format_rate
from castwise.spec.trial import CUDA_ROUND, TrialSpec
from castwise.spec.user_model import UserParts, locate

CASTWISE, SCRIPT = "rung", "script"  # the names of the sides in records
GOAL = 0.01  # how far a script's speed may be from its loop's
_TIMEOUT_SECONDS = 1800.0
_EPOCHS, _EPOCH_SECONDS = 11, 0.3  # as many steps as castwise's blocks, and one epoch to warm up


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


def loop_of(written: str, machine: Machine) -> tuple[TrialSpec, UserParts | None]:
    """Return the loop that is written as WORKLOAD,PRECISION,TECHNIQUES,BATCH, or a search's fastest by its name."""
    if "," not in written:
        return fastest_of(written, machine.device), None
    workload, precision, techniques, batch_size = written.split(",")
    parts, own = None, None
    if find_workload(workload).family == "own":
        found = inspect_user_model(machine, locate(workload))
        parts, own = found.parts, found.model
    spec = TrialSpec(
        workload=find_workload(workload).name,
        precision=precision,
        loss_scale=find_precision(precision).loss_scale,
        batch_size=int(batch_size),
        techniques=parse_techniques(techniques),
        device=machine.device,
        user_model=own,
        protocol=CUDA_ROUND.model_copy(update={"timeout_seconds": _TIMEOUT_SECONDS}),
    )
    return spec, parts


def measure_loop(spec: TrialSpec, machine: Machine) -> tuple[float, float]:
    """Return the units per second of a loop in a process of castwise's, and the seconds of a step.

    Raises:
        RuntimeError: The trial failed.
    """
    (trial,) = TrialRunner(ForkserverEngine(), None, machine.environment, NullListener()).run([spec])
    speed = throughput(trial)
    if trial.status != "ok" or speed is None or trial.facts is None:
        raise RuntimeError(f"{spec.label}: {trial.status}: {trial.message}")
    return speed, spec.batch_size * trial.facts.units_per_sample / speed


def run_script(file: Path, options: Sequence[str]) -> float:
    """Return the units per second of a script: the median of its epochs but the first, in which it compiles.

    Raises:
        RuntimeError: The script failed.
    """
    command = [sys.executable, file.name, *options]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=file.parent, timeout=_TIMEOUT_SECONDS, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{file.name}: {done.stderr[-2000:]}")
    return statistics.median(float(line.split()[-2]) for line in done.stdout.splitlines()[1:])


def lines_table(_: str = "") -> str:
    """Return how many lines the script of each search's fastest loop has, and the file beside it."""
    cells = []
    for name in searches():
        try:
            spec = fastest_of(name)
            files = script_of(spec)
        except UsageError:
            continue
        lengths = [str(len(text.splitlines())) for text in files.values()]
        loop = markdown_text(f"{spec.precision}, {join(spec.techniques)}")
        cells.append([name, loop, lengths[0], lengths[1] if len(lengths) > 1 else "–"])
    return "\n".join(markdown("workload | loop | train.py | train_parts.py", "llrr", cells)) + "\n"


def compare(spec: TrialSpec, machine: Machine, rounds: int, parts: UserParts | None = None) -> list[dict[str, Any]]:
    """Return the speed of each side in each round."""
    spec = spec.model_copy(update={"device": machine.device})
    runs: list[dict[str, Any]] = []
    step_seconds = 1.0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "train.py"
        files = script_of(spec, file, parts=parts)
        for path, text in files.items():
            path.write_text(text)
        for number in range(rounds):
            for side in (CASTWISE, SCRIPT) if number % 2 == 0 else (SCRIPT, CASTWISE):
                if side == CASTWISE:
                    speed, step_seconds = measure_loop(spec, machine)
                else:
                    steps = 8 * max(1, round(_EPOCH_SECONDS / step_seconds / 8))
                    speed = run_script(file, ("--epochs", str(_EPOCHS), "--steps", str(steps)))
                runs.append({"side": side, "per_second": speed})
    return runs


def table(paths: Sequence[Path]) -> str:
    """Return a line per loop: its speed, and the ratio of its script to it. The last record of a loop counts."""
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        document = json.loads(path.read_text())
        where = place_of(document["environment"], path.name[:10])
        gpu = short_device_name(document["environment"]["gpu"] or "CPU")
        found |= {loop["name"]: loop | {"where": where, "gpu": gpu} for loop in document["loops"]}
    places = "\n\n".join(where for where, _ in by_place(found.values()))
    heading = "workload | GPU | loop | castwise | script ÷ castwise | 95 % interval | processes per side | within 1 %"
    return "\n".join([places, "", *markdown(heading, "lllrrrrl", map(_cells, found.values()))]) + "\n"


def _cells(loop: Mapping[str, Any]) -> list[object]:
    spec = TrialSpec.model_validate(loop["spec"])
    name = f"{loop['name']}, batch {spec.batch_size}"
    words = markdown_text(f"{spec.precision}, {join(spec.techniques)}")
    ours, script = ([run["per_second"] for run in loop["turns"] if run["side"] == side] for side in (CASTWISE, SCRIPT))
    if not ours or len(ours) != len(script):
        return [name, loop["gpu"], words, *"––––", markdown_text(loop.get("failure", "not measured")[:200])]
    speed, ratio = estimate(ours), estimate([mine / other for mine, other in zip(script, ours, strict=True)])
    assert speed is not None
    assert ratio is not None
    interval, verdict = "–", "one process"
    if ratio.n > 1:
        interval = f"{ratio.low:.3f} … {ratio.high:.3f}"
        is_within = ratio.low >= 1 - GOAL and ratio.high <= 1 + GOAL
        is_outside = ratio.high < 1 - GOAL or ratio.low > 1 + GOAL
        verdict = "yes" if is_within else "no" if is_outside else "undecided"
    rate = f"{format_rate(speed.value)} {loop.get('unit') or find_workload(spec.workload).unit}/s"
    return [name, loop["gpu"], words, rate, f"{ratio.value:.3f}", interval, ratio.n, verdict]


def main() -> int:
    """Measure the loops that are named and write the record after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=sorted(searches()))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--lines", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.lines:
        print(lines_table(), end="")
        return 0
    if arguments.out is None:
        parser.error("name a file for the record with --out")
    machine = detect_machine(None, None)
    loops: list[dict[str, Any]] = []
    for name in arguments.names:
        spec, parts = loop_of(name, machine)
        stem = Path(name.partition(",")[0]).stem
        loop: dict[str, Any] = {"name": stem, "spec": spec.redacted.model_dump(mode="json"), "turns": []}
        loop["unit"] = None if parts is None else parts.unit
        try:
            loop["turns"] = compare(spec, machine, arguments.rounds, parts)
        except (RuntimeError, CastwiseError, subprocess.SubprocessError, ValueError) as error:
            loop["failure"] = str(error)
        loops.append(loop)
        write(arguments.out, {"environment": machine.environment.model_dump(mode="json"), "loops": loops})
        print(*_cells(loop), sep=" | ", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
