"""castwise's fastest loop of a model and a good loop by hand, in turns, and the ratio of their speeds.

    python benchmarks/by_hand.py --out benchmarks/records/by_hand/DATE-NAME.json [WORKLOAD ...]

Each turn is a process of its own: the loop by hand, castwise's, and the one by hand again, so that a noisy machine
shows. `hand_loops.py` has the loops by hand.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from emitted import measure_loop
from stored import by_place, markdown, place_of, write

from castwise.errors import CastwiseError
from castwise.orchestrator.machine import Machine, detect_machine
from castwise.registry.precisions import find_precision
from castwise.registry.techniques import parse_techniques
from castwise.registry.workloads import find_workload
from castwise.render.units import format_rate
from castwise.spec.trial import CUDA_PROTOCOL, MeasurementProtocol, TrialSpec

HAND, CASTWISE = "by hand", "castwise"  # the names of the sides in records
_HAND_LOOPS = Path(__file__).with_name("hand_loops.py")
_TIMEOUT_SECONDS = 600.0
_PROTOCOL = CUDA_PROTOCOL.model_copy(update={"max_seconds": 4.0, "timeout_seconds": _TIMEOUT_SECONDS})
_TINY_PROTOCOL = _PROTOCOL.model_copy(update={"warm_up_seconds": 0.05, "block_seconds": 0.01, "max_seconds": 0.05})


@dataclass(frozen=True)
class Row:
    """A model, and its loops."""

    workload: str
    batch_size: int
    hand_precision: str
    compiled: bool  # the model by hand is under torch.compile
    precision: str
    techniques: str  # of castwise's loop

    @property
    def loops(self) -> dict[str, str]:
        """Return the sides' loops in words."""
        by_hand = f"{self.hand_precision}, compiled" if self.compiled else self.hand_precision
        return {HAND: by_hand, CASTWISE: f"{self.precision}, {self.techniques}"}


def _images(workload: str, batch_size: int, techniques: str) -> Row:
    return Row(workload, batch_size, "bf16-mixed", True, "bf16-master", f"channels-last+cudnn-search+{techniques}")


# compiled-update took a minute to compile for ResNet-50's 161 tensors, and was no faster than the fused optimizer.
_STRIDED = "fused-optimizer+compile+cuda-graph+batch-norm-kernel+space-to-depth"
ROWS = (
    _images("resnet50", 256, f"{_STRIDED}+max-pool-kernel"),
    _images("resnet101", 128, f"{_STRIDED}+max-pool-kernel"),
    _images("inception_v3", 128, f"{_STRIDED}+max-pool-kernel"),
    _images("efficientnet_b0", 128, _STRIDED),
    _images("wrn-28-10", 128, "compiled-update+matmul-stem+batch-norm-kernel+compile+cuda-graph"),
    # By hand, compiling made all precisions slower; float32 with TF32 products was the fastest.
    Row("mlp-4096", 512, "tf32", False, "bf16-master", "compiled-update+compile+cuda-graph-8"),
    Row("lstm-lm", 20, "tf32", False, "bf16-mixed", "compiled-update+compile+cuda-graph-8"),
    Row("lstm-lm-1500", 80, "bf16-mixed", False, "bf16-mixed", "compiled-update+compile+cuda-graph"),
)


def measure_by_hand(row: Row, device: str, seconds: float) -> float:
    """Return the units per second of the loop by hand, in a process of its own."""
    command = [sys.executable, str(_HAND_LOOPS), row.workload, str(row.batch_size), row.hand_precision]
    command += ["--device", device, "--seconds", str(seconds), *(["--compile"] if row.compiled else [])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_SECONDS)
    return float(json.loads(done.stdout.splitlines()[-1])["per_second"])


def measure(row: Row, machine: Machine, protocol: MeasurementProtocol) -> dict[str, Any]:
    """Return a row's record; each turn is printed as it ends."""
    spec = TrialSpec(
        workload=row.workload,
        precision=row.precision,
        loss_scale=find_precision(row.precision).loss_scale,
        batch_size=row.batch_size,
        device=machine.device,
        techniques=parse_techniques(row.techniques),
        protocol=protocol,
    )
    turns: list[dict[str, Any]] = []
    for side in (HAND, CASTWISE, HAND):
        if side == HAND:
            speed = measure_by_hand(row, machine.device, protocol.max_seconds)
        else:
            speed, _ = measure_loop(spec, machine)
        unit = find_workload(row.workload).unit
        print(f"{row.workload}, {side}, {row.loops[side]}: {format_rate(speed)} {unit}/s", flush=True)
        turns.append({"side": side, "per_second": speed})
    return {
        "name": row.workload,
        "batch_size": row.batch_size,
        "loops": row.loops,
        "turns": turns,
        "environment": machine.environment.model_dump(mode="json"),
    }


def table(paths: Sequence[Path]) -> str:
    """Return a line per row, whose last record counts, and below the table the loops."""
    found: dict[str, Mapping[str, Any]] = {}
    for path in paths:
        for record in json.loads(path.read_text())["rows"]:
            found[record["name"]] = record | {"where": place_of(record["environment"], path.name[:10])}
    records = [found[row.workload] for row in ROWS if row.workload in found]
    cells = []
    for record in records:
        hand, ours = ([each["per_second"] for each in record["turns"] if each["side"] == s] for s in (HAND, CASTWISE))
        unit = find_workload(record["name"]).unit
        speeds = [statistics.median(side) for side in (hand, ours)]
        ratio = f"{speeds[1] / speeds[0]:.2f} ({min(ours) / max(hand):.2f} to {max(ours) / min(hand):.2f})"
        model = f"{record['name']}, batch {record['batch_size']}"
        cells.append([model, *(f"{format_rate(speed)} {unit}/s" for speed in speeds), ratio])
    places = "\n\n".join(where for where, _ in by_place(records))
    lines = [f"- {each['name']}: " + "; ".join(": ".join(loop) for loop in each["loops"].items()) for each in records]
    heading = "model | by hand | castwise | castwise ÷ by hand"
    return "\n".join([places, "", *markdown(heading, "lrrr", cells), "", *lines]) + "\n"


def main() -> int:
    """Measure the rows, and write the record after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {row.workload: row for row in ROWS}
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"{', '.join(known)}; all by default")
    parser.add_argument("--tiny", action="store_true", help="the plain loops on a CPU, to try this program itself")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    names = arguments.workloads or list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no row named {unknown[0]!r}; rows: {', '.join(known)}")
    rows, protocol = [known[name] for name in names], _PROTOCOL
    if arguments.tiny:
        protocol = _TINY_PROTOCOL
        rows = [
            replace(row, batch_size=2, hand_precision="fp32", compiled=False, precision="fp32", techniques="none")
            for row in rows
        ]
    machine = detect_machine("cpu" if arguments.tiny else None, None)
    records, has_failed = list[dict[str, Any]](), False
    for row in rows:
        try:
            records.append(measure(row, machine, protocol))
        except (RuntimeError, CastwiseError, subprocess.SubprocessError) as error:
            print(f"{row.workload}: {error}", file=sys.stderr, flush=True)
            has_failed = True
        write(arguments.out, {"rows": records})
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
