"""How many bytes the kernels move that torch.compile generates for a fast loop, and how fast: what a goal would need.

    python benchmarks/bytes_moved.py --out benchmarks/records/bytes_moved/DATE-NAME.json [ROW ...]

Inductor's own count is used, in which a kernel reads and writes each element once. Products and attention are left
out. For comparison a tensor is copied.
"""

import argparse
import gc
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from by_hand import ROWS
from stored import write
from torch._inductor import config
from torch._inductor.scheduler import Scheduler
from torch.profiler import ProfilerActivity, profile

from castwise.orchestrator.machine import detect_machine
from castwise.registry.workloads import find_workload
from castwise.worker.build import build_trial
from castwise.worker.data.sharding import rank_batches
from castwise.worker.distributed import Peers

_STEPS = 3  # before which code is compiled, and that are profiled
_GIGABYTES_COPIED = 4


def main() -> None:
    """Measure each loop, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", default=("gpt2-b64", "gpt-d2048x12", "vit-b16"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    config.force_disable_caches = True  # code of the cache would not be counted
    machine = detect_machine(None, None)
    record: dict[str, Any] = {"environment": machine.environment.model_dump(mode="json"), "rows": []}
    record["copied_per_second"] = _measure_copy(machine.device)
    for name in arguments.rows:
        record["rows"].append({"name": name} | _measure(name, machine.device))
        print(record["rows"][-1], flush=True)
        write(arguments.out, record)


def _measure(name: str, device: str) -> dict[str, Any]:
    """Return the bytes and the time of a loop's generated kernels in a step, without a CUDA graph."""
    row = ROWS[name]
    # The chunks of a loss run the same code several times.
    spec = row.spec(device, row.ungraphed.replace("chunked-loss+", ""))
    moved: list[int] = []
    generate = Scheduler.codegen

    def generate_counted(self: Any) -> Any:
        moved.extend(node.get_read_write_buffers_sizes() for node in self.nodes if not node.is_extern())
        return generate(self)

    Scheduler.codegen = generate_counted
    try:
        with ExitStack() as stack:
            setup = build_trial(spec, stack, Peers())
            batches = rank_batches(find_workload(row.workload), setup.task, spec, 1, Peers())
            batch = setup.prepare(batches[0]) if setup.prepare else batches[0]
            for _ in range(_STEPS):
                setup.step(batch)
            torch.cuda.synchronize()
            counted = sum(moved)
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                for _ in range(_STEPS):
                    setup.step(batch)
                torch.cuda.synchronize()
    finally:
        Scheduler.codegen = generate
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
    kernels = [event for event in profiler.events() if event.name.startswith("triton_")]
    return {
        "techniques": list(spec.techniques),
        "batch_size": row.batch_size,
        "bytes": counted,
        "kernels": len(kernels) // _STEPS,
        "seconds": sum(event.device_time for event in kernels) / _STEPS / 1e6,
    }


def _measure_copy(device: str) -> float:
    """Return the bytes that a copy reads and writes in a second."""
    source = torch.ones(_GIGABYTES_COPIED * 10**9 // 4, device=device)
    target = torch.empty_like(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for event in (start, end):
        for _ in range(2 * _STEPS):
            target.copy_(source)
        event.record()
    torch.cuda.synchronize()
    return 2 * source.nbytes * 2 * _STEPS / (start.elapsed_time(end) / 1000)


if __name__ == "__main__":
    main()
