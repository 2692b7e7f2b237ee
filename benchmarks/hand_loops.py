"""Training loops in plain PyTorch, as one writes them by hand: what castwise's loops are compared with.

    python benchmarks/hand_loops.py TASK

TASK is JSON, a `HandTask`: `goals.py` runs it in a process of its own and reads the JSON that it prints, the seconds a
step of each timed block, or the seconds of each epoch of a run. Models, batches and recipes are castwise's, so that
both sides compute the same.
"""

import inspect
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from castwise.registry.datasets import SYNTHETIC_PREFIX
from castwise.registry.precisions import find_precision
from castwise.registry.workloads import OptimizerSpec, Workload, find_workload
from castwise.spec.recipe import Recipe
from castwise.worker.data.datasets import load_images
from castwise.worker.data.transforms import STATISTICS
from castwise.worker.models import build_task
from castwise.worker.precision import numeric_state
from castwise.worker.steady_run import time_works

Batch = tuple[Tensor, ...]
Step = Callable[[Batch], Tensor]
Loop = Callable[[int], None]

_FIRST_STEPS = 4  # libraries are loaded, algorithms searched, code compiled
_FEWEST_BLOCKS = 3
_MOST_WARM_UP_STEPS = 5000
_CROP_PADDING = 4  # of CIFAR's crops
_STEPS_BEFORE_CAPTURE = 3  # Source: PyTorch, "CUDA semantics", Whole-network capture
_AUTOCAST = {"fp16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


@dataclass(frozen=True)
class HandTask:
    """A loop, and how it is measured."""

    workload: str
    batch_size: int  # samples per GPU and step
    precision: str  # fp32, tf32, fp16-mixed or bf16-mixed
    device: str  # "cpu" or "cuda:N", the first of several
    tuned: bool = False  # channels_last, cuDNN's search and a fused optimizer, if they apply
    compiled: bool = False  # the model is under torch.compile
    graph: bool = False  # the whole step of a run is a CUDA graph
    seconds: float = 4.0  # of all blocks
    block_seconds: float = 0.2
    warm_up_seconds: float = 1.5  # of the steps between the first ones and the blocks
    world_size: int = 1  # GPUs, a process each
    recipe: dict[str, Any] | None = None  # of a run; None times steps
    data_set: str | None = None  # of the run
    data_dir: str | None = None

    @property
    def row(self) -> Workload:
        return find_workload(self.workload)

    @property
    def is_channels_last(self) -> bool:
        return self.tuned and self.row.unit == "images"


def autocast_of(precision: str, device_type: str) -> AbstractContextManager[object]:
    """Return the autocast of a precision; one that does nothing for float32."""
    dtype = _AUTOCAST.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device_type, dtype=dtype)


