"""The best loop by hand of a speed goal, in a process of its own: `goals.py` starts it and reads its last line.

    python benchmarks/goal_hand.py TASK

TASK is JSON, a `HandTask`. Plain PyTorch: of castwise's are the models, the batches and the recipe, so that both sides
compute the same. Prints JSON: the seconds a step of each timed block, or the seconds of each epoch of a run.
"""

import inspect
import json
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from hand_loops import Batch, Step, make_step
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from castwise.registry.precisions import find_precision
from castwise.registry.workloads import OptimizerSpec, Workload, find_workload
from castwise.spec.recipe import Recipe
from castwise.worker.models import build_task
from castwise.worker.precision import numeric_state
from castwise.worker.steady_run import time_work

_FIRST_STEPS = 4  # libraries are loaded, algorithms searched, code compiled
_FEWEST_BLOCKS = 3


@dataclass(frozen=True)
class HandTask:
    """What is to be measured."""

    workload: str
    batch_size: int  # samples a step and GPU
    precision: str  # "tf32", "fp16-mixed" or "bf16-mixed"
    tuned: bool  # it has channels_last, cuDNN's search and a fused optimizer, as far as they apply
    compiled: bool  # the model is under torch.compile
    graph: bool  # the whole step of a run is a CUDA graph
    device: str  # "cpu" or "cuda:N", the first of several
    seconds: float = 4.0  # time of all blocks
    block_seconds: float = 0.2  # time of one
    warm_up_seconds: float = 1.5  # time of steps before them, after the first ones
    world_size: int = 1  # GPUs, each with its process
    recipe: dict[str, Any] | None = None  # of a run, as JSON has it; None times steps
    data_set: str | None = None  # of the run
    data_dir: str | None = None  # where it lies

    @property
    def row(self) -> Workload:
        return find_workload(self.workload)

    @property
    def is_channels_last(self) -> bool:
        return self.tuned and self.row.unit == "images"


def measure(task: HandTask) -> dict[str, object]:
    """Return what was measured, in this process and, with several GPUs, in one for each."""
    torch.backends.cudnn.benchmark = task.tuned
    if task.recipe is not None:
        from goal_hand_run import train_run

        recipe = Recipe.model_validate(task.recipe)
        with numeric_state(find_precision(task.precision)):
            return train_run(task, recipe)
    if task.world_size == 1:
        return _time_steps(task, torch.device(task.device))
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "rank0.json"
        arguments = (asdict(task), _free_port(), str(answer))
        torch.multiprocessing.spawn(_rank, arguments, nprocs=task.world_size)  # type: ignore[no-untyped-call]
        result: dict[str, object] = json.loads(answer.read_text())
        return result


def _rank(rank: int, values: dict[str, Any], port: int, answer: str) -> None:
    task = HandTask(**values)
    torch.backends.cudnn.benchmark = task.tuned
    device = torch.device(task.device)
    if device.type == "cuda":
        device = torch.device("cuda", (device.index or 0) + rank)
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    address = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group(backend, init_method=address, rank=rank, world_size=task.world_size)
    try:
        result = _time_steps(task, device)
        if rank == 0:
            Path(answer).write_text(json.dumps(result))
        distributed.barrier()
    finally:
        distributed.destroy_process_group()


def _time_steps(task: HandTask, device: torch.device) -> dict[str, object]:
    with numeric_state(find_precision(task.precision)):
        work = _steps_of(task, device)

        def timed(steps: int) -> float:
            if distributed.is_initialized():
                distributed.barrier()
            return time_work(device, lambda: work(steps))

        started = time.perf_counter()
        for _ in range(_FIRST_STEPS):
            timed(1)
        start_seconds = time.perf_counter() - started
        step_seconds = timed(_FIRST_STEPS) / _FIRST_STEPS
        warm_up = _agreed(max(_FIRST_STEPS, round(task.warm_up_seconds / step_seconds)), device)
        step_seconds = timed(min(warm_up, 5000)) / min(warm_up, 5000)
        per_block = _agreed(max(1, round(task.block_seconds / step_seconds)), device)
        count = _agreed(max(_FEWEST_BLOCKS, round(task.seconds / (per_block * step_seconds))), device)
        return {"start_seconds": start_seconds, "blocks": [timed(per_block) / per_block for _ in range(count)]}


def _agreed(number: int, device: torch.device) -> int:
    """Return the first rank's number: all must take the same steps."""
    if not distributed.is_initialized():
        return number
    place = torch.tensor(number, device=device)
    distributed.broadcast(place, 0)
    return int(place)


def _steps_of(task: HandTask, device: torch.device) -> Callable[[int], None]:
    torch.manual_seed(0)
    row = task.row
    parts = build_task(row)
    model = placed(parts.model, task, device)
    optimizer = make_optimizer(row.optimizer, model, fused=task.tuned)
    shared: nn.Module = model
    if task.world_size > 1:
        ids = [device.index] if device.type == "cuda" else None
        shared = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    step: Step = make_step(parts.compute_loss, compiled(shared, task), optimizer, task.precision, row.clip_grad_norm)
    generator = torch.Generator(device).manual_seed(0)
    batches = [
        laid_out(each, task) for each in parts.make_batches(row.resident_batches, task.batch_size, device, generator)
    ]
    taken = 0

    def work(steps: int) -> None:
        nonlocal taken
        for index in range(taken, taken + steps):
            step(batches[index % len(batches)])
        taken += steps

    return work


def placed(model: nn.Module, task: HandTask, device: torch.device) -> nn.Module:
    """Return a model on the device, in the layout of the loop."""
    model = model.to(device).train()
    return model.to(memory_format=torch.channels_last) if task.is_channels_last else model


def compiled(model: nn.Module, task: HandTask) -> nn.Module:
    """Return a model under torch.compile where the loop has it."""
    found: nn.Module = torch.compile(model, dynamic=False) if task.compiled else model  # type: ignore[assignment]
    return found


def laid_out(batch: Batch, task: HandTask) -> Batch:
    """Return a batch in the layout of the loop."""
    if not task.is_channels_last:
        return batch
    return tuple(each.contiguous(memory_format=torch.channels_last) if each.dim() == 4 else each for each in batch)


def make_optimizer(
    spec: OptimizerSpec, model: nn.Module, *, fused: bool, capturable: bool = False
) -> torch.optim.Optimizer:
    """Return the optimizer over a model's weights, fused or for a CUDA graph where its class can be."""
    kind = getattr(torch.optim, spec.name)
    known = inspect.signature(kind).parameters
    added = {name: True for name, asked in (("fused", fused), ("capturable", capturable)) if asked and name in known}
    weights = [each for each in model.parameters() if each.requires_grad]
    optimizer: torch.optim.Optimizer = kind(weights, **dict(spec.arguments), **added)
    return optimizer


def _free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])


def main() -> int:
    """Measure the task that the command line names."""
    task = HandTask(**json.loads(sys.argv[1]))
    device = torch.device(task.device)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        print(json.dumps(measure(task)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
