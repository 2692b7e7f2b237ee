"""How a run's models validate: with the running statistics that training leaves, and with those taken without dropout.

    python benchmarks/dropout_statistics.py [--techniques LOOP,LOOP] [--seeds 0,1,2] [--data DIR] [--out FILE] [CELL]

CELL is SUITE:WORKLOAD:PRECISION:BATCH. Each of its loops trains the suite's whole run; `none` is the published one,
`tuned` the suite's tuned one. Where dropout stands before a batch norm, training's variances are larger than
validation's, the more so the farther the images' means are from 0, and how a model validates is a matter of chance;
statistics that are taken over training images without dropout are validation's own.

Source: Li et al., "Understanding the Disharmony between Dropout and Batch Normalization by Variance Shift", 2019.
"""

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from suite_loops import find_spec
from torch import nn

from castwise.data_sets import default_data_dir
from castwise.measure.data.on_device import Augmentation, DeviceImages, Epochs
from castwise.measure.data.resident import load_images
from castwise.measure.training import TrainingRun
from castwise.measure.workloads import build_task
from castwise.measure.workloads.task import Batch
from castwise.plan import TrialSpec
from castwise.suite import Choice
from castwise.sweep.bench import find_bench
from castwise.workloads import find_workload

CELL = "wrn-cifar10:wrn-28-10:fp16-mixed:128"
_NUM_BATCHES = 40
_BATCH_SIZE = 256


def measure(spec: TrialSpec, data_dir: Path) -> dict[str, Any]:
    """Train a run and return how its model validates."""
    run = TrainingRun(spec, data_dir)
    assert spec.recipe is not None
    epochs = [run.run_epoch() for _ in range(spec.recipe.num_epochs)]
    model = build_task(find_workload(spec.workload)).model.to(spec.device)  # without techniques
    model.load_state_dict(run.model.state_dict())
    run.close()
    training, tested = (_images(spec, data_dir, split) for split in ("train", "test"))
    return {
        "techniques": list(spec.techniques),
        "seed": spec.seed,
        "training_loss": statistics.fmean(loss for _, loss in epochs[-1].losses),
        "accuracy": epochs[-1].accuracy,
        "plain_accuracy": accuracy_of(model, tested),
        "accuracy_without_dropout": accuracy_of(without_dropout(model, training[:_NUM_BATCHES]), tested),
    }


def _images(spec: TrialSpec, data_dir: Path, split: str) -> list[Batch]:
    name = spec.data_set
    order = Epochs(_BATCH_SIZE, shuffle=split == "train")
    images = DeviceImages(load_images(name, data_dir, split), name, Augmentation(), order, torch.device(spec.device))
    return [images.make(drawn) for drawn in images.start(0)]


@torch.no_grad()
def without_dropout(model: nn.Module, batches: Iterable[Batch]) -> nn.Module:
    """Return a copy of a model whose running statistics are the mean of batches', computed without dropout."""
    model = copy.deepcopy(model).train()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.reset_running_stats()
            part.momentum = None
        if isinstance(part, nn.Dropout):
            part.eval()
    for images, _ in batches:
        model(images)
    return model


@torch.no_grad()
def accuracy_of(model: nn.Module, batches: Iterable[Batch]) -> float:
    """Return the share of images that a model classifies rightly, in float32."""
    model.eval()
    right = torch.cat([model(images).argmax(1) == labels for images, labels in batches])
    return float(right.double().mean())


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cell", nargs="?", default=CELL)
    parser.add_argument("--techniques", default="none,tuned", help="loops, joined by commas")
    parser.add_argument("--seeds", default="0,1,2", help="joined by commas")
    parser.add_argument("--epochs", type=int, help="cut runs short after so many epochs")
    parser.add_argument("--data", type=Path, default=default_data_dir())
    parser.add_argument("--out", type=Path, help="benchmarks/records/dropout_statistics/DATE-NAME.json keeps a run")
    return parser.parse_args()


def main() -> int:
    """Measure the runs and print a line each."""
    arguments = parse()
    bench = find_bench(None, arguments.data)
    document: dict[str, Any] = {
        "environment": bench.environment.model_dump(mode="json"),
        "cell": arguments.cell,
        "runs": [],
    }
    for techniques in arguments.techniques.split(","):
        choice = Choice(epochs=arguments.epochs, techniques=(techniques,))
        spec = find_spec(arguments.cell, choice, bench.device)
        for seed in map(int, arguments.seeds.split(",")):
            document["runs"].append(measure(spec.model_copy(update={"seed": seed}), arguments.data))
            print(json.dumps(document["runs"][-1]), flush=True)
            if arguments.out:
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