def make_step(
    compute_loss: Callable[[nn.Module, Batch], Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    precision: str,
    clip: float | None,
) -> Step:
    """Return a function that trains on a batch and returns its loss."""
    device_type = next(model.parameters()).device.type
    weights = [weight for weight in model.parameters() if weight.requires_grad]

    def forward(batch: Batch) -> Tensor:
        with autocast_of(precision, device_type):
            return compute_loss(model, batch)

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = forward(batch)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(weights, clip)
        optimizer.step()
        return loss

    if precision != "fp16-mixed":
        return step
    scaler = torch.amp.GradScaler(device_type)

    def scaled_step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = forward(batch)
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(weights, clip)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return scaled_step


def make_optimizer(
    spec: OptimizerSpec, model: nn.Module, *, fused: bool, capturable: bool = False
) -> torch.optim.Optimizer:
    """Return the optimizer over a model's weights, fused or for a CUDA graph if its class can be."""
    kind = getattr(torch.optim, spec.name)
    known = inspect.signature(kind).parameters
    added = {name: True for name, asked in (("fused", fused), ("capturable", capturable)) if asked and name in known}
    weights = [each for each in model.parameters() if each.requires_grad]
    optimizer: torch.optim.Optimizer = kind(weights, **dict(spec.arguments), **added)
    return optimizer


def place_model(model: nn.Module, task: HandTask, device: torch.device) -> nn.Module:
    """Return a model on the device, in the loop's memory format."""
    model = model.to(device).train()
    return model.to(memory_format=torch.channels_last) if task.is_channels_last else model


def compile_model(model: nn.Module, task: HandTask) -> nn.Module:
    """Return a model under torch.compile, if the loop compiles."""
    compiled: nn.Module = torch.compile(model, dynamic=False) if task.compiled else model  # type: ignore[assignment]
    return compiled


def make_loop(task: HandTask, device: torch.device) -> Loop:
    """Return a function that trains the given number of steps on synthetic batches."""
    torch.manual_seed(0)
    row = task.row
    parts = build_task(row)
    model = place_model(parts.model, task, device)
    optimizer = make_optimizer(row.optimizer, model, fused=task.tuned)
    wrapped: nn.Module = model
    if task.world_size > 1:
        ids = [device.index] if device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    step = make_step(parts.compute_loss, compile_model(wrapped, task), optimizer, task.precision, row.clip_grad_norm)
    generator = torch.Generator(device).manual_seed(0)
    batches: list[Batch] = parts.make_batches(row.resident_batches, task.batch_size, device, generator)
    if task.is_channels_last:
        layout = torch.channels_last
        batches = [
            tuple(part.contiguous(memory_format=layout) if part.dim() == 4 else part for part in batch)
            for batch in batches
        ]
    done = 0

    def loop(steps: int) -> None:
        nonlocal done
        for index in range(done, done + steps):
            step(batches[index % len(batches)])
        done += steps

    return loop


def time_steps(task: HandTask, device: torch.device) -> dict[str, object]:
    """Return the seconds of the first steps, and the seconds a step of each timed block."""
    with numeric_state(find_precision(task.precision)):
        loop = make_loop(task, device)

        def timed(steps: int) -> float:
            if distributed.is_initialized():
                distributed.barrier()
            return time_works(device, [lambda: loop(steps)])[0]

        started = time.perf_counter()
        for _ in range(_FIRST_STEPS):
            timed(1)
        start_seconds = time.perf_counter() - started
        step_seconds = timed(_FIRST_STEPS) / _FIRST_STEPS
        warm_up = _agreed(max(_FIRST_STEPS, round(task.warm_up_seconds / step_seconds)), device)
        warm_up = min(warm_up, _MOST_WARM_UP_STEPS)
        step_seconds = timed(warm_up) / warm_up
        per_block = _agreed(max(1, round(task.block_seconds / step_seconds)), device)
        count = _agreed(max(_FEWEST_BLOCKS, round(task.seconds / (per_block * step_seconds))), device)
        return {"start_seconds": start_seconds, "blocks": [timed(per_block) / per_block for _ in range(count)]}


def _agreed(number: int, device: torch.device) -> int:
    """Return the first rank's number: all must take the same steps."""
    if not distributed.is_initialized():
        return number
    shared = torch.tensor(number, device=device)
    distributed.broadcast(shared, 0)
    return int(shared)


def _rank(rank: int, values: dict[str, Any], folder: str) -> None:
    """Time steps as one rank of several; the first writes the answer into the folder."""
    task = HandTask(**values)
    torch.backends.cudnn.benchmark = task.tuned
    device = torch.device(task.device)
    if device.type == "cuda":
        device = torch.device("cuda", (device.index or 0) + rank)
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    rendezvous = (Path(folder) / "rendezvous").as_uri()
    distributed.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=task.world_size)
    try:
        answer = time_steps(task, device)
        if rank == 0:
            (Path(folder) / "answer.json").write_text(json.dumps(answer))
        distributed.barrier()
    finally:
        distributed.destroy_process_group()


def train_run(task: HandTask, recipe: Recipe) -> dict[str, object]:
    """Train all epochs of a published run; return the seconds of each with its validation, and the last accuracy.

    The data lies on the device, the step may be a CUDA graph, and the host reads nothing within an epoch.
    """
    device, row = torch.device(task.device), task.row
    torch.manual_seed(0)
    parts = build_task(row)
    model = place_model(parts.model, task, device)
    asked = recipe.optimizer
    spec = row.optimizer if asked is None else OptimizerSpec(asked.name, tuple(asked.arguments.items()))
    is_graph = task.graph and device.type == "cuda"
    optimizer = make_optimizer(spec, model, fused=task.tuned, capturable=is_graph)
    train, test = (_Images(task, split, device) for split in ("train", "test"))

    fast = compile_model(model, task)
    step = make_step(parts.compute_loss, fast, optimizer, task.precision, row.clip_grad_norm)
    uncompiled = make_step(parts.compute_loss, model, optimizer, task.precision, row.clip_grad_norm)
    if is_graph:
        step = _Graphed(step, optimizer, device)

    # Rates do not matter to the time, but what it costs to set them does.
    drop_last = recipe.loader.drop_last
    is_stepwise = recipe.schedule.kind != "step"
    scheduler: torch.optim.lr_scheduler.LRScheduler
    if is_stepwise:
        total = train.num_batches(task.batch_size, drop_last=drop_last) * recipe.epochs
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 0.001 + step / total))
    else:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, **recipe.schedule.arguments)

    seconds, accuracy = list[float](), None
    for _ in range(recipe.num_epochs):
        started = time.perf_counter()
        model.train()
        for index, batch in enumerate(train.batches(task.batch_size, drop_last=drop_last)):
            if index == recipe.max_steps:
                break
            (step if len(batch[1]) == task.batch_size else uncompiled)(batch)
            if is_stepwise:
                scheduler.step()
        if not is_stepwise:
            scheduler.step()
        if recipe.validate_each_epoch:
            accuracy = _validate(model, test, recipe, task)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return {"epochs": seconds, "accuracy": accuracy}


