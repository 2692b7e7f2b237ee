"""What the same comparison costs by hand: one run of a plain script a precision, one after another, with no interval.

    python benchmarks/hand_runs.py [WORKLOAD] [--batch-size N] [--precision LIST] [--tuned] [--out FILE]

Each run is a fresh Python that imports torch, builds model and data, trains some steps, and times a few more: what
people who publish such figures do. Prints the step time of each and the seconds that it took from start to end; beside
it stands what `castwise run --within 1%` takes for the same cells (`round_cost.py`).
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_WARM_UP_STEPS = 10
_TIMED_STEPS = 50
_PRECISIONS = "fp32,tf32,fp16-mixed,bf16-mixed,fp16-true,bf16-true"
_HALVES = {"fp16-true": "float16", "bf16-true": "bfloat16"}


def train_one(workload: str, precision: str, batch_size: int, device_name: str, *, tuned: bool) -> float:
    """Return the seconds a step of a plain loop, in this process."""
    import torch
    from hand_loops import make_step

    from castwise.registry.precisions import find_precision
    from castwise.registry.workloads import find_workload
    from castwise.worker.models import build_task
    from castwise.worker.precision import numeric_state

    row, device = find_workload(workload), torch.device(device_name)
    torch.backends.cudnn.benchmark = tuned
    dtype = getattr(torch, _HALVES.get(precision, "float32"))
    layout = torch.channels_last if tuned else torch.preserve_format
    task = build_task(row)
    model = task.model.to(device, dtype=dtype, memory_format=layout).train()
    batches = [
        tuple(part.to(dtype) if part.is_floating_point() else part for part in batch)
        for batch in task.make_batches(2, batch_size, device, torch.Generator(device))
    ]
    if tuned:
        batches = [tuple(part.to(memory_format=layout) if part.ndim == 4 else part for part in b) for b in batches]
    optimizer = getattr(torch.optim, row.optimizer.name)(model.parameters(), **dict(row.optimizer.arguments))
    step = make_step(task.compute_loss, model, optimizer, precision, row.clip_grad_norm)

    def train(count: int) -> float:
        begun = time.perf_counter()
        for number in range(count):
            loss = step(batches[number % len(batches)])
        loss.item()
        return time.perf_counter() - begun

    with numeric_state(find_precision(precision)):  # TF32 or not
        train(_WARM_UP_STEPS)
        return train(_TIMED_STEPS) / _TIMED_STEPS


def _environment(device: str) -> dict[str, Any]:
    """Return what the machine is; imported here, since what a run by hand imports is timed."""
    from castwise.orchestrator.machine import choose_device, find_commit
    from castwise.orchestrator.processes import ForkserverEngine
    from castwise.registry.datasets import default_data_dir

    return choose_device(ForkserverEngine(default_data_dir(), find_commit()), device).model_dump(mode="json")


def main() -> int:
    """Start the runs one after another and print what each took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", default="resnet50")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--precision", default=_PRECISIONS)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tuned", action="store_true", help="channels_last and cuDNN's search")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        seconds = train_one(
            arguments.workload,
            arguments.precision,
            arguments.batch_size,
            arguments.device,
            tuned=arguments.tuned,
        )
        print(seconds)
        return 0
    own = [*sys.argv[1:], "--one"]
    runs = []
    for precision in arguments.precision.split(","):
        begun = time.perf_counter()
        answer = subprocess.run(
            [sys.executable, __file__, *own, "--precision", precision], check=True, capture_output=True, text=True
        )
        whole = time.perf_counter() - begun
        runs.append({"precision": precision, "step_seconds": float(answer.stdout), "seconds": whole})
        print(f"{precision:12} {1e3 * float(answer.stdout):8.2f} ms a step; the run took {whole:.1f} s", flush=True)
    print(f"all: {sum(run['seconds'] for run in runs):.1f} s")  # type: ignore[misc]
    if arguments.out:
        document = {
            "environment": _environment(arguments.device),
            "workload": arguments.workload,
            "batch_size": arguments.batch_size,
            "tuned": arguments.tuned,
            "runs": runs,
        }
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
