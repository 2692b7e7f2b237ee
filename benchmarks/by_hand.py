"""castwise's fastest loop of a model and a good loop by hand, in turns, and the ratio of their speeds.

    python benchmarks/by_hand.py --out benchmarks/records/by_hand/DATE-NAME.json [ROW ...]

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
from castwise.registry.gpus import short_device_name
from castwise.registry.precisions import find_precision
from castwise.registry.techniques import parse_techniques
from castwise.registry.workloads import find_workload
from castwise.show.units import format_rate
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
    compiled: bool  # the loop by hand is under torch.compile
    precision: str
    techniques: str  # of castwise's loop
    padded: bool = False  # the vocabulary by hand is a multiple of 64

    @property
    def ungraphed(self) -> str:
        """Return castwise's techniques without a CUDA graph, whose kernels have no names of modules in a profile."""
        return self.techniques.removesuffix("+cuda-graph").replace("compiled-update", "fused-optimizer")

    def spec(self, device: str, techniques: str) -> TrialSpec:
        """Return a trial of castwise's loop with these techniques."""
        return TrialSpec(
            workload=self.workload,
            precision=self.precision,
            loss_scale=find_precision(self.precision).loss_scale,
            batch_size=self.batch_size,
            device=device,
            techniques=parse_techniques(techniques),
        )

    @property
    def loops(self) -> dict[str, str]:
        """Return the sides' loops in words."""
        changes = (", compiled" if self.compiled else "") + (", vocabulary padded" if self.padded else "")
        return {HAND: self.hand_precision + changes, CASTWISE: f"{self.precision}, {self.techniques}"}


def _images(workload: str, batch_size: int, techniques: str) -> Row:
    return Row(workload, batch_size, "bf16-mixed", True, "bf16-master", f"channels-last+cudnn-search+{techniques}")


# compiled-update took a minute to compile for ResNet-50's 161 tensors, and was no faster than the fused optimizer.
_STRIDED = "fused-optimizer+compile+cuda-graph+batch-norm-kernel+space-to-depth"
_UPDATED = "compiled-update+compile+cuda-graph"
_GELU = f"short-gelu+{_UPDATED}"
_WORDS = "compiled-update+pad-vocabulary+short-gelu+compile+cuda-graph"
_CHUNKED = "cudnn-attention+compiled-update+pad-vocabulary+short-gelu+chunked-loss+compile+cuda-graph"
_FP8 = "fp8-tensorwise"
# By name: the workload's, and what tells a row from another of the same workload.
ROWS = {
    "resnet50": _images("resnet50", 256, f"{_STRIDED}+max-pool-kernel"),
    "resnet101": _images("resnet101", 128, f"{_STRIDED}+max-pool-kernel"),
    "inception_v3": _images("inception_v3", 128, f"{_STRIDED}+max-pool-kernel"),
    "efficientnet_b0": _images("efficientnet_b0", 128, _STRIDED),
    "wrn-28-10": _images("wrn-28-10", 128, "compiled-update+matmul-stem+batch-norm-kernel+compile+cuda-graph"),
    # By hand, compiling made all precisions slower; float32 with TF32 products was the fastest.
    "mlp-4096": Row("mlp-4096", 512, "tf32", False, "bf16-master", f"{_UPDATED}-8"),
    "lstm-lm": Row("lstm-lm", 20, "tf32", False, "bf16-mixed", f"{_UPDATED}-8"),
    "lstm-lm-1500": Row("lstm-lm-1500", 80, "bf16-mixed", False, "bf16-mixed", _UPDATED),
    "gpt2": Row("gpt2", 16, "bf16-mixed", True, "bf16-master", _WORDS, padded=True),
    "gpt2-b64": Row("gpt2", 64, "bf16-mixed", True, "bf16-master", _CHUNKED, padded=True),
    "gpt-d2048x12": Row("gpt-d2048x12", 16, "bf16-mixed", True, "bf16-master", _WORDS, padded=True),
    "gpt-d2048x12-fp8": Row("gpt-d2048x12", 16, _FP8, True, _FP8, _WORDS, padded=True),
    "gpt-d2048x12-b64": Row("gpt-d2048x12", 64, "bf16-mixed", True, "bf16-master", _WORDS, padded=True),
    "gpt-d2048x12-fp8-b64": Row("gpt-d2048x12", 64, _FP8, True, _FP8, _WORDS, padded=True),
    "gpt-d4096": Row("gpt-d4096", 8, "bf16-mixed", True, "bf16-master", _WORDS, padded=True),
    "gpt-d4096-fp8": Row("gpt-d4096", 8, _FP8, True, _FP8, _WORDS, padded=True),
    "gpt-d4096-b32": Row("gpt-d4096", 32, "bf16-mixed", True, "bf16-master", _WORDS, padded=True),
    "gpt-d4096-fp8-b32": Row("gpt-d4096", 32, _FP8, True, _FP8, _WORDS, padded=True),
    "vit-b16": Row("vit-b16", 256, "bf16-mixed", True, "bf16-master", f"channels-last+matmul-stem+{_GELU}"),
    "bert-base": Row("bert-base", 64, "bf16-mixed", True, "bf16-master", f"sparse-prediction+{_WORDS}", padded=True),
}