class _Images:
    """A split of a data set on the device, normalised once; training batches of CIFAR are cropped and mirrored."""

    def __init__(self, task: HandTask, split: str, device: torch.device) -> None:
        assert task.data_set is not None
        name = task.data_set.removeprefix(SYNTHETIC_PREFIX)
        pixels, labels = load_images(task.data_set, Path(task.data_dir) if task.data_dir else None, split)
        mean, deviation = (torch.tensor(each, device=device).view(1, -1, 1, 1) for each in STATISTICS[name])
        images = (pixels.to(device) / 255 - mean) / deviation
        self._shuffles = split == "train"
        self._augments = split == "train" and name != "mnist"
        if self._augments:
            black = -mean / deviation
            images = nn.functional.pad(images - black, (_CROP_PADDING,) * 4) + black
        self._images = images.permute(0, 2, 3, 1).contiguous()  # a crop's pixels are gathered as they lie
        self._labels, self._device, self._side = labels.to(device), device, pixels.shape[-1]
        self._layout = torch.channels_last if task.is_channels_last else torch.contiguous_format

    def num_batches(self, batch_size: int, *, drop_last: bool) -> int:
        count = len(self._labels)
        return count // batch_size if drop_last else -(-count // batch_size)

    def batches(self, batch_size: int, *, drop_last: bool) -> Iterator[Batch]:
        make_order = torch.randperm if self._shuffles else torch.arange
        order = make_order(len(self._labels), device=self._device)
        for index in range(self.num_batches(batch_size, drop_last=drop_last)):
            chosen = order[index * batch_size : (index + 1) * batch_size]
            images = self._crop(chosen) if self._augments else self._images[chosen]
            yield images.permute(0, 3, 1, 2).contiguous(memory_format=self._layout), self._labels[chosen]

    def _crop(self, chosen: Tensor) -> Tensor:
        pixels = torch.arange(self._side, device=self._device)

        def draw(below: int) -> Tensor:
            return torch.randint(below, (len(chosen), 1), device=self._device)

        rows = draw(2 * _CROP_PADDING + 1) + pixels
        columns = draw(2 * _CROP_PADDING + 1) + torch.where(draw(2) == 1, pixels.flip(0), pixels)
        return self._images[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]


@torch.no_grad()
def _validate(model: nn.Module, images: _Images, recipe: Recipe, task: HandTask) -> float:
    model.eval()
    right, count = torch.zeros((), dtype=torch.int64, device=task.device), 0
    for index, (pixels, labels) in enumerate(images.batches(recipe.validation_batch_size, drop_last=False)):
        if index == recipe.max_steps:
            break
        with autocast_of(task.precision, torch.device(task.device).type):
            right += (model(pixels).argmax(1) == labels).sum()
        count += len(labels)
    return int(right) / count


class _Graphed:
    """A step that is captured at its fourth batch, and replayed from then on.

    Source: PyTorch, "CUDA semantics", Whole-network capture.
    """

    def __init__(self, step: Step, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._step, self._optimizer, self._device = step, optimizer, device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._left = _STEPS_BEFORE_CAPTURE
        self._graph: torch.cuda.CUDAGraph | None = None
        for group in optimizer.param_groups:  # the schedule writes into it, and the graph reads it
            group["lr"] = torch.tensor(float(group["lr"]), device=device)

    def __call__(self, batch: Batch) -> Tensor:
        if self._left:
            self._left -= 1
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                loss = self._step(batch)
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            return loss
        if self._graph is None:
            self._graph = self._capture(batch)
        for place, part in zip(self._places, batch, strict=True):
            place.copy_(part)
        self._graph.replay()
        return self._loss

    def _capture(self, batch: Batch) -> torch.cuda.CUDAGraph:
        self._places = tuple(torch.empty_like(part) for part in batch)
        self._optimizer.zero_grad()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            self._loss = self._step(self._places)
        return graph


def measure(task: HandTask) -> dict[str, object]:
    """Return what was measured: in this process or, on several GPUs, in one for each."""
    torch.backends.cudnn.benchmark = task.tuned
    if task.recipe is not None:
        with numeric_state(find_precision(task.precision)):
            return train_run(task, Recipe.model_validate(task.recipe))
    if task.world_size == 1:
        return time_steps(task, torch.device(task.device))
    with tempfile.TemporaryDirectory() as folder:
        arguments = (asdict(task), folder)
        torch.multiprocessing.spawn(_rank, arguments, nprocs=task.world_size)  # type: ignore[no-untyped-call]
        answer: dict[str, object] = json.loads((Path(folder) / "answer.json").read_text())
        return answer


if __name__ == "__main__":
    asked = HandTask(**json.loads(sys.argv[1]))
    with torch.cuda.device(asked.device) if asked.device != "cpu" else nullcontext():
        print(json.dumps(measure(asked)))
