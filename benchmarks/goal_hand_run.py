"""A published run by hand: its data lies on the device, the step may be a CUDA graph, nothing is read in between."""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from hand_loops import Batch, Step, autocast_of, make_step
from torch import Tensor, nn

from castwise.registry.datasets import SYNTHETIC_PREFIX
from castwise.registry.workloads import OptimizerSpec
from castwise.spec.recipe import Recipe
from castwise.worker.data.datasets import load_images
from castwise.worker.data.transforms import STATISTICS
from castwise.worker.models import build_task

if TYPE_CHECKING:
    from goal_hand import HandTask

_Batch = TypeVar("_Batch")
_PADDING = 4  # of CIFAR's crops
_WARM_UP_STEPS = 3  # Source: PyTorch, "CUDA semantics", Whole-network capture


def train_run(task: "HandTask", recipe: Recipe) -> dict[str, object]:
    """Train all epochs, and return the seconds of each with its validation, and the last accuracy."""
    from goal_hand import compiled, make_optimizer, placed

    device, row = torch.device(task.device), task.row
    torch.manual_seed(0)
    parts = build_task(row)
    model = placed(parts.model, task, device)
    asked = recipe.optimizer
    spec = row.optimizer if asked is None else OptimizerSpec(asked.name, tuple(asked.arguments.items()))
    is_graph = task.graph and device.type == "cuda"
    optimizer = make_optimizer(spec, model, fused=task.tuned, capturable=is_graph)
    train, test = (_Images(task, split, device) for split in ("train", "test"))
    fast = compiled(model, task)
    step = make_step(parts.compute_loss, fast, optimizer, task.precision, row.clip_grad_norm)
    plain = make_step(parts.compute_loss, model, optimizer, task.precision, row.clip_grad_norm)
    num_batches = train.num_batches(task.batch_size, drop_last=recipe.loader.drop_last)
    if is_graph:
        step = _Graphed(step, optimizer, device)
    scheduler = make_scheduler(recipe, optimizer, num_batches)
    epochs, accuracy, begun = list[float](), None, time.perf_counter()
    for _ in range(recipe.num_epochs):
        started = time.perf_counter()
        model.train()
        batches = train.batches(task.batch_size, drop_last=recipe.loader.drop_last)
        for batch in scheduled(batches, recipe, scheduler):
            (step if len(batch[1]) == task.batch_size else plain)(batch)
        if recipe.validate_each_epoch:
            accuracy = _validate(model, test, recipe, task)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        epochs.append(time.perf_counter() - started)
    return {"epochs": epochs, "total_seconds": time.perf_counter() - begun, "accuracy": accuracy}


def make_scheduler(
    recipe: Recipe, optimizer: torch.optim.Optimizer, steps_per_epoch: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a schedule that costs what the run's costs; its rates do not matter to the time."""
    if recipe.schedule.kind == "step":
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, **recipe.schedule.arguments)
    total = steps_per_epoch * recipe.epochs
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 0.001 + step / total))


def scheduled(
    batches: Iterable[_Batch], recipe: Recipe, scheduler: torch.optim.lr_scheduler.LRScheduler
) -> Iterator[_Batch]:
    """Yield an epoch's batches, as many as the run takes; move the rate after each, or once behind the last."""
    for index, batch in enumerate(batches):
        yield batch
        if recipe.schedule.kind != "step":
            scheduler.step()
        if index + 1 == recipe.max_steps:
            break
    if recipe.schedule.kind == "step":
        scheduler.step()


class _Images:
    """A split of a data set on the device, normalised once; training batches of CIFAR are cropped and mirrored."""

    def __init__(self, task: "HandTask", split: str, device: torch.device) -> None:
        assert task.data_set is not None
        name = task.data_set.removeprefix(SYNTHETIC_PREFIX)
        pixels, labels = load_images(task.data_set, Path(task.data_dir) if task.data_dir else None, split)
        mean, deviation = (torch.tensor(each, device=device).view(1, -1, 1, 1) for each in STATISTICS[name])
        images = (pixels.to(device) / 255 - mean) / deviation
        self._augments = split == "train" and name != "mnist"
        if self._augments:
            black = -mean / deviation
            images = nn.functional.pad(images - black, (_PADDING,) * 4) + black
        # Channels last: a crop's pixels are gathered as they lie.
        self._images = images.permute(0, 2, 3, 1).contiguous()
        self._labels, self._device, self._side = labels.to(device), device, pixels.shape[-1]
        self._shuffles = split == "train"
        self._layout = torch.channels_last if task.is_channels_last else torch.contiguous_format

    def num_batches(self, batch_size: int, *, drop_last: bool) -> int:
        """Return the batches of an epoch."""
        count = len(self._labels)
        return count // batch_size if drop_last else -(-count // batch_size)

    def batches(self, batch_size: int, *, drop_last: bool) -> Iterator[Batch]:
        """Return the batches of an epoch."""
        count = len(self._labels)
        order = (
            torch.randperm(count, device=self._device) if self._shuffles else torch.arange(count, device=self._device)
        )
        for index in range(self.num_batches(batch_size, drop_last=drop_last)):
            chosen = order[index * batch_size : (index + 1) * batch_size]
            images = self._cropped(chosen) if self._augments else self._images[chosen]
            yield images.permute(0, 3, 1, 2).contiguous(memory_format=self._layout), self._labels[chosen]

    def _cropped(self, chosen: Tensor) -> Tensor:
        count, places = len(chosen), torch.arange(self._side, device=self._device)

        def draw(below: int) -> Tensor:
            return torch.randint(below, (count, 1), device=self._device)

        rows = draw(2 * _PADDING + 1) + places
        columns = draw(2 * _PADDING + 1) + torch.where(draw(2) == 1, places.flip(0), places)
        return self._images[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]


@torch.no_grad()
def _validate(model: nn.Module, images: _Images, recipe: Recipe, task: "HandTask") -> float:
    model.eval()
    right, count = torch.zeros((), dtype=torch.int64, device=task.device), 0
    for index, (pixels, labels) in enumerate(images.batches(recipe.validation_batch_size, drop_last=False)):
        with autocast_of(task.precision, torch.device(task.device).type):
            right += (model(pixels).argmax(1) == labels).sum()
        count += len(labels)
        if index + 1 == recipe.max_steps:
            break
    return int(right) / count


class _Graphed:
    """A step that is captured at its fourth batch and replayed from there on.

    Source: PyTorch, "CUDA semantics", Whole-network capture.
    """

    def __init__(self, step: Step, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._step, self._optimizer, self._device = step, optimizer, device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._left = _WARM_UP_STEPS
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
            self._capture(batch)
        assert self._graph is not None
        for place, part in zip(self._places, batch, strict=True):
            place.copy_(part)
        self._graph.replay()
        return self._loss

    def _capture(self, batch: Batch) -> None:
        self._places = tuple(torch.empty_like(part) for part in batch)
        self._optimizer.zero_grad()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            self._loss = self._step(self._places)
        self._graph = graph