def tiny(row: Row) -> Row:
    """Return a row whose plain loops a CPU runs within a minute: sequences are short, and GPTs narrow."""
    workload = "gpt-d128" if row.workload.startswith("gpt-d") else row.workload
    if find_workload(workload).longest is not None:
        workload += "@32"
    row = replace(row, hand_precision="fp32", compiled=False, precision="fp32", techniques="none")
    return replace(row, workload=workload, batch_size=2)


def measure_by_hand(row: Row, device: str, seconds: float) -> float:
    """Return the units per second of the loop by hand, in a process of its own."""
    command = [sys.executable, str(_HAND_LOOPS), row.workload, str(row.batch_size), row.hand_precision]
    command += ["--device", device, "--seconds", str(seconds)]
    command += [*(["--compile"] if row.compiled else []), *(["--pad"] if row.padded else [])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_SECONDS)
    return float(json.loads(done.stdout.splitlines()[-1])["per_second"])


def measure(name: str, row: Row, machine: Machine, protocol: MeasurementProtocol) -> dict[str, Any]:
    """Return a row's record; each turn is printed as it ends."""
    spec = row.spec(machine.device, row.techniques).model_copy(update={"protocol": protocol})
    turns: list[dict[str, Any]] = []
    for side in (HAND, CASTWISE, HAND):
        if side == HAND:
            speed = measure_by_hand(row, machine.device, protocol.max_seconds)
        else:
            speed, _ = measure_loop(spec, machine)
        unit = find_workload(row.workload).unit
        print(f"{name}, {side}, {row.loops[side]}: {format_rate(speed)} {unit}/s", flush=True)
        turns.append({"side": side, "per_second": speed})
    return {
        "name": name,
        "workload": row.workload,
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
    records = [found[name] for name in ROWS if name in found]
    cells = []
    for record in records:
        hand, ours = ([each["per_second"] for each in record["turns"] if each["side"] == s] for s in (HAND, CASTWISE))
        unit = find_workload(record.get("workload", record["name"])).unit  # older records have the name alone
        speeds = [statistics.median(side) for side in (hand, ours)]
        ratio = f"{speeds[1] / speeds[0]:.2f} ({min(ours) / max(hand):.2f} to {max(ours) / min(hand):.2f})"
        batch_size = record["batch_size"]
        model = f"{record['name'].removesuffix(f'-b{batch_size}')}, batch {batch_size}"
        gpu = short_device_name(record["environment"]["gpu"] or "CPU")
        cells.append([model, gpu, *(f"{format_rate(speed)} {unit}/s" for speed in speeds), ratio])
    places = "\n\n".join(where for where, _ in by_place(records))
    lines = [f"- {each['name']}: " + "; ".join(": ".join(loop) for loop in each["loops"].items()) for each in records]
    heading = "model | GPU | by hand | castwise | castwise ÷ by hand"
    return "\n".join([places, "", *markdown(heading, "llrrr", cells), "", *lines]) + "\n"


def main() -> int:
    """Measure the rows, and write the record after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"{', '.join(ROWS)}; all by default")
    help_of_tiny = "plain loops on a CPU, on short sequences and narrow GPTs, to try this program itself"
    parser.add_argument("--tiny", action="store_true", help=help_of_tiny)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    names = arguments.rows or list(ROWS)
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"no row named {unknown[0]!r}; rows: {', '.join(ROWS)}")
    protocol = _TINY_PROTOCOL if arguments.tiny else _PROTOCOL
    machine = detect_machine("cpu" if arguments.tiny else None, None)
    records, has_failed = list[dict[str, Any]](), False
    for name in names:
        row = tiny(ROWS[name]) if arguments.tiny else ROWS[name]
        try:
            records.append(measure(name, row, machine, protocol))
        except (RuntimeError, CastwiseError, subprocess.SubprocessError) as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            has_failed = True
        write(arguments.out, {"rows": records})
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
