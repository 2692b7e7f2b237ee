"""Whole published runs in castwise beside the same loops written by hand over the same loader, in one run.

    python benchmarks/suite_loops.py [--data DIR] [--results DIR] [--out FILE] [--epochs N] [--max-steps N] [CELL ...]

CELL is SUITE:WORKLOAD:PRECISION:BATCH. The hand-written loop goes first, in a process of its own; then the suite's
trial runs (or is taken from --results, where the suite was run just before). Prints how much longer castwise takes.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from castwise.analysis.training_metrics import split
from castwise.orchestrator.job import ResumePolicy, build_job
from castwise.orchestrator.machine import detect_machine
from castwise.records.store import Store
from castwise.registry.datasets import default_data_dir
from castwise.registry.precisions import find_precision
from castwise.registry.suite_filter import SuiteFilter
from castwise.registry.suites import find_suite, specs_of
from castwise.registry.workloads import Workload, find_workload
from castwise.spec.plan import TrialSpec
from castwise.spec.recipe import Recipe
from castwise.worker.data.epoch_iterators import make_feeds
from castwise.worker.distributed import Peers
from castwise.worker.models import build_task
from castwise.worker.precision import numeric_state

_Batch = TypeVar("_Batch")

CELLS = ("tensorcore:mnist-cnn:fp16-mixed:512", "wrn-cifar10:wrn-28-10:fp16-mixed:128")


def find_spec(cell: str, choice: SuiteFilter, device: str) -> TrialSpec:
    """Return the trial of a cell."""
    suite, workload, precision, batch_size = cell.split(":")
    specs = specs_of(find_suite(suite), device=device, choice=choice)
    asked = (workload, precision, int(batch_size))
    return next(spec for spec in specs if (spec.workload, spec.precision, spec.batch_size) == asked)


def by_hand(spec: TrialSpec, data_dir: Path) -> float:
    """Return the seconds of the run as one would write it: plain PyTorch; only model and loader are castwise's."""
    recipe, row, device = spec.recipe, find_workload(spec.workload), torch.device(spec.device)
    assert recipe is not None
    torch.manual_seed(spec.seed)
    with numeric_state(find_precision(spec.precision)):
        task = build_task(row)
        model = task.model.to(device)
        optimizer = make_optimizer(row, recipe, model)
        scaler = torch.amp.GradScaler(device.type, enabled=spec.precision == "fp16-mixed")
        feeds = make_feeds(row, task, spec, data_dir, Peers())
        scheduler = make_scheduler(recipe, optimizer, feeds.training.num_batches)
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        for epoch in range(recipe.num_epochs):
            model.train()
            for images, labels in scheduled(feeds.training.start(epoch), recipe, scheduler):
                optimizer.zero_grad()
                with torch.autocast(device.type, dtype=torch.float16, enabled=spec.precision == "fp16-mixed"):
                    loss = nn.functional.cross_entropy(model(images), labels)
                scaler.scale(loss).backward()
                if row.clip_grad_norm is not None:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), row.clip_grad_norm)
                scaler.step(optimizer)
                scaler.update()
                loss.item()
            if feeds.validation is not None:
                validate(model, feeds.validation.start(0), device)
        torch.cuda.synchronize(device)
        return time.perf_counter() - started


def make_optimizer(row: Workload, recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """Return the run's optimizer."""
    if recipe.optimizer is not None:
        return getattr(torch.optim, recipe.optimizer.name)(model.parameters(), **recipe.optimizer.arguments)
    return getattr(torch.optim, row.optimizer.name)(model.parameters(), **dict(row.optimizer.arguments))


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


@torch.no_grad()
def validate(model: nn.Module, batches: object, device: torch.device) -> float:
    """Return the accuracy."""
    model.eval()
    right, count = torch.zeros((), dtype=torch.int64, device=device), 0
    for images, labels in batches:  # type: ignore[attr-defined]
        with torch.autocast(device.type, dtype=torch.float16):
            right += (model(images).argmax(1) == labels).sum()
        count += len(labels)
    return int(right) / count


def in_castwise(spec: TrialSpec, arguments: argparse.Namespace) -> float:
    """Return the seconds of the suite's trial, training and validation."""
    bench = detect_machine(None, arguments.data)
    store = Store(arguments.results) if arguments.results else None
    (trial,) = build_job(bench, store, [spec], ResumePolicy()).run()
    times = split(trial)
    if trial.status != "ok" or times is None:
        sys.exit(f"{spec.label}: {trial.status}: {trial.message}\n{trial.log}")
    return times.total


def main() -> int:
    """Run the cells and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", default=CELLS)
    parser.add_argument("--data", type=Path, default=default_data_dir())
    parser.add_argument("--results", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--by-hand", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("suite_loops.py needs a GPU", file=sys.stderr)
        return 2
    choice = SuiteFilter(epochs=arguments.epochs, max_steps=arguments.max_steps)
    if arguments.by_hand:
        print(by_hand(find_spec(arguments.by_hand, choice, "cuda:0"), arguments.data))
        return 0
    results = []
    for cell in arguments.cells:
        spec = find_spec(cell, choice, "cuda:0")
        command = [sys.executable, __file__, *sys.argv[1:], "--by-hand", cell]
        hand = float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[-1])
        ours = in_castwise(spec, arguments)
        length = spec.recipe.model_dump(include={"epochs", "stop_after", "max_steps"}) if spec.recipe else {}
        results.append({"cell": cell, "hand_seconds": hand, "castwise_seconds": ours, **length})
        print(f"{cell:45} by hand {hand:7.2f} s, castwise {ours:7.2f} s: {100 * (ours / hand - 1):+.1f} %", flush=True)
    if arguments.out:
        environment = detect_machine(None, arguments.data).environment.model_dump(mode="json")
        arguments.out.write_text(json.dumps({"environment": environment, "cells": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
